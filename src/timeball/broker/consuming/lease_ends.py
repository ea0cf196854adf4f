"""The CANCEL rows that end leases kept in the log: as columns, and a few as values. No I/O.

They have no id, as the message's own belongs to its sender. Each names the promise it ends, and the row that gave it
the instant it had when that is another one. `tests/broker/consuming/test_lease_ends.py` holds that both ways give the
same rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from timeball.broker.consuming.redelivery_rows import retry_topic
from timeball.broker.consuming.requests import Receipt
from timeball.message import Int64Array, Kind, LogRow, build_rows


def cancel_rows(
    receipts: Sequence[Receipt], due_ms: Int64Array, version: Int64Array, reason: str, now_ms: int
) -> pa.RecordBatch:
    """Return LOG_SCHEMA rows that end these leases, each by the version of its promise that was due at `due_ms`."""
    number = np.array([receipt.seq for receipt in receipts], dtype=np.int64)
    return build_rows(
        len(receipts),
        kind=int(Kind.CANCEL),
        topic=[retry_topic(receipt.group, receipt.topic) for receipt in receipts],
        queue_id=-1,
        properties=reason,
        store_ms=now_ms,
        due_ms=due_ms,
        source_seq=number,
        version_seq=pa.array(version, mask=version == number),
    )


def few_cancel_rows(
    receipts: Sequence[Receipt], due_ms: Int64Array, version: Int64Array, reason: str, now_ms: int
) -> list[LogRow]:
    """Return the same rows as values."""
    return [
        (
            int(Kind.CANCEL), retry_topic(receipt.group, receipt.topic), -1, None, None, None, None, None, reason,
            None, None, now_ms, None, None, None, None, due, None, receipt.seq,
            None if seq == receipt.seq else seq, None,
        )
        for receipt, due, seq in zip(receipts, due_ms.tolist(), version.tolist(), strict=True)
    ]  # fmt: skip
