"""The scheduler: promises near their instants, in one order, from all backlogs.

    add -> a backlog --open, ahead of its time--> loaded --take_due--> in flight --released--> outcomes
                      \\--------------------------> rewrites --rewritten, durable--> the backlog again

A promise that is not settled is in exactly one of these places. No promise is handed out before an earlier one that a
backlog may still hold (`first_due_ms`), that is being written again, or that is loaded without its body; so there is
one order, by instant and number, for every way a promise can take.

All methods run on the event loop, in the order in which the log gives out sequence numbers; that order decides every
race, so that a promise handed out cannot be cancelled and a cancelled one is never handed out.

The next instant is kept, and not asked of every part at every step: each change that makes it earlier calls `_expect`.
A clock that is set makes no message due that has a due time of its own: loaded ones stay loaded. Durations go on
elapsing: their due times are shifted by the step (durations.py, and `clock_stepped` of delay levels).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from itertools import pairwise

import msgspec
import numpy as np
import pyarrow as pa

from timeball.log.few_rows import Pairs, ReadRows, filtered
from timeball.log.reader import LogReader
from timeball.message import Int64Array
from timeball.schedule.backlog import SORT_ROWS, Backlog, Bools, Opened, Rewritten
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
REWRITES_SHARE = 8  # of the memory for bodies


class Scheduler:
    """One for all promises. `restore` comes before anything else, once for each backlog."""

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
        """Schedule what `backlogs` keep, the first of which keeps durations; `table` opens promises in files."""
        self.outcomes, self.external, self.backlogs, self._table = outcomes, external, list(backlogs), table
        self._reader, self._ahead_ms, self._on_failure = reader, ahead_ms, on_failure
        self._thread = reader_thread
        self._sources = {id(backlog): Source.of(backlog) for backlog in backlogs}
        self._files = None if table is None else Source(table.read_files, external=external, in_files=True)
        files = [] if self._files is None else [self._files]
        self.durations = Durations(outcomes, lambda: reader.next_seq) if durations is None else durations
        # Of durations whose due times the clock has shifted: in the log, and in files below a number.
        self._shifted = Source(backlogs[0].read_bodies, has_own_instants=True, is_shifted=True)
        self._shifted_files = Source(
            self._read_shifted_files, has_own_instants=True, is_shifted=True, in_files=True
        )
        self._adopting: asyncio.Task[None] | None = None
        # While the durations of before the start are read: they seem to be due behind this instant, but may not be.
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
        # A backlog that is being opened, and its first instant before: until the end that bounds what may be due.
        self._openings: dict[int, tuple[asyncio.Task[None], int]] = {}
        # Called when there is something to do before the instant that `fall_asleep` returned.
        self.on_earlier: Callable[[], None] = lambda: None
        self._now_ms = self._marked_ms = -FAR_MS
        self._rewritten_rows, self._next_ms = 0, -FAR_MS  # the kept instant; -FAR_MS: awake
        self._awaits_durable = False  # whether the ticker sleeps until a hand-out is durable

    # -- promises come ---------------------------------------------------------------------------------------

    def add(
        self, backlog: Backlog, promises: ReadRows, pairs: Pairs, now_ms: int, lasting: Bools | None = None
    ) -> None:
        """Keep these durable promises, rows of the log that gave them their instants at `now_ms`.

        `lasting`: which of them are durations that began then; None when none is, or the backlog knows.
        """
        due, seq = pairs
        self.outcomes.waiting_rows += len(seq)
        if lasting is not None and not self.durations.is_full:
            self.durations.newest.append((due[lasting], seq[lasting]))
        near = backlog.add(Waiting(due, seq, seq), now_ms)
        self._bound_opening(backlog, due, near)
        if near_rows := int(np.count_nonzero(near)):
            found = promises if near_rows == len(near) else filtered(promises, near)
            self._expect(self.loaded.add(self._sources[id(backlog)], found, now_ms))
        if near_rows < len(near):
            self._expect_opening(backlog)

    async def attach(self, attachment: Attachment, resumes: str = "", now_ms: int = 0) -> None:
        """Let files of a durable TABLE row join, and leave, the table; what `resumes` names is held no longer.

        Rows of a bulk job or of a campaign that is resumed, due before `now_ms`, are late from then on only.
        What a file may hold of the time that has been opened is opened before the file goes.
        """
        table = self._table
        assert table is not None
        await self.loaded.wait_held()
        # An opening reads a list of files in another thread: none of them may leave the table meanwhile.
        while id(table) in self._openings or not table.may_attach(attachment):
            if id(table) not in self._openings:
                # As far as sends have opened it, which read the clock later than the last tick: else this goes round
                # until the next one.
                self._start_opening(table, max(self._now_ms, table.opened_ms - self._ahead_ms))
            await asyncio.wait([self._openings[id(table)][0]])
        table.attach(attachment, now_ms)
        if attachment.job == "compact":
            self.durations.files_to_seq = max(self.durations.files_to_seq, attachment.to_seq)
        self.outcomes.add_late(attachment.ranges, attachment.rows if attachment.job == "bulk" else 0)
        self.outcomes.holds.remove(resumes)
        self._expect_opening(table)

    def hold(self, name: str, ranges: Sequence[tuple[int, int]]) -> int:
        """Load nothing of these ranges of a bulk attach until they are resumed; return from which instant."""
        from_ms = self.outcomes.hold(name, ranges, self.settled_before_ms)
        self.loaded.drop(lambda seq: within(seq, ranges))
        return from_ms

    def lease(self, now_ms: int, lease_ms: int) -> None:
        """Leave promises in files to a dispatcher outside for so long; 0: no more."""
        self.external.lease(now_ms, lease_ms)
        self._look_now()

    # -- promises are due ------------------------------------------------------------------------------------

    def take_due(self, now_ms: int, limit: int) -> ReadRows | None:
        """Return up to `limit` promises due by now, sorted by (due_ms, seq) and in flight; None when there are none."""
        self._follow_clock(now_ms)
        self._open_if_needed(now_ms)
        return self.loaded.take_due(now_ms, limit, self._below_ms())

    def take_brought(self, promises: pa.RecordBatch) -> pa.RecordBatch | None:
        """Return those of what a dispatcher brings, all of it due, that wait and were left to it; now in flight.

        Sorted as a hand-out is; None when there are none.
        """
        assert self._files is not None
        run = Run.of([promises])
        was_full = not self.loaded.has_room(self._now_ms)
        # Both: left to the dispatcher, and not settled. One that was loaded meanwhile is no longer in the index.
        keep = self._files.index.contains(run.due, run.seq) & self.outcomes.may_load(run.due, run.seq)
        keep[1:] &= (run.seq[1:] != run.seq[:-1]) | (run.due[1:] != run.due[:-1])  # each once
        if was_full:
            self._look_now()
        if not keep.any():
            return None
        run = run if keep.all() else run.filtered(keep)
        self.outcomes.hand_out(run.due, run.seq, run.due)
        return run.rows

    def released(self, seq: Int64Array) -> None:
        """Count these, of the oldest hand-out, as released: their records are durable."""
        self.outcomes.released(seq)
        if self._awaits_durable:
            self._awaits_durable = False
            self._look_now()

    def take_rewrites(self, limit: int) -> pa.RecordBatch | None:
        """Return up to `limit` promises to be written again, as their new rows are to say; None when none are.

        They keep their numbers and the time they were accepted at (`store_ms`).
        """
        return self.rewrites.take_rows(limit) if self.rewrites.rows else None

    def rewritten(self, seq: Int64Array, row_seq: Int64Array, now_ms: int) -> None:
        """Keep promises given out by `take_rewrites`, in that order, in these rows from now on: they are durable."""
        batch = self.rewrites.rewritten(seq)
        promises = batch.promises
        self._rewritten_rows += len(seq)
        # Cancelled while the new row was on its way: the row is in the log, and the promise is settled all the same.
        waits = ~self.outcomes.is_settled(promises.due_ms, promises.seq)
        if waits.any():
            kept = Waiting(promises.due_ms[waits], seq[waits], row_seq[waits])
            near = batch.backlog.add(kept, now_ms, Rewritten(promises.row_seq[waits], promises.note[waits]))
            self.durations.rewritten(kept.due_ms, kept.seq, kept.row_seq)
            self._bound_opening(batch.backlog, kept.due_ms, near)
            self._expect_loaded(batch.backlog, kept.part(near & ~self.durations.contains(kept.seq)))
        self._look_now()

    # -- settling them ---------------------------------------------------------------------------------------

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> Bools:
        """Cancel those of these promises that wait until now; return which.

        They stay where they are, and are left out when their turn comes. One that is being written again holds up
        the others no more.
        """
        waited = self.outcomes.cancel(due_ms, seq)
        if self.rewrites.rows:
            self._look_now()
        return waited

    @property
    def settled_before_ms(self) -> int:
        """Return the instant before which every durable promise is settled, durably."""
        # Asked only if a step has shifted some, as this is read once a second.
        late_ms = self.durations.first_promised_ms() if len(self.durations.known) else FAR_MS
        firsts = (self.outcomes.first_in_flight_ms, self.loaded.first_due_ms(), late_ms)
        missing = (backlog.missing_due_ms for backlog in self.backlogs)
        return min(self._below_ms(), *missing, *(ms for ms in firsts if ms is not None))

    @property
    def settled_ms(self) -> int:
        """Return the instant, now at the latest, before which all is settled that was opened."""
        return min(self.settled_before_ms, self._now_ms)

    @property
    def in_flight_rows(self) -> int:
        """Return how many rows are on their way to the disk."""
        return self.outcomes.in_flight_rows + self.rewrites.in_flight_rows

    # -- restarts, and retention -----------------------------------------------------------------------------

    def settled(self) -> Settled:
        """Return all that is settled, for a checkpoint."""
        self._move_mark()
        return self.outcomes.settled()

    def needed_seq(self) -> int | None:
        """Return the oldest row of the log that a backlog, or what has been opened, still needs."""
        rows = [backlog.needed_seq(self.settled_ms) for backlog in self.backlogs]
        rows += [self.loaded.needed_seq(), self.rewrites.needed_seq()]
        return min((row for row in rows if row is not None), default=None)

    def state(self, backlog: Backlog) -> msgspec.Struct | None:
        """Return what a backlog needs for a restart besides the files that `files_to_sync` names."""
        return backlog.state(self.settled_ms)

    def restore(
        self, backlog: Backlog, state: msgspec.Struct | None, settled: Settled, waiting: Waiting, now_ms: int
    ) -> None:
        """Start a backlog with its state and the promises that came since; blocking. Outcomes are restored before."""
        self._now_ms = now_ms
        self._take_over(backlog, backlog.restore(state, settled, waiting, now_ms))

    async def close(self) -> None:
        """Wait until the reader thread has finished; the node closes the backlogs and their files."""
        if self._adopting is not None:
            await asyncio.wait([self._adopting])
        while self._openings:
            await asyncio.wait([task for task, _ in self._openings.values()])
        await self.loaded.wait_idle()
        await self.rewrites.wait_idle()

    def statistics(self) -> dict[str, int]:
        """Return counts for people, by name; what backlogs count comes besides."""
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
        """Return whether the reader thread works for this."""
        return bool(self._openings) or self.loaded.is_gathering or self.rewrites.is_loading

    def _below_ms(self) -> int:
        """Return the instant at which something may be due that is not loaded: nothing later is handed out."""
        below_ms = min(self._held_ms, self.rewrites.first_due_ms()) if self.rewrites.rows else self._held_ms
        firsts = [backlog.first_due_ms for backlog in self.backlogs]
        return min(below_ms, *firsts, *(first_ms for _, first_ms in self._openings.values()))

    def _open_ms(self, backlog: Backlog) -> int:
        """Return when to open a backlog: half the lead ahead, and the other half is left to load bodies in.

        Without room it is opened when loaded promises cannot be handed out before, or when it holds due ones.
        """
        first_ms = backlog.first_due_ms
        if first_ms == FAR_MS or id(backlog) in self._openings:
            return FAR_MS
        open_ms = first_ms - self._ahead_ms // 2
        if open_ms > self._now_ms:
            return open_ms  # whether there is room is asked then
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
        """Let an opening under way hold up all that is due after those that are not near: it may give them up, too."""
        # They came after its bound was read: the mark would pass them, and they would count as settled.
        if (opening := self._openings.get(id(backlog))) is not None and not near.all():
            self._openings[id(backlog)] = opening[0], min(opening[1], int(due_ms[~near].min()))

    async def _open(self, backlog: Backlog, now_ms: int) -> None:
        times = (source := self._sources[id(backlog)]).opened
        opened = await backlog.open(now_ms, now_ms + self._ahead_ms)
        for begin in range(0, len(opened), SORT_ROWS):
            if begin:
                await asyncio.sleep(0)
            if source.opened != times:
                return  # the clock was set back, and all of it is opened again
            self._take_over(backlog, opened.part(slice(begin, begin + SORT_ROWS)))

    def _take_over(self, backlog: Backlog, opened: Opened) -> None:
        """Load the promises that a backlog has given up, or write them again; drop those that are settled."""
        if not backlog.has_own_instants:
            waits = self.outcomes.may_load(opened.due_ms, opened.seq)
            opened = opened if waits.all() else opened.part(waits)
        if len(self.durations.known) and (shifted := self.durations.contains(opened.seq)).any():
            opened = opened.part(~shifted)  # loaded already, for other instants
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
        """Let all durations be due when they have elapsed, and not when the clock shows what their rows say."""
        durations, loaded = self.durations, self.loaded
        step_ms = durations.apply()
        for backlog in self.backlogs:
            if backlog.clock_stepped(now_ms, durations.shift_of):
                loaded.forget(self._sources[id(backlog)], backlog.holds)
        before = durations.known
        for source in (self._shifted, self._shifted_files):
            loaded.forget(source, lambda seq: is_in(before, seq))
        shifted = durations.shifted()
        if durations.find is not None and self._adopting is None:
            self._adopting = asyncio.get_running_loop().create_task(self._adopt_durations(durations.find))
            self._adopting.add_done_callback(self._adopted)
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
        """Take note of the durations of before the start, as far as the log has them."""
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
        """Return what the files hold of these (reader thread), by the instants that they were promised for."""
        assert self._table is not None
        promised_ms = self.durations.promised_of(seq)
        order = np.lexsort((seq, promised_ms))
        promised_ms, seq = promised_ms[order], seq[order]
        # One read for each stretch of instants: a read goes through all rows between its first and its last.
        cuts = [0, *(np.flatnonzero(np.diff(promised_ms) > self._ahead_ms) + 1).tolist(), len(seq)]
        return pa.concat_batches(
            [
                self._table.read_files(promised_ms[begin:end], seq[begin:end], seq[begin:end])
                for begin, end in pairwise(cuts)
            ]
        )

    def _move_mark(self) -> None:
        # Not beyond now: the mark never goes back, and what comes behind it must be remembered by name.
        mark_ms = self.settled_ms
        self.outcomes.move_mark(mark_ms, self._reader.next_seq)
        self.durations.forget_before(mark_ms)

    # -- the ticker ------------------------------------------------------------------------------------------

    def next_due_ms(self) -> int | None:
        """Return when there is something to do: to hand out, to load, to open, to write again; None when never."""
        if self.rewrites.rows and self.rewrites.is_ready:
            return self._now_ms
        loads_ms = self.loaded.next_ms(self._now_ms, self._below_ms())
        next_ms = min(loads_ms, *map(self._open_ms, self.backlogs))
        return None if next_ms == FAR_MS else next_ms

    def fall_asleep(self, *, until_durable: bool = False) -> int | None:
        """Return what `next_due_ms` does, and keep it: what makes it earlier from now on calls `on_earlier`.

        `until_durable`: the next step waits until rows that are on their way have reached the disk.
        """
        self._awaits_durable = until_durable
        next_ms = None if until_durable else self.next_due_ms()
        self._next_ms = FAR_MS if next_ms is None else next_ms
        return next_ms

    def _expect(self, ms: int) -> None:
        """Wake the ticker when it sleeps past this instant, at which there is something to do."""
        if ms < self._next_ms:
            self._next_ms = ms
            self.on_earlier()

    def _expect_opening(self, backlog: Backlog) -> None:
        if backlog.first_due_ms < FAR_MS:
            self._expect(backlog.first_due_ms - self._ahead_ms // 2)

    def _look_now(self) -> None:
        self._expect(-FAR_MS + 1)
