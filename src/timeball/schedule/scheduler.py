"""The scheduler: collects the messages that will soon be due from all backlogs and hands them out in one order.

    add -> a backlog --open, ahead of its time--> loaded --take_due--> in flight --released--> outcomes
                      \\--------------------------> rewrites --rewritten, durable--> the backlog again

A message that is not settled (neither released nor cancelled) is in exactly one of these states. To *open* a backlog
means to take messages out of it ahead of their due times.

All messages are handed out by due time and sequence number. So a message is not handed out while an earlier one may
still be in a backlog (`first_due_ms`), is being rewritten, or is loaded without its body.

All methods run on the event loop, in the order in which the log assigns sequence numbers. That order decides every
race: a message that was handed out cannot be cancelled, and a cancelled one is never handed out.

The scheduler stores the next time at which it has work (`_next_ms`). Each change that makes this time earlier calls
`_wake_by`. So no step has to search all backlogs and sources.

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
from timeball.model import limits
from timeball.model.message import Int64Array
from timeball.schedule.backlog import SORT_ROWS, Backlog, Bools, Opened, Rewritten
from timeball.schedule.delay_levels import DelayLevels
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.due_wheel import Run
from timeball.schedule.durations import Durations, Find, is_in
from timeball.schedule.hour_log import HourLog
from timeball.schedule.loaded import ExternalDelivery, Loaded, Source
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
        """Schedule the messages in `backlogs`. The first one stores messages with durations.

        `table` opens messages that are in files of the pending table. `ahead_ms` is the time between opening a message
        and its due time. `gather_bytes` is the memory for bodies. `on_failure` is called with the exception if an
        opening or a read fails.
        """
        self.outcomes, self.external, self.backlogs, self._table = outcomes, external, list(backlogs), table
        self._reader, self._ahead_ms, self._on_failure = reader, ahead_ms, on_failure
        self._thread = reader_thread
        self._sources = {id(backlog): Source.of(backlog) for backlog in backlogs}
        self._files = None if table is None else Source(table.read_files, external=external, in_files=True)
        file_sources = [] if self._files is None else [self._files]
        self.durations = Durations(outcomes, lambda: reader.next_seq) if durations is None else durations
        # Sources for durations whose due times a clock step has shifted: those in the log, and those in files (below
        # `durations.files_to_seq`).
        self._shifted = Source(backlogs[0].read_bodies, changes_due_times=True, is_shifted=True)
        self._shifted_files = Source(
            self._read_shifted_files, changes_due_times=True, is_shifted=True, in_files=True
        )
        self._reading_durations: asyncio.Task[None] | None = None
        # While the durations from before the start are being read, only messages due before this time are handed out:
        # later ones may be durations whose due times the clock step shifts. FAR_MS otherwise.
        self._unread_durations_ms = FAR_MS
        self.loaded = Loaded(
            reader_thread, outcomes,
            [*self._sources.values(), *file_sources, self._shifted, self._shifted_files], ahead_ms=ahead_ms,
            gather_bytes=gather_bytes - gather_bytes // REWRITES_SHARE, on_change=self._wake_now, on_failure=on_failure,
        )  # fmt: skip
        self.rewrites = Rewrites(
            reader, reader_thread, outcomes, chunk_bytes=gather_bytes // REWRITES_SHARE,
            on_change=self._wake_now, on_failure=on_failure,
        )  # fmt: skip
        # The backlogs that are being opened, each with its `first_due_ms` before the opening. That time bounds what may
        # be handed out until the opening ends.
        self._openings: dict[int, tuple[asyncio.Task[None], int]] = {}
        # Called when there is work before the time that `fall_asleep` returned.
        self.on_earlier: Callable[[], None] = lambda: None
        # Called while a message is due and a commit of other rows begins, which the message may join.
        self.on_commit: Callable[[], None] = lambda: None
        self._now_ms = self._marked_ms = -FAR_MS
        # `_next_ms` is the stored time of the next work, -FAR_MS while the ticker is awake.
        self._rewritten_rows, self._next_ms = 0, -FAR_MS
        self._awaits_durable = False  # whether the ticker sleeps until handed-out rows are durable

    # -- adding messages -----------------------------------------------------------------------------------------------

    def add(
        self,
        backlog: Backlog,
        scheduled_rows: ReadRows,
        pairs: Pairs,
        now_ms: int,
        is_duration: Bools | None = None,
    ) -> None:
        """Add durable messages. `scheduled_rows` are the rows of the log that gave them their due times at `now_ms`.

        `pairs` are their due times and numbers. `is_duration` is a mask of the messages whose due times are durations
        that began at `now_ms`. It is None if there are no durations, or if the backlog recognizes them itself.
        """
        due, seq = pairs
        self.outcomes.waiting_rows += len(seq)
        if is_duration is not None and not self.durations.is_full:
            self.durations.newest.append((due[is_duration], seq[is_duration]))
        near = backlog.add(Waiting(due, seq, seq), now_ms)
        self._lower_opening_bound(backlog, due, near)
        # A wake-up is needed for each of the two parts: near messages are loaded, far ones are opened later.
        if near_count := int(np.count_nonzero(near)):
            near_messages = scheduled_rows if near_count == len(near) else filtered(scheduled_rows, near)
            self._wake_by(self.loaded.add(self._sources[id(backlog)], near_messages, now_ms))
        if near_count < len(near):
            self._wake_for_opening(backlog)

    async def attach(self, attachment: Attachment, resumes: str = "", now_ms: int = 0) -> None:
        """Apply a durable TABLE row: add its files to the table and remove others. End the hold `resumes`, if any.

        Waits until the messages due before `table.opened_ms` in the files to be removed have been opened. Rows of a
        bulk job or of a resumed campaign may be due before `now_ms`. Their lateness counts from `now_ms`.
        """
        table = self._table
        assert table is not None
        await self.loaded.wait_until_none_held()
        # An opening reads a list of files in another thread. None of these files may leave the table meanwhile.
        while id(table) in self._openings or not table.may_attach(attachment):
            if id(table) not in self._openings:
                # `add` may have moved `opened_ms` further than the last tick, because it reads the clock later. Opening
                # only as of the last tick, this loop would repeat until the next tick.
                self._start_opening(table, max(self._now_ms, table.opened_ms - self._ahead_ms))
            await asyncio.wait([self._openings[id(table)][0]])
        table.attach(attachment, now_ms)
        if attachment.job == "compact":
            self.durations.files_to_seq = max(self.durations.files_to_seq, attachment.to_seq)
        self.outcomes.exclude_from_mark(attachment.ranges, attachment.rows if attachment.job == "bulk" else 0)
        self.outcomes.holds.remove(resumes)
        self._wake_for_opening(table)

    def hold(self, name: str, ranges: Sequence[tuple[int, int]]) -> int:
        """Hold the messages of these ranges (first_seq, rows) of a bulk attach: load none until the hold is removed.

        Returns the due time (ms) from which on the messages are held.
        """
        from_ms = self.outcomes.hold(name, ranges, self.settled_before_ms)
        self.loaded.remove_held(lambda seq: within(seq, ranges))
        return from_ms

    def lease(self, now_ms: int, lease_ms: int) -> None:
        """Leave messages in files to an external dispatcher for `lease_ms`. 0 ends the lease."""
        self.external.lease(now_ms, lease_ms)
        self._wake_now()

    # -- handing out ---------------------------------------------------------------------------------------------------

    def take_due(self, now_ms: int, limit: int) -> ReadRows | None:
        """Hand out up to `limit` messages due by now, sorted by (due_ms, seq). None if there are none."""
        self._follow_clock(now_ms)
        self._open_if_needed(now_ms)
        return self.loaded.take_due(now_ms, limit, self._hand_out_bound_ms())

    def hand_out_dispatched(self, scheduled_rows: pa.RecordBatch) -> pa.RecordBatch | None:
        """Hand out the messages that an external dispatcher brings, if they are still pending and were left to it.

        All of `scheduled_rows` (READ_SCHEMA) must be due. The result is sorted as in `take_due`. None if it would be
        empty.
        """
        assert self._files is not None
        run = Run.from_batches([scheduled_rows])
        was_full = not self.loaded.has_capacity(self._now_ms)
        # A message that is not in the index was never left to the dispatcher, or has been loaded here meanwhile.
        keep = self._files.index.contains(run.due_ms, run.seq) & self.outcomes.may_load(run.due_ms, run.seq)
        # A message may be brought twice in these rows. Keep the first.
        keep[1:] &= (run.seq[1:] != run.seq[:-1]) | (run.due_ms[1:] != run.due_ms[:-1])
        # The messages handed out here will leave the index, so there may be capacity to open a backlog.
        if was_full:
            self._wake_now()
        if not keep.any():
            return None
        run = run if keep.all() else run.filtered(keep)
        self.outcomes.hand_out(run.due_ms, run.seq, run.due_ms)
        return run.rows

    def released(self, seq: Int64Array, cancelled: Bools | None = None) -> None:
        """Count these messages, the first ones in flight, as released. Their release records are durable.

        `cancelled` is a mask of the messages that have a CANCEL or a MOVED row instead. None if there are none.
        """
        self.outcomes.released(seq, cancelled)
        if self._awaits_durable:
            self._awaits_durable = False
            self._wake_now()

    def take_rewrites(self, limit: int) -> pa.RecordBatch | None:
        """Take up to `limit` messages that must be rewritten, in the form of their new rows. None if there are none.

        They keep their sequence numbers and the time at which they were accepted (`store_ms`).
        """
        return self.rewrites.take_rows(limit) if self.rewrites.rows else None

    def rewritten(self, seq: Int64Array, row_seq: Int64Array, now_ms: int) -> None:
        """Give messages from `take_rewrites` back to their backlog, because their new rows are durable.

        They must come in the order in which they were taken. `row_seq` contains their new rows.
        """
        batch = self.rewrites.rewritten(seq)
        opened = batch.opened
        self._rewritten_rows += len(seq)
        # A message that was cancelled while its new row was being written is settled, although the row is in the log.
        unsettled = ~self.outcomes.is_settled(opened.due_ms, opened.seq)
        if unsettled.any():
            pending = Waiting(opened.due_ms[unsettled], seq[unsettled], row_seq[unsettled])
            near = batch.backlog.add(
                pending, now_ms, Rewritten(opened.row_seq[unsettled], opened.note[unsettled])
            )
            self.durations.rewritten(pending.due_ms, pending.seq, pending.row_seq)
            self._lower_opening_bound(batch.backlog, pending.due_ms, near)
            # Shifted durations are loaded already.
            self._load_later(batch.backlog, pending.part(near & ~self.durations.contains(pending.seq)))
        self._wake_now()

    # -- settling messages -----------------------------------------------------------------------------------

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> Bools:
        """Cancel these messages, as far as they are pending. Returns a mask of the cancelled ones.

        A cancelled message stays stored and is skipped when it becomes due. If it is being rewritten, it no longer
        delays the others.
        """
        was_cancelled = self.outcomes.cancel(due_ms, seq)
        if self.rewrites.rows:
            self._wake_now()
        return was_cancelled

    @property
    def settled_before_ms(self) -> int:
        """The due time before which every message in the log is durably settled."""
        # The durations are only scanned if a clock step has shifted some.
        durations_ms = self.durations.first_original_due_ms() if len(self.durations.shifted_seqs) else FAR_MS
        missing = (backlog.missing_due_ms for backlog in self.backlogs)
        settled_ms = min(self._hand_out_bound_ms(), self.loaded.first_due_ms(), durations_ms, *missing)
        in_flight_ms = self.outcomes.first_in_flight_ms
        return settled_ms if in_flight_ms is None else min(settled_ms, in_flight_ms)

    @property
    def settled_ms(self) -> int:
        """The earlier of `settled_before_ms` and now."""
        return min(self.settled_before_ms, self._now_ms)

    @property
    def is_full(self) -> bool:
        """True if the bodies being written to disk leave no room for another hand-out."""
        return self.outcomes.in_flight_bytes >= limits.RELEASE_BYTES_IN_FLIGHT_MAX

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
        seqs = [backlog.needed_seq(self.settled_ms) for backlog in self.backlogs]
        seqs += [self.loaded.needed_seq(), self.rewrites.needed_seq()]
        return min((seq for seq in seqs if seq is not None), default=None)

    def state(self, backlog: Backlog) -> msgspec.Struct | None:
        """Collect the state that a backlog needs for a restart, besides the files from `files_to_sync`."""
        return backlog.state(self.settled_ms)

    def restore(
        self, backlog: Backlog, state: msgspec.Struct | None, settled: Settled, waiting: Waiting, now_ms: int
    ) -> None:
        """Start a backlog from its state and the later messages. Restore the outcomes first.

        Blocks the event loop, so only a start calls it.
        """
        self._now_ms = now_ms
        self._take_over(backlog, backlog.restore(state, settled, waiting, now_ms))

    async def close(self) -> None:
        """Wait until the reader thread has finished. The node closes the backlogs and their files."""
        if self._reading_durations is not None:
            await asyncio.wait([self._reading_durations])
        while self._openings:
            await asyncio.wait([task for task, _ in self._openings.values()])
        await self.loaded.wait_idle()
        await self.rewrites.wait_idle()

    def statistics(self) -> dict[str, int]:
        """Collect counts for statistics, by name. The backlogs have further counts of their own."""
        now_ms, leased_out_rows = self._now_ms, 0
        if self._files is not None and self.external.is_leased(now_ms):
            self._files.forget_settled(self.outcomes)
            leased_out_rows = len(self._files.index)
        return {
            "near_rows": len(self.loaded),
            "wheel_rows": self.loaded.wheel_rows,
            "moving_rows": self.rewrites.rows,
            "moved_rows": self._rewritten_rows,
            "cancelled_rows": self.outcomes.cancelled_rows,
            "dispatched_rows": leased_out_rows,
            "fetched_rows": self.external.loaded_rows,
            "tick_ms": self.outcomes.cursor.tick_ms,
            "local_index": self.outcomes.cursor.local_index,
        }

    # -- opening backlogs ------------------------------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """True while the reader thread works for the scheduler."""
        return bool(self._openings) or self.loaded.is_gathering or self.rewrites.is_loading

    def _hand_out_bound_ms(self) -> int:
        """Find a lower bound of the due times of messages that are not loaded. Only earlier messages are handed out."""
        rewrites_ms = self.rewrites.first_due_ms() if self.rewrites.rows else FAR_MS
        firsts = [backlog.first_due_ms for backlog in self.backlogs]
        firsts += [first_ms for _, first_ms in self._openings.values()]
        return min(self._unread_durations_ms, rewrites_ms, *firsts)

    def _next_open_ms(self, backlog: Backlog) -> int:
        """Compute when to open a backlog: half the lead time (`ahead_ms`) before its first message is due.

        If memory is full, the backlog is opened only when its first message is due no later than the loaded ones.
        FAR_MS if it is empty, if it is being opened, or if it must wait for memory.
        """
        first_ms = backlog.first_due_ms
        if first_ms == FAR_MS or id(backlog) in self._openings:
            return FAR_MS
        open_ms = first_ms - self._ahead_ms // 2
        if open_ms > self._now_ms:
            return open_ms  # the capacity is checked at that time
        if self.rewrites.is_full:
            return FAR_MS
        if self.loaded.has_capacity(self._now_ms) and self.rewrites.has_capacity:
            return open_ms
        return first_ms if first_ms <= self.loaded.first_due_ms() else FAR_MS

    def _open_if_needed(self, now_ms: int) -> None:
        """Start to open the backlogs whose time has come."""
        for backlog in self.backlogs:
            if self._next_open_ms(backlog) <= now_ms:
                self._start_opening(backlog, now_ms)

    def _start_opening(self, backlog: Backlog, now_ms: int) -> None:
        """Open a backlog in a task, and store its `first_due_ms` as a bound until the task ends."""
        task = asyncio.get_running_loop().create_task(self._open(backlog, now_ms))
        self._openings[id(backlog)] = task, backlog.first_due_ms
        task.add_done_callback(lambda _: self._finish_opening(backlog, task))

    def _lower_opening_bound(self, backlog: Backlog, due_ms: Int64Array, near: Bools) -> None:
        """Lower the bound of a running opening: it may also open the added messages that are not near."""
        # These messages were added after the bound was read. Without this the mark would pass them, and they would
        # count as settled.
        if (opening := self._openings.get(id(backlog))) is not None and not near.all():
            task, first_ms = opening
            self._openings[id(backlog)] = task, min(first_ms, int(due_ms[~near].min()))

    async def _open(self, backlog: Backlog, now_ms: int) -> None:
        """Open a backlog, and load or rewrite the opened messages."""
        source = self._sources[id(backlog)]
        discards = source.discards
        opened = await backlog.open(now_ms, now_ms + self._ahead_ms)
        for begin in range(0, len(opened), SORT_ROWS):
            if begin:
                # In parts, with a pause after each: sorting a million messages at once would block the event loop.
                await asyncio.sleep(0)
            if source.discards != discards:
                return  # a clock step has discarded this opening; all of the backlog is opened again
            self._take_over(backlog, opened.part(slice(begin, begin + SORT_ROWS)))

    def _take_over(self, backlog: Backlog, opened: Opened) -> None:
        """Load opened messages, or pass them to `rewrites`. Skip those that are settled or held."""
        # A backlog with `changes_due_times` has skipped settled messages itself: outcomes do not contain its due times.
        if not backlog.changes_due_times:
            loadable = self.outcomes.may_load(opened.due_ms, opened.seq)
            opened = opened if loadable.all() else opened.part(loadable)
        if len(self.durations.shifted_seqs) and (is_shifted := self.durations.contains(opened.seq)).any():
            opened = opened.part(~is_shifted)  # already loaded, with shifted due times
        near = Waiting(opened.due_ms, opened.seq, opened.row_seq).part(~opened.rewrites)
        self._load_later(backlog, near)
        if opened.rewrites.any():
            self.rewrites.add(backlog, opened.part(opened.rewrites))

    def _load_later(self, backlog: Backlog, near: Waiting) -> None:
        """Let `loaded` read the bodies of near messages ahead of their due times, from the table or the log."""
        if not len(near):
            return
        if (in_table := near.row_seq < 0).any():
            assert self._files is not None
            files = near.part(in_table)
            self.loaded.add_without_bodies(self._files, files.due_ms, files.seq, files.row_seq)
            near = near.part(~in_table)
        self.loaded.add_without_bodies(self._sources[id(backlog)], near.due_ms, near.seq, near.row_seq)

    def _finish_opening(self, backlog: Backlog, task: asyncio.Task[None]) -> None:
        """Remove the bound of an opening, and report its end or its failure."""
        del self._openings[id(backlog)]
        error = None if task.cancelled() else task.exception()
        if error is None:
            self._wake_now()
        else:
            logger.critical("opening a backlog failed reason=%s", error)
            self._on_failure(error)

    # -- clocks ----------------------------------------------------------------------------------------------

    def _follow_clock(self, now_ms: int) -> None:
        """Store the time of this call. Handle clock steps, and move the mark once a second."""
        previous_ms, self._now_ms = self._now_ms, now_ms
        if now_ms < previous_ms:
            logger.warning("clock set back back_ms=%d", previous_ms - now_ms)
        if now_ms < previous_ms or (self.durations.has_changed and self.durations.is_off):
            self._follow_step(now_ms, previous_ms)
        if not 0 <= now_ms - self._marked_ms < MARK_EVERY_MS:
            self._marked_ms = now_ms
            self._move_mark()

    def _follow_step(self, now_ms: int, previous_ms: int) -> None:
        """Shift the due times of all durations after a clock step, so that each ends when its time has elapsed."""
        durations, loaded = self.durations, self.loaded
        step_ms = durations.apply()
        for backlog in self.backlogs:
            # All of the backlog is opened again, so its loaded messages must go first.
            if backlog.clock_stepped(now_ms, durations.shift_of):
                loaded.forget(self._sources[id(backlog)], backlog.holds)
        # Durations that were shifted before are loaded again below, with their new due times.
        previously_shifted = durations.shifted_seqs
        for source in (self._shifted, self._shifted_files):
            loaded.forget(source, lambda seq: is_in(previously_shifted, seq))
        shifted = durations.shifted()
        if durations.find is not None and self._reading_durations is None:
            self._reading_durations = asyncio.get_running_loop().create_task(
                self._read_durations(durations.find)
            )
            self._reading_durations.add_done_callback(self._finish_reading_durations)
        # After a step forward, a duration that has not been read yet would seem to be due.
        if step_ms > 0 and self._reading_durations is not None and not self._reading_durations.done():
            self._unread_durations_ms = min(self._unread_durations_ms, previous_ms)
        if not len(shifted.seq):
            return
        shifted_seqs = durations.shifted_seqs
        loaded.remove_for_reload(lambda seq: is_in(shifted_seqs, seq))
        row_seq = durations.rows_of(shifted.seq)
        in_files = row_seq < durations.files_to_seq
        for source, mask in ((self._shifted, ~in_files), (self._shifted_files, in_files)):
            if mask.any():
                loaded.add_without_bodies(source, shifted.due_ms[mask], shifted.seq[mask], row_seq[mask])
        logger.info("durations follow the step of the clock messages=%d", len(shifted.seq))
        self._wake_now()

    async def _read_durations(self, find: Find) -> None:
        """Read the durations from before the start that are in the log and not in files."""
        from_seq, to_seq = self.durations.files_to_seq, self.durations.begun_seq
        loop = asyncio.get_running_loop()
        stored = await loop.run_in_executor(self._thread, find, self._reader, from_seq, to_seq)
        self.durations.add_stored(stored)

    def _finish_reading_durations(self, task: asyncio.Task[None]) -> None:
        """Apply the shifts to the durations that `_read_durations` has added, or report its failure."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            logger.critical("reading durations failed reason=%s", error)
            self._on_failure(error)
        elif not task.cancelled():
            self._unread_durations_ms = FAR_MS
            self._follow_step(self._now_ms, self._now_ms)
            self._wake_now()

    def _read_shifted_files(self, due_ms: Int64Array, seq: Int64Array, row_seq: Int64Array) -> pa.RecordBatch:
        """Read the bodies of shifted durations from the files (reader thread).

        The files are sorted by the original due times, so `due_ms` and `row_seq` are not used.
        """
        assert self._table is not None
        original_due_ms = self.durations.original_due_times(seq)
        order = np.lexsort((seq, original_due_ms))
        original_due_ms, seq = original_due_ms[order], seq[order]
        # One read per cluster of due times: a read goes through all rows between its first and its last due time.
        cuts = [0, *(np.flatnonzero(np.diff(original_due_ms) > self._ahead_ms) + 1).tolist(), len(seq)]
        return pa.concat_batches(
            [
                self._table.read_files(original_due_ms[begin:end], seq[begin:end], seq[begin:end])
                for begin, end in pairwise(cuts)
            ]
        )

    def _move_mark(self) -> None:
        """Advance the mark (outcomes.py) to the time before which everything is settled."""
        # `settled_ms` is not later than now. A mark in the future would cost memory: it never moves back, and each
        # message that arrives later and is due before it needs a settled pair.
        mark_ms = self.settled_ms
        self.outcomes.move_mark(mark_ms, self._reader.next_seq)
        self.durations.forget_before(mark_ms)

    # -- the ticker ------------------------------------------------------------------------------------------

    def next_due_ms(self) -> int | None:
        """Compute when the scheduler next has work (ms): hand out, load, open or rewrite. None if it has none."""
        if self.rewrites.rows and self.rewrites.is_ready:
            return self._now_ms
        loads_ms = self.loaded.next_ms(self._now_ms, self._hand_out_bound_ms())
        next_ms = min(loads_ms, *map(self._next_open_ms, self.backlogs))
        return None if next_ms == FAR_MS else next_ms

    def next_deadline_ms(self) -> int | None:
        """Find the earliest time at which a message may be handed out, for a manual clock. None if none is pending.

        A message that is added or moved later may be due earlier. Opening and loading ahead of due times are no
        deadlines: a manual clock waits for them at the due time.
        """
        work_ms = self.next_due_ms()
        if work_ms is None:
            return None
        first_ms = min(self._hand_out_bound_ms(), self.loaded.first_due_ms())
        # The later one, because a message that is left to a dispatcher is handed out later than it is due.
        return work_ms if first_ms == FAR_MS else max(work_ms, first_ms)

    def fall_asleep(self, *, until_durable: bool = False) -> int | None:
        """Store and return the result of `next_due_ms`. A later change that makes it earlier calls `on_earlier`.

        With `until_durable` the result is None, and `on_earlier` is called when rows in flight are on disk.
        """
        self._awaits_durable = until_durable
        next_ms = None if until_durable else self.next_due_ms()
        self._next_ms = FAR_MS if next_ms is None else next_ms
        return next_ms

    def _wake_by(self, ms: int) -> None:
        """Wake the ticker if it would sleep past `ms`, at which there is work."""
        if ms < self._next_ms:
            self._next_ms = ms
            self.on_earlier()

    def _wake_for_opening(self, backlog: Backlog) -> None:
        """Wake the ticker when the backlog must be opened."""
        if backlog.first_due_ms < FAR_MS:
            self._wake_by(backlog.first_due_ms - self._ahead_ms // 2)

    def _wake_now(self) -> None:
        """Wake the ticker if it sleeps, because there may be work now."""
        # Earlier than every stored time, except the -FAR_MS of a ticker that is awake.
        self._wake_by(-FAR_MS + 1)


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The scheduler, its backlogs, and the outcomes of all scheduled messages."""

    scheduler: Scheduler
    backlog: Backlog  # the configured strategy, which stores the messages that are sent with a due time
    hour_log: HourLog  # serves the pending table, under every strategy
    levels: DelayLevels
    outcomes: Outcomes

    @property
    def compacts(self) -> bool:
        """True if scheduled messages wait in the log's tail until compaction moves them to the pending table."""
        return self.backlog is self.hour_log
