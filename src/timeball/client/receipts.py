"""Results of sends: the receipt of a message, and the outcomes of the rows of a `send_many`. Needs no Arrow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import msgspec

from timeball.client.attempts import NotNow
from timeball.client.identifiers import IDENTIFIERS
from timeball.model.answers import EXISTS, SendAck, SentState, UniqueMessage
from timeball.model.errors import OverLimit, RequestError, TimeballError, Unavailable
from timeball.model.wire import SendKey

if TYPE_CHECKING:
    import pyarrow as pa

IfSettled = Literal["keep", "send"]
SPANS_SHOWN = 10  # ranges of rows listed in an error text


class Receipt(msgspec.Struct, frozen=True):
    """The receipt of a message, which is on the broker's disk.

    `outcome` is "created" for a message of this send, and "exists" for a message that was sent before under the
    same message id. With a unique key it is also "replaced", where `replaced` is the message that is no longer pending,
    or "kept": the receipt is that of the pending message.

    `state` is the current state of the message (answers.SentState). `due_ms` is its current due time, or None if the
    message was not scheduled. `past_ms` is the time by which the due time had passed when the broker accepted the
    message, in milliseconds, or 0. The broker delivers a message with a past due time at once.
    """

    id: str
    seq: int
    due_ms: int | None
    store_ms: int
    outcome: str = "created"
    state: str = "waiting"
    past_ms: int = 0
    replaced: UniqueMessage | None = None


def build_receipt(message_id: str, ack: SendAck, due_ms: int | None, past_ms: int) -> Receipt:
    """Build the receipt of a send of one message from the broker's answer.

    For a message that was sent before, `ack` has the current due time and state. `due_ms` and `past_ms`: those of a
    message of this send.
    """
    if ack.states:
        current = ack.states[0]
        return Receipt(message_id, ack.first_seq, current.due_ms, ack.store_ms, ack.outcome, current.state)
    state = "visible" if due_ms is None or due_ms <= ack.store_ms else "waiting"
    return Receipt(message_id, ack.first_seq, due_ms, ack.store_ms, ack.outcome, state, past_ms)


class ExistingRows(msgspec.Struct, frozen=True):
    """Rows of a `send_many` that were sent before, [first_row, first_row + len(states)), and their current states.

    Their sequence numbers begin at `first_seq` and have no gaps.
    """

    first_row: int
    first_seq: int
    states: list[SentState]


class AcceptedRows(msgspec.Struct, frozen=True):
    """Rows of a `send_many` that the broker accepted, [first_row, first_row + rows).

    Their sequence numbers begin at `first_seq` and have no gaps.
    """

    first_row: int
    rows: int
    first_seq: int


class RefusedRows(msgspec.Struct, frozen=True):
    """Rows of a `send_many` that were not acknowledged, [first_row, first_row + rows), and the error."""

    first_row: int
    rows: int
    error: TimeballError


class SendSummary(msgspec.Struct, frozen=True):
    """The result of a `send_many`. Each list has an entry per batch, in the order of the rows.

        accepted    the broker has these rows on its disk
        refused     the broker has none of these rows
        unknown     the broker may or may not have these rows: the answer was lost, or the broker failed meanwhile
        existing    accepted rows that an earlier call had sent with the same ids and `retry=True`

    `rows` is the number of rows read from the caller so far. Each of them is in accepted, refused or unknown.
    `past_rows` is the number of accepted rows whose due time had passed when the broker accepted them. The broker
    delivers these at once. `past_ms` is the largest time by which a due time had passed, in milliseconds.
    """

    rows: int
    accepted: list[AcceptedRows]
    refused: list[RefusedRows]
    ids: pa.ChunkedArray | Sequence[str]  # of each row read, accepted or not; over Flight a column of Arrow
    existing: list[ExistingRows] = []
    unknown: list[RefusedRows] = []
    past_rows: int = 0
    past_ms: int = 0

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """The pair (first_seq, rows) of each accepted batch, in order."""
        return [(batch.first_seq, batch.rows) for batch in self.accepted]


def spans(row_ranges: Iterable[AcceptedRows | RefusedRows]) -> str:
    """List row numbers for an error text, with adjacent ranges joined: "rows 0 to 8191, 9000 to 9009".

    Lists the first SPANS_SHOWN ranges, and counts the others. "" for no ranges.
    """
    joined: list[tuple[int, int]] = []
    for row_range in sorted(row_ranges, key=lambda row_range: row_range.first_row):
        if joined and joined[-1][1] == row_range.first_row:
            joined[-1] = joined[-1][0], row_range.first_row + row_range.rows
        else:
            joined.append((row_range.first_row, row_range.first_row + row_range.rows))
    texts = [
        f"{first} to {end - 1}" if end - first > 1 else str(first) for first, end in joined[:SPANS_SHOWN]
    ]
    if len(joined) > SPANS_SHOWN:
        texts.append(f"{len(joined) - SPANS_SHOWN} more spans, which the error's summary lists")
    return "rows " + ", ".join(texts) if texts else ""


class Outcomes:
    """The outcomes of the batches of a `send_many` so far."""

    def __init__(self, *, collect: bool) -> None:
        """Begin without rows. `collect`: a refused batch does not end the call."""
        self._collect = collect
        self._rows = 0  # number of rows read from the caller
        self._accepted: list[AcceptedRows] = []
        self._refused: list[RefusedRows] = []
        self._existing: list[ExistingRows] = []
        self._past_rows = self._past_ms = 0
        self.unknown: list[RefusedRows] = []

    def add_rows(self, rows: int) -> int:
        """Count rows read from the caller. Returns the number of the first of them."""
        first_row, self._rows = self._rows, self._rows + rows
        return first_row

    def accept(self, first_row: int, ack: SendAck, past_rows: int, past_ms: int) -> None:
        """Record a batch that the broker has. `past_rows` and `past_ms` are those of SendSummary."""
        self._accepted.append(AcceptedRows(first_row, ack.rows, ack.first_seq))
        if ack.outcome == EXISTS:
            self._existing.append(ExistingRows(first_row, ack.first_seq, ack.states))
        self._past_rows += past_rows
        self._past_ms = max(self._past_ms, past_ms)

    def fail(self, first_row: int, rows: int, error: TimeballError, *, is_last: bool = False) -> None:
        """Record a batch that was not acknowledged. Raises its error, with the rows in the text, if it ends the call.

        `is_last`: another error has ended the call already, so this one is only recorded.
        """
        is_refused = isinstance(error, (NotNow, RequestError, OverLimit))
        (self._refused if is_refused else self.unknown).append(RefusedRows(first_row, rows, error))
        goes_on = is_last or (self._collect and not isinstance(error, Unavailable))
        if not goes_on:
            raise type(error)(f"rows {first_row} to {first_row + rows - 1}: {error}") from error

    def refuse(self, first_row: int, rows: int, error: TimeballError) -> None:
        """Record a batch of which the broker has nothing, without raising its error."""
        self._refused.append(RefusedRows(first_row, rows, error))

    def summary(self, ids: pa.ChunkedArray | Sequence[str]) -> SendSummary:
        """Build the summary. `ids` are those of all rows read."""
        return SendSummary(
            self._rows,
            self._accepted,
            self._refused,
            ids,
            self._existing,
            self.unknown,
            self._past_rows,
            self._past_ms,
        )

    def error(self, error: TimeballError, ids: pa.ChunkedArray | Sequence[str]) -> TimeballError:
        """Build the error of a call that `error` ends. `ids` are those of all rows read.

        Its text names the accepted rows, and its `summary` lists the outcomes.
        """
        extended = type(error)(f"{error} ({self._describe_progress()})")
        extended.summary = self.summary(ids)
        return extended

    def _describe_progress(self) -> str:
        """Describe in an error text which rows were accepted."""
        if not self._accepted and not self.unknown:
            return "no row of this call was accepted"
        accepted, unknown = spans(self._accepted), spans(self.unknown)
        text = f"accepted: {accepted}" if accepted else "no row is known to be accepted"
        if unknown:
            text += f"; may or may not be accepted: {unknown}"
        return f"{text}; no other row was accepted, so send only those again"


class SendKeys:
    """Creates the idempotency keys of a call. All of them name the same attempt, which is unique to the call.

    Without `is_used` (that is, without `retry=True`) batches get no keys.
    """

    def __init__(self, if_settled: IfSettled, *, is_used: bool) -> None:
        """Prepare keys. Raises RequestError for an unknown `if_settled`, or for "send" without keys."""
        if if_settled not in ("keep", "send"):
            raise RequestError(f"if_settled={if_settled!r}: 'keep' or 'send'")
        if if_settled == "send" and not is_used:
            raise RequestError(
                "if_settled='send' goes with retry=True, by which the broker knows the earlier send"
            )
        self._if_settled = if_settled
        self._attempt = IDENTIFIERS.next_id() if is_used else ""  # "": without keys

    def key_for(self, topic: object, message_id: object) -> SendKey | None:
        """Make the key of a batch whose first message has this topic and id. None if keys are not used.

        The same messages get the same key if they are sent again.
        """
        if not self._attempt:
            return None
        return SendKey(
            idempotency_key=f"{topic}/{message_id}", attempt=self._attempt, if_settled=self._if_settled
        )
