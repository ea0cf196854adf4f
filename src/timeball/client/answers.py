"""What the client's verbs return besides the broker's own answers (wire.py): small frozen records."""

from __future__ import annotations

import msgspec
import pyarrow as pa

from timeball.errors import TimeballError


class Receipt(msgspec.Struct, frozen=True):
    """One message is on disk. `due_ms` is None for a message that is visible at once."""

    id: str
    seq: int
    due_ms: int | None
    store_ms: int


class RefusedRows(msgspec.Struct, frozen=True):
    """Rows of a `send_many` that the broker did not take: [first_row, first_row + rows)."""

    first_row: int
    rows: int
    error: TimeballError


class SendSummary(msgspec.Struct, frozen=True):
    """What became of a `send_many`. `ranges`: (first_seq, rows) of each batch accepted, in order."""

    rows: int
    ranges: list[tuple[int, int]]
    refused: list[RefusedRows]
    ids: pa.ChunkedArray  # one string per row given, accepted or not
