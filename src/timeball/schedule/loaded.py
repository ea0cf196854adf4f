"""Opened messages: load their bodies ahead of their due times, or leave this to a dispatcher, and hand them out once.

    opened      --add_without_bodies-->  index: two int64 a message  --gather-->  wheel: bodies  --take_due-->
    just added  --add----------------------------------------------------------->

Messages are handed out in order. A message may be handed out when it comes before every message whose body is not in
memory, and is due earlier than every message that is still in a backlog. So the order does not depend on when messages
arrive, and a clock that is set back makes none of them late or early. If more bodies are due at one time than memory
may hold, some are handed out while others are read.

A *gather* is one read of bodies in the reader thread. Bodies are loaded up to `ahead_ms` before their due time if
memory allows it. At the due time they are loaded in any case, because a message without memory would never be handed
out.

Messages belong to several *sources*, which differ in how their bodies are read. Messages of one source may be left to
an external dispatcher (`ExternalDelivery`). They are loaded later and meanwhile delay no other messages.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from timeball.log.row_encoder import NumberedRows, ReadRows, filtered, pairs_of
from timeball.model import limits
from timeball.model.config import MIB
from timeball.model.message import Int64Array
from timeball.schedule.backlog import Backlog, Bools
from timeball.schedule.due_index import FAR_MS, DueIndex
from timeball.schedule.due_wheel import DueWheel, Run
from timeball.schedule.locations import Locations, as_scheduled
from timeball.schedule.outcomes import Outcomes
from timeball.table.data_file import Position

logger = logging.getLogger(__name__)

# The estimate before the first gather. The average size that a gather measures replaces it.
ROW_BYTES_GUESS = 512  # bytes per row
EARLIEST, NEVER = (-FAR_MS, 0), (FAR_MS, 0)  # (due_ms, seq)

AHEAD_MS = 10_000
GATHER_BYTES = 512 * MIB
GATHERS = 4  # gathers that fill this memory; several, so that bodies can be handed out while others are read
GRACE_MS = 2_000

ReadBodies = Callable[[Int64Array, Int64Array, Int64Array], pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class LoadBounds:
    """When bodies are loaded, and how much memory they may take. Only tests choose other values."""

    ahead_ms: int = AHEAD_MS  # before the due time, at which a body is loaded
    gather_bytes: int = GATHER_BYTES  # approximate memory for bodies; delay levels may take half as much more
    grace_ms: int = GRACE_MS  # after the due time, until which a message is left to an external dispatcher


@dataclass(slots=True)
class Source:
    """Messages whose bodies are read in the same way and are not in memory yet."""

    read_bodies: ReadBodies
    decode: Callable[[pa.RecordBatch], pa.RecordBatch] = lambda scheduled_rows: scheduled_rows
    external: ExternalDelivery | None = None  # set if a dispatcher may bring these messages
    changes_due_times: bool = False  # the same field of the backlog
    is_shifted: bool = False  # durations after a clock step (durations.py)
    in_files: bool = False
    index: DueIndex = field(default_factory=DueIndex)
    locations: Locations = field(default_factory=Locations)
    discards: int = 0  # how many times the index was emptied (`Loaded.forget`)

    def decoded(self, scheduled_rows: ReadRows) -> ReadRows:
        """Convert log rows to messages as they were accepted. NumberedRows already have that form."""
        if isinstance(scheduled_rows, NumberedRows):
            return scheduled_rows
        return self.decode(as_scheduled(scheduled_rows))

    @classmethod
    def of(cls, backlog: Backlog) -> Source:
        """Build the source of the messages that a backlog opens."""
        return cls(backlog.read_bodies, backlog.decode_from_log, changes_due_times=backlog.changes_due_times)

    def is_leased_out(self, now_ms: int) -> bool:
        """Check whether a dispatcher has a lease on this source, so that its messages delay no others."""
        return self.external is not None and self.external.is_leased(now_ms)

    def forget_settled(self, outcomes: Outcomes) -> None:
        """Remove the earliest messages from the index, up to the first that is not settled (released or cancelled)."""
        while (head_ms := self.index.first_due_ms) < FAR_MS:
            # The messages of one due time. They are removed all together, or up to the first unsettled one.
            due, seq = self.index.between(EARLIEST, (head_ms + 1, 0))
            settled = outcomes.is_settled(due, seq)
            if not settled.all():
                self.index.pop_before(head_ms, int(seq[int(settled.argmin())]))
                return
            self.index.pop_before(head_ms + 1, 0)

    def needed_seq(self) -> int | None:
        """Find the oldest row of the log that contains one of these messages. None if no row is needed."""
        # Bodies in files do not need the log.
        if self.in_files or not len(self.index):
            return None
        return int(self.locations.rows_of(self.index.numbers()).min())


@dataclass(frozen=True, slots=True)
class Gathering:
    """Messages of one source that a gather is loading."""

    source: Source
    # The value of `source.discards` when the gather began. If it has changed at the end, the result is discarded.
    discards: int
    due_ms: Int64Array
    seq: Int64Array
    row_seq: Int64Array


class Loaded:
    """The opened messages. Each is in an index, in a gather, in the wheel, or handed out. Belongs to the event loop."""

    def __init__(
        self,
        reader_thread: Executor,
        outcomes: Outcomes,
        sources: Sequence[Source],
        *,
        ahead_ms: int,
        gather_bytes: int,
        on_change: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Call `on_change` when a gather has ended, and `on_failure` with the exception when one has failed.

        Bodies are loaded up to `ahead_ms` before their due times. `gather_bytes` bounds the memory for them.
        """
        self._thread, self._outcomes, self._sources = reader_thread, outcomes, sources
        self._ahead_ms, self._gather_bytes = ahead_ms, gather_bytes
        self._on_change, self._on_failure = on_change, on_failure
        self.wheel = DueWheel()
        self._gathering: asyncio.Task[None] | None = None
        # One gather runs at a time. The reader thread also serves consumers, and a second gather would only wait behind
        # it.
        self._gathers: list[Gathering] = []
        self._gathering_from: Position = NEVER  # the first message in a gather, of those that delay others
        self._row_bytes = ROW_BYTES_GUESS
        # Functions from numbers to a mask of the messages that `remove_for_reload` removed during the gather. Its rows
        # for these messages are discarded.
        self._removals: list[Callable[[Int64Array], Bools]] = []

    def __len__(self) -> int:
        return self.index_rows + len(self.wheel) + sum(len(gather.seq) for gather in self._gathers)

    @property
    def index_rows(self) -> int:
        """The number of messages whose bodies are not in memory."""
        return sum(len(source.index) for source in self._sources)

    @property
    def wheel_rows(self) -> int:
        """The number of messages whose bodies are in memory."""
        return len(self.wheel)

    @property
    def size_bytes(self) -> int:
        """The approximate memory of the bodies, in bytes."""
        return self.wheel.size_bytes

    @property
    def is_gathering(self) -> bool:
        """True while the reader thread loads bodies."""
        return self._gathering is not None

    def has_capacity(self, now_ms: int) -> bool:
        """Check whether backlogs may open more messages: each index is smaller than its limit."""
        return all(
            len(source.index)
            < (OPENED_ROWS_MAX if source.external is None else source.external.rows_max(now_ms))
            for source in self._sources
            # Shifted sources have no limit here, because `durations.ROWS_MAX` bounds them.
            if not source.is_shifted
        )

    # -- adding and removing messages ----------------------------------------------------------------------

    def add(self, source: Source, scheduled_rows: ReadRows, now_ms: int) -> int:
        """Add messages from the rows that were just appended. Returns when to load or hand out the first one (ms)."""
        scheduled_rows = source.decoded(scheduled_rows)
        due, seq = pairs_of(scheduled_rows)
        first_ms = int(due.min())
        # If memory is full, the bodies are dropped and read again from the log when they are due.
        if not self._has_memory_for_bodies():
            source.index.add(due, seq)
            return first_ms
        # Rows due within `ahead_ms` are kept, because reading them again so soon would cost more.
        is_soon = due <= now_ms + self._ahead_ms
        if is_soon.all():
            self.wheel.add(scheduled_rows)
            return first_ms
        if is_soon.any():
            self.wheel.add(filtered(scheduled_rows, is_soon))
        source.index.add(due[~is_soon], seq[~is_soon])
        return min(first_ms, int(due[~is_soon].min()) - self._ahead_ms // 2)

    def add_without_bodies(
        self, source: Source, due_ms: Int64Array, seq: Int64Array, row_seq: Int64Array
    ) -> None:
        """Add messages whose bodies are in the rows `row_seq` of the log, or in files of the table."""
        source.index.add(due_ms, seq)
        if not source.in_files:
            source.locations.add(seq, row_seq)

    def forget(self, source: Source, is_of_source: Callable[[Int64Array], Bools]) -> None:
        """Remove all messages of a source, which will be opened again.

        `is_of_source` computes a mask of the numbers that belong to the source.
        """
        source.index, source.locations = DueIndex(), Locations()
        # A gather in progress may read removed messages. `_gather` compares this number and discards its rows.
        source.discards += 1
        self._remove_bodies(is_of_source)

    def remove_for_reload(self, is_removed: Callable[[Int64Array], Bools]) -> None:
        """Remove the messages in the mask of `is_removed` from all sources. They are loaded again with other due times.

        Rows of a gather in progress are removed when it ends.
        """
        for source in self._sources:
            if len(source.index):
                source.index.drop(is_removed)
        if self._gathering is not None:
            self._removals.append(is_removed)
        self._remove_bodies(is_removed)

    def remove_held(self, is_removed: Callable[[Int64Array], Bools]) -> None:
        """Remove messages in files that are held from now on. Rows of a gather are removed when it ends (`_gather`)."""
        for source in self._sources:
            if source.external is not None:
                source.index.drop(is_removed)
        self._remove_bodies(is_removed)
        self._on_change()

    def _remove_bodies(self, is_removed: Callable[[Int64Array], Bools]) -> None:
        """Remove the messages in the mask of `is_removed` from the wheel."""
        # The whole wheel is rebuilt, because its rows do not record their source. This is rare: clock steps and pauses.
        run = self.wheel.take_due(FAR_MS, len(self.wheel))
        if run is not None:
            kept = ~is_removed(run.seq)
            self.wheel.add_run(run if kept.all() else run.filtered(kept))

    # -- handing out ---------------------------------------------------------------------------------------

    def take_due(self, now_ms: int, limit: int, below_ms: int) -> ReadRows | None:
        """Hand out up to `limit` messages due by now and before `below_ms`, sorted by (due_ms, seq).

        None if there are none. Their bodies have at most RELEASE_BYTES_MAX, so the next call may hand out more at once.
        Backlogs may still contain messages due at `below_ms` or later.
        """
        self._gather_if_needed(now_ms)
        # Invariant: no message is handed out before an earlier one whose body is not in memory. This bound ensures it.
        # It is a position (due_ms, seq), so that some messages of one due time are handed out while others are read.
        bound = min((now_ms + 1, 0), (below_ms, 0), self._first_unloaded(now_ms, now_ms))
        bound_ms, bound_seq = bound
        while (
            self.wheel.has_before(bound)
            and (run := self.wheel.take_due(bound_ms, limit, limits.RELEASE_BYTES_MAX, before_seq=bound_seq))
            is not None
        ):
            # Outcomes identify a message by its original due time. After a clock step it may count as due at another
            # time.
            original_due_ms, last_ms = run.original_due_ms, run.last_original_due_ms
            # Cancelled messages are dropped only here, so that a cancel needs no search in memory. Nearly all cancelled
            # messages are due later than this run, so this comparison is usually enough.
            if self._outcomes.first_cancelled_ms <= last_ms:
                keep = ~self._outcomes.was_cancelled(original_due_ms, run.seq)
                if not keep.any():
                    continue
                if not keep.all():
                    run, original_due_ms = run.filtered(keep), original_due_ms[keep]
            # Due at another time than the original one, because a clock was set (durations.py).
            rows = run.rows_as_due() if run.is_shifted else run.rows
            recorded_ms = original_due_ms if rows is run.rows else pairs_of(rows)[0]
            # In flight from here on: a later cancel fails, and recovery looks for the release record.
            self._outcomes.hand_out(original_due_ms, run.seq, recorded_ms, run.body_bytes)
            return rows
        return None

    def next_ms(self, now_ms: int, below_ms: int) -> int:
        """Compute when to call `take_due` next: to hand out a message due before `below_ms`, or to begin a gather.

        FAR_MS if neither is possible before a gather in progress or an opening has ended, or if there are no messages.
        """
        # `on_change` reports the end of a gather, and the scheduler reports the end of an opening.
        bound, gather_ms = (below_ms, 0), FAR_MS
        if self._gathering is None:
            gather_ms = self._next_gather_ms(now_ms)
        else:
            bound = min(bound, self._first_unloaded(now_ms, self.wheel.first_due_ms))
        return min(gather_ms, self.wheel.first_due_ms) if self.wheel.has_before(bound) else gather_ms

    def first_due_ms(self) -> int:
        """Find the earliest due time of a message that is not handed out. FAR_MS if there are none."""
        for source in self._sources:
            if source.external is not None:
                source.forget_settled(self._outcomes)  # messages that a dispatcher brought are settled
        firsts = (source.index.first_due_ms for source in self._sources)
        gathers = (int(gather.due_ms[0]) for gather in self._gathers)
        return min(self.wheel.first_due_ms, *firsts, *gathers)

    def needed_seq(self) -> int | None:
        """Find a row of the log below which no row is needed for a body that is not in memory. None if none is."""
        needed_rows = [source.needed_seq() for source in self._sources]
        needed_rows += [int(gather.row_seq.min()) for gather in self._gathers if not gather.source.in_files]
        return min((needed_row for needed_row in needed_rows if needed_row is not None), default=None)

    async def wait_until_none_held(self) -> None:
        """Wait until no gather contains a held message. The files of a resume contain all held messages again."""
        holds = self._outcomes.holds
        while any(holds.contains(gather.due_ms, gather.seq).any() for gather in self._gathers):
            await self.wait_idle()

    async def wait_idle(self) -> None:
        """Wait until no gather is in progress."""
        while self._gathering is not None:
            await asyncio.wait([self._gathering])

    # -- loading bodies ------------------------------------------------------------------------------------

    def _has_memory_for_bodies(self) -> bool:
        """Check whether the bodies of new messages stay in memory: half of the memory is left to gathers."""
        return self.wheel.size_bytes < self._gather_bytes // 2

    def _has_memory_for_gather(self) -> bool:
        return self.wheel.size_bytes < self._gather_bytes - self._gather_bytes // GATHERS

    def _first_unloaded(self, now_ms: int, to_ms: int) -> Position:
        """Find the position of the first message that is in a gather, or that is in an index and due by `to_ms`.

        NEVER if there is none. Messages that are left to a dispatcher are not considered: they delay no others.
        """
        first = self._gathering_from
        for source in self._sources:
            if source.index.first_due_ms <= min(to_ms, first[0]) and not source.is_leased_out(now_ms):
                first = min(first, source.index.first())
        return first

    def _next_gather_ms(self, now_ms: int) -> int:
        """Compute when to begin a gather: ahead of the first due time if memory allows it, else at that time.

        FAR_MS if there is nothing to load, or if memory is full and bodies that can be handed out will make room.
        """
        # A gather loads messages due within the whole lead time, but the next one begins only half the lead time before
        # a due time. So there is one gather per half lead time, not one per message.
        has_memory = self._has_memory_for_gather()
        lead_ms = self._ahead_ms // 2 if has_memory else 0
        # While memory is full, bodies that can be handed out before the first missing one make room for it.
        makes_room = not has_memory and self.wheel.has_before(
            self._first_unloaded(now_ms, self.wheel.first_due_ms)
        )
        first_ms = FAR_MS
        for source in self._sources:
            head_ms = source.index.first_due_ms
            if head_ms < FAR_MS and (not makes_room or source.is_leased_out(now_ms)):
                load_ms = head_ms - lead_ms
                if source.external is not None:
                    load_ms = source.external.load_ms(now_ms, head_ms, load_ms)
                first_ms = min(first_ms, load_ms)
        return first_ms

    def _gather_if_needed(self, now_ms: int) -> None:
        """Start a gather if one is due and none is running."""
        while self._gathering is None and self._next_gather_ms(now_ms) <= now_ms:
            self._start_gather(now_ms)

    def _start_gather(self, now_ms: int) -> None:
        """Take messages out of the indexes, as far ahead as memory allows, and start to load their bodies."""
        has_memory = self._has_memory_for_gather()
        # At least one row of any size.
        rows_max = max(1, self._gather_bytes // GATHERS // self._row_bytes)
        until_ms_by_source = []
        for source in self._sources:
            # If memory is full, only due messages are loaded.
            load_until_ms = now_ms + self._ahead_ms if has_memory else now_ms
            if source.is_leased_out(now_ms):
                assert source.external is not None
                load_until_ms = now_ms - source.external.grace_ms
            until_ms_by_source.append(load_until_ms + 1 if len(source.index) else -FAR_MS)
        # One cut for all sources, by (due_ms, seq): earlier messages must be in memory before later ones.
        cut = self._find_cut(until_ms_by_source, rows_max)
        gathers: list[Gathering] = []
        for source, until_ms in zip(self._sources, until_ms_by_source, strict=True):
            due, seq = source.index.pop_before(*min(cut, (until_ms, 0)))
            row_seq = source.locations.pop(seq)
            if not source.changes_due_times:
                # Settled messages are skipped before their bodies are read, so that a cancelled campaign costs no disk
                # reads.
                pending = self._outcomes.are_pending(due, seq)
                due, seq, row_seq = due[pending], seq[pending], row_seq[pending]
            if not len(seq):
                continue
            if not source.is_leased_out(now_ms):
                # These messages are now in no index. Until they are in the wheel, `_gathering_from` delays later ones.
                self._gathering_from = min(self._gathering_from, (int(due[0]), int(seq[0])))
            elif source.external is not None:
                source.external.loaded_rows += len(seq)
            gathers.append(Gathering(source, source.discards, due, seq, row_seq))
        if gathers:
            self._gathers = gathers
            self._gathering = asyncio.get_running_loop().create_task(self._gather(gathers))
            self._gathering.add_done_callback(self._finish_gather)

    def _find_cut(self, until_ms_by_source: list[int], rows_max: int) -> Position:
        """Find the position before which at most `rows_max` messages are to be loaded, of all sources together.

        `until_ms_by_source` has the time before which messages of each source are to be loaded. -FAR_MS: none of them.
        """
        pairs = [
            source.index.between(EARLIEST, (until_ms, 0))
            for source, until_ms in zip(self._sources, until_ms_by_source, strict=True)
            if until_ms > -FAR_MS
        ]
        pairs = [pair for pair in pairs if len(pair[0])]
        if sum(len(due) for due, _ in pairs) <= rows_max:
            return NEVER
        due, seq = pairs[0]
        if len(pairs) > 1:
            due, seq = (np.concatenate(columns) for columns in zip(*pairs, strict=True))
            order = np.lexsort((seq, due))
            due, seq = due[order], seq[order]
        return int(due[rows_max]), int(seq[rows_max])

    async def _gather(self, gathers: list[Gathering]) -> None:
        """Read the bodies in the reader thread. Add them to the wheel, without messages that were removed meanwhile."""
        runs = await asyncio.get_running_loop().run_in_executor(self._thread, self._read, gathers)
        for gather, run in zip(gathers, runs, strict=True):
            if gather.discards != gather.source.discards:
                continue  # a clock step has discarded these messages meanwhile
            if len(run.seq) < len(gather.seq):
                self._settle_missing(gather, run)
            for is_removed in self._removals:
                run = run.filtered(~is_removed(run.seq))
            if len(self._outcomes.holds):
                run = run.filtered(~self._outcomes.holds.contains(run.due_ms, run.seq))
            self.wheel.add_run(run)

    def _read(self, gathers: list[Gathering]) -> list[Run]:
        """Read the bodies of each gather as a run sorted by due time (reader thread)."""
        runs = []
        for gather in gathers:
            if gather.source.external is not None:
                # `HourLog.read_files` needs the messages in the order of due times, which they have.
                rows = gather.source.read_bodies(gather.due_ms, gather.seq, gather.row_seq)
                runs.append(Run.from_batches([rows]))
                continue
            # In the order of the log, so that each frame is decoded once.
            order = np.argsort(gather.row_seq)
            rows = gather.source.read_bodies(gather.due_ms[order], gather.seq[order], gather.row_seq[order])
            runs.append(Run.with_due_times(gather.due_ms, gather.seq, rows))
        size_bytes, count = sum(run.rows.nbytes for run in runs), sum(len(run.seq) for run in runs)
        self._row_bytes = max(64, size_bytes // max(1, count))
        return runs

    def _settle_missing(self, gather: Gathering, run: Run) -> None:
        """Settle the messages of a gather that the read has not found.

        In the log, their rows are no scheduled messages. In files, a rewrite of the table has omitted them because they
        were settled. A shifted duration is settled under its original due time, so there is nothing to do.
        """
        is_missing = ~np.isin(gather.seq, run.seq)
        due, seq = gather.due_ms[is_missing], gather.seq[is_missing]
        if gather.source.is_shifted:
            return  # settled meanwhile
        if gather.source.external is None:
            self._outcomes.add_settled(due, seq)
        else:
            assert self._outcomes.is_settled(due, seq).all(), f"opened, and in no file: seq {seq[:9]}"

    def _finish_gather(self, task: asyncio.Task[None]) -> None:
        """Reset the state of the gather, and report its end or its failure."""
        self._gathering, self._gathering_from, self._gathers, self._removals = None, NEVER, [], []
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            logger.critical("gathering due scheduled messages failed reason=%s", error)
            self._on_failure(error)
            return
        self._on_change()


# ---- the lease of an external dispatcher ---------------------------------------------------------------------
# An external *dispatcher* reads due messages from files of the pending table and passes them on. While it has its
# lease, the scheduler does not load the bodies of near messages in files. The dispatcher reads them itself and brings
# them when they are due. The scheduler then hands out those that are still pending. It loads a message itself if the
# dispatcher has not brought it `grace_ms` after its due time, or when the lease is over.

LEASE_MS_MAX = limits.HOUR_MS
# Messages left to a dispatcher, 16 to 32 bytes each. With more, the backlog is opened as late as possible.
LEASED_ROWS_MAX = 8_000_000
OPENED_ROWS_MAX = 1 << 20  # the same limit without a dispatcher


class ExternalDelivery:
    """The lease of one dispatcher. Belongs to the event loop.

    A dispatcher that crashes, lags or repeats itself loses no message and duplicates none. It delays no message by more
    than the grace period plus one read of a file. A message that was brought stays in the index until the grace period
    is over. Then it is skipped, because it is settled.
    """

    def __init__(self, grace_ms: int = GRACE_MS) -> None:
        self.grace_ms = grace_ms
        self.loaded_rows = 0  # messages since the start that the dispatcher did not bring in time
        self._lease_until_ms = 0

    def lease(self, now_ms: int, lease_ms: int) -> None:
        """Leave messages to a dispatcher for `lease_ms` from now on. 0 ends the lease."""
        # Bounded, because a dispatcher that crashes delays messages by the grace period until its lease is over.
        self._lease_until_ms = now_ms + min(lease_ms, LEASE_MS_MAX)

    def is_leased(self, now_ms: int) -> bool:
        """Check whether a dispatcher has a lease. A clock that was set back does not extend it."""
        # A lease that seems to end later than any lease can: the clock was set back, so treat it as over.
        return now_ms < self._lease_until_ms <= now_ms + LEASE_MS_MAX

    def rows_max(self, now_ms: int) -> int:
        """Compute the maximum number of opened messages without bodies."""
        return LEASED_ROWS_MAX if self.is_leased(now_ms) else OPENED_ROWS_MAX

    def load_ms(self, now_ms: int, due_ms: int, default_ms: int) -> int:
        """Compute when to load the message due at `due_ms`. Without a lease, that is `default_ms`."""
        if not self.is_leased(now_ms):
            return default_ms
        # At the end of the grace period or of the lease, but never earlier than without a dispatcher.
        return min(due_ms + self.grace_ms, max(self._lease_until_ms, default_ms))
