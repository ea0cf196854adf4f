"""Which places in the level queues are settled: all below a queue's `low`, and those named here behind it.

What is released in turn moves `low` and is never named. Named is what was settled out of turn: cancelled, or
released before its predecessors, which happens after a clock was set back. A name leaves as `low` moves past it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from timeball import limits
from timeball.log.checkpoint import LevelFacts
from timeball.message import Int64Array
from timeball.schedule.delay_levels.queue import CHUNK, LevelQueue
from timeball.schedule.delay_levels.rows import offset_of, place_of, queue_of
from timeball.schedule.due_index import DueIndex


class SettledPlaces:
    """See the module. `queues` is the strategy's own; it grows as levels are used."""

    def __init__(self, queues: dict[int, LevelQueue]) -> None:
        self._queues = queues
        self._released, self._cancelled = DueIndex(), DueIndex()  # by place, twice

    def __len__(self) -> int:
        """How many are named."""
        return len(self._released) + len(self._cancelled)

    @property
    def cancelled_rows(self) -> int:
        """Cancelled, and named still."""
        return len(self._cancelled)

    def contains(self, places: Int64Array) -> npt.NDArray[np.bool_]:
        """Which of these are settled."""
        lows = np.zeros(limits.QUEUES_PER_TOPIC_MAX, dtype=np.int64)
        for number, queue in self._queues.items():
            lows[number] = queue.low
        settled = offset_of(places) < lows[queue_of(places)]
        for named in (self._released, self._cancelled):
            settled |= named.contains(places, places)
        return np.asarray(settled)

    def release(self, places: Int64Array) -> None:
        """These have been released, durably."""
        numbers = queue_of(places)
        for number in np.unique(numbers).tolist():
            queue, mine = self._queues[number], np.sort(places[numbers == number])
            offsets = offset_of(mine)
            if int(offsets[0]) == queue.low and int(offsets[-1]) - queue.low + 1 == len(offsets):
                queue.low += len(offsets)
            else:
                self._released.add(mine, mine)
            self._advance(queue)

    def cancel(self, places: Int64Array) -> None:
        """These have been cancelled."""
        self._cancelled.add(places, places)
        for number in np.unique(queue_of(places)).tolist():
            self._advance(self._queues[number])

    def facts(self, queue: LevelQueue) -> LevelFacts:
        """For a checkpoint."""
        offsets = offset_of(self._named(queue, queue.low, queue.index.max_offset))
        if len(offsets) == 0:
            return LevelFacts(queue.low)
        begins = np.concatenate(([0], np.flatnonzero(np.diff(offsets) != 1) + 1))
        counts = np.diff(np.append(begins, len(offsets)))
        return LevelFacts(queue.low, tuple(zip(offsets[begins].tolist(), counts.tolist(), strict=True)))

    def restore(self, queue: LevelQueue, facts: LevelFacts, settled_seq: Int64Array) -> None:
        """From a checkpoint and the rows behind it. What lies outside the queue as it is now is put right."""
        low, high = queue.index.min_offset, queue.index.max_offset
        queue.low = min(max(facts.offset, low), high)
        offsets = [np.arange(first, first + count) for first, count in facts.settled]
        named = np.unique(np.concatenate([*offsets, queue.find(settled_seq)]))
        named = place_of(queue.number, named[(named >= queue.low) & (named < high)])
        self._released.add(named, named)
        self._advance(queue)

    def _advance(self, queue: LevelQueue) -> None:
        """Move `low` past what is settled."""
        while len(self):
            named = self._named(queue, queue.low, queue.low + CHUNK)
            in_turn = offset_of(named) == queue.low + np.arange(len(named))
            count = int(np.argmin(np.append(in_turn, False)))
            for index in (self._released, self._cancelled):
                index.remove(named[:count], named[:count])
            queue.low += count
            if count < CHUNK:
                return

    def _named(self, queue: LevelQueue, begin: int, end: int) -> Int64Array:
        low, high = place_of(queue.number, np.array([begin, end])).tolist()
        found = [index.between((low, 0), (high, 0))[0] for index in (self._released, self._cancelled)]
        return np.sort(np.concatenate(found))
