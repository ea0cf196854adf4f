"""Promises that have been opened: bodies loaded ahead of their instants, handed out once, in order.

    opened      --expect-->  index: two int64 a promise  --gather-->  wheel: bodies  --take_due-->
    just added  --add------------------------------------------------>

There is no horizon. A promise may be handed out when it is earlier than every promise whose body is not in memory, and
earlier than all that backlogs still hold; so the order does not depend on when promises arrive, and a clock that is set
back makes none late or early. Bodies are loaded `ahead_ms` before their instant as long as memory allows, and at the
instant whether it allows or not: a promise without room would never be handed out.

Promises come from several *sources*, which differ in how their bodies are read. Those of one may be left to a
dispatcher outside (external_delivery.py): these are loaded late, and hold up nothing meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa

from timeball.log.few_rows import NumberedRows, ReadRows, filtered, pairs_of
from timeball.message import Int64Array
from timeball.schedule.backlog import Backlog, Bools
from timeball.schedule.due_index import FAR_MS, DueIndex
from timeball.schedule.due_wheel import DueWheel, Run
from timeball.schedule.external_delivery import OPENED_ROWS_MAX, ExternalDelivery
from timeball.schedule.locations import Locations, as_promises
from timeball.schedule.outcomes import Outcomes

logger = logging.getLogger(__name__)

# The measured average of the last gather takes its place.
ROW_BYTES_GUESS = 512  # before anything has been gathered
EVER = (-FAR_MS, 0)

ReadBodies = Callable[[Int64Array, Int64Array, Int64Array], pa.RecordBatch]


@dataclass(slots=True)
class Source:
    """Promises whose bodies are read in one way and are not in memory yet."""

    read_bodies: ReadBodies
    decode: Callable[[pa.RecordBatch], pa.RecordBatch] = lambda promises: promises
    external: ExternalDelivery | None = None  # of promises that a dispatcher may bring
    has_own_instants: bool = False  # as of its backlog
    is_shifted: bool = False  # durations, after a step of the clock (durations.py)
    in_files: bool = False
    index: DueIndex = field(default_factory=DueIndex)
    locations: Locations = field(default_factory=Locations)
    opened: int = 0  # how often all of it has been opened anew

    def decoded(self, promises: ReadRows) -> ReadRows:
        """Return promises as they were accepted, of the rows that hold them; those that come as values are that."""
        return promises if isinstance(promises, NumberedRows) else self.decode(as_promises(promises))

    @classmethod
    def of(cls, backlog: Backlog) -> Source:
        """Return the promises that a backlog gives up."""
        return cls(backlog.read_bodies, backlog.decode_waiting, has_own_instants=backlog.has_own_instants)

    def is_left_outside(self, now_ms: int) -> bool:
        """Return whether a dispatcher is at work, so that these hold up nothing."""
        return self.external is not None and self.external.is_leased(now_ms)

    def forget_settled(self, outcomes: Outcomes) -> None:
        """Forget the earliest of these promises as far as they are settled."""
        while (head_ms := self.index.first_due_ms) < FAR_MS:
            due, seq = self.index.between(EVER, (head_ms + 1, 0))
            settled = outcomes.is_settled(due, seq)
            if not settled.all():
                # Up to the first that still waits: the index gives up pairs only from its beginning.
                self.index.pop_before(head_ms, int(seq[int(settled.argmin())]))
                return
            self.index.pop_before(head_ms + 1, 0)

    def needed_seq(self) -> int | None:
        """Return the oldest row in which one of these lies."""
        # Bodies in files do not need the log.
        if self.in_files or not len(self.index):
            return None
        return int(self.locations.rows_of(self.index.numbers()).min())


@dataclass(frozen=True, slots=True)
class Gathering:
    """Promises of one source on their way into memory."""

    source: Source
    opened: int
    due: Int64Array
    seq: Int64Array
    row_seq: Int64Array


class Loaded:
    """Belongs to the event loop. Every promise here is in an index, in a gather, in the wheel, or handed out."""

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
        """Call `on_change` when a gather has ended, `on_failure` when one has failed."""
        self._thread, self._outcomes, self._sources = reader_thread, outcomes, sources
        self._ahead_ms, self._gather_bytes = ahead_ms, gather_bytes
        self._on_change, self._on_failure = on_change, on_failure
        self._wheel = DueWheel()
        self._gathering: asyncio.Task[None] | None = None
        # One gather at a time: the reader thread also serves consumers, and a second gather would only wait behind
        # it.
        self._gathers: list[Gathering] = []
        self._gathering_ms = FAR_MS  # the earliest instant on its way into memory, of what may hold up others
        self._row_bytes = ROW_BYTES_GUESS
        # Taken out while a gather is under way: its rows that these name are thrown away.
        self._taken_out: list[Callable[[Int64Array], Bools]] = []

    def __len__(self) -> int:
        return self.index_rows + len(self._wheel) + sum(len(gather.seq) for gather in self._gathers)

    @property
    def index_rows(self) -> int:
        """Return how many promises wait without their bodies."""
        return sum(len(source.index) for source in self._sources)

    @property
    def wheel_rows(self) -> int:
        """Return how many promises have their bodies in memory."""
        return len(self._wheel)

    @property
    def size_bytes(self) -> int:
        """Return how many bytes these are, about."""
        return self._wheel.size_bytes

    @property
    def is_gathering(self) -> bool:
        """Return whether the reader thread works for this."""
        return self._gathering is not None

    def has_room(self, now_ms: int) -> bool:
        """Return whether backlogs may give up more, or must wait until some of this is handed out."""
        return all(
            len(source.index)
            < (OPENED_ROWS_MAX if source.external is None else source.external.rows_max(now_ms))
            for source in self._sources
            if not source.is_shifted
        )

    # -- coming --------------------------------------------------------------------------------------------

    def add(self, source: Source, promises: ReadRows, now_ms: int) -> int:
        """Keep these, which lie in their first rows. Return when to look at them."""
        promises = source.decoded(promises)
        due, seq = pairs_of(promises)
        first_ms = int(due.min())
        # Their bodies are given up again, and read from the log when they are due: memory has a bound, the log has
        # them.
        if not self._has_room_for_bodies():
            source.index.add(due, seq)
            return first_ms
        # The rows are in memory already: reading them again within `ahead_ms` would cost more than keeping them.
        soon = due <= now_ms + self._ahead_ms
        if soon.all():
            self._wheel.add(promises)
            return first_ms
        if soon.any():
            self._wheel.add(filtered(promises, soon))
        source.index.add(due[~soon], seq[~soon])
        return min(first_ms, int(due[~soon].min()) - self._ahead_ms // 2)

    def expect(self, source: Source, due_ms: Int64Array, seq: Int64Array, row_seq: Int64Array) -> None:
        """Keep these, whose bodies lie in these rows, or in the table."""
        source.index.add(due_ms, seq)
        if not source.in_files:
            source.locations.add(seq, row_seq)

    def forget(self, source: Source, is_of_source: Callable[[Int64Array], Bools]) -> None:
        """Forget all promises of a source: its backlog will give them up again."""
        source.index, source.locations = DueIndex(), Locations()
        # A gather that is under way belongs to the forgotten ones; `_gather` throws its rows away by this number.
        source.opened += 1
        self._drop_bodies(is_of_source)

    def take_out(self, is_gone: Callable[[Int64Array], Bools]) -> None:
        """Forget these of all sources: they are loaded again, to be due at other instants."""
        for source in self._sources:
            if len(source.index):
                source.index.drop(is_gone)
        if self._gathering is not None:
            self._taken_out.append(is_gone)
        self._drop_bodies(is_gone)

    def drop(self, is_gone: Callable[[Int64Array], Bools]) -> None:
        """Let go of promises in files with these numbers; those on their way into memory go when they arrive."""
        for source in self._sources:
            if source.external is not None:
                source.index.drop(is_gone)
        self._drop_bodies(is_gone)
        self._on_change()

    def _drop_bodies(self, is_gone: Callable[[Int64Array], Bools]) -> None:
        # All of the wheel is taken apart: rows do not say which source they are of. A clock is set back rarely.
        run = self._wheel.take_due(FAR_MS, len(self._wheel))
        if run is not None:
            kept = ~is_gone(run.seq)
            self._wheel.add_run(run if kept.all() else run.filtered(kept))

    # -- going ---------------------------------------------------------------------------------------------

    def take_due(self, now_ms: int, limit: int, below_ms: int) -> ReadRows | None:
        """Return up to `limit` promises due by now and before `below_ms`, sorted, now in flight; None when none are.

        `below_ms`: a backlog may hold what comes before it.
        """
        self._gather_if_needed(now_ms)
        # Invariant: nothing is handed out past a promise that is not in memory yet. This one bound keeps the order.
        high_ms = min(now_ms + 1, below_ms, self._unloaded_ms(now_ms))
        while (
            self._wheel.first_due_ms < high_ms and (run := self._wheel.take_due(high_ms, limit)) is not None
        ):
            # By the instants they were promised for: a level's row may count as due earlier (delay_levels).
            promised_ms, last_ms = run.promised_ms, run.last_promised_ms
            # Cancelled promises are dropped here, the last moment: a cancel then costs no search in memory. Nearly
            # always only such are cancelled as are due far ahead.
            if self._outcomes.first_cancelled_ms <= last_ms:
                keep = ~self._outcomes.was_cancelled(promised_ms, run.seq)
                if not keep.any():
                    continue
                if not keep.all():
                    run, promised_ms = run.filtered(keep), promised_ms[keep]
            # Due at another instant than promised: a clock was set (durations.py).
            rows = run.rows_as_due() if run.is_shifted else run.rows
            recorded_ms = promised_ms if rows is run.rows else pairs_of(rows)[0]
            # In flight from here on: a cancel that comes now is too late, and recovery looks for the release record.
            self._outcomes.hand_out(promised_ms, run.seq, recorded_ms)
            return rows
        return None

    def next_ms(self, now_ms: int, below_ms: int) -> int:
        """Return when `take_due` has something to do among promises due before `below_ms`; FAR_MS when never."""
        first_ms = self._wheel.first_due_ms
        if first_ms >= min(below_ms, self._gathering_ms):
            first_ms = FAR_MS  # the end of a gather is told, and so is what a backlog opens
        return first_ms if self._gathering is not None else min(first_ms, self._gather_ms(now_ms))

    def first_due_ms(self) -> int:
        """Return the earliest instant of those not handed out; FAR_MS when there are none."""
        for source in self._sources:
            if source.external is not None:
                source.forget_settled(self._outcomes)  # brought by a dispatcher
        firsts = (source.index.first_due_ms for source in self._sources)
        gathers = (int(gather.due[0]) for gather in self._gathers)
        return min(self._wheel.first_due_ms, *firsts, *gathers)

    def needed_seq(self) -> int | None:
        """Return the oldest row of the log whose body is not in memory, or an older one."""
        rows = [source.needed_seq() for source in self._sources]
        rows += [int(gather.row_seq.min()) for gather in self._gathers if not gather.source.in_files]
        return min((row for row in rows if row is not None), default=None)

    async def wait_held(self) -> None:
        """Return when none is on its way into memory that is held: the files of a resume bring all of these."""
        holds = self._outcomes.holds
        while any(holds.contains(gather.due, gather.seq).any() for gather in self._gathers):
            await self.wait_idle()

    async def wait_idle(self) -> None:
        """Return when the reader thread is done with this."""
        while self._gathering is not None:
            await asyncio.wait([self._gathering])

    # -- gathering -----------------------------------------------------------------------------------------

    def _has_room_for_bodies(self) -> bool:
        return self._wheel.size_bytes < self._gather_bytes // 2

    def _unloaded_ms(self, now_ms: int) -> int:
        """Return the earliest instant of a promise without a body, of those that hold up others."""
        first_ms = self._gathering_ms
        for source in self._sources:
            head_ms = source.index.first_due_ms
            if head_ms < first_ms and not source.is_left_outside(now_ms):
                first_ms = head_ms
        return first_ms

    def _gather_ms(self, now_ms: int) -> int:
        """Return when to load bodies next; without room, at their instants, when others have made room."""
        # Half of the lead, while a gather takes all of it: one gather each half of the lead, not one a promise.
        lead_ms = self._ahead_ms // 2 if self._has_room_for_bodies() else 0
        first_ms = FAR_MS
        for source in self._sources:
            head_ms = source.index.first_due_ms
            if head_ms < FAR_MS:
                load_ms = head_ms - lead_ms
                if source.external is not None:
                    load_ms = source.external.load_ms(now_ms, head_ms, load_ms)
                first_ms = min(first_ms, load_ms)
        return first_ms

    def _gather_if_needed(self, now_ms: int) -> None:
        while self._gathering is None and self._gather_ms(now_ms) <= now_ms:
            self._start_gather(now_ms)

    def _start_gather(self, now_ms: int) -> None:
        has_room = self._has_room_for_bodies()
        # Half of what may be in memory; at least one, however large.
        rows_max = max(1, self._gather_bytes // 2 // self._row_bytes)
        untils = []
        for source in self._sources:
            ahead_ms = now_ms + self._ahead_ms if has_room else now_ms
            if source.is_left_outside(now_ms):
                assert source.external is not None
                ahead_ms = now_ms - source.external.grace_ms
            untils.append(ahead_ms + 1 if len(source.index) else -FAR_MS)
        # One cut for all sources, in their common order: what is earlier must be in memory before what is later.
        high = self._cut(untils, rows_max)
        gathers: list[Gathering] = []
        for source, until_ms in zip(self._sources, untils, strict=True):
            due, seq = source.index.pop_before(*min(high, (until_ms, 0)))
            row_seq = source.locations.pop(seq)
            if not source.has_own_instants:
                # Settled ones are left out before their bodies are read: a campaign that was called off costs no
                # disk.
                waits = self._outcomes.waits(due, seq)
                due, seq, row_seq = due[waits], seq[waits], row_seq[waits]
            if not len(seq):
                continue
            if not source.is_left_outside(now_ms):
                # On their way into memory, so in no index: this instant holds up later ones in their place.
                self._gathering_ms = min(self._gathering_ms, int(due[0]))
            elif source.external is not None:
                source.external.loaded_rows += len(seq)
            gathers.append(Gathering(source, source.opened, due, seq, row_seq))
        if gathers:
            self._gathers = gathers
            self._gathering = asyncio.get_running_loop().create_task(self._gather(gathers))
            self._gathering.add_done_callback(self._gathered)

    def _cut(self, untils: list[int], rows_max: int) -> tuple[int, int]:
        """Return the position before which at most `rows_max` promises wait without bodies."""
        pairs = [
            source.index.between(EVER, (until_ms, 0))
            for source, until_ms in zip(self._sources, untils, strict=True)
            if until_ms > -FAR_MS
        ]
        pairs = [pair for pair in pairs if len(pair[0])]
        if sum(len(due) for due, _ in pairs) <= rows_max:
            return (FAR_MS, 0)
        due, seq = pairs[0]
        if len(pairs) > 1:
            due, seq = (np.concatenate(columns) for columns in zip(*pairs, strict=True))
            order = np.lexsort((seq, due))
            due, seq = due[order], seq[order]
        return int(due[rows_max]), int(seq[rows_max])

    async def _gather(self, gathers: list[Gathering]) -> None:
        runs = await asyncio.get_running_loop().run_in_executor(self._thread, self._read, gathers)
        for gather, run in zip(gathers, runs, strict=True):
            if gather.opened != gather.source.opened:
                continue  # the clock was set back meanwhile
            if len(run.seq) < len(gather.seq):
                self._missing(gather, run)
            for is_gone in self._taken_out:
                run = run.filtered(~is_gone(run.seq))
            if len(self._outcomes.holds):
                run = run.filtered(~self._outcomes.holds.contains(run.due, run.seq))
            self._wheel.add_run(run)

    def _read(self, gathers: list[Gathering]) -> list[Run]:
        """Read bodies (reader thread), sorted by instant."""
        runs = []
        for gather in gathers:
            if gather.source.external is not None:
                rows = gather.source.read_bodies(gather.due, gather.seq, gather.row_seq)
                runs.append(Run.of([rows]))
                continue
            # In the order of the log, so that each frame is decoded once.
            order = np.argsort(gather.row_seq)
            rows = gather.source.read_bodies(gather.due[order], gather.seq[order], gather.row_seq[order])
            runs.append(Run.at(gather.due, gather.seq, rows))
        size_bytes, count = sum(run.rows.nbytes for run in runs), sum(len(run.seq) for run in runs)
        self._row_bytes = max(64, size_bytes // max(1, count))
        return runs

    def _missing(self, gather: Gathering, run: Run) -> None:
        """Settle those without a body: no promise at all, or rewritten out of the table because it was settled."""
        gone = ~np.isin(gather.seq, run.seq)
        due, seq = gather.due[gone], gather.seq[gone]
        if gather.source.is_shifted:
            return  # settled meanwhile, under the instant it was promised for
        if gather.source.external is None:
            self._outcomes.add_settled(due, seq)
        else:
            assert self._outcomes.is_settled(due, seq).all(), f"opened, and in no file: seq {seq[:9]}"

    def _gathered(self, task: asyncio.Task[None]) -> None:
        self._gathering, self._gathering_ms, self._gathers, self._taken_out = None, FAR_MS, [], []
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            logger.critical("gathering due promises failed reason=%s", error)
            self._on_failure(error)
            return
        self._on_change()
