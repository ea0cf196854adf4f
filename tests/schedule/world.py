"""The broker around one strategy: a real log and real files, clocks that tests set, and a model.

`World` appends scheduled messages, releases, rewrites, cancels and attachments to the log, takes due messages, restarts
from checkpoints, and compares every result with `stage.Model`. Any difference is an AssertionError. It takes the same
steps in the same order as the broker, without its edges.

Handed-out messages and rewrites stay in memory until the test makes them durable (`release`, `finish_rewrites`). With
`restart(unreported=True)` the disk has made them durable, but the broker stops before it is notified.
"""

from __future__ import annotations

import asyncio
import copy
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
from tests.crash_files import CrashFiles
from tests.schedule.attaching import Attaching
from tests.schedule.readback import column, read_back
from tests.schedule.stage import (
    Model,
    Restart,
    Rig,
    Saved,
    StepExecutor,
)

from timeball.broker.accepting.delivery import moved_rows
from timeball.io.clock import ManualClock, SchedulerClock
from timeball.io.files import File, Files
from timeball.log.reader import LogReader
from timeball.log.recovery import open_log
from timeball.log.row_encoder import pairs_of
from timeball.log.writer import LogWriter
from timeball.model.message import Int64Array, Kind, build_rows, int64, with_seq
from timeball.schedule.backlog import Backlog
from timeball.schedule.loaded import ExternalDelivery
from timeball.schedule.outcomes import NOTHING_SETTLED, Outcomes
from timeball.schedule.scheduler import Scheduler
from timeball.table.attachment import Attachment

T = TypeVar("T")

TURNS_MAX = 100_000  # iterations of the loop after which a strategy must be idle
SEGMENT_BYTES = 32 * 1024  # some tens of frames
ALL = 1_000_000
CHECKPOINT = "checkpoint"  # this file contains an index of `World.ever_saved`, which has the content
IDLE_CALLS_MAX = 3  # calls in a row that may hand out nothing at one time, for example to free memory first


class World(Attaching):
    """One strategy in its surroundings. Tests call all methods from outside the event loop."""

    def __init__(
        self,
        rig: Rig,
        files: Files | None = None,
        *,
        reader_is_open: bool = True,
        wall_ms: int = ManualClock.wall,
        checkpoints: Sequence[Saved] = (),
    ) -> None:
        """The clocks begin at `wall_ms`. `checkpoints` are those in the files, the newest last."""
        self.rig = rig
        # The number of programs that hand out. Each one does it in order.
        self._hands = getattr(rig, "hands", 1)
        self.files: Files = CrashFiles() if files is None else files
        self.loop = asyncio.new_event_loop()
        self.manual = ManualClock(wall_ms)
        self.clock = SchedulerClock(self.manual)
        self.reader_thread = StepExecutor(is_open=reader_is_open)
        self.model = Model()
        self.checkpoints = list(checkpoints)
        self.ever_saved = list(checkpoints)
        self.attached: list[tuple[int, Attachment]] = []
        self.failures: list[BaseException] = []
        self.watermark = 1
        self._counter = 0
        # Rows to be rewritten whose new rows are not durable yet, oldest first.
        self._taken_rewrites: deque[pa.RecordBatch] = deque()
        self._saving: tuple[Saved, list[tuple[str, list[File]]]] | None = None
        # The time until which a ticker would sleep (None: until woken), and whether it has been woken since.
        self._asleep_until: int | None = None
        self._woken, self._last_call_ms = True, self.now_ms
        self.external = ExternalDelivery()
        self.strategy: Scheduler
        self.backlog: Backlog
        try:
            self.run(self._open())
        except BaseException:  # also a power cut
            self.loop.close()
            raise

    # -- what the broker does: send, release, cancel, rewrite --------------------------------------------

    def admit(self, due_times: Sequence[int]) -> list[int]:
        """Make scheduled messages with these due times durable. Returns their sequence numbers."""
        return self.run(self._admit(list(due_times)))

    async def _admit(self, due_times: list[int]) -> list[int]:
        bodies = [f"body {self._counter + i}".encode() for i in range(len(due_times))]
        self._counter += len(due_times)
        rows = build_rows(
            len(due_times), kind=int(Kind.SCHEDULED), topic="t", queue_id=-1, body=bodies,
            unique_key=[body.decode() for body in bodies], store_ms=self.now_ms, due_ms=due_times,
        )  # fmt: skip
        rows = self.rig.encode(rows, self.backlog)
        first_seq, now_ms = self.writer.next_seq, rows["store_ms"][0].as_py()
        seqs = list(range(first_seq, first_seq + len(due_times)))

        def on_durable() -> None:
            self.model.accepted.update(dict.fromkeys(seqs, now_ms))
            self.model.at.update(zip(seqs, seqs, strict=True))
            self.model.waiting.update(
                {seq: (due, body) for seq, due, body in zip(seqs, due_times, bodies, strict=True)}
            )
            self.rig.keep(rows, first_seq)
            scheduled_rows = with_seq(rows, first_seq)
            self.strategy.add(self.backlog, scheduled_rows, pairs_of(scheduled_rows), now_ms)

        await self.writer.append(rows, on_durable=on_durable)[1]
        return seqs

    def take(self, limit: int = ALL) -> list[tuple[int, int]] | None:
        """Hand out once and check the result. Returns its (due_ms, seq), or None if nothing is due.

        If nothing is due, messages that must be rewritten are taken instead, as the ticker does. They stay in memory.
        """
        return self.run(self._take(limit))

    async def _take(self, limit: int) -> list[tuple[int, int]] | None:
        now_ms, idle_calls = self.now_ms, 0
        self._last_call_ms = now_ms
        while idle_calls < IDLE_CALLS_MAX:
            batch = self.strategy.take_due(now_ms, limit)
            if batch is not None:
                self._woken = True
                return self.model.hand_out(batch, now_ms, limit)
            batch = self.strategy.take_rewrites(limit)
            if batch is not None:
                self.model.move(batch, limit)
                self._taken_rewrites.append(batch)
                continue
            idle_calls += 1
            until = self._asleep_until = self.strategy.fall_asleep()
            self._woken = False
            if until is None or until > now_ms or self.strategy.is_busy:
                return None
        raise AssertionError(f"would loop without work: nothing is due at {now_ms}, yet next is {until}")

    def release(self, batches: int = ALL) -> None:
        """Make the release records of the oldest hand-out durable."""
        while self.model.in_flight and batches > 0:
            batches -= 1
            self.release_part(len(self.model.in_flight[0]))

    def release_part(self, rows: int) -> None:
        """Make a frame with the first `rows` releases of the oldest hand-out durable."""
        if self.model.in_flight:
            self.run(self._release(list(self.model.in_flight[0])[:rows]))

    async def _release(self, seqs: list[int]) -> None:
        handed_out = self.model.in_flight[0]
        seq = column(seqs)
        due = column(handed_out[number][0] for number in seqs)
        await self._settle_rows(Kind.RELEASE, due, seq, lambda: self.strategy.released(seq))
        self.model.released.update((number, handed_out.pop(number)[0]) for number in seqs)
        if not handed_out:
            self.model.in_flight.popleft()

    def finish_rewrites(self, batches: int = ALL) -> None:
        """Make the new rows of the oldest rewrite durable."""
        while self._taken_rewrites and batches > 0:
            batches -= 1
            self.finish_part_of_rewrite(self._taken_rewrites[0].num_rows)

    def finish_part_of_rewrite(self, rows: int) -> None:
        """Make a frame with the first `rows` new rows of the oldest rewrite durable."""
        if self._taken_rewrites:
            self.run(self._append_rewritten(rows))

    async def _append_rewritten(self, count: int) -> None:
        batch = self._taken_rewrites.popleft()
        if batch.num_rows > count:
            self._taken_rewrites.appendleft(batch.slice(count))
        rows, seq = moved_rows(batch.slice(0, count), now_ms=self.now_ms), int64(batch["seq"])[:count]
        at = np.arange(self.writer.next_seq, self.writer.next_seq + len(seq))

        def on_durable() -> None:
            self.model.mark_rewritten(at.tolist())
            self.strategy.rewritten(seq, at, self.now_ms)

        await self.writer.append(rows, on_durable=on_durable)[1]

    def cancel(self, seqs: Sequence[int]) -> list[bool]:
        """Cancel these messages of the log, and compare the result with the model."""
        return self.run(self._cancel(list(seqs)))

    async def _cancel(self, seqs: list[int]) -> list[bool]:
        due = column(self.model.due_of(seq) for seq in seqs)
        answers = self.strategy.cancel(due, column(seqs)).tolist()
        chosen = self.model.cancel(seqs, answers)
        if chosen:
            await self._settle_rows(Kind.CANCEL, column(map(self.model.due_of, chosen)), column(chosen))
            self.model.cancelling.clear()
        return answers

    def was_cancelled(self, seqs: Sequence[int]) -> list[bool]:
        """Check which of these messages the strategy remembers as cancelled."""
        due = column(map(self.model.due_of, seqs))
        return [bool(answer) for answer in self.strategy.outcomes.was_cancelled(due, column(seqs))]

    async def _settle_rows(
        self, kind: Kind, due: Int64Array, seq: Int64Array, on_durable: Callable[[], None] = lambda: None
    ) -> None:
        rows = build_rows(
            len(seq), kind=int(kind), topic="t", queue_id=0, store_ms=self.now_ms, due_ms=due, source_seq=seq
        )
        await self.writer.append(rows, on_durable=on_durable)[1]

    # -- time, checkpoints, restarts ---------------------------------------------------------------------

    @property
    def now_ms(self) -> int:
        """The time of the scheduler's clock."""
        return self.clock.now_ms()

    def advance(self, ms: int) -> None:
        """Advance the clocks."""
        self.manual.advance(ms)

    def save(self) -> None:
        """Save a checkpoint and check its content."""
        self.begin_save()
        self.end_save()

    def begin_save(self) -> None:
        """Take the first half of a checkpoint, on the event loop: its state."""
        settled = self.strategy.settled()
        self.model.check_settled(settled)
        self.model.check_settled_before(self.strategy.settled_before_ms)
        # A copy, because later changes must not affect it.
        state = copy.deepcopy(self.rig.state(self.strategy.state(self.backlog)))
        if self._saving is not None:
            self.backlog.sync_failed()  # the previous checkpoint was not completed
        dirty = self.backlog.files_to_sync()
        self._saving = (Saved(self.reader.next_seq, settled, state), dirty)

    def end_save(self) -> None:
        """Take the second half of a checkpoint, in another thread: sync the files, then save it."""
        assert self._saving is not None
        (saved, dirty), self._saving = self._saving, None
        self.backlog.rows_synced()
        for folder, files in [(folder, files) for folder, files in dirty if files]:
            for file in files:
                file.sync()
            self.files.sync_dir(folder)
        self.ever_saved.append(saved)
        self.files.replace(CHECKPOINT, str(len(self.ever_saved) - 1).encode())
        self.checkpoints.append(saved)

    def apply_retention(self) -> None:
        """Save a checkpoint, then remove the segments that are not needed."""
        self.save()
        seqs = [self.reader.next_seq, self.strategy.needed_seq()]
        seqs += [self.watermark] if self.rig.has_table else []
        needed, segments = min(seq for seq in seqs if seq is not None), self.reader.segments
        expired = segments.expired(now_ms=1 << 62, retention_ms=0, needed_from_seq=needed)
        segments.remove(self.files, expired)
        if not self.rig.has_table:  # with a table, settled messages stay known for longer
            self.model.apply_retention(self.reader.first_seq)

    def restart(self, *, back: int = 0, power_cut: int | None = None, unreported: bool = False) -> None:
        """Start again from the checkpoint `back` before the last one, or from the log's beginning.

        Messages whose releases were not durable are pending again, and rewritten ones without a durable new row have
        their old row. With `unreported` both were durable, but the broker was not notified. `power_cut` is the seed of
        what the disk loses. A backlog with files of its own has removed files that only older checkpoints need, so
        with `back` it starts without a checkpoint. If the log no longer has its beginning, `back` is ignored.
        """
        self.reader_thread.is_open, was_open = True, self.reader_thread.is_open
        self.settle()
        if unreported:
            self.run(self._append_unreported())
        self.run(self.writer.close())
        if power_cut is not None:
            assert isinstance(self.files, CrashFiles)
            self.files = self.files.crash(power_cut)
        while self.model.in_flight:
            self.model.waiting.update(self.model.in_flight.popleft())
        self.model.moving.clear()
        self._taken_rewrites.clear()
        self._saving = None
        if back and self.reader.first_seq == 1:
            self.checkpoints = [] if self.rig.has_files else self.checkpoints[:-back]
        self.clock = SchedulerClock(self.manual)  # a new process reads the wall clock
        self.run(self._open())
        self.reader_thread.is_open = was_open

    async def _append_unreported(self) -> None:
        for batch in self._taken_rewrites:
            at = list(range(self.writer.next_seq, self.writer.next_seq + batch.num_rows))
            await self.writer.append(moved_rows(batch, now_ms=self.now_ms))[1]
            self.model.mark_rewritten(at)
        while self.model.in_flight:
            handed_out = {seq: due for seq, (due, _) in self.model.in_flight.popleft().items()}
            await self._settle_rows(Kind.RELEASE, column(handed_out.values()), column(handed_out))
            self.model.released |= handed_out

    async def _open(self) -> None:
        saved = self.checkpoints[-1] if self.checkpoints else Saved(1, NOTHING_SETTLED)
        opened = open_log(
            self.files, segment_bytes=SEGMENT_BYTES, now_ms=self.manual.wall_ms(),
            durable_before_seq=saved.seq if self.checkpoints else 0,
        )  # fmt: skip
        self.reader = LogReader(opened.segments)
        self.writer = LogWriter(
            self.files, opened.segments, opened.file, self.manual, StepExecutor(),
            segment_bytes=SEGMENT_BYTES, on_failure=self.failures.append,
        )  # fmt: skip
        restart, outcomes, rig = self._read_back(saved), Outcomes(), self.rig
        outcomes.restore(restart.settled)
        built = rig.build(self, restart, outcomes)
        self.backlog = built.backlog
        self.strategy = rig.scheduler(
            self.reader, self.reader_thread, outcomes, [built.backlog], table=built.table, external=self.external,
            ahead_ms=rig.ahead_ms, gather_bytes=rig.gather_bytes, on_failure=self.failures.append,
        )  # fmt: skip
        self.strategy.on_earlier = self.wake
        self.strategy.restore(built.backlog, built.state, restart.settled, built.waiting, self.now_ms)
        self._asleep_until, self._woken = None, True

    def _read_back(self, saved: Saved) -> Restart:
        return read_back(self.reader, self.rig.kind, saved, self.attached, self.watermark)

    # -- waiting for the reader thread -------------------------------------------------------------------

    def wake(self) -> None:
        """The `on_earlier` of the scheduler: record that it wakes the ticker."""
        self._woken = True

    def settle(self) -> None:
        """Let the reader thread finish all its jobs."""
        self.run(self._pump(None))

    async def _pump(self, task: asyncio.Task[None] | None) -> None:
        """Run the reader thread until `task` is done. Without a task, run it until it is idle."""
        for _ in range(TURNS_MAX):
            self.reader_thread.step()
            await asyncio.sleep(0)
            if task is not None and task.done():
                return task.result()
            if task is None and not len(self.reader_thread) and not self.strategy.is_busy:
                assert not self.failures, self.failures
                return None
        raise AssertionError("the strategy is always busy")

    def drain(self, limit: int = ALL) -> list[tuple[int, int]]:
        """Hand out all due messages, as the ticker does, and check that none is left.

        Rewrites become durable at once.
        """
        taken: list[tuple[int, int]] = []
        for _ in range(TURNS_MAX):
            self.settle()
            if self._taken_rewrites:
                self.finish_rewrites()
                continue
            pairs = self.take(limit)
            if pairs is not None:
                assert not taken or taken[-1] < pairs[0] or self._hands > 1, f"{pairs[0]} after {taken[-1]}"
                taken += pairs
            elif not self._taken_rewrites and not self.strategy.is_busy:
                break
        self.model.check_nothing_overdue(self.now_ms)
        return sorted(taken) if self._hands > 1 else taken

    def check_sleep(self) -> None:
        """Check that a ticker that sleeps now and is not woken wakes in time for the first message."""
        first = self.model.wake_by_ms
        if first is None or self.strategy.is_busy:
            return
        now_ms, upcoming = self.now_ms, self.strategy.next_due_ms()
        # A woken ticker calls the scheduler again, so the next time may be as late as the time of the last call.
        latest_ms = max(first, now_ms, self._last_call_ms if self._woken else now_ms)
        assert upcoming is not None and upcoming <= latest_ms, f"{upcoming} is after {first}"
        if not self._woken:
            until = self._asleep_until
            assert until is not None and until <= max(first, now_ms), f"asleep until {until}, missing {first}"

    # -- helpers -----------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Run one iteration of the event loop."""
        self.run(asyncio.sleep(0))

    def memory(self) -> int:
        """Count the messages that take memory now."""
        scheduler = self.strategy
        held_rows = len(scheduler.loaded) + scheduler.rewrites.rows + len(scheduler.outcomes)
        return self.rig.rows_in_memory(self.backlog) + held_rows

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the world's loop. Returns its result."""
        return self.loop.run_until_complete(coroutine)

    def close(self) -> None:
        """Close all files and the loop."""
        self.reader_thread.is_open = True
        try:
            self.settle()
            self.run(self.writer.close())
        finally:
            self.loop.close()
