"""Opened messages: load their bodies ahead of their due times and hand them out once, in order.

    opened      --expect-->  index: two int64 a scheduled message  --gather-->  wheel: bodies  --take_due-->
    just added  --add------------------------------------------------>

There is no fixed horizon. A message may be handed out when it is earlier than every message whose body is not in
memory, and earlier than every message that is still in a backlog. So the order does not depend on when messages arrive,
and a clock that is set back makes none of them late or early.

A *gather* is one read of bodies in the reader thread. Bodies are loaded up to `ahead_ms` before their due time if
memory allows it. At the due time they are loaded in any case, because a message without memory would never be handed
out.

Messages come from several *sources*, which differ in how their bodies are read. Messages of one source may be left to
an external dispatcher (external_delivery.py). These are loaded late and delay no others meanwhile.
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
from timeball.model.message import Int64Array
from timeball.schedule.backlog import Backlog, Bools
from timeball.schedule.due_index import FAR_MS, DueIndex
from timeball.schedule.due_wheel import DueWheel, Run
from timeball.schedule.external_delivery import OPENED_ROWS_MAX, ExternalDelivery
from timeball.schedule.locations import Locations, as_scheduled
from timeball.schedule.outcomes import Outcomes

logger = logging.getLogger(__name__)

# The estimate before the first gather. The average size that a gather measures replaces it.
ROW_BYTES_GUESS = 512  # bytes per row
EVER = (-FAR_MS, 0)

ReadBodies = Callable[[Int64Array, Int64Array, Int64Array], pa.RecordBatch]


@dataclass(slots=True)
class Source:
    """Messages whose bodies are read in the same way and are not in memory yet."""

    read_bodies: ReadBodies
    decode: Callable[[pa.RecordBatch], pa.RecordBatch] = lambda scheduled_rows: scheduled_rows
    external: ExternalDelivery | None = None  # set if a dispatcher may bring these messages
    has_own_instants: bool = False  # the same field of the backlog
    is_shifted: bool = False  # durations after a clock step (durations.py)
    in_files: bool = False
    index: DueIndex = field(default_factory=DueIndex)
    locations: Locations = field(default_factory=Locations)
    opened: int = 0  # how many times the index was discarded so that the backlog opens everything again

    def decoded(self, scheduled_rows: ReadRows) -> ReadRows:
        """Convert log rows to messages in their accepted form. Rows as values already have that form."""
        return (
            scheduled_rows
            if isinstance(scheduled_rows, NumberedRows)
            else self.decode(as_scheduled(scheduled_rows))
        )

    @classmethod
    def of(cls, backlog: Backlog) -> Source:
        """Build the source of the messages that a backlog opens."""
        return cls(backlog.read_bodies, backlog.decode_waiting, has_own_instants=backlog.has_own_instants)

    def is_left_outside(self, now_ms: int) -> bool:
        """Check whether a dispatcher has a lease on this source, so that its messages delay no others."""
        return self.external is not None and self.external.is_leased(now_ms)

    def forget_settled(self, outcomes: Outcomes) -> None:
        """Remove the earliest messages from the index, up to the first that is not settled (released or cancelled)."""
        while (head_ms := self.index.first_due_ms) < FAR_MS:
            due, seq = self.index.between(EVER, (head_ms + 1, 0))
            settled = outcomes.is_settled(due, seq)
            if not settled.all():
                # Up to the first pending message: the index removes pairs only from its beginning.
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
    # The value of `source.opened` when the gather began. If it has changed, the result is discarded.
    opened: int
    due: Int64Array
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
        """Call `on_change` when a gather has ended, and `on_failure` when one has failed.

        `gather_bytes` bounds the memory for bodies.
        """
        self._thread, self._outcomes, self._sources = reader_thread, outcomes, sources
        self._ahead_ms, self._gather_bytes = ahead_ms, gather_bytes
        self._on_change, self._on_failure = on_change, on_failure
        self._wheel = DueWheel()
        self._gathering: asyncio.Task[None] | None = None
        # One gather runs at a time. The reader thread also serves consumers, and a second gather would only wait behind
        # it.
        self._gathers: list[Gathering] = []
        self._gathering_ms = FAR_MS  # the earliest due time in a gather, of the messages that delay others
        self._row_bytes = ROW_BYTES_GUESS
        # Predicates of messages that were taken out during a gather. The gather's rows that match one are discarded.
        self._taken_out: list[Callable[[Int64Array], Bools]] = []

    def __len__(self) -> int:
        return self.index_rows + len(self._wheel) + sum(len(gather.seq) for gather in self._gathers)

    @property
    def index_rows(self) -> int:
        """The number of messages whose bodies are not in memory."""
        return sum(len(source.index) for source in self._sources)

    @property
    def wheel_rows(self) -> int:
        """The number of messages whose bodies are in memory."""
        return len(self._wheel)

    @property
    def size_bytes(self) -> int:
        """The approximate memory of the bodies, in bytes."""
        return self._wheel.size_bytes

    @property
    def is_gathering(self) -> bool:
        """True while the reader thread loads bodies."""
        return self._gathering is not None

    def has_room(self, now_ms: int) -> bool:
        """Check whether backlogs may open more, or have to wait until some of these messages are handed out."""
        return all(
            len(source.index)
            < (OPENED_ROWS_MAX if source.external is None else source.external.rows_max(now_ms))
            for source in self._sources
            # Shifted sources have no limit here, because `durations.ROWS_MAX` bounds them.
            if not source.is_shifted
        )

    # -- coming --------------------------------------------------------------------------------------------

    def add(self, source: Source, scheduled_rows: ReadRows, now_ms: int) -> int:
        """Add messages that are still in their first rows. Return the time of the next work on them, in ms."""
        scheduled_rows = source.decoded(scheduled_rows)
        due, seq = pairs_of(scheduled_rows)
        first_ms = int(due.min())
        # Without room the bodies are dropped and read from the log when they are due, so that memory is bounded.
        if not self._has_room_for_bodies():
            source.index.add(due, seq)
            return first_ms
        # These rows are in memory already. Reading them again within `ahead_ms` would cost more than keeping them.
        soon = due <= now_ms + self._ahead_ms
        if soon.all():
            self._wheel.add(scheduled_rows)
            return first_ms
        if soon.any():
            self._wheel.add(filtered(scheduled_rows, soon))
        source.index.add(due[~soon], seq[~soon])
        return min(first_ms, int(due[~soon].min()) - self._ahead_ms // 2)

    def expect(self, source: Source, due_ms: Int64Array, seq: Int64Array, row_seq: Int64Array) -> None:
        """Add messages whose bodies are in these rows of the log, or in the table."""
        source.index.add(due_ms, seq)
        if not source.in_files:
            source.locations.add(seq, row_seq)

    def forget(self, source: Source, is_of_source: Callable[[Int64Array], Bools]) -> None:
        """Remove all messages of a source. `is_of_source` selects those in the wheel. They will be opened again."""
        source.index, source.locations = DueIndex(), Locations()
        # A gather in progress belongs to the removed messages. `_gather` compares this number and discards its rows.
        source.opened += 1
        self._drop_bodies(is_of_source)

    def take_out(self, is_gone: Callable[[Int64Array], Bools]) -> None:
        """Remove messages from all sources. They are loaded again with other due times."""
        for source in self._sources:
            if len(source.index):
                source.index.drop(is_gone)
        if self._gathering is not None:
            self._taken_out.append(is_gone)
        self._drop_bodies(is_gone)

    def drop(self, is_gone: Callable[[Int64Array], Bools]) -> None:
        """Remove messages in files by sequence number. Those in a gather are removed when it ends."""
        for source in self._sources:
            if source.external is not None:
                source.index.drop(is_gone)
        self._drop_bodies(is_gone)
        self._on_change()

    def _drop_bodies(self, is_gone: Callable[[Int64Array], Bools]) -> None:
        # All of the wheel is rebuilt, because its rows do not contain their source. This is rare: clock steps and
        # pauses.
        run = self._wheel.take_due(FAR_MS, len(self._wheel))
        if run is not None:
            kept = ~is_gone(run.seq)
            self._wheel.add_run(run if kept.all() else run.filtered(kept))

    # -- going ---------------------------------------------------------------------------------------------

    def take_due(self, now_ms: int, limit: int, below_ms: int) -> ReadRows | None:
        """Hand out up to `limit` messages due by now and before `below_ms`, sorted. None if there are none.

        A backlog may still contain messages due at or after `below_ms`.
        """
        self._gather_if_needed(now_ms)
        # Invariant: no message is handed out after one whose body is not in memory. This one bound keeps the order.
        high_ms = min(now_ms + 1, below_ms, self._unloaded_ms(now_ms))
        while (
            self._wheel.first_due_ms < high_ms and (run := self._wheel.take_due(high_ms, limit)) is not None
        ):
            # Outcomes identify a message by its original due time. After a clock step it may count as due at another
            # time.
            promised_ms, last_ms = run.promised_ms, run.last_promised_ms
            # Cancelled messages are dropped only here, so that a cancel needs no search in memory. Nearly all cancelled
            # messages are due far ahead, so the first comparison usually decides.
            if self._outcomes.first_cancelled_ms <= last_ms:
                keep = ~self._outcomes.was_cancelled(promised_ms, run.seq)
                if not keep.any():
                    continue
                if not keep.all():
                    run, promised_ms = run.filtered(keep), promised_ms[keep]
            # Due at another time than the original one, because a clock was set (durations.py).
            rows = run.rows_as_due() if run.is_shifted else run.rows
            recorded_ms = promised_ms if rows is run.rows else pairs_of(rows)[0]
            # In flight from here on: a later cancel fails, and recovery looks for the release record.
            self._outcomes.hand_out(promised_ms, run.seq, recorded_ms)
            return rows
        return None

    def next_ms(self, now_ms: int, below_ms: int) -> int:
        """Compute when `take_due` next has work among messages due before `below_ms`. FAR_MS if never."""
        first_ms = self._wheel.first_due_ms
        if first_ms >= min(below_ms, self._gathering_ms):
            first_ms = FAR_MS  # `on_change` reports the end of a gather, and the scheduler that of an opening
        return first_ms if self._gathering is not None else min(first_ms, self._gather_ms(now_ms))

    def first_due_ms(self) -> int:
        """Find the earliest due time of a message that is not handed out. FAR_MS if there are none."""
        for source in self._sources:
            if source.external is not None:
                source.forget_settled(self._outcomes)  # settled ones, which a dispatcher brought
        firsts = (source.index.first_due_ms for source in self._sources)
        gathers = (int(gather.due[0]) for gather in self._gathers)
        return min(self._wheel.first_due_ms, *firsts, *gathers)

    def needed_seq(self) -> int | None:
        """Find the oldest row of the log whose body is not in memory, or an older one. None if no row is needed."""
        rows = [source.needed_seq() for source in self._sources]
        rows += [int(gather.row_seq.min()) for gather in self._gathers if not gather.source.in_files]
        return min((row for row in rows if row is not None), default=None)

    async def wait_held(self) -> None:
        """Wait until no gather contains a held message. The files of a resume contain all of these again."""
        holds = self._outcomes.holds
        while any(holds.contains(gather.due, gather.seq).any() for gather in self._gathers):
            await self.wait_idle()

    async def wait_idle(self) -> None:
        """Wait until the reader thread has finished its gather."""
        while self._gathering is not None:
            await asyncio.wait([self._gathering])

    # -- gathering -----------------------------------------------------------------------------------------

    def _has_room_for_bodies(self) -> bool:
        return self._wheel.size_bytes < self._gather_bytes // 2

    def _unloaded_ms(self, now_ms: int) -> int:
        """Find the earliest due time of a message without a body, among those that delay others."""
        first_ms = self._gathering_ms
        for source in self._sources:
            head_ms = source.index.first_due_ms
            if head_ms < first_ms and not source.is_left_outside(now_ms):
                first_ms = head_ms
        return first_ms

    def _gather_ms(self, now_ms: int) -> int:
        """Compute when to load bodies next: ahead of their due times with room in memory, else at their due times."""
        # Half of the lead time, while a gather loads all of it. So there is one gather per half of the lead time, not
        # one per message.
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
        # One gather may take half of the memory for bodies, but at least one row of any size.
        rows_max = max(1, self._gather_bytes // 2 // self._row_bytes)
        untils = []
        for source in self._sources:
            # Without room only due messages are loaded.
            ahead_ms = now_ms + self._ahead_ms if has_room else now_ms
            if source.is_left_outside(now_ms):
                assert source.external is not None
                ahead_ms = now_ms - source.external.grace_ms
            untils.append(ahead_ms + 1 if len(source.index) else -FAR_MS)
        # One cut for all sources, in their common order: earlier messages must be in memory before later ones.
        high = self._cut(untils, rows_max)
        gathers: list[Gathering] = []
        for source, until_ms in zip(self._sources, untils, strict=True):
            due, seq = source.index.pop_before(*min(high, (until_ms, 0)))
            row_seq = source.locations.pop(seq)
            if not source.has_own_instants:
                # Settled messages are skipped before their bodies are read, so that a cancelled campaign costs no disk
                # reads.
                waits = self._outcomes.waits(due, seq)
                due, seq, row_seq = due[waits], seq[waits], row_seq[waits]
            if not len(seq):
                continue
            if not source.is_left_outside(now_ms):
                # These messages are now in no index. Their earliest due time delays later messages in their place.
                self._gathering_ms = min(self._gathering_ms, int(due[0]))
            elif source.external is not None:
                source.external.loaded_rows += len(seq)
            gathers.append(Gathering(source, source.opened, due, seq, row_seq))
        if gathers:
            self._gathers = gathers
            self._gathering = asyncio.get_running_loop().create_task(self._gather(gathers))
            self._gathering.add_done_callback(self._gathered)

    def _cut(self, untils: list[int], rows_max: int) -> tuple[int, int]:
        """Find the (due_ms, seq) before which at most `rows_max` messages without bodies are pending."""
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
                continue  # a clock step has discarded these messages meanwhile
            if len(run.seq) < len(gather.seq):
                self._missing(gather, run)
            for is_gone in self._taken_out:
                run = run.filtered(~is_gone(run.seq))
            if len(self._outcomes.holds):
                run = run.filtered(~self._outcomes.holds.contains(run.due, run.seq))
            self._wheel.add_run(run)

    def _read(self, gathers: list[Gathering]) -> list[Run]:
        """Read the bodies of each gather as a run sorted by due time (reader thread)."""
        runs = []
        for gather in gathers:
            if gather.source.external is not None:
                # `read_files` needs the messages sorted by due time, as they are.
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
        """Settle messages without a body.

        Either the row is no scheduled message, or the table was rewritten without the message because it was settled.
        """
        gone = ~np.isin(gather.seq, run.seq)
        due, seq = gather.due[gone], gather.seq[gone]
        if gather.source.is_shifted:
            return  # settled meanwhile, under the original due time
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
            logger.critical("gathering due scheduled messages failed reason=%s", error)
            self._on_failure(error)
            return
        self._on_change()
