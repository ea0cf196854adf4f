"""`HourLog`: tail, pending table and second wheel behind the contract of a schedule.

The horizon H = (due_ms, seq) splits everything in two. Below it a promise is in the wheel, or settled; at or
above it, in the tail or in a file, whose rows nobody has looked at yet. A *gather* moves H ahead in the reader
thread: while it runs, the old horizon stays the bound of what may be handed out (`_loaded`), and new
promises are already sorted by the new one (`_horizon`). An attach replaces tail rows by file rows *above* H
only; rows of a bulk attach below H go straight into the wheel.

H moves back only when the clock does, or when a start finds its clock far behind what was sent before: parking.py.

Cancelled promises stay where they are and are filtered when they are handed out; what has become of each is
`settling.Settling`'s to remember.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypedDict

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.files import Files
from timeball.log.reader import LogReader
from timeball.message import Int64Array, int64
from timeball.schedule.due_index import DueIndex
from timeball.schedule.hour_log.behind import Behind
from timeball.schedule.hour_log.dispatched import Dispatched
from timeball.schedule.hour_log.parking import Parking
from timeball.schedule.hour_log.pending import PendingFiles, close_far, load, survey
from timeball.schedule.hour_log.placement import FIRST, NEVER, before, cut_to_budget, earliest, next_horizon
from timeball.schedule.places import Placed, Places, take_promises
from timeball.schedule.settling import Settling
from timeball.schedule.strategy import Settled
from timeball.schedule.tick import Tick
from timeball.schedule.wheel import Run, SecondWheel
from timeball.table.attachment import Attachment, FileEntry
from timeball.table.data_file import DataFile, Position, search

logger = logging.getLogger(__name__)

ROW_BYTES_GUESS = 512  # before anything has been gathered
PURGE_EVERY_MS = 1_000
GRACE_MS = 2_000  # as in config.py


class _Calls(TypedDict):
    on_change: Callable[[], None]
    on_failure: Callable[[BaseException], None]


class HourLog:
    """See the module's docstring; implements `strategy.Strategy`."""

    def __init__(
        self,
        files: Files,
        reader: LogReader,
        reader_thread: Executor,
        entries: list[FileEntry],
        settling: Settling,
        *,
        ahead_ms: int,
        gather_bytes: int,
        grace_ms: int = GRACE_MS,
        on_change: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`settling` knows what recovery found settled, and is shared by all who keep promises for an instant.

        A dispatcher may be late by `grace_ms`. `on_change` is called when `next_due_ms` may have become earlier;
        `on_failure` when a gather fails.
        """
        self._reader, self._thread = reader, reader_thread
        self._ahead_ms, self._gather_bytes = ahead_ms, gather_bytes
        self._on_change, self._on_failure = on_change, on_failure
        self.pending = PendingFiles(files, entries)
        self._tail = DueIndex()
        self._wheel = SecondWheel()
        calls: _Calls = {"on_change": on_change, "on_failure": on_failure}
        self._behind = Behind(reader_thread, self._wheel, **calls)
        self.dispatched = Dispatched(
            self.pending, self._wheel, settling, reader_thread, ahead_ms=ahead_ms, grace_ms=grace_ms, **calls
        )
        self._parking = Parking(settling, self.dispatched.contains)
        self._settling = settling
        settling.bounds.append(self._settled_before_ms)
        self._places = Places()  # of promises in the tail that do not lie in their first row
        self._horizon: Position = FIRST
        self._loaded: Position = FIRST
        self._gathering: asyncio.Task[None] | None = None
        self._row_bytes = ROW_BYTES_GUESS
        self._purged_ms = 0

    # -- the contract ------------------------------------------------------------------------------------

    def admit(self, promises: pa.RecordBatch) -> None:
        """See Strategy. Promises below the horizon keep their bodies and go to the wheel."""
        due, seq = int64(promises.column("due_ms")), int64(promises.column("seq"))
        next_ms = self.next_due_ms()
        near = before(due, seq, self._horizon)
        if near.all():
            self._wheel.add(promises)
        elif near.any():
            self._wheel.add(promises.filter(pa.array(near)))
            self._tail.add(due[~near], seq[~near])
        else:
            self._tail.add(due, seq)
        after = self.next_due_ms()
        if after is not None and (next_ms is None or after < next_ms):
            self._on_change()

    def due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        """See Strategy."""
        self._gather_if_needed(now_ms)
        self.dispatched.fetch_if_needed(now_ms, self._rows_max, self._wheel_has_room())
        high = min((now_ms + 1, 0), self._loaded)
        while (run := self._wheel.take_due(high, limit)) is not None:
            keep = ~self._settling.was_cancelled(run.due, run.seq)
            if not keep.any():
                continue
            rows = run.rows if keep.all() else run.rows.filter(pa.array(keep))
            self._settling.hand_out(run.due[keep], run.seq[keep])
            return rows
        return None

    def bring(self, promises: pa.RecordBatch) -> pa.RecordBatch | None:
        """What a dispatcher brings, all of it due: those of it that wait and were left to it, now in flight.

        Sorted as a hand-out is; None when there are none. As for those handed out by `due`, `released` is next.
        """
        run = Run.of([promises])
        was_full = not self._has_room()
        keep = self.dispatched.take(run.due, run.seq)
        keep[keep] = ~self._settling.was_cancelled(run.due[keep], run.seq[keep])
        if was_full:
            self._on_change()
        if not keep.any():
            return None
        self._settling.hand_out(run.due[keep], run.seq[keep])
        return run.rows if keep.all() else run.rows.filter(pa.array(keep))

    def released(self, due_ms: Int64Array, seq: Int64Array) -> None:
        """See Strategy."""
        self._settling.released(due_ms, seq)

    def moving(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        """See Strategy. What moves a promise to the table is an attach."""
        return None

    def moved(self, seq: Int64Array, at_seq: Int64Array) -> None:
        """See Strategy."""
        raise AssertionError("nothing was to be moved")

    def next_due_ms(self) -> int | None:
        """See Strategy. Above the horizon it is the instant at which to gather, half the lead ahead."""
        near, gather_ms = self._wheel.next_due_ms(), None
        if self._gathering is None:
            far = self._first_far_ms()
            # Without room for more bodies the wheel's own next instant is what makes room.
            gather_ms = far - self._ahead_ms // 2 if far is not None and self._has_room() else None
        elif near is not None and near >= self._loaded[0]:
            near = None  # it must wait for the gather, which calls `on_change`
        return earliest(near, gather_ms, self.dispatched.next_ms(self._wheel_has_room()))

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """See Strategy."""
        here = ~before(due_ms, seq, self._loaded)
        if not here.all():
            due, seqs = due_ms[~here], seq[~here]
            here[~here] = self._wheel.contains(due, seqs) | self.dispatched.contains(due, seqs)
        here[here] = self._settling.cancel(due_ms[here], seq[here])
        return here

    def was_cancelled(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """See Strategy."""
        return self._settling.was_cancelled(due_ms, seq)

    def settled(self) -> Settled:
        """See Strategy."""
        self._move_mark()
        return self._settling.settled()

    def statistics(self) -> dict[str, int]:
        """See Strategy."""
        return {
            "tail_rows": len(self._tail),
            "wheel_rows": len(self._wheel) + len(self._parking),
            "table_rows": self.pending.rows,
            "table_files": len(self.pending),
            "open_files": self.pending.open_files,
            "cancelled_rows": self._settling.cancelled_rows,
            "dispatched_rows": len(self.dispatched),
            "fetched_rows": self.dispatched.fetched_rows,
            "tick_ms": self.tick.tick_ms,
            "local_index": self.tick.local_index,
        }

    @property
    def tick(self) -> Tick:
        """The state that a successor starts from: see `schedule.tick`."""
        return self._settling.tick

    # -- moving what waits ---------------------------------------------------------------------------------

    @property
    def settled_before_ms(self) -> int:
        """Every durable promise due before this instant is settled, durably."""
        return self._settled_before_ms()

    async def attach(self, attachment: Attachment) -> None:
        """Files of a durable TABLE row join (and leave) the table; the tail gives up what they cover.

        Waits for a gather or fetch under way: it works on a list of files and would miss rows that change place now.
        """
        while under_way := [task for task in (self._gathering, self.dispatched.fetching) if task is not None]:
            await asyncio.wait(under_way)
        fresh = self.pending.apply(attachment)
        if attachment.job == "compact":
            self._tail.drop_seqs_below(attachment.to_seq)
        elif attachment.job == "bulk":
            self._settling.add_late(attachment.ranges)
            self._load_behind_horizon(fresh)
        self._on_change()

    async def quiet(self) -> None:
        """Return when every known promise below the horizon is in the wheel or dispatched, as `cancel` assumes."""
        await self._behind.quiet()

    def restore(self, settled: Settled, waiting: Placed) -> None:
        """Recovery: what the log and the checkpoint say is settled, and the tail's other promises."""
        due_ms, seq = waiting.due_ms, waiting.seq
        mark = self._parking.highest = (settled.before_ms, 0)
        late = before(due_ms, seq, mark)
        # What is below the mark came late, or the mark is far ahead of the clock: then not all of it is near.
        order = np.lexsort((seq[late], due_ms[late]))
        self._horizon = cut_to_budget(due_ms[late][order], seq[late][order], mark, self._rows_max)
        self._loaded = self._horizon
        late = before(due_ms, seq, self._horizon)
        if late.any():
            self._wheel.add(take_promises(self._reader, np.sort(waiting.at[late])))
        self._tail.add(due_ms[~late], seq[~late])
        self._places.add(seq[~late], waiting.at[~late])
        # A file attached since the mark was set may hold rows below the horizon that nobody has looked at.
        self._load_behind_horizon(
            [f for f in self.pending.all() if settled.may_touch(f.entry.min_seq, f.entry.max_seq)], settled
        )

    # -- inside ----------------------------------------------------------------------------------------------

    def _settled_before_ms(self) -> int:
        first_ms = earliest(
            self._settling.first_in_flight_ms,
            self._wheel.next_due_ms(),
            self._first_far_ms() if self._gathering is None else self._loaded[0],
            self._behind.first_due_ms,
            self.dispatched.first_due_ms,
        )
        return NEVER[0] if first_ms is None else first_ms

    def _first_far_ms(self) -> int | None:
        """A lower bound of the first instant above the horizon."""
        return earliest(
            self._tail.min_due_ms(),
            self.pending.next_due_ms(self._horizon[0]),
            self._parking.next_due_ms(),
        )

    def _move_mark(self) -> None:
        # The horizon of the next start is the mark: beyond ours it would take what is not near into memory.
        before_ms = min(self._settled_before_ms(), self._loaded[0])
        self._settling.move_mark(before_ms, self._reader.next_seq)

    def _gather_if_needed(self, now_ms: int) -> None:
        if now_ms - self._purged_ms >= PURGE_EVERY_MS:
            self._purged_ms = now_ms
            self._move_mark()
        if self._gathering is not None:
            return
        if (
            self._horizon[0] > now_ms + 2 * self._ahead_ms
            and not self._behind
            and not self.dispatched.fetching
        ):
            self._step_back((now_ms + self._ahead_ms, 0))
        target = next_horizon(self._horizon, now_ms, self._ahead_ms)
        if target > self._horizon and self._has_room():
            self._start_gather(target, now_ms)

    def _step_back(self, horizon: Position) -> None:
        """The clock is far behind the horizon: move it back."""
        behind_ms = self._horizon[0] - horizon[0]
        logger.warning("clock set back, promises wait until it has caught up behind_ms=%d", behind_ms)
        self._parking.park(self._wheel, horizon, self._horizon)
        self.pending.passed(self._horizon[0])
        self._horizon = self._loaded = horizon

    def _reach(self, horizon: Position) -> None:
        """All before this position is in the wheel, or settled."""
        self._parking.unpark(self._wheel, horizon)
        self._loaded = horizon

    def _has_room(self) -> bool:
        return self._wheel_has_room() and not self.dispatched.is_full

    def _wheel_has_room(self) -> bool:
        return not len(self._wheel) or self._wheel.size_bytes < self._gather_bytes // 2

    @property
    def _rows_max(self) -> int:
        """Rows of one gather. At least one, however large: what has no room would never be kept."""
        return max(1, self._gather_bytes // self._row_bytes)

    def _start_gather(self, target: Position, now_ms: int) -> None:
        near, target = self.pending.near(self._horizon, target)
        nothing = not near and self._tail.count_before(target[0]) == 0
        if nothing and not self.pending.any_far(target[0]):
            self._horizon = target
            self._reach(target)
            return
        task = self._gather(near, self._horizon, target, self.dispatched.begin(now_ms))
        self._gathering = asyncio.get_running_loop().create_task(task)
        self._gathering.add_done_callback(self._gathered)

    async def _gather(self, near: list[DataFile], low: Position, target: Position, left: Position) -> None:
        """Load rows in [low, target), or up to the largest horizon below `target` that memory allows.

        What lies in files from `left` on is left to a dispatcher.
        """
        loop = asyncio.get_running_loop()
        # The horizon must not move before it is known how far it may; promises admitted meanwhile go to the
        # tail, which is only read when the bound is fixed, on this loop and without a pause in between.
        if near:
            window = await loop.run_in_executor(self._thread, survey, near, low, target)
            self.pending.learn(window.next_due_ms)
            target, file_due, file_seq = window.high, window.due_ms, window.seq
        else:
            file_due = file_seq = np.empty(0, np.int64)
        tail_due, tail_seq = self._tail.between(low, target)
        cut = search(file_due, file_seq, left)
        due, seq = np.concatenate([file_due[:cut], tail_due]), np.concatenate([file_seq[:cut], tail_seq])
        order = np.lexsort((seq, due))
        target = cut_to_budget(due[order], seq[order], target, self._rows_max)
        tail_due, tail_seqs = self._tail.pop_before(*target)
        self._horizon = target
        # Receipts are promises, and nearly all of them are cancelled by now: their bodies are not read again.
        tail_at = self._places.pop(tail_seqs)[~self._settling.was_cancelled(tail_due, tail_seqs)]
        bodies = near if cut else []
        runs = await loop.run_in_executor(self._thread, self._load, bodies, tail_at, low, min(left, target))
        for run in runs:
            self._wheel.add_run(self._parking.not_seen(run, low))
        end = search(file_due, file_seq, target)
        due, seq = file_due[cut:end], file_seq[cut:end]
        keep = self._parking.unseen(due, seq, low)
        self.dispatched.add(due[keep], seq[keep])
        self._reach(target)

    def _load(self, near: list[DataFile], tail_at: Int64Array, low: Position, high: Position) -> list[Run]:
        """Bodies of the window (reader thread), sorted."""
        batches = []
        if len(tail_at):
            batches.append(take_promises(self._reader, np.sort(tail_at)))
        rows = load(near, low, high)
        close_far(self.pending.all(), high[0])
        if rows is not None:
            batches.append(rows)
        if not batches:
            return []
        run = Run.of(batches)
        self._row_bytes = max(64, run.rows.nbytes // max(1, run.rows.num_rows))
        return [run]

    def _load_behind_horizon(self, files: list[DataFile], settled: Settled | None = None) -> None:
        """Files may bring rows due below the horizon: near, or late already. What `settled` covers is left out."""
        self._behind.load(files, self._horizon, settled)

    def _gathered(self, task: asyncio.Task[None]) -> None:
        self._gathering = None
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            logger.critical("gathering due promises failed reason=%s", error)
            self._on_failure(error)
            return
        self._on_change()

    async def close(self) -> None:
        """Wait for the reader thread to be done with us."""
        if self._gathering is not None:
            await asyncio.wait([self._gathering])
        await self.dispatched.quiet()
        await self.quiet()
