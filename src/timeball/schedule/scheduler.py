"""The scheduler: collects the messages that will soon be due from all backlogs and hands them out in one order.

    add -> a backlog --open, ahead of its time--> loaded --take_due--> in flight --released--> outcomes
                      \\--------------------------> rewrites --rewritten, durable--> the backlog again

A message that is not settled (neither released nor cancelled) is in exactly one of these places. To *open* means to
take messages out of a backlog ahead of their due times.

Messages are handed out by due time and sequence number, whichever way they take. So a message is not handed out while
an earlier one may still be in a backlog (`first_due_ms`), is being rewritten, or is loaded without its body.

All methods run on the event loop, in the order in which the log assigns sequence numbers. That order decides every
race: a message that was handed out cannot be cancelled, and a cancelled one is never handed out.

The scheduler stores the next time at which it has work. Each change that makes this time earlier calls `_expect`, so no
step has to ask every part.

When the clock is set, a message with a due time of its own follows the clock, and loaded messages stay loaded.
Durations follow elapsed time: their due times are shifted by the step (durations.py, and `clock_stepped` of the delay
levels).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import numpy as np
import pyarrow as pa

from timeball.log.reader import LogReader
from timeball.log.row_encoder import Pairs, ReadRows, filtered
from timeball.model.message import Int64Array
from timeball.schedule.backlog import SORT_ROWS, Backlog, Bools, Opened, Rewritten
from timeball.schedule.delay_levels.backlog import DelayLevels
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.due_wheel import Run
from timeball.schedule.durations import Durations, Find, is_in
from timeball.schedule.external_delivery import ExternalDelivery
from timeball.schedule.hour_log.backlog import HourLog
from timeball.schedule.loaded import Loaded, Source
from timeball.schedule.locations import Waiting
from timeball.schedule.outcomes import Outcomes, Settled
from timeball.schedule.rewrites import Rewrites
from timeball.table.attachment import Attachment, within

logger = logging.getLogger(__name__)

MARK_EVERY_MS = 1_000
REWRITES_SHARE = 8  # the fraction of the memory for bodies that rewrites may use: 1/8


class Scheduler:
    """The scheduler of all scheduled messages. Call `restore` once for each backlog before any other method."""

    def __init__(
        self,
        reader: LogReader,
        reader_thread: Executor,
        outcomes: Outcomes,
        backlogs: Sequence[Backlog],
        *,
        table: HourLog | None,
        external: ExternalDelivery,
        ahead_ms: int,
        gather_bytes: int,
        on_failure: Callable[[BaseException], None],
        durations: Durations | None = None,
    ) -> None:
        """Schedule the messages in `backlogs`. The first one keeps the durations.

        `table` opens messages that are in files of the pending table. `ahead_ms` is the time between opening a message
        and its due time. `gather_bytes` is the memory for bodies.
        """
        self.outcomes, self.external, self.backlogs, self._table = outcomes, external, list(backlogs), table
        self._reader, self._ahead_ms, self._on_failure = reader, ahead_ms, on_failure
        self._thread = reader_thread
        self._sources = {id(backlog): Source.of(backlog) for backlog in backlogs}
        self._files = None if table is None else Source(table.read_files, external=external, in_files=True)
        files = [] if self._files is None else [self._files]
        self.durations = Durations(outcomes, lambda: reader.next_seq) if durations is None else durations
        # Sources for durations whose due times a clock step has shifted: those in the log, and those in files (below
        # `durations.files_to_seq`).
        self._shifted = Source(backlogs[0].read_bodies, has_own_instants=True, is_shifted=True)
        self._shifted_files = Source(
            self._read_shifted_files, has_own_instants=True, is_shifted=True, in_files=True
        )
        self._adopting: asyncio.Task[None] | None = None
        # Nothing due after this time is handed out while the durations from before the start are being read: until then
        # it is open whether the clock step shifts their due times.
        self._held_ms = FAR_MS
        self.loaded = Loaded(
            reader_thread, outcomes,
            [*self._sources.values(), *files, self._shifted, self._shifted_files], ahead_ms=ahead_ms,
            gather_bytes=gather_bytes - gather_bytes // REWRITES_SHARE, on_change=self._look_now, on_failure=on_failure,
        )  # fmt: skip
        self.rewrites = Rewrites(
            reader, reader_thread, outcomes, chunk_bytes=gather_bytes // REWRITES_SHARE,
            on_change=self._look_now, on_failure=on_failure,
        )  # fmt: skip
        # The backlogs that are being opened, each with its `first_due_ms` before the opening. That time bounds what may
        # be handed out until the opening ends.
        self._openings: dict[int, tuple[asyncio.Task[None], int]] = {}
        # Called when there is work before the time that `fall_asleep` returned.
        self.on_earlier: Callable[[], None] = lambda: None
        self._now_ms = self._marked_ms = -FAR_MS
        # `_next_ms` is the stored time of the next work, -FAR_MS while the ticker is awake.
        self._rewritten_rows, self._next_ms = 0, -FAR_MS
        self._awaits_durable = False  # whether the ticker sleeps until handed-out rows are durable

    # -- scheduled messages come ---------------------------------------------------------------------------------------

    def add(
        self,
        backlog: Backlog,
        scheduled_rows: ReadRows,
        pairs: Pairs,
        now_ms: int,
        lasting: Bools | None = None,
    ) -> None:
        """Add durable messages, in the rows of the log that gave them their due times at `now_ms`.

        `lasting` marks the messages whose due times are durations that began at that time. It is None when there are no
        durations, or when the backlog recognizes them itself.
        """
        due, seq = pairs
        self.outcomes.waiting_rows += len(seq)
        if lasting is not None and not self.durations.is_full:
            self.durations.newest.append((due[lasting], seq[lasting]))
        near = backlog.add(Waiting(due, seq, seq), now_ms)
        self._bound_opening(backlog, due, near)
        # A wake-up is needed for each of the two parts: near messages are loaded, far ones are opened later.
        if near_rows := int(np.count_nonzero(near)):
            found = scheduled_rows if near_rows == len(near) else filtered(scheduled_rows, near)
            self._expect(self.loaded.add(self._sources[id(backlog)], found, now_ms))
        if near_rows < len(near):
            self._expect_opening(backlog)

    async def attach(self, attachment: Attachment, resumes: str = "", now_ms: int = 0) -> None:
        """Apply a durable TABLE row: its files join and leave the table. End the hold named `resumes`.

        Rows of a bulk job or of a resumed campaign may be due before `now_ms`. Their lateness counts from `now_ms`. A
        file that leaves the table is first opened as far as the backlog is open.
        """
        table = self._table
        assert table is not None
        await self.loaded.wait_held()
        # An opening reads a list of files in another thread. None of these files may leave the table meanwhile.
        while id(table) in self._openings or not table.may_attach(attachment):
            if id(table) not in self._openings:
                # Open as far as `add` has moved the bound: it reads the clock later than the last tick. With the time
                # of the tick this loop would repeat until the next tick.
                self._start_opening(table, max(self._now_ms, table.opened_ms - self._ahead_ms))
            await asyncio.wait([self._openings[id(table)][0]])
        table.attach(attachment, now_ms)
        if attachment.job == "compact":
            self.durations.files_to_seq = max(self.durations.files_to_seq, attachment.to_seq)
        self.outcomes.add_late(attachment.ranges, attachment.rows if attachment.job == "bulk" else 0)
        self.outcomes.holds.remove(resumes)
        self._expect_opening(table)

    def hold(self, name: str, ranges: Sequence[tuple[int, int]]) -> int:
        """Load none of these ranges of a bulk attach until they are resumed.

        Return the due time from which on the messages are held.
        """
        from_ms = self.outcomes.hold(name, ranges, self.settled_before_ms)
        self.loaded.drop(lambda seq: within(seq, ranges))
        return from_ms

    def lease(self, now_ms: int, lease_ms: int) -> None:
        """Leave messages in files to an external dispatcher for `lease_ms`. 0 ends the lease."""
        self.external.lease(now_ms, lease_ms)
        self._look_now()

    # -- scheduled messages are due ------------------------------------------------------------------------------------

    def take_due(self, now_ms: int, limit: int) -> ReadRows | None:
        """Hand out up to `limit` messages due by now, sorted by (due_ms, seq). None if there are none."""
        self._follow_clock(now_ms)
        self._open_if_needed(now_ms)
        return self.loaded.take_due(now_ms, limit, self._below_ms())

    def take_brought(self, scheduled_rows: pa.RecordBatch) -> pa.RecordBatch | None:
        """Hand out the messages that a dispatcher brings, if they are still pending and were left to it.

        `scheduled_rows` are all due. The result is sorted like that of `take_due`. It is None if no message is left.
        """
        assert self._files is not None
        run = Run.of([scheduled_rows])
        was_full = not self.loaded.has_room(self._now_ms)
        # A message must be left to the dispatcher and not be settled. One that was loaded meanwhile is no longer in the
        # index.
        keep = self._files.index.contains(run.due, run.seq) & self.outcomes.may_load(run.due, run.seq)
        # A message may be brought twice; keep the first.
        keep[1:] &= (run.seq[1:] != run.seq[:-1]) | (run.due[1:] != run.due[:-1])
        # The messages brought here will leave the index, so there may be room to open a backlog.
        if was_full:
            self._look_now()
        if not keep.any():
            return None
        run = run if keep.all() else run.filtered(keep)
        self.outcomes.hand_out(run.due, run.seq, run.due)
        return run.rows

    def released(self, seq: Int64Array) -> None:
        """Count these messages of the oldest hand-out as released. Their release records are durable."""
        self.outcomes.released(seq)
        if self._awaits_durable:
            self._awaits_durable = False
            self._look_now()

    def take_rewrites(self, limit: int) -> pa.RecordBatch | None:
        """Take up to `limit` messages that must be rewritten, in the form of their new rows. None if there are none.

        They keep their sequence numbers and the time at which they were accepted (`store_ms`).
        """
        return self.rewrites.take_rows(limit) if self.rewrites.rows else None

    def rewritten(self, seq: Int64Array, row_seq: Int64Array, now_ms: int) -> None:
        """Give messages from `take_rewrites` back to their backlog, in that order: their new rows are durable.

        `row_seq` contains the new rows.
        """
        batch = self.rewrites.rewritten(seq)
        scheduled_rows = batch.scheduled_rows
        self._rewritten_rows += len(seq)
        # A message that was cancelled while its new row was being written is settled, although the row is in the log.
        waits = ~self.outcomes.is_settled(scheduled_rows.due_ms, scheduled_rows.seq)
        if waits.any():
            kept = Waiting(scheduled_rows.due_ms[waits], seq[waits], row_seq[waits])
            near = batch.backlog.add(
                kept, now_ms, Rewritten(scheduled_rows.row_seq[waits], scheduled_rows.note[waits])
            )
            self.durations.rewritten(kept.due_ms, kept.seq, kept.row_seq)
            self._bound_opening(batch.backlog, kept.due_ms, near)
            self._expect_loaded(batch.backlog, kept.part(near & ~self.durations.contains(kept.seq)))
        self._look_now()

    # -- settling them ---------------------------------------------------------------------------------------

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> Bools:
        """Cancel the pending ones of these messages. Return a mask of the messages that were cancelled.

        A cancelled message stays where it is and is skipped when it becomes due. If it is being rewritten, it no longer
        delays the others.
        """
        waited = self.outcomes.cancel(due_ms, seq)
        if self.rewrites.rows:
            self._look_now()
        return waited

    @property
    def settled_before_ms(self) -> int:
        """The due time before which every durable message is durably settled."""
        # Read once a second, so the durations are only scanned if a clock step has shifted some.
        late_ms = self.durations.first_promised_ms() if len(self.durations.known) else FAR_MS
        firsts = (self.outcomes.first_in_flight_ms, self.loaded.first_due_ms(), late_ms)
        missing = (backlog.missing_due_ms for backlog in self.backlogs)
        return min(self._below_ms(), *missing, *(ms for ms in firsts if ms is not None))

    @property
    def settled_ms(self) -> int:
        """Like `settled_before_ms`, but not later than now."""
        return min(self.settled_before_ms, self._now_ms)

    @property
    def in_flight_rows(self) -> int:
        """The number of rows that are being written to disk."""
        return self.outcomes.in_flight_rows + self.rewrites.in_flight_rows

    # -- restarts, and retention -----------------------------------------------------------------------------

    def settled(self) -> Settled:
        """Collect all settled messages for a checkpoint."""
        self._move_mark()
        return self.outcomes.settled()

    def needed_seq(self) -> int | None:
        """Find the oldest row of the log that a backlog or an opened message still needs. None if no row is needed."""
        rows = [backlog.needed_seq(self.settled_ms) for backlog in self.backlogs]
        rows += [self.loaded.needed_seq(), self.rewrites.needed_seq()]
        return min((row for row in rows if row is not None), default=None)

    def state(self, backlog: Backlog) -> msgspec.Struct | None:
        """Collect the state that a backlog needs for a restart, besides the files from `files_to_sync`."""
        return backlog.state(self.settled_ms)

    def restore(
        self, backlog: Backlog, state: msgspec.Struct | None, settled: Settled, waiting: Waiting, now_ms: int
    ) -> None:
        """Start a backlog from its state and the later messages. This blocks. Restore the outcomes first."""
        self._now_ms = now_ms
        self._take_over(backlog, backlog.restore(state, settled, waiting, now_ms))

    async def close(self) -> None:
        """Wait until the reader thread has finished. The node closes the backlogs and their files."""
        if self._adopting is not None:
            await asyncio.wait([self._adopting])
        while self._openings:
            await asyncio.wait([task for task, _ in self._openings.values()])
        await self.loaded.wait_idle()
        await self.rewrites.wait_idle()

    def statistics(self) -> dict[str, int]:
        """Collect counts for statistics, by name. The backlogs have further counts of their own."""
        now_ms, left = self._now_ms, 0
        if self._files is not None and self.external.is_leased(now_ms):
            self._files.forget_settled(self.outcomes)
            left = len(self._files.index)
        return {
            "near_rows": len(self.loaded),
            "wheel_rows": self.loaded.wheel_rows,
            "moving_rows": self.rewrites.rows,
            "moved_rows": self._rewritten_rows,
            "cancelled_rows": self.outcomes.cancelled_rows,
            "dispatched_rows": left,
            "fetched_rows": self.external.loaded_rows,
            "tick_ms": self.outcomes.cursor.tick_ms,
            "local_index": self.outcomes.cursor.local_index,
        }

    # -- opening backlogs ------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """True while the reader thread works for the scheduler."""
        return bool(self._openings) or self.loaded.is_gathering or self.rewrites.is_loading

    def _below_ms(self) -> int:
        """Find the earliest due time of a message that may not be loaded. Nothing later is handed out."""
        below_ms = min(self._held_ms, self.rewrites.first_due_ms()) if self.rewrites.rows else self._held_ms
        firsts = [backlog.first_due_ms for backlog in self.backlogs]
        return min(below_ms, *firsts, *(first_ms for _, first_ms in self._openings.values()))

    def _open_ms(self, backlog: Backlog) -> int:
        """Compute when to open a backlog: half the lead time (`ahead_ms`) before its first message is due.

        The other half of the lead time is left for loading bodies. If memory is full, the backlog is opened only when
        its first message is due no later than the loaded ones.
        """
        first_ms = backlog.first_due_ms
        if first_ms == FAR_MS or id(backlog) in self._openings:
            return FAR_MS
        open_ms = first_ms - self._ahead_ms // 2
        if open_ms > self._now_ms:
            return open_ms  # the room is checked at that time
        if self.rewrites.is_full:
            return FAR_MS
        if self.loaded.has_room(self._now_ms) and self.rewrites.has_room:
            return open_ms
        return first_ms if first_ms <= self.loaded.first_due_ms() else FAR_MS

    def _open_if_needed(self, now_ms: int) -> None:
        for backlog in self.backlogs:
            if self._open_ms(backlog) <= now_ms:
                self._start_opening(backlog, now_ms)

    def _start_opening(self, backlog: Backlog, now_ms: int) -> None:
        task = asyncio.get_running_loop().create_task(self._open(backlog, now_ms))
        self._openings[id(backlog)] = task, backlog.first_due_ms
        task.add_done_callback(lambda _: self._opening_ended(backlog, task))

    def _bound_opening(self, backlog: Backlog, due_ms: Int64Array, near: Bools) -> None:
        """Lower the bound of a running opening: it may also open the added messages that are not near."""
        # These messages came after the bound was read. Without this the mark would pass them, and they would count as
        # settled.
        if (opening := self._openings.get(id(backlog))) is not None and not near.all():
            self._openings[id(backlog)] = opening[0], min(opening[1], int(due_ms[~near].min()))

    async def _open(self, backlog: Backlog, now_ms: int) -> None:
        times = (source := self._sources[id(backlog)]).opened
        opened = await backlog.open(now_ms, now_ms + self._ahead_ms)
        for begin in range(0, len(opened), SORT_ROWS):
            if begin:
                # In parts, with a pause after each: sorting out a million messages at once would stop the event loop.
                await asyncio.sleep(0)
            if source.opened != times:
                return  # a clock step has discarded this opening; all of the backlog is opened again
            self._take_over(backlog, opened.part(slice(begin, begin + SORT_ROWS)))

    def _take_over(self, backlog: Backlog, opened: Opened) -> None:
        """Load opened messages, or pass them to `rewrites`. Drop those that are settled."""
        # A backlog with `has_own_instants` has skipped settled messages itself: outcomes do not contain its due times.
        if not backlog.has_own_instants:
            waits = self.outcomes.may_load(opened.due_ms, opened.seq)
            opened = opened if waits.all() else opened.part(waits)
        if len(self.durations.known) and (shifted := self.durations.contains(opened.seq)).any():
            opened = opened.part(~shifted)  # already loaded, with shifted due times
        near = Waiting(opened.due_ms, opened.seq, opened.row_seq).part(~opened.rewrites)
        self._expect_loaded(backlog, near)
        if opened.rewrites.any():
            self.rewrites.add(backlog, opened.part(opened.rewrites))

    def _expect_loaded(self, backlog: Backlog, near: Waiting) -> None:
        if not len(near):
            return
        if (in_table := near.row_seq < 0).any():
            assert self._files is not None
            files = near.part(in_table)
            self.loaded.expect(self._files, files.due_ms, files.seq, files.row_seq)
            near = near.part(~in_table)
        self.loaded.expect(self._sources[id(backlog)], near.due_ms, near.seq, near.row_seq)

    def _opening_ended(self, backlog: Backlog, task: asyncio.Task[None]) -> None:
        del self._openings[id(backlog)]
        error = None if task.cancelled() else task.exception()
        if error is None:
            self._look_now()
        else:
            logger.critical("opening a backlog failed reason=%s", error)
            self._on_failure(error)

    # -- clocks ----------------------------------------------------------------------------------------------

    def _follow_clock(self, now_ms: int) -> None:
        was_ms, self._now_ms = self._now_ms, now_ms
        if now_ms < was_ms:
            logger.warning("clock set back back_ms=%d", was_ms - now_ms)
        if now_ms < was_ms or (self.durations.has_changed and self.durations.is_off):
            self._follow_step(now_ms, was_ms)
        if not 0 <= now_ms - self._marked_ms < MARK_EVERY_MS:
            self._marked_ms = now_ms
            self._move_mark()

    def _follow_step(self, now_ms: int, was_ms: int) -> None:
        """Shift the due times of all durations, so that each ends after its elapsed time instead of by the clock."""
        durations, loaded = self.durations, self.loaded
        step_ms = durations.apply()
        for backlog in self.backlogs:
            # All of the backlog is opened again, so its loaded messages must go first.
            if backlog.clock_stepped(now_ms, durations.shift_of):
                loaded.forget(self._sources[id(backlog)], backlog.holds)
        # The messages of earlier shifts are replaced by those of the new shift below.
        before = durations.known
        for source in (self._shifted, self._shifted_files):
            loaded.forget(source, lambda seq: is_in(before, seq))
        shifted = durations.shifted()
        if durations.find is not None and self._adopting is None:
            self._adopting = asyncio.get_running_loop().create_task(self._adopt_durations(durations.find))
            self._adopting.add_done_callback(self._adopted)
        # After a step forward a duration that has not been read yet would look due.
        if step_ms > 0 and self._adopting is not None and not self._adopting.done():
            self._held_ms = min(self._held_ms, was_ms)
        if not len(shifted.seq):
            return
        known = durations.known
        loaded.take_out(lambda seq: is_in(known, seq))
        row_seq = durations.rows_of(shifted.seq)
        in_files = row_seq < durations.files_to_seq
        for source, chosen in ((self._shifted, ~in_files), (self._shifted_files, in_files)):
            if chosen.any():
                loaded.expect(source, shifted.due_ms[chosen], shifted.seq[chosen], row_seq[chosen])
        logger.info("durations follow the step of the clock messages=%d", len(shifted.seq))
        self._look_now()

    async def _adopt_durations(self, find: Find) -> None:
        """Read the durations from before the start, as far as they are still in the log."""
        from_seq, to_seq = self.durations.files_to_seq, self.durations.begun_seq
        loop = asyncio.get_running_loop()
        self.durations.adopt(await loop.run_in_executor(self._thread, find, self._reader, from_seq, to_seq))

    def _adopted(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.critical("reading durations failed reason=%s", error)
            self._on_failure(error)
        elif not task.cancelled():
            self._held_ms = FAR_MS
            self._follow_step(self._now_ms, self._now_ms)
            self._look_now()

    def _read_shifted_files(self, due_ms: Int64Array, seq: Int64Array, row_seq: Int64Array) -> pa.RecordBatch:
        """Read the bodies of shifted durations from the files, where they are sorted by their original due times.

        Runs in the reader thread.
        """
        assert self._table is not None
        promised_ms = self.durations.promised_of(seq)
        order = np.lexsort((seq, promised_ms))
        promised_ms, seq = promised_ms[order], seq[order]
        # One read per cluster of due times: a read goes through all rows between its first and its last due time.
        cuts = [0, *(np.flatnonzero(np.diff(promised_ms) > self._ahead_ms) + 1).tolist(), len(seq)]
        return pa.concat_batches(
            [
                self._table.read_files(promised_ms[begin:end], seq[begin:end], seq[begin:end])
                for begin, end in pairwise(cuts)
            ]
        )

    def _move_mark(self) -> None:
        # Not later than now: the mark never moves back, and each message settled behind it needs a pair in memory.
        mark_ms = self.settled_ms
        self.outcomes.move_mark(mark_ms, self._reader.next_seq)
        self.durations.forget_before(mark_ms)

    # -- the ticker ------------------------------------------------------------------------------------------

    def next_due_ms(self) -> int | None:
        """Compute when the scheduler next has to hand out, load, open or rewrite. None if there is no such time."""
        if self.rewrites.rows and self.rewrites.is_ready:
            return self._now_ms
        loads_ms = self.loaded.next_ms(self._now_ms, self._below_ms())
        next_ms = min(loads_ms, *map(self._open_ms, self.backlogs))
        return None if next_ms == FAR_MS else next_ms

    def fall_asleep(self, *, until_durable: bool = False) -> int | None:
        """Store and return the result of `next_due_ms`. Later changes that make it earlier call `on_earlier`.

        With `until_durable` the next step waits until the rows in flight are on disk.
        """
        self._awaits_durable = until_durable
        next_ms = None if until_durable else self.next_due_ms()
        self._next_ms = FAR_MS if next_ms is None else next_ms
        return next_ms

    def _expect(self, ms: int) -> None:
        """Wake the ticker if it would sleep past `ms`, at which there is work."""
        if ms < self._next_ms:
            self._next_ms = ms
            self.on_earlier()

    def _expect_opening(self, backlog: Backlog) -> None:
        if backlog.first_due_ms < FAR_MS:
            self._expect(backlog.first_due_ms - self._ahead_ms // 2)

    def _look_now(self) -> None:
        self._expect(-FAR_MS + 1)


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The scheduler, its backlogs, and the outcomes of all scheduled messages."""

    scheduler: Scheduler
    backlog: Backlog  # stores messages sent with a due time: the configured strategy
    hour_log: HourLog  # serves the pending table, under every strategy
    levels: DelayLevels
    outcomes: Outcomes

    @property
    def compacts(self) -> bool:
        """True if scheduled messages wait in the log's tail until compaction moves them to the pending table."""
        return self.backlog is self.hour_log
