"""What the client's verbs return: small frozen records. Instants in milliseconds since 1970 UTC."""

from __future__ import annotations

from typing import Literal

import msgspec
import pyarrow as pa

from timeball.errors import TimeballError


class SendAck(msgspec.Struct, frozen=True):
    """The broker's word that a batch is on disk."""

    first_seq: int
    rows: int
    store_ms: int


class Receipt(msgspec.Struct, frozen=True):
    """One message is on disk. `due_ms` is None for a message that is visible at once."""

    id: str
    seq: int
    due_ms: int | None
    store_ms: int


class Verdict(msgspec.Struct, frozen=True):
    """What became of a promise that was to be cancelled or moved. `at_ms`: when that happened, as far as known.

    cancelled           it will not be delivered
    rescheduled         it will be delivered at `due_ms`; `seq` is its new number
    already_cancelled   somebody was first: it was not going to be delivered
    released            too late: it is in its queue
    expired             it waits no more; what became of it is older than what the broker keeps
    not_found           no promise is known by this name
    """

    subject: str
    verdict: Literal["cancelled", "rescheduled", "already_cancelled", "released", "expired", "not_found"]
    seq: int | None
    at_ms: int | None
    due_ms: int | None = None

    @property
    def cancelled(self) -> bool:
        """Whether the message will certainly not be delivered."""
        return self.verdict in ("cancelled", "already_cancelled")


class Attached(msgspec.Struct, frozen=True, kw_only=True):
    """The pending table's version and watermark after an attach; `repeated` if the broker had it already."""

    version: int
    watermark: int
    seq: int
    repeated: bool = False


class QueueRange(msgspec.Struct, frozen=True):
    """Offsets kept of a queue: min <= offset < max."""

    min: int
    max: int


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
