"""What a consumer is given."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from timeball.broker.receipts import AnyReceipt, Receipt

__all__ = ["AnyReceipt", "Receipt", "Received"]


class Received(NamedTuple):
    """Rows handed out (READ_SCHEMA) and their receipts; the attempt is a row's reconsume_times + 1."""

    rows: pa.RecordBatch
    receipts: list[AnyReceipt]
