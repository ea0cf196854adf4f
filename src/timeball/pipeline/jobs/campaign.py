"""One campaign, as its commands see it: what the broker decided about it, and how far its promises have come.

The broker keeps what was decided and does what is asked (docs/pipeline/bulk.md). This counts what happened, from the
log and the pending table, with Arrow in the calling process and some bytes a promise:

    rows = released + cancelled + waiting + held

Its numbers are ranges, (first_seq, rows): a handful, one a task of its write.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as ds

from timeball.errors import NotFound
from timeball.message import Int64Array, Kind, int64
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.table_store import TableFile, read_files, table_files
from timeball.pipeline.views.snapshot import settled_status
from timeball.rules import check_campaign
from timeball.table import attachment as att
from timeball.table.attachment import Ranges, within
from timeball.wire import Campaign as Decided
from timeball.wire import Status

STATES = ("planned", "running", "paused", "cancelled", "finished")


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


class Paused(msgspec.Struct, frozen=True, kw_only=True):
    """A pause: how many promises it holds. `repeated`: it was paused before."""

    campaign: str
    held: int
    repeated: bool


class Resumed(msgspec.Struct, frozen=True, kw_only=True):
    """A resume: how many promises wait again, moved by `shift_ms`. `repeated`: it was not paused."""

    campaign: str
    rows: int
    shift_ms: int
    repeated: bool


class Cancelled(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a cancel: `newly` by this call, `cancelled` of the campaign altogether; the rest is `released`."""

    campaign: str
    rows: int
    newly: int
    cancelled: int
    released: int


class Campaign:
    """A campaign at a broker. `table_uri`: where this process reaches the pending table, if not as the broker says."""

    def __init__(self, broker: Endpoint, campaign: str, table_uri: str | None = None) -> None:
        self.broker = broker
        self.id = check_campaign(campaign)
        self.table_uri = table_uri or broker.status().table.uri

    # ---- what was decided -----------------------------------------------------------------------------------

    def decided(self) -> Decided:
        """Return it as the broker has it; raise NotFound."""
        return self.broker.campaigns(self.id)[0]

    def find_decided(self) -> Decided | None:
        """Return it as the broker has it, None when there is no such campaign."""
        try:
            return self.decided()
        except NotFound:
            return None

    def plan(self, rows: int, at_ms: int, groups: Sequence[str] = ()) -> Decided:
        """Make it, before anything is written; return what stands when it was planned before.

        `groups`: of a cluster those that have a part of it, all of them.
        """
        return self.broker.change_campaign(self.id, "plan", rows=rows, at_ms=at_ms, groups=groups)

    def pause(self) -> Paused:
        """Hold everything that waits now."""
        done = self.broker.change_campaign(self.id, "pause")
        return Paused(campaign=self.id, held=self.progress().held, repeated=done.repeated)

    def resume(self, *, shift: bool = False) -> Resumed:
        """Let everything that is held wait again, at its own instants or later by the length of the pause."""
        done = self.broker.change_campaign(self.id, "resume", shift=shift)
        return Resumed(campaign=self.id, rows=done.count, shift_ms=done.shift_ms, repeated=done.repeated)

    def cancel(self) -> Cancelled:
        """End all that waits or is held. Definite: what is not among `cancelled` is, or is being, released."""
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
        """Count: every promise is released, cancelled, waiting or held."""
        status = settled_status(self.broker, self.table_uri)
        decided = self.decided()
        if not decided.ranges:
            return _nothing_attached(decided)
        released, cancelled = self._settled(decided, status)
        due_ms = self._waiting(decided, status, ordered([released, cancelled]))
        is_held, is_whole = decided.held_from_ms is not None, status.log.first_seq <= decided.planned_seq
        if decided.state == "cancelled" and not is_whole:
            due_ms = due_ms[:0]  # rows of the table whose CANCEL rows the log has let go
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
        """Return the sorted numbers that the log before `end` says are released, and cancelled."""
        begin = min(max(decided.planned_seq, end.log.first_seq), end.log.durable_seq)

        def named(kind: Kind) -> Int64Array:
            found: list[Int64Array] = []
            for batch in self.broker.read_log(begin, end.log.durable_seq, [kind], columns=["source_seq"]):
                seq = int64(batch.column("source_seq"))
                found.append(seq[att.within(seq, decided.ranges)])
            return ordered(found)

        # A message that was given another instant leaves its campaign, as if it had been cancelled.
        moved: list[Int64Array] = []
        columns = ["source_seq", "from_due_ms"]
        for batch in self.broker.read_log(begin, end.log.durable_seq, [Kind.MOVED], columns=columns):
            seq = int64(batch.filter(batch.column("from_due_ms").is_valid()).column("source_seq"))
            moved.append(seq[att.within(seq, decided.ranges)])
        left, released = ordered(moved), named(Kind.RELEASE)
        released = released[~is_in(released, left)]
        return released, ordered([named(Kind.CANCEL), left])

    def _waiting(self, decided: Decided, status: Status, gone: Int64Array) -> Int64Array:
        """Return the instants of all that waits or is held."""
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
    """Return how many promises each paused campaign holds; these wait nowhere until it is resumed."""
    paused = [each.campaign for each in broker.campaigns() if each.held_from_ms is not None]
    return {name: Campaign(broker, name, table_uri).progress().held for name in sorted(paused)}


def find_attach(broker: Endpoint, job_id: str, from_seq: int) -> att.Attachment | None:
    """Return the bulk attach of this job in the log from row `from_seq` on, as far as it is kept."""
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
    """Sort all numbers of the parts, each once. numpy's own `unique` builds a hash table first, which takes longer."""
    joined = np.concatenate([np.empty(0, np.int64), *parts])
    joined.sort()
    kept: Int64Array = joined[np.diff(joined, prepend=-1) != 0]
    return kept


def is_in(seq: Int64Array, numbers: Int64Array) -> npt.NDArray[np.bool_]:
    """Return which of `seq` are among the sorted `numbers`."""
    if not len(numbers):
        return np.zeros(len(seq), dtype=np.bool_)
    at = np.minimum(np.searchsorted(numbers, seq), len(numbers) - 1)
    return np.asarray(numbers[at] == seq)


def table_rows(
    uri: str, version: int, ranges: Ranges, columns: Sequence[str], due_from_ms: int
) -> Iterator[pa.RecordBatch]:
    """Read rows of one version of the pending table numbered in `ranges` and due at `due_from_ms` or later.

    In `columns`, which have seq; the files by their first instant.
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
