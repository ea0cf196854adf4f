"""Show and change a campaign, as a whole or as parts in several groups: its state, and the progress of its messages.

The broker stores the state of a campaign and carries out pause, resume and cancel (docs/pipeline/bulk.md). `progress`
counts the outcomes of its messages from the log and the pending table. It uses Arrow in the calling process, and needs
a few bytes of memory per message:

    rows = released + cancelled + waiting + held

`waiting` messages are pending and will be released. `held` messages are pending too, but their campaign is paused. The
numbers of the messages form few ranges (first_seq, rows), about one for each task that has written the campaign.

In a cluster, a campaign has a part in each group that has some of its messages. Calls go to all its parts, and the
answers are added up. With one group, the only part is the campaign itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as ds

from timeball.model.answers import Campaign as CampaignState
from timeball.model.answers import Status
from timeball.model.errors import NotFound
from timeball.model.message import Int64Array, Kind, int64
from timeball.model.rules import check_campaign
from timeball.spark.endpoint import Endpoint, Group, group_table_uri, read_groups
from timeball.spark.table_store import TableFile, read_files, table_files
from timeball.spark.views.snapshot import status_with_all_attaches
from timeball.table import attachment as att
from timeball.table.attachment import Ranges, within

# ---- the answers ----------------------------------------------------------------------------------------------

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
    # False if retention has removed log rows since the campaign was planned. Then `released` counts all messages that
    # are neither pending nor known to be cancelled.
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


# ---- the campaign of one group --------------------------------------------------------------------------------


class Campaign:
    """A campaign at a broker. `table_uri`: the pending table's URI for this process, if it is not the broker's."""

    def __init__(self, broker: Endpoint, campaign: str, table_uri: str | None = None) -> None:
        self.broker = broker
        self.id = check_campaign(campaign)
        self.table_uri = table_uri or broker.status().table.uri

    # ---- the state at the broker ----------------------------------------------------------------------------

    def read_state(self) -> CampaignState:
        """Read the state of the campaign from the broker. Raises NotFound for an unknown campaign."""
        return self.broker.campaigns(self.id)[0]

    def find_state(self) -> CampaignState | None:
        """Read the state of the campaign from the broker. Returns None for an unknown campaign."""
        try:
            return self.read_state()
        except NotFound:
            return None

    def plan(self, rows: int, at_ms: int, groups: Sequence[str] = ()) -> CampaignState:
        """Create the campaign at the broker, before any file is written. Returns its state.

        If it exists, it stays as it is, and its state is returned. `rows`: the number of its messages. `at_ms`: the
        time of the plan. `groups`: if there are several groups, all groups with a part of the campaign.
        """
        return self.broker.change_campaign(self.id, "plan", rows=rows, at_ms=at_ms, groups=groups)

    def pause(self) -> Paused:
        """Hold all waiting messages. Raises NotFound for an unknown campaign."""
        state = self.broker.change_campaign(self.id, "pause")
        return Paused(campaign=self.id, held=self.progress().held, repeated=state.repeated)

    def resume(self, *, shift: bool = False) -> Resumed:
        """Make all held messages wait again. With `shift`, they are later by the length of the pause.

        Raises NotFound for an unknown campaign.
        """
        state = self.broker.change_campaign(self.id, "resume", shift=shift)
        return Resumed(campaign=self.id, rows=state.count, shift_ms=state.shift_ms, repeated=state.repeated)

    def cancel(self) -> Cancelled:
        """Cancel all waiting and held messages. All other messages were released, or are being released.

        Raises NotFound for an unknown campaign.
        """
        state, progress = self.broker.change_campaign(self.id, "cancel"), self.progress()
        return Cancelled(
            campaign=self.id,
            rows=progress.rows,
            newly=state.count,
            cancelled=progress.cancelled,
            released=progress.rows - progress.cancelled,
        )

    # ---- the outcomes of its messages -----------------------------------------------------------------------

    def progress(self) -> Progress:
        """Count the messages: each is released, cancelled, waiting or held. Raises NotFound for an unknown campaign."""
        status = status_with_all_attaches(self.broker, self.table_uri)
        state = self.read_state()
        if not state.ranges:
            return _progress_without_rows(state)
        released, cancelled = self._read_settled(state, status)
        due_ms = self._read_pending_due_ms(state, status, sorted_distinct([released, cancelled]))
        is_held, is_whole = state.held_from_ms is not None, status.log.first_seq <= state.planned_seq
        if state.state == "cancelled" and not is_whole:
            # Cancelled messages may still be in the table although retention has removed their CANCEL rows.
            due_ms = due_ms[:0]
        cancelled_count = max(len(cancelled), state.cancelled)
        released_count = len(released) if is_whole else state.rows - cancelled_count - len(due_ms)
        has_next = len(due_ms) > 0 and not is_held
        return Progress(
            campaign=self.id,
            state=state.state,
            rows=state.rows,
            released=released_count,
            cancelled=cancelled_count,
            waiting=0 if is_held else len(due_ms),
            held=len(due_ms) if is_held else 0,
            next_due_ms=int(due_ms.min()) if has_next else None,
            last_due_ms=int(due_ms.max()) if has_next else None,
            planned_ms=state.planned_ms,
            percent=round(100 * (released_count + cancelled_count) / state.rows, 1),
            whole=is_whole,
        )

    def _read_settled(self, state: CampaignState, status: Status) -> tuple[Int64Array, Int64Array]:
        """Read the numbers of the messages that were released and cancelled, according to the log up to `status`.

        Returns (released, cancelled), both sorted.
        """
        begin = min(max(state.planned_seq, status.log.first_seq), status.log.durable_seq)

        def read_sources(kind: Kind) -> Int64Array:
            """Read the sorted numbers of the messages that rows of this kind have settled."""
            by_batch: list[Int64Array] = []
            for batch in self.broker.read_log(begin, status.log.durable_seq, [kind], columns=["source_seq"]):
                seq = int64(batch.column("source_seq"))
                by_batch.append(seq[att.within(seq, state.ranges)])
            return sorted_distinct(by_batch)

        # A message that was moved to another due time has left its campaign and counts as cancelled.
        moved_by_batch: list[Int64Array] = []
        columns = ["source_seq", "from_due_ms"]
        for batch in self.broker.read_log(begin, status.log.durable_seq, [Kind.MOVED], columns=columns):
            seq = int64(batch.filter(batch.column("from_due_ms").is_valid()).column("source_seq"))
            moved_by_batch.append(seq[att.within(seq, state.ranges)])
        moved_away, released = sorted_distinct(moved_by_batch), read_sources(Kind.RELEASE)
        released = released[~is_in(released, moved_away)]
        return released, sorted_distinct([read_sources(Kind.CANCEL), moved_away])

    def _read_pending_due_ms(self, state: CampaignState, status: Status, settled: Int64Array) -> Int64Array:
        """Read the due times (ms) of all waiting or held messages.

        `settled`: the sorted numbers of the settled (released or cancelled) messages.
        """
        from_ms = status.settled_before_ms if state.held_from_ms is None else state.held_from_ms
        due_by_batch: list[Int64Array] = [np.empty(0, np.int64)]
        for batch in table_rows(
            self.table_uri, status.table.version, state.ranges, ["seq", "due_ms"], from_ms
        ):
            is_pending = ~is_in(int64(batch.column("seq")), settled)
            due_by_batch.append(int64(batch.column("due_ms"))[is_pending])
        return np.concatenate(due_by_batch)


def _progress_without_rows(state: CampaignState) -> Progress:
    """Build the progress of a campaign without messages: planned, or ended without a valid row."""
    is_planned = state.state == "planned"
    return Progress(
        campaign=state.campaign, state=state.state, rows=state.rows if is_planned else 0,
        released=0, cancelled=0, waiting=0, held=0, planned_ms=state.planned_ms,
        percent=0.0 if is_planned else 100.0,
    )  # fmt: skip


def held(broker: Endpoint, table_uri: str | None = None) -> dict[str, int]:
    """Count the messages that each paused campaign holds. Views of pending messages do not contain them."""
    paused = [each.campaign for each in broker.campaigns() if each.held_from_ms is not None]
    return {name: Campaign(broker, name, table_uri).progress().held for name in sorted(paused)}


def find_attach(broker: Endpoint, job_id: str, from_seq: int) -> att.Attachment | None:
    """Find the attach of a job in the log from row `from_seq` on. Returns None if the kept log does not contain it."""
    log = broker.status().log
    begin = min(max(from_seq, log.first_seq), log.durable_seq)
    for batch in broker.read_log(begin, log.durable_seq, [Kind.TABLE], columns=["body"]):
        for body in batch.column("body").to_pylist():  # one for each change of the table
            change = att.decode_change(body)
            if isinstance(change, att.Attachment) and change.job_id == job_id:
                return change
    return None


# ---- ranges of numbers ----------------------------------------------------------------------------------------


def sorted_distinct(arrays: Sequence[Int64Array]) -> Int64Array:
    """Sort the distinct numbers of all arrays. numpy's `unique` would take longer, because it uses a hash table."""
    values = np.concatenate([np.empty(0, np.int64), *arrays])
    values.sort()
    distinct: Int64Array = values[np.diff(values, prepend=-1) != 0]
    return distinct


def is_in(seq: Int64Array, numbers: Int64Array) -> npt.NDArray[np.bool_]:
    """Compute a mask of the values of `seq` that are in the sorted `numbers`."""
    if not len(numbers):
        return np.zeros(len(seq), dtype=np.bool_)
    index = np.minimum(np.searchsorted(numbers, seq), len(numbers) - 1)
    return np.asarray(numbers[index] == seq)


def table_rows(
    uri: str, version: int, ranges: Ranges, columns: Sequence[str], due_from_ms: int
) -> Iterator[pa.RecordBatch]:
    """Yield rows of one version of the pending table with numbers in `ranges` that are due at `due_from_ms` or later.

    `columns` must contain seq and due_ms. Files with earlier due times come first. Raises the errors of `read_files`.
    """
    if not ranges:
        return
    low, high = min(first for first, _ in ranges), max(first + rows for first, rows in ranges)
    paths = [
        file.path
        for file in sorted(table_files(uri, version), key=lambda file: file.min_due_ms or 0)
        if file.may_hold((due_from_ms, None)) and _may_hold(file, ranges)
    ]
    row_filter = (ds.field("seq") >= low) & (ds.field("seq") < high) & (ds.field("due_ms") >= due_from_ms)
    for batch in read_files(uri, paths, columns, row_filter):
        is_in_ranges = within(int64(batch.column("seq")), ranges)
        rows = batch if is_in_ranges.all() else batch.filter(pa.array(is_in_ranges))
        if rows.num_rows:
            yield rows


def _may_hold(file: TableFile, ranges: Ranges) -> bool:
    """Check whether a file may contain numbers in `ranges`, by its bounds."""
    if file.min_seq is None or file.max_seq is None:
        return True
    return any(first <= file.max_seq and file.min_seq < first + rows for first, rows in ranges)


# ---- campaigns with parts in several groups -------------------------------------------------------------------
# The plan of each part names all groups of the campaign. So a group that no longer exists raises an error, and its part
# is not silently left out. If the job died before it planned a part, this part has no messages yet.

T = TypeVar("T")

# A campaign has the first of these states that any of its parts has. So it is finished when all its parts are.
STATE_PRECEDENCE = ("planned", "cancelled", "paused", "running", "finished")


@contextmanager
def open_parts(endpoint: str, campaign: str, table_uri: str | None = None) -> Iterator[dict[str, Campaign]]:
    """Open the parts of a campaign, by the name of the group: in the groups that its plan names, or else in all groups.

    `table_uri`: the URI of the pending tables for this process, if it is not the brokers'. It contains `{group}` if
    there are several groups. The connections are closed after the block. Raises NotFound for a group in the plan that
    does not exist, and SetupError for a bad `table_uri`.
    """
    groups = read_groups(endpoint)
    with ExitStack() as opened:

        def open_in(group: Group) -> Campaign:
            uri = group_table_uri("--table-uri", table_uri, group.name, len(groups))
            return Campaign(opened.enter_context(Endpoint(group.endpoint)), campaign, uri)

        yield _select_planned({group.name: open_in(group) for group in sorted(groups)})


def _select_planned(campaigns: dict[str, Campaign]) -> dict[str, Campaign]:
    """Select the groups that the campaign's plan names, or all if it is not planned.

    `campaigns`: the campaign in each group of the cluster, planned there or not. Raises NotFound if the plan names a
    group that is not in the cluster.
    """
    states = (
        {name: campaign.find_state() for name, campaign in campaigns.items()} if len(campaigns) > 1 else {}
    )
    planned = {name: state for name, state in states.items() if state is not None}
    if not planned:
        return campaigns
    # A plan names no groups if it was made when there was one group, or for one group only.
    names = next((state.groups for state in planned.values() if state.groups), list(planned))
    for name in names:
        if name not in campaigns:
            raise NotFound(f"the campaign has a part in the group {name!r}, which is not in the cluster")
    return {name: campaigns[name] for name in names}


class CampaignParts:
    """A campaign, as the sum of its parts in several groups. Its methods raise NotFound if no part is planned."""

    def __init__(self, parts: Mapping[str, Campaign]) -> None:
        self._parts = dict(parts)

    def progress(self) -> Progress:
        """Count the messages of all parts."""
        return sum_progress(self._call_parts(Campaign.progress))

    def pause(self) -> Paused:
        """Hold all waiting messages."""
        results = self._call_parts(Campaign.pause)
        return Paused(
            campaign=results[0].campaign,
            held=sum(result.held for result in results),
            repeated=all(result.repeated for result in results),
        )

    def resume(self, *, shift: bool = False) -> Resumed:
        """Make all held messages wait again.

        The parts were paused one by one, and `shift_ms` is their longest shift.
        """
        results = self._call_parts(lambda part: part.resume(shift=shift))
        return Resumed(
            campaign=results[0].campaign,
            rows=sum(result.rows for result in results),
            shift_ms=max(result.shift_ms for result in results),
            repeated=all(result.repeated for result in results),
        )

    def cancel(self) -> Cancelled:
        """Cancel all waiting and held messages."""
        results = self._call_parts(Campaign.cancel)
        return Cancelled(
            campaign=results[0].campaign,
            rows=sum(result.rows for result in results),
            newly=sum(result.newly for result in results),
            cancelled=sum(result.cancelled for result in results),
            released=sum(result.released for result in results),
        )

    def _call_parts(self, call: Callable[[Campaign], T]) -> list[T]:
        """Call a function for each planned part. Returns the results. Raises NotFound if no part is planned."""
        if len(self._parts) == 1:
            return [call(part) for part in self._parts.values()]
        planned = [part for part in self._parts.values() if part.find_state() is not None]
        # If no part is planned, `call` raises NotFound.
        return [call(part) for part in planned or self._parts.values()]


def sum_progress(parts: list[Progress]) -> Progress:
    """Add the progress of the parts."""
    if len(parts) == 1:
        return parts[0]
    rows, settled = sum(part.rows for part in parts), sum(part.released + part.cancelled for part in parts)
    due_ms = [part.next_due_ms for part in parts if part.next_due_ms is not None]
    last_ms = [part.last_due_ms for part in parts if part.last_due_ms is not None]
    return Progress(
        campaign=parts[0].campaign,
        state=min((part.state for part in parts), key=STATE_PRECEDENCE.index),
        rows=rows,
        released=sum(part.released for part in parts),
        cancelled=sum(part.cancelled for part in parts),
        waiting=sum(part.waiting for part in parts),
        held=sum(part.held for part in parts),
        next_due_ms=min(due_ms, default=None),
        last_due_ms=max(last_ms, default=None),
        planned_ms=min(part.planned_ms for part in parts),
        percent=round(100 * settled / rows, 1) if rows else parts[0].percent,
        whole=all(part.whole for part in parts),
    )
