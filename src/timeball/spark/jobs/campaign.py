"""One campaign, for the commands that show and change it: its state at the broker, and the progress of its messages.

The broker stores the state of a campaign and carries out pause, resume and cancel (docs/pipeline/bulk.md). This module
counts the outcomes of its messages, from the log and the pending table. It does so with Arrow in the calling process,
and needs some bytes of memory per message:

    rows = released + cancelled + waiting + held

`waiting` messages are pending and will be released. `held` messages are pending too, but their campaign is paused. The
numbers of the messages form few ranges (first_seq, rows), about one for each task that has written the campaign.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as ds

from timeball.model.errors import NotFound
from timeball.model.message import Int64Array, Kind, int64
from timeball.model.rules import check_campaign
from timeball.model.wire import Campaign as Decided
from timeball.model.wire import Status
from timeball.spark.endpoint import Endpoint
from timeball.spark.table_store import TableFile, read_files, table_files
from timeball.spark.views.snapshot import settled_status
from timeball.table import attachment as att
from timeball.table.attachment import Ranges, within

STATES = ("planned", "running", "paused", "cancelled", "finished")


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of a campaign. The counts are messages. Times are in milliseconds since 1970."""

    campaign: str
    state: str  # one of STATES
    rows: int
    released: int
    cancelled: int
    waiting: int
    held: int
    next_due_ms: int | None = None  # the earliest due time; None if no message is waiting
    last_due_ms: int | None = None  # the latest due time; None if no message is waiting
    planned_ms: int
    percent: float  # of rows that are released or cancelled
    # False if retention has removed log rows since the campaign was planned. Then `released` is all messages that are
    # neither pending nor known to be cancelled.
    whole: bool = True


class Paused(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a pause. `held`: messages that it holds. `repeated`: the campaign was paused before."""

    campaign: str
    held: int
    repeated: bool


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a resume: `rows` messages are waiting again, `shift_ms` later. `repeated`: it was not paused."""

    campaign: str
    rows: int
    shift_ms: int
    repeated: bool


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a cancel. `newly`: messages cancelled by this call. `cancelled`: all cancelled ones."""

    campaign: str
    rows: int
    newly: int
    cancelled: int
    released: int  # the others, including those whose release is under way


class Campaign:
    """A campaign at a broker. `table_uri`: the pending table's URI for this process, if it is not the broker's."""

    def __init__(self, broker: Endpoint, campaign: str, table_uri: str | None = None) -> None:
        self.broker = broker
        self.id = check_campaign(campaign)
        self.table_uri = table_uri or broker.status().table.uri

    # ---- what was decided -----------------------------------------------------------------------------------

    def decided(self) -> Decided:
        """Fetch the state of the campaign from the broker. Raises NotFound."""
        return self.broker.campaigns(self.id)[0]

    def find_decided(self) -> Decided | None:
        """Fetch the state of the campaign from the broker, or None if there is no such campaign."""
        try:
            return self.decided()
        except NotFound:
            return None

    def plan(self, rows: int, at_ms: int, groups: Sequence[str] = ()) -> Decided:
        """Create the campaign at the broker, before any file is written. If it is planned already, return that plan.

        `rows`: the number of its messages. `at_ms`: the time of the plan. `groups`: if there are several groups, all
        groups with a part of the campaign.
        """
        return self.broker.change_campaign(self.id, "plan", rows=rows, at_ms=at_ms, groups=groups)

    def pause(self) -> Paused:
        """Hold all waiting messages."""
        done = self.broker.change_campaign(self.id, "pause")
        return Paused(campaign=self.id, held=self.progress().held, repeated=done.repeated)

    def resume(self, *, shift: bool = False) -> Resumed:
        """Make all held messages wait again. With `shift`, their due times move by the length of the pause."""
        done = self.broker.change_campaign(self.id, "resume", shift=shift)
        return Resumed(campaign=self.id, rows=done.count, shift_ms=done.shift_ms, repeated=done.repeated)

    def cancel(self) -> Cancelled:
        """Cancel all waiting and held messages. This is final: messages not in `cancelled` are or will be released."""
        done, progress = self.broker.change_campaign(self.id, "cancel"), self.progress()
        return Cancelled(
            campaign=self.id,
            rows=progress.rows,
            newly=done.count,
            cancelled=progress.cancelled,
            released=progress.rows - progress.cancelled,
        )

    # ---- what happened --------------------------------------------------------------------------------------

    def progress(self) -> Progress:
        """Count the messages: each is released, cancelled, waiting or held."""
        status = settled_status(self.broker, self.table_uri)
        decided = self.decided()
        if not decided.ranges:
            return _nothing_attached(decided)
        released, cancelled = self._settled(decided, status)
        due_ms = self._waiting(decided, status, ordered([released, cancelled]))
        is_held, is_whole = decided.held_from_ms is not None, status.log.first_seq <= decided.planned_seq
        if decided.state == "cancelled" and not is_whole:
            # Cancelled rows may still be in the table when retention has removed their CANCEL rows.
            due_ms = due_ms[:0]
        ended = max(len(cancelled), decided.cancelled)
        out = len(released) if is_whole else decided.rows - ended - len(due_ms)
        has_next = len(due_ms) > 0 and not is_held
        return Progress(
            campaign=self.id,
            state=decided.state,
            rows=decided.rows,
            released=out,
            cancelled=ended,
            waiting=0 if is_held else len(due_ms),
            held=len(due_ms) if is_held else 0,
            next_due_ms=int(due_ms.min()) if has_next else None,
            last_due_ms=int(due_ms.max()) if has_next else None,
            planned_ms=decided.planned_ms,
            percent=round(100 * (out + ended) / decided.rows, 1),
            whole=is_whole,
        )

    def _settled(self, decided: Decided, end: Status) -> tuple[Int64Array, Int64Array]:
        """Find the sorted numbers of the messages that the log before `end` records as released, and as cancelled."""
        begin = min(max(decided.planned_seq, end.log.first_seq), end.log.durable_seq)

        def named(kind: Kind) -> Int64Array:
            found: list[Int64Array] = []
            for batch in self.broker.read_log(begin, end.log.durable_seq, [kind], columns=["source_seq"]):
                seq = int64(batch.column("source_seq"))
                found.append(seq[att.within(seq, decided.ranges)])
            return ordered(found)

        # A message that was moved to another due time has left its campaign and counts as cancelled.
        moved: list[Int64Array] = []
        columns = ["source_seq", "from_due_ms"]
        for batch in self.broker.read_log(begin, end.log.durable_seq, [Kind.MOVED], columns=columns):
            seq = int64(batch.filter(batch.column("from_due_ms").is_valid()).column("source_seq"))
            moved.append(seq[att.within(seq, decided.ranges)])
        left, released = ordered(moved), named(Kind.RELEASE)
        released = released[~is_in(released, left)]
        return released, ordered([named(Kind.CANCEL), left])

    def _waiting(self, decided: Decided, status: Status, gone: Int64Array) -> Int64Array:
        """Read the due times (ms) of all waiting or held messages.

        `gone`: sorted numbers of the settled (released or cancelled) ones.
        """
        from_ms = status.settled_before_ms if decided.held_from_ms is None else decided.held_from_ms
        found: list[Int64Array] = [np.empty(0, np.int64)]
        for batch in table_rows(
            self.table_uri, status.table.version, decided.ranges, ["seq", "due_ms"], from_ms
        ):
            waits = ~is_in(int64(batch.column("seq")), gone)
            found.append(int64(batch.column("due_ms"))[waits])
        return np.concatenate(found)


def _nothing_attached(decided: Decided) -> Progress:
    is_planned = decided.state == "planned"
    return Progress(
        campaign=decided.campaign, state=decided.state, rows=decided.rows if is_planned else 0,
        released=0, cancelled=0, waiting=0, held=0, planned_ms=decided.planned_ms,
        percent=0.0 if is_planned else 100.0,
    )  # fmt: skip


def held(broker: Endpoint, table_uri: str | None = None) -> dict[str, int]:
    """Count the messages that each paused campaign holds. Views of pending messages do not contain them."""
    paused = [each.campaign for each in broker.campaigns() if each.held_from_ms is not None]
    return {name: Campaign(broker, name, table_uri).progress().held for name in sorted(paused)}


def find_attach(broker: Endpoint, job_id: str, from_seq: int) -> att.Attachment | None:
    """Find the bulk attach of a job in the log, from row `from_seq` on. None if the kept log does not contain it."""
    log = broker.status().log
    begin = min(max(from_seq, log.first_seq), log.durable_seq)
    for batch in broker.read_log(begin, log.durable_seq, [Kind.TABLE], columns=["body"]):
        for body in batch.column("body").to_pylist():  # one for each change of the table
            found = att.decode_change(body)
            if isinstance(found, att.Attachment) and found.job_id == job_id:
                return found
    return None


# ---- ranges of numbers ----------------------------------------------------------------------------------------


def ordered(parts: Sequence[Int64Array]) -> Int64Array:
    """Sort the distinct numbers of all parts. Does not use numpy's `unique`, whose hash table takes longer."""
    joined = np.concatenate([np.empty(0, np.int64), *parts])
    joined.sort()
    kept: Int64Array = joined[np.diff(joined, prepend=-1) != 0]
    return kept


def is_in(seq: Int64Array, numbers: Int64Array) -> npt.NDArray[np.bool_]:
    """Compute a mask of the values of `seq` that are in the sorted `numbers`."""
    if not len(numbers):
        return np.zeros(len(seq), dtype=np.bool_)
    at = np.minimum(np.searchsorted(numbers, seq), len(numbers) - 1)
    return np.asarray(numbers[at] == seq)


def table_rows(
    uri: str, version: int, ranges: Ranges, columns: Sequence[str], due_from_ms: int
) -> Iterator[pa.RecordBatch]:
    """Read rows of one version of the pending table with numbers in `ranges` that are due at `due_from_ms` or later.

    `columns` must contain seq and due_ms. Files with earlier due times come first.
    """
    if not ranges:
        return
    low, high = min(first for first, _ in ranges), max(first + rows for first, rows in ranges)
    paths = [
        file.path
        for file in sorted(table_files(uri, version), key=lambda file: file.min_due_ms or 0)
        if file.may_hold((due_from_ms, None)) and _may_hold(file, ranges)
    ]
    wanted = (ds.field("seq") >= low) & (ds.field("seq") < high) & (ds.field("due_ms") >= due_from_ms)
    for batch in read_files(uri, paths, columns, wanted):
        inside = within(int64(batch.column("seq")), ranges)
        rows = batch if inside.all() else batch.filter(pa.array(inside))
        if rows.num_rows:
            yield rows


def _may_hold(file: TableFile, ranges: Ranges) -> bool:
    if file.min_seq is None or file.max_seq is None:
        return True
    return any(first <= file.max_seq and file.min_seq < first + rows for first, rows in ranges)
