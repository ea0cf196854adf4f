"""The pipeline's end of the wire: the few calls that Spark's processes make to a broker.

A thin shell around one Flight client. Errors come back as the types the broker raised; a broker that cannot
be reached is `Unavailable`, so that a runner can tell "wait" from "give up". Calls which may be repeated
without harm (status, attach: it carries its own job and epoch) are repeated for `patience_s`; `reserve` too,
because a number set aside twice is only a hole.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Self, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.flight as flight

from timeball.client.dialing import check_process, dial
from timeball.client.failures import TOO_LONG
from timeball.clock import Clock, SystemClock
from timeball.errors import OutOfRange, OverLimit, TimeballError, Unavailable, from_code
from timeball.limits import PULL_ROWS_MAX
from timeball.message import TABLE_SCHEMA
from timeball.table import attachment as att

LOG = logging.getLogger("timeball.pipeline")

T = TypeVar("T")

CALL_TIMEOUT_S = 60.0
LONG_CALL_TIMEOUT_S = 1_800.0
PATIENCE_S = 20.0  # a broker that restarts with a million rows in its tail is back within seconds
PAUSE_S = (0.1, 2.0)  # first and longest pause between two tries
COALESCE_ROWS = 65_536
COMPACTED = "hour_log"  # the strategy whose promises move to the pending table


class LogStatus(msgspec.Struct, frozen=True):
    """Bounds of the log: rows with first_seq <= seq < durable_seq can be read."""

    first_seq: int
    next_seq: int
    durable_seq: int


class TableStatus(msgspec.Struct, frozen=True):
    """The pending table: where it is and its current version."""

    uri: str
    version: int


class Status(msgspec.Struct, frozen=True):
    """What the pipeline needs of the broker's status; the rest of the answer is ignored."""

    now_ms: int
    log: LogStatus
    table: TableStatus
    watermark: int
    settled_before_ms: int
    strategy: str = COMPACTED  # who keeps promises


class Start(msgspec.Struct, frozen=True):
    """The first row of a life of the log, its instant, and that of the last row before it."""

    first_seq: int
    at_ms: int
    before_ms: int


class RangesCancelled(msgspec.Struct, frozen=True):
    """Of so many numbers: how many promises one call ended; all others were settled before.

    Of the settled ones `already_cancelled` are known to have been cancelled.
    """

    rows: int
    cancelled: int
    already_cancelled: int
    settled: int


class ReleaseAnswer(msgspec.Struct, frozen=True):
    """What became of a batch that was brought: rows released by it, durably, and rows left; or an error's code."""

    released: int = 0
    left: int = 0
    error: str = ""
    text: str = ""


class QueueStatus(msgspec.Struct, frozen=True):
    """A queue keeps the offsets min <= offset < max."""

    min: int
    max: int


class Endpoint:
    """One broker. Not shared between processes; cheap to open in each task."""

    def __init__(self, uri: str, *, patience_s: float = PATIENCE_S, clock: Clock | None = None) -> None:
        self.uri = uri
        self._patience_ns = int(patience_s * 1e9)
        self._clock = clock or SystemClock()
        self._client = dial(uri)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the connection."""
        self._client.close()

    def status(self) -> Status:
        """Ask where log, watermark and table stand now."""
        return self._call("status", {}, Status)

    def reserve(self, rows: int) -> int:
        """Set aside `rows` sequence numbers; returns the first."""
        answer = self._call("reserve", {"rows": rows}, dict[str, int])
        return answer["first_seq"]

    def attach(self, attachment: att.Attachment) -> att.Attached:
        """Make files part of the pending table; a repeated attach is answered with `repeated`."""
        return self._call("attach", attachment, att.Attached)

    def cancel_ranges(self, ranges: Sequence[tuple[int, int]], reason: str = "") -> RangesCancelled:
        """End what waits of these numbers of a bulk job, (first_seq, rows); may be repeated.

        Some hundred thousand a second, so it may take minutes.
        """
        return self._call(
            "cancel_range", {"ranges": ranges, "reason": reason}, RangesCancelled, LONG_CALL_TIMEOUT_S
        )

    def starts(self, from_seq: int, to_seq: int) -> list[Start]:
        """Read the starts of the log whose first row lies in [from_seq, to_seq)."""
        answer = self._call("starts", {"from_seq": from_seq, "to_seq": to_seq}, dict[str, list[Start]])
        return answer["starts"]

    def lease_dispatcher(self, lease_ms: int) -> None:
        """Tell the broker that a dispatcher brings what is due for the next `lease_ms`; 0 ends the lease."""
        self._call("dispatcher", {"lease_ms": lease_ms}, dict[str, Any])

    def release(self, batches: Iterable[pa.RecordBatch]) -> list[ReleaseAnswer]:
        """Bring batches of TABLE_SCHEMA rows that are due; one answer each. The batches may be slow to come."""
        check_process()
        answers: list[ReleaseAnswer] = []
        try:
            writer, reader = self._client.do_exchange(flight.FlightDescriptor.for_path(b"release"))
            with writer:
                writer.begin(TABLE_SCHEMA)
                for batch in batches:
                    writer.write_batch(batch)
                writer.done_writing()
                for chunk in reader:
                    answers.append(msgspec.json.decode(chunk.app_metadata.to_pybytes(), type=ReleaseAnswer))
        except pa.ArrowException as error:
            raise from_wire(error, self.uri) from error
        return answers

    def lease_compactor(self, lease_ms: int) -> None:
        """Tell the broker that a job compacts for the next `lease_ms`."""
        self._call("compactor", {"lease_ms": lease_ms}, dict[str, Any])

    def read_log(
        self,
        from_seq: int,
        to_seq: int,
        kinds: Sequence[int] | None = None,
        coalesce_rows: int = COALESCE_ROWS,
        columns: Sequence[str] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Read rows from_seq <= seq < to_seq of these kinds, in order, as batches of `columns` of READ_SCHEMA."""
        ticket = {
            "read": "log",
            "from_seq": from_seq,
            "to_seq": to_seq,
            "kinds": None if kinds is None else list(kinds),
            "coalesce_rows": coalesce_rows,
            "columns": None if columns is None else list(columns),
        }
        yield from self._get(ticket)

    def queues(self, topic: str) -> dict[int, tuple[int, int]]:
        """Return each queue's first kept offset and its next one; NotFound without such a topic."""
        answer = self._call("queues", {"topic": topic}, dict[str, dict[int, QueueStatus]])
        return {queue: (each.min, each.max) for queue, each in answer["queues"].items()}

    def read_queue(self, topic: str, queue_id: int, begin: int, end: int) -> Iterator[pa.RecordBatch]:
        """Read rows begin <= offset < end of a queue, in order, in READ_SCHEMA; OutOfRange if it is shorter."""
        while begin < end:
            ticket = {"read": "queue", "topic": topic, "queue_id": queue_id, "offset": begin}
            count = 0
            for batch in self._get({**ticket, "rows": min(end - begin, PULL_ROWS_MAX)}):
                count += batch.num_rows
                yield batch
            if not count:
                raise OutOfRange(f"queue {queue_id} of {topic!r} ends at {begin}, before {end}")
            begin += count

    def _get(self, ticket: dict[str, object]) -> Iterator[pa.RecordBatch]:
        check_process()
        try:
            reader = self._client.do_get(flight.Ticket(msgspec.json.encode(ticket)))
            for chunk in reader:
                if chunk.data is not None and chunk.data.num_rows:
                    yield chunk.data
        except pa.ArrowException as error:
            raise from_wire(error, self.uri) from error

    def _call(self, verb: str, body: object, answer: type[T], timeout_s: float = CALL_TIMEOUT_S) -> T:
        data = msgspec.json.encode(body)
        give_up_ns = self._clock.monotonic_ns() + self._patience_ns
        pause_s = PAUSE_S[0]
        while True:
            try:
                return self._call_once(verb, data, answer, timeout_s)
            except Unavailable as error:
                if self._clock.monotonic_ns() >= give_up_ns:
                    raise
                LOG.warning(
                    "broker not reached, trying again broker=%s verb=%s retry_s=%.1f reason=%s",
                    self.uri,
                    verb,
                    pause_s,
                    error,
                )
            # Jitter: after a restart the tasks of a whole cluster would otherwise knock at once.
            threading.Event().wait(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, PAUSE_S[1])

    def _call_once(self, verb: str, data: bytes, answer: type[T], timeout_s: float) -> T:
        check_process()
        options = flight.FlightCallOptions(timeout=timeout_s)
        try:
            results = list(self._client.do_action(flight.Action(verb, data), options))
        except pa.ArrowException as error:
            raise from_wire(error, self.uri) from error
        return msgspec.json.decode(results[0].body.to_pybytes(), type=answer)


def from_wire(error: Exception, uri: str) -> TimeballError:
    """Return the error that the broker raised; what the transport itself reports is `Unavailable`."""
    code = getattr(error, "extra_info", b"") or b""
    if code and not isinstance(error, flight.FlightUnavailableError):
        return from_code(code.decode("utf-8", "replace"), _sentence(str(error)))
    if TOO_LONG in str(error):
        return OverLimit(f"{uri} takes no request as long as this one: bring fewer files, or ranges, at once")
    if isinstance(
        error, (flight.FlightUnavailableError, flight.FlightTimedOutError, flight.FlightCancelledError)
    ):
        return Unavailable(f"no broker answers at {uri}; is `timeball serve` running there?")
    return Unavailable(f"the connection to {uri} failed: {_sentence(str(error))}")


def _sentence(text: str) -> str:
    """Return what the broker wrote, without the transport's additions ("Detail: Failed", "gRPC client debug …")."""
    text = text.split(". gRPC client debug context", 1)[0]
    return text.removesuffix(". Detail: Failed")
