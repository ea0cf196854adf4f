"""One campaign: its progress and its end. Pause and resume are in jobs/pause.py.

The table of campaigns has what was decided, the broker's log what happened. Each command first completes what an
earlier one left open when its process died, and may itself be repeated:

    'planned' without 'attached'    look in the log for a TABLE row with the campaign's id as its job
    'resuming' without 'resumed'    look for one with the job "<id>/resume-<n>"
    cancelled while it attached     both commands check again after their own step, so one of them sees the other's

    rows = released + cancelled + waiting + held

In the log held promises are cancelled, for the reason of the pause; a resume attaches them under new numbers, which
count from then on. Arrow counts in the calling process, without Spark, in some bytes a promise.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.errors import InvalidMessage, OutOfRange
from timeball.message import CANCEL_REASON, Int64Array, Kind, encode_properties, int64
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.jobs import seq_ranges
from timeball.pipeline.jobs.campaigns import Campaigns, Event, check_id, last
from timeball.pipeline.views.snapshot import settled_status
from timeball.table import attachment as att
from timeball.wire import Status

STATES = ("planned", "active", "pausing", "paused", "resuming", "cancelled", "done")


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a campaign. Counts are promises; instants in milliseconds, None when nothing waits.

    `whole` is False when retention has let go of a part of the log in which it was settled: then `released` are all
    that neither wait nor are known to be cancelled.
    """

    campaign: str
    state: str
    rows: int
    released: int
    cancelled: int
    waiting: int
    held: int
    next_due_ms: int | None = None
    last_due_ms: int | None = None
    planned_ms: int
    percent: float
    whole: bool = True


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a cancel: `newly` by this call, `cancelled` of the campaign altogether; the rest is `released`."""

    campaign: str
    rows: int
    newly: int
    cancelled: int
    released: int


class Settled(msgspec.Struct, frozen=True):
    """Sorted numbers of a campaign's promises that the log says are settled; `by_reason` is a part of `cancelled`."""

    released: Int64Array
    cancelled: Int64Array
    by_reason: dict[str, Int64Array]

    @property
    def all(self) -> Int64Array:
        """Return the numbers that are released or cancelled."""
        return seq_ranges.ordered([self.released, self.cancelled])


class Campaign:
    """A campaign at a broker. `table_uri`: where this process reaches the pending table, if not as the broker says."""

    def __init__(self, broker: Endpoint, campaign: str, table_uri: str | None = None) -> None:
        self.broker = broker
        self.id = check_id(campaign)
        self.table_uri = table_uri or broker.status().table.uri
        self.table = Campaigns(self.table_uri)

    # ---- what was decided -----------------------------------------------------------------------------------

    def events(self) -> list[Event]:
        """Return its events, after completing from the log what a process that died left open; NotFound if none."""
        found = self.table.of(self.id)
        for begun, ended in (("planned", "attached"), ("resuming", "resumed")):
            opened = last(found, begun)
            if opened and last(found, ended, number=opened.number) is None:
                self.record_attached(opened, ended)
        return self.table.of(self.id)

    def record_planned(self, rows: int, at_ms: int, detail: dict[str, object]) -> Event:
        """Record its first event; return the one that counts of two that are written at the same time."""
        self.record("planned", rows=rows, at_ms=at_ms, detail=detail)
        return self.table.of(self.id)[0]

    def record_attached(self, opened: Event, ended: str) -> Event | None:
        """Write down the attach that `opened` has led to, if there is one in the log by now."""
        found = find_attach(self.broker, self.job_id(opened), opened.log_seq)
        if found is None:
            return None
        return self.record(ended, opened.number, rows=found.rows, ranges=found.ranges)

    def job_id(self, opened: Event) -> str:
        """Return the name of the attach that follows a 'planned' or a 'resuming'."""
        return self.id if opened.event == "planned" else f"{self.id}/resume-{opened.number}"

    def record(
        self,
        event: str,
        number: int = 0,
        *,
        rows: int = 0,
        ranges: list[tuple[int, int]] | None = None,
        detail: dict[str, object] | None = None,
        at_ms: int | None = None,
    ) -> Event:
        """Append an event, of now unless `at_ms` says otherwise."""
        status = self.broker.status()
        written = Event(
            campaign=self.id,
            event=event,
            number=number,
            at_ms=status.now_ms if at_ms is None else at_ms,
            log_seq=status.log.durable_seq,
            rows=rows,
            ranges=ranges or [],
            detail=detail or {},
        )
        self.table.record(written)
        return written

    # ---- what happened --------------------------------------------------------------------------------------

    def settled(self, events: list[Event], end: Status) -> Settled:
        """Read what the log before `end` says of all numbers that the campaign has ever had."""
        ranges, begin = all_ranges(events), max(events[0].log_seq, end.log.first_seq)
        begin = min(begin, end.log.durable_seq)

        def numbers(batch: pa.RecordBatch) -> Int64Array:
            return int64(batch.column("source_seq"))

        released: list[Int64Array] = []
        cancelled: list[Int64Array] = []
        by_reason: dict[str, list[Int64Array]] = {}
        for batch in self.broker.read_log(begin, end.log.durable_seq, [Kind.RELEASE], columns=["source_seq"]):
            seq = numbers(batch)
            released.append(seq[att.within(seq, ranges)])
        for batch in self.broker.read_log(
            begin, end.log.durable_seq, [Kind.CANCEL], columns=["source_seq", "properties"]
        ):
            inside = att.within(numbers(batch), ranges)
            cancelled.append(numbers(batch)[inside])
            for reason in pc.unique(batch.column("properties").filter(pa.array(inside))).drop_null():
                same = pc.fill_null(pc.equal(batch.column("properties"), reason), False)
                chosen = inside & same.to_numpy(zero_copy_only=False)
                by_reason.setdefault(reason.as_py(), []).append(numbers(batch)[chosen])
        # A message that was given another instant leaves its campaign, as if it had been cancelled.
        moves = ["source_seq", "from_due_ms"]
        for batch in self.broker.read_log(begin, end.log.durable_seq, [Kind.MOVED], columns=moves):
            seq = numbers(batch.filter(batch.column("from_due_ms").is_valid()))
            cancelled.append(seq[att.within(seq, ranges)])
            released = [found[~np.isin(found, seq)] for found in released]
        return Settled(
            seq_ranges.ordered(released),
            seq_ranges.ordered(cancelled),
            {reason: seq_ranges.ordered(found) for reason, found in by_reason.items()},
        )

    def progress(self) -> Progress:
        """Return how far it is, as of one status of the broker."""
        events = self.events()
        attached, ended = last(events, "attached"), last(events, "ended")
        if attached is None:
            return _progress(self.id, events, 0, 0, 0, 0, None)
        if ended is not None:  # nothing can change any more, and the log need not be kept for it
            return _progress(self.id, events, attached.rows - ended.rows, ended.rows, 0, 0, None)
        status = settled_status(self.broker, self.table_uri)
        settled = self.settled(events, status)
        waiting, first_ms, last_ms = self._waiting(events, status, settled)
        held = self._held(events, settled)
        on_pauses = sum(
            len(settled.by_reason.get(properties(pause_reason(self.id, n)), _NONE)) for n in _pauses(events)
        )
        cancelled = len(settled.cancelled) - on_pauses
        if last(events, "cancelled"):
            cancelled, held = cancelled + held, 0
        whole = status.log.first_seq <= events[0].log_seq
        # With a part of the log gone, on the pauses' account there may be less than was resumed; rows is what stays.
        released = len(settled.released) if whole else attached.rows - cancelled - waiting - held
        return _progress(
            self.id, events, released, cancelled, waiting, held, (first_ms, last_ms), whole=whole
        )

    def _waiting(
        self, events: list[Event], status: Status, settled: Settled
    ) -> tuple[int, int | None, int | None]:
        rows, first_ms, last_ms = 0, None, None
        columns, gone, held = ["seq", "due_ms"], settled.all, held_ranges(events)
        for batch in seq_ranges.table_rows(
            self.table_uri, status.table.version, all_ranges(events), columns, status.settled_before_ms
        ):
            seq = int64(batch.column("seq"))
            out = seq_ranges.is_in(seq, gone) | att.within(seq, held)
            due_ms = int64(batch.column("due_ms"))[~out]
            if len(due_ms):
                rows += len(due_ms)
                least, most = int(due_ms.min()), int(due_ms.max())
                first_ms = least if first_ms is None else min(first_ms, least)
                last_ms = most if last_ms is None else max(last_ms, most)
        return rows, first_ms, last_ms

    def _held(self, events: list[Event], settled: Settled) -> int:
        """Count what the pauses that are not resumed hold, or have cancelled so far."""
        held = 0
        for number in _pauses(events):
            if last(events, "resumed", number=number) is None:
                paused = last(events, "paused", number=number)
                reason = properties(pause_reason(self.id, number))
                held += paused.rows if paused else len(settled.by_reason.get(reason, _NONE))
        return held

    # ---- its end --------------------------------------------------------------------------------------------

    def cancel(self) -> Cancelled:
        """End all that waits or is held. Definite: what is not among `cancelled` is, or is being, released."""
        self.table.of(self.id)
        self.record("cancelled")
        newly = self.cancel_attached()
        progress = self.progress()
        if last(self.events(), "attached"):
            self.record("ended", rows=progress.cancelled)
        return Cancelled(
            campaign=self.id,
            rows=progress.rows,
            newly=newly,
            cancelled=progress.cancelled,
            released=progress.rows - progress.cancelled,
        )

    def cancel_attached(self) -> int:
        """Cancel what waits of a campaign that was cancelled; returns how many promises this call has ended."""
        events = self.events()
        ranges = all_ranges(events)
        if not ranges:
            return 0
        return self.broker.cancel_ranges(ranges, f"campaign {self.id}").cancelled

    def is_cancelled(self) -> bool:
        """Return whether it was cancelled, perhaps meanwhile by another process."""
        return last(self.table.events(self.id), "cancelled") is not None


_NONE = np.empty(0, np.int64)


def find_attach(broker: Endpoint, job_id: str, from_seq: int) -> att.Attachment | None:
    """Return the attach of this job in the log from row `from_seq` on, as far as it is kept."""
    log = broker.status().log
    begin = min(max(from_seq, log.first_seq), log.durable_seq)
    for batch in broker.read_log(begin, log.durable_seq, [Kind.TABLE], columns=["body"]):
        for body in batch.column("body").to_pylist():  # one for each change of the table
            found = att.decode_change(body)
            if isinstance(found, att.Attachment) and found.job_id == job_id:
                return found
    return None


def all_ranges(events: list[Event]) -> list[tuple[int, int]]:
    """Return every number the campaign's promises have had."""
    return [each for event in events if event.event in ("attached", "resumed") for each in event.ranges]


def held_ranges(events: list[Event]) -> list[tuple[int, int]]:
    """Return every number that a pause has taken back. Its row may outlive in the table what the log had of it."""
    return [each for event in events if event.event == "paused" for each in event.ranges]


def pause_reason(campaign: str, number: int) -> str:
    """Return the reason that a pause gives for its cancels."""
    return f"pause {campaign} {number}"


def properties(reason: str) -> str:
    """Return how a reason stands in the properties of a CANCEL row."""
    return encode_properties({CANCEL_REASON: reason})


def state(events: list[Event], is_done: bool) -> str:
    """Return one of STATES."""
    if last(events, "cancelled"):
        return "cancelled"
    newest = last(events, "planned", "attached", "pausing", "paused", "resuming", "resumed")
    assert newest is not None
    if newest.event in ("attached", "resumed"):
        return "done" if is_done else "active"
    return newest.event


def must_be_attached(events: list[Event]) -> Event:
    """Return the event 'attached'; InvalidMessage when it was cancelled, OutOfRange when it is not attached yet."""
    if last(events, "cancelled"):
        raise InvalidMessage(f"campaign {events[0].campaign} was cancelled")
    attached = last(events, "attached")
    if attached is None:
        raise OutOfRange(f"campaign {events[0].campaign} is planned, and nothing of it is attached yet")
    return attached


def _pauses(events: list[Event]) -> list[int]:
    return [event.number for event in events if event.event == "pausing"]


def _progress(
    campaign: str,
    events: list[Event],
    released: int,
    cancelled: int,
    waiting: int,
    held: int,
    due: tuple[int | None, int | None] | None,
    *,
    whole: bool = True,
) -> Progress:
    attached = last(events, "attached")
    if attached is not None:
        rows = attached.rows
    else:  # nothing is there that could be counted yet, or ever
        rows = 0 if last(events, "cancelled") else events[0].rows
    first_ms, last_ms = due or (None, None)
    return Progress(
        campaign=campaign,
        state=state(events, is_done=waiting == 0 and held == 0),
        rows=rows,
        released=released,
        cancelled=cancelled,
        waiting=waiting,
        held=held,
        next_due_ms=first_ms,
        last_due_ms=last_ms,
        planned_ms=events[0].at_ms,
        percent=round(100 * (released + cancelled) / rows, 1) if rows else 100.0 * (attached is not None),
        whole=whole,
    )
