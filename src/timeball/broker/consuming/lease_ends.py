"""The CANCEL rows that end leases kept in the log: as columns, or as values when they are few. No I/O.

The rows have no id, because the message's id belongs to its sender. Each names the promise that it ends. If the promise
was moved, it also names the row that gave the promise its current due time. `tests/broker/consuming/test_lease_ends.py`
checks that both ways build the same rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from timeball.broker.consuming.redelivery_rows import retry_topic
from timeball.broker.consuming.requests import Receipt
from timeball.model.message import Int64Array, Kind, LogRow, build_rows


def cancel_rows(
    receipts: Sequence[Receipt], due_ms: Int64Array, version: Int64Array, reason: str, now_ms: int
) -> pa.RecordBatch:
    """Build LOG_SCHEMA rows that end these leases. `due_ms` and `version` are those of the newest versions."""
    number = np.array([receipt.seq for receipt in receipts], dtype=np.int64)
    return build_rows(
        len(receipts),
        kind=int(Kind.CANCEL),
        topic=[retry_topic(receipt.group, receipt.topic) for receipt in receipts],
        # A CANCEL row is not visible, so it has no queue.
        queue_id=-1,
        # All rows of a call have the same reason, which is encoded once.
        properties=reason,
        store_ms=now_ms,
        due_ms=due_ms,
        source_seq=number,
        # Null for a promise that was never moved, as the number names it already.
        version_seq=pa.array(version, mask=version == number),
    )


def few_cancel_rows(
    receipts: Sequence[Receipt], due_ms: Int64Array, version: Int64Array, reason: str, now_ms: int
) -> list[LogRow]:
    """Build the same rows as values."""
    # In the order of LOG_SCHEMA.
    return [
        (
            int(Kind.CANCEL), retry_topic(receipt.group, receipt.topic), -1, None, None, None, None, None, reason,
            None, None, now_ms, None, None, None, None, due, None, receipt.seq,
            None if seq == receipt.seq else seq, None,
        )
        for receipt, due, seq in zip(receipts, due_ms.tolist(), version.tolist(), strict=True)
    ]  # fmt: skip
