"""The strategy `delay_levels`: what waits in the level queues, when it is due, and what of it is settled.

Every promise that is not settled is in exactly one place:

    a stretch (queue.py)    an entry of its queue's index; the body is on disk
    a gather under way      the reader thread fetches the bodies
    the second wheel        bodies in memory: what was accepted for the next seconds, or has been gathered
    in flight               handed out; its release record is on the way to the disk

Whatever the wheel holds, nothing is handed out past the earliest promise that is still on disk, so that order
holds across levels. Nothing waits for room in memory that is due now, so that order cannot become a deadlock.

Promises are known by their places (rows.py); settled.py knows which of these are settled.

The wheel is a cache of the queues: when the clock is set back it is thrown away, and the queues are looked through
again for what now counts as due (`LevelQueue.notice_set_back`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.log.checkpoint import LevelFacts
from timeball.log.queue_index import QueueIndex
from timeball.log.reader import LogReader
from timeball.message import Int64Array, Kind, int64
from timeball.schedule.delay_levels.levels import LevelTable
from timeball.schedule.delay_levels.queue import LevelQueue, Picked, Position
from timeball.schedule.delay_levels.rows import offset_of, place_of, restored
from timeball.schedule.delay_levels.settled import SettledPlaces
from timeball.schedule.due_index import DueIndex
from timeball.schedule.wheel import Run, SecondWheel

logger = logging.getLogger(__name__)

GATHER_ROWS_MAX = 131_072  # the loop reads so many entries at a time, some milliseconds

_NONE = np.empty(0, np.int64)


class DelayLevels:
    """See the module's docstring; implements `strategy.Strategy`."""

    def __init__(
        self,
        reader: LogReader,
        reader_thread: Executor,
        table: LevelTable,
        indexes: Callable[[], Sequence[QueueIndex]],
        *,
        ahead_ms: int,
        gather_bytes: int,
        on_change: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`indexes` gives the schedule topic's queues; `on_change` and `on_failure` as for every strategy."""
        self.table = table
        self._reader, self._thread, self._indexes = reader, reader_thread, indexes
        self._ahead_ms, self._gather_bytes = ahead_ms, gather_bytes
        self._on_change, self._on_failure = on_change, on_failure
        self._queues: dict[int, LevelQueue] = {}
        self._wheel = SecondWheel()
        self._settled = SettledPlaces(self._queues)
        self._remembered = DueIndex()  # (due_ms, seq) of what was cancelled, until it would have been due
        self._in_flight: deque[tuple[Int64Array, Int64Array, Int64Array]] = deque()  # (due_ms, seq, place)
        self._gathering: asyncio.Task[None] | None = None
        self._gathers: set[asyncio.Task[None]] = set()  # it, and those whose outcome nobody wants any more
        self._gathering_head: Position | None = None
        self._handed_before = _NONE  # places in flight when the queues were looked through again
        self._now_ms = -(1 << 62)  # the latest instant seen

    # -- the contract ------------------------------------------------------------------------------------

    def admit(self, promises: pa.RecordBatch) -> None:
        """See Strategy. The rows stand in their queues' indexes already."""
        due, queue = int64(promises.column("due_ms")), promises.column("queue_id").to_numpy()
        places = place_of(queue, int64(promises.column("queue_offset")))
        accepted = int64(promises.column("store_ms"))
        before, self._now_ms = self.next_due_ms(), max(self._now_ms, int(accepted[-1]))
        soon = due - accepted <= self._ahead_ms
        near = np.zeros(len(due), dtype=np.bool_)
        for number in np.unique(queue).tolist():
            level, mine = self._queue(number), queue == number
            if self._has_room() and not level.stretches:
                near |= mine & soon
                mine &= ~soon
            if mine.any():
                self._wait_on_disk(level, places[mine], due[mine], int64(promises.column("seq"))[mine])
        if near.any():
            rows = promises if near.all() else promises.filter(pa.array(near))
            rows = restored(rows, places=places[near], due_ms=due[near])
            self._wheel.add(rows)
        after = self.next_due_ms()
        if after is not None and (before is None or after < before):
            self._on_change()

    def due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        """See Strategy."""
        self._follow_clock(now_ms)
        self._gather_if_needed(now_ms)
        high = min((now_ms + 1, 0), self._bound(now_ms) or (now_ms + 1, 0))
        while (run := self._wheel.take_due(high, limit)) is not None:
            places = int64(run.rows.column("queue_offset"))
            keep = ~self._settled.contains(places)
            if not keep.any():
                continue
            rows = run.rows if keep.all() else run.rows.filter(pa.array(keep))
            self._in_flight.append((run.due[keep], run.seq[keep], places[keep]))
            return rows
        return None

    def released(self, due_ms: Int64Array, seq: Int64Array) -> None:
        """See Strategy."""
        due, handed, places = self._in_flight.popleft()
        count = len(seq)
        assert np.array_equal(handed[:count], seq), (
            "releases become durable in the order in which they were handed out"
        )
        if count < len(handed):  # large bodies: one run was several frames
            self._in_flight.appendleft((due[count:], handed[count:], places[count:]))
        self._settled.release(places[:count])

    def moving(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        """See Strategy. A promise stays where it is until it is due."""
        return None

    def moved(self, seq: Int64Array, at_seq: Int64Array) -> None:
        """See Strategy."""
        raise AssertionError("nothing was to be moved")

    def next_due_ms(self) -> int | None:
        """See Strategy. For what is on disk it is the instant at which to gather, half the lead ahead."""
        near = self._wheel.next_due_ms()
        if self._gathering_head is not None:
            # What comes behind it must wait for the gather, which calls `on_change`.
            return near if near is not None and near < self._gathering_head[0] else None
        head = self._head(self._now_ms)
        if head is None:
            return near
        # Without room for more bodies the wheel's own next instant is what makes room.
        gather_ms = head[0] - self._ahead_ms // 2 if self._has_room() else head[0]
        return gather_ms if near is None else min(near, gather_ms)

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """See Strategy."""
        places = self._places(seq)
        waiting = places >= 0
        waiting[waiting] = ~self._settled.contains(places[waiting])
        for _, _, handed_out in self._in_flight:
            waiting &= ~np.isin(places, handed_out)
        self._remembered.add(due_ms[waiting], seq[waiting])
        chosen = places[waiting]
        self._settled.cancel(chosen)
        return np.asarray(waiting)

    def was_cancelled(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """See Strategy. Later the log knows it, by the message's id."""
        return self._remembered.contains(due_ms, seq)

    def statistics(self) -> dict[str, int]:
        """Counts for people."""
        waiting = sum(queue.waiting_rows for queue in self._queues.values())
        return {
            "waiting_rows": waiting - len(self._settled),
            "wheel_rows": len(self._wheel),
            "cancelled_rows": self._settled.cancelled_rows,
        }

    # -- what a restart needs ------------------------------------------------------------------------------

    def state(self) -> dict[int, LevelFacts]:
        """Every queue's offset, with all durable releases accounted for, and what is settled behind it."""
        return {number: self._settled.facts(queue) for number, queue in self._queues.items()}

    def restore(self, state: dict[int, LevelFacts], settled_seq: Int64Array) -> None:
        """Recovery: the checkpoint's state, and the promises settled since; blocking, on the loop."""
        for number, index in enumerate(self._indexes()):
            if index.max_offset > index.min_offset:
                queue = self._queue(number)
                self._settled.restore(queue, state.get(number, LevelFacts(0)), settled_seq)
                queue.rebuild()
                self._remember_waits(queue)

    @property
    def first_waiting_seq(self) -> int | None:
        """The oldest row of the log that somebody waits for; retention must leave it."""
        seqs = [queue.first_waiting_seq for queue in self._queues.values()]
        return min((seq for seq in seqs if seq is not None), default=None)

    @property
    def settled_before_ms(self) -> int:
        """Every durable promise due before this instant is settled, durably."""
        bound = self._bound(self._now_ms)
        candidates = [
            1 << 62 if bound is None else bound[0],
            self._wheel.next_due_ms(),
            *(int(due[0]) for due, _, _ in self._in_flight),
        ]
        return min(ms for ms in candidates if ms is not None)

    def offsets(self) -> dict[int, tuple[int, int]]:
        """level -> (offset, end of its queue), for administrators."""
        return {
            number + 1: (queue.low, queue.index.max_offset) for number, queue in sorted(self._queues.items())
        }

    async def close(self) -> None:
        """Wait for the reader thread to be done with us."""
        if self._gathers:
            await asyncio.wait(self._gathers)

    # -- where promises are ----------------------------------------------------------------------------------

    def _queue(self, number: int) -> LevelQueue:
        queue = self._queues.get(number)
        if queue is None:
            duration_ms = self.table.durations_ms[number] if number < len(self.table) else None
            queue = self._queues[number] = LevelQueue(number, self._indexes()[number], duration_ms)
        return queue

    def _wait_on_disk(self, queue: LevelQueue, places: Int64Array, due: Int64Array, seq: Int64Array) -> None:
        offsets = offset_of(places)
        cuts = (np.flatnonzero(np.diff(offsets) != 1) + 1).tolist()
        for begin, end in zip([0, *cuts], [*cuts, len(offsets)], strict=True):
            queue.extend(int(offsets[begin]), due[begin:end], seq[begin:end])

    def _places(self, seq: Int64Array) -> Int64Array:
        """Where these stand in the queues; -1 for those that are no promises of levels, or settled."""
        places = np.full(len(seq), -1, dtype=np.int64)
        for number, queue in self._queues.items():
            offsets = queue.find(seq)
            known = offsets >= 0
            places[known] = place_of(number, offsets[known])
        return places

    def _head(self, now_ms: int) -> Position | None:
        heads = [queue.head(now_ms) for queue in self._queues.values()]
        return min((head for head in heads if head is not None), default=None)

    def _bound(self, now_ms: int) -> Position | None:
        """The earliest promise whose body is not in memory."""
        heads = (self._gathering_head, self._head(now_ms))
        return min((head for head in heads if head is not None), default=None)

    def _has_room(self) -> bool:
        return self._wheel.size_bytes < self._gather_bytes // 2

    def _follow_clock(self, now_ms: int) -> None:
        if now_ms < self._now_ms:
            logger.warning(
                "clock set back, delay levels are read again back_ms=%d",
                self._now_ms - now_ms,
            )
            self._wheel, self._gathering, self._gathering_head = SecondWheel(), None, None
            self._handed_before = np.concatenate([_NONE, *(places for _, _, places in self._in_flight)])
            for queue in self._queues.values():
                queue.rebuild()
        self._now_ms = now_ms
        self._remembered.pop_before(now_ms, 0)
        for queue in self._queues.values():
            queue.notice_set_back(now_ms)

    def _remember_waits(self, queue: LevelQueue) -> None:
        """A table that has become shorter must not make those wait less who wait already."""
        for stretch in queue.stretches:
            row = self._reader.take(int64(pa.array([stretch.head[1]])))
            queue.longest_wait(stretch.head[0] - int(row.column("store_ms")[0].as_py()))

    # -- gathering -----------------------------------------------------------------------------------------------

    def _gather_if_needed(self, now_ms: int) -> None:
        while self._gathering is None:
            head = self._head(now_ms)
            if head is None or head[0] - self._ahead_ms // 2 > now_ms:
                return
            if not self._has_room() and head[0] > now_ms:
                return
            due, seq, places = self._pick(now_ms)
            if len(seq):
                self._gathering_head = (int(due.min()), 0)
                task = asyncio.get_running_loop().create_task(self._gather(due, seq, places))
                self._gathering = task
                self._gathers.add(task)
                task.add_done_callback(self._gathered)

    def _pick(self, now_ms: int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """(due_ms, seq, place) of what is due next; it leaves its stretches. What is settled is left out."""
        picks = [
            picked
            for queue in self._queues.values()
            for picked in queue.pick(now_ms + self._ahead_ms, now_ms, GATHER_ROWS_MAX)
        ]
        due, seq, size = (
            np.concatenate([getattr(picked, name) for picked in picks]) for name in ("due", "seq", "size")
        )
        owner = np.repeat(np.arange(len(picks)), [len(p.seq) for p in picks])
        order = np.lexsort((seq, due))[:GATHER_ROWS_MAX]
        # Half of what may be in memory; at least one, however large: what has no room would never be kept.
        fitting = int(np.searchsorted(np.cumsum(size[order]), self._gather_bytes // 2, side="right"))
        order = order[: max(1, fitting)]
        counts = np.bincount(owner[order], minlength=len(picks)).tolist()
        chosen = [_take(picked, count) for picked, count in zip(picks, counts, strict=True) if count]
        due, seq, places = (np.concatenate(parts) for parts in zip(*chosen, strict=True))
        open_ = ~self._settled.contains(places)
        if len(self._handed_before):
            open_ &= ~np.isin(places, self._handed_before)
        return due[open_], seq[open_], places[open_]

    async def _gather(self, due: Int64Array, seq: Int64Array, places: Int64Array) -> None:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        run, strangers = await loop.run_in_executor(self._thread, self._load, due, seq, places)
        if self._gathering is task:  # else the clock was set back meanwhile
            self._wheel.add_run(run)
            self._settled.release(strangers)

    def _load(self, due: Int64Array, seq: Int64Array, places: Int64Array) -> tuple[Run, Int64Array]:
        """Bodies from the log (reader thread), as the messages they are; and the places of what is no promise."""
        order = np.argsort(seq)
        rows = self._reader.take(seq[order])
        due, places = due[order], places[order]
        ours = rows.column("kind").to_numpy() == Kind.PROMISE
        strangers = places[~ours]
        if len(strangers):
            # Somebody's message to this topic, from before it was ours: it is in its queue already.
            rows, due, places = rows.filter(pa.array(ours)), due[ours], places[ours]
        return Run.of([restored(rows, places=places, due_ms=due)]), strangers

    def _gathered(self, task: asyncio.Task[None]) -> None:
        self._gathers.discard(task)
        if self._gathering is task:
            self._gathering = self._gathering_head = None
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            logger.critical("gathering due messages of delay levels failed reason=%s", error)
            self._on_failure(error)
            return
        self._on_change()


def _take(picked: Picked, count: int) -> tuple[Int64Array, Int64Array, Int64Array]:
    first = picked.queue.take(picked.stretch, count)
    offsets = np.arange(first, first + count, dtype=np.int64)
    return picked.due[:count], picked.seq[:count], place_of(picked.queue.number, offsets)
