"""The queues of a cascade, two a level and one for what is near: where promises are entered, and what is opened next.

    queue     0    1      2      3    4      …    63   64
    level     -    1s            5s               20h
              near more   last   more last        more last

A queue is opened by its head alone: one of hops with more behind them when the hop is over, rounded up to a tenth
of a second so that hops come in batches; one of last hops half the lead before, and then as far as the whole lead
reaches. What the heads say together is looked at when one of them changes, because it is asked for at each step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from timeball.files import File, Files
from timeball.message import Int64Array
from timeball.schedule.level_cascade.hops import FAR_MS, NEAR, QUEUES, earliest_due_ms, enter, is_last
from timeball.schedule.level_cascade.queue import RECORD, Entries, HopQueue, IsSettled, QueueState

SCAN_MS = 100  # RocketMQ's

_NONE = np.empty(0, np.int64)


class Heads(NamedTuple):
    """What the heads of all queues say."""

    opens_ms: int  # when the first of them is opened
    bound_ms: int  # nothing in any of them is due before this


class Queues:
    """See the module."""

    def __init__(self, files: Files, folder: str, saved: list[QueueState] | None, lead_ms: int) -> None:
        """Open what a checkpoint vouches for in `folder`, and forget the rest; None: nothing is known of it yet.

        `lead_ms` before its instant a promise is near.
        """
        states = {state.number: state for state in saved or ()}
        numbers = range(QUEUES if saved is not None else 0)
        self._all = [HopQueue(files, folder, number, states.get(number)) for number in numbers]
        self._lead_ms = lead_ms
        self._heads: Heads | None = None

    def __iter__(self) -> Iterator[HopQueue]:
        return iter(self._all)

    @property
    def near(self) -> HopQueue:
        """The queue of those that are near, which are opened as they come."""
        return self._all[NEAR]

    @property
    def unopened_rows(self) -> int:
        """Entries that wait for the end of a hop; of cancelled promises too, as nobody has looked."""
        return sum(queue.unopened_rows for queue in self._all)

    # -- entering ------------------------------------------------------------------------------------------------

    def enter(
        self, due: Int64Array, seq: Int64Array, at: Int64Array, hops: Int64Array, entry_ms: int
    ) -> npt.NDArray[np.bool_]:
        """An entry for each promise, sorted by place; true for those that are near, whose entries are opened."""
        entered = enter(due, hops, entry_ms, self._lead_ms)
        order = np.argsort(entered.queue, kind="stable")
        records = np.empty(len(due), RECORD)
        records["hop_end_ms"], records["due_ms"] = entered.hop_end_ms[order], due[order]
        records["seq"], records["at"], records["hops"] = seq[order], at[order], entered.left[order]
        numbers = entered.queue[order]
        cuts = np.flatnonzero(np.diff(numbers)) + 1
        for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(due)], strict=True):
            queue = self._all[int(numbers[begin])]
            head_ms = queue.head_ms
            queue.append(records[begin:end])
            if queue.head_ms != head_ms:
                self._heads = None
        near = np.asarray(entered.queue == NEAR)
        if near.any():
            self.near.hold(self.take(self.near, FAR_MS, len(due)))
        return near

    # -- opening -------------------------------------------------------------------------------------------------

    def opens_ms(self, queue: HopQueue) -> int:
        """When a queue is opened, as its head says; FAR_MS when nothing waits in it."""
        if queue.head_ms is None:
            return FAR_MS
        if is_last(queue.number):
            return queue.head_ms - self._lead_ms // 2
        return -(-queue.head_ms // SCAN_MS) * SCAN_MS

    def heads(self) -> Heads:
        """What the heads of all queues say now."""
        if not self._all:
            return Heads(FAR_MS, -FAR_MS)
        if self._heads is None:
            waiting = [queue for queue in self._all if queue.head_ms is not None]
            self._heads = Heads(
                min(map(self.opens_ms, waiting), default=FAR_MS), min(map(bound_ms, waiting), default=FAR_MS)
            )
        return self._heads

    def open(self, queue: HopQueue, now_ms: int, rows_max: int) -> Entries:
        """The first entries of a queue that is to be opened now; see `HopQueue.take`."""
        return self.take(queue, now_ms + self._lead_ms if is_last(queue.number) else now_ms, rows_max)

    def take(self, queue: HopQueue, until_ms: int, rows_max: int) -> Entries:
        """See `HopQueue.take`."""
        self._heads = None
        return queue.take(until_ms, rows_max)

    # -- letting go, and a restart ---------------------------------------------------------------------------------

    def advance(self, is_settled: IsSettled, moved_from: list[Int64Array]) -> None:
        """Let go of opened entries that are done: settled, or moved from these places."""
        places = np.concatenate([_NONE, *moved_from])
        for queue in self._all:
            queue.advance(is_settled, places)

    def forget_old_places(self, seq: Int64Array) -> None:
        """These were written again after the state was saved: each has an entry that says where it lay before.

        They were opened since, so they stand at the beginning of some stretch; the search ends with the last.
        """
        places = [(queue, queue.low) for queue in self._all if queue.low < queue.log.end]
        left = len(seq)
        while left and places:
            further = []
            for queue, begin in places:
                found, end = queue.find(seq, begin)
                queue.forget(found)
                left -= len(found)
                if end < queue.log.end:
                    further.append((queue, end))
            places = further

    @property
    def first_at(self) -> int | None:
        """The oldest place of a promise that waits, as of the last `advance`, or an older one."""
        return min((at for queue in self._all if (at := queue.first_at) is not None), default=None)

    def state(self) -> list[QueueState]:
        """For a checkpoint, after an `advance`."""
        return [queue.state() for queue in self._all if queue.log.end]

    def take_dirty(self) -> list[tuple[str, list[File]]]:
        """See Keeper."""
        return [(queue.log.folder, queue.log.take_dirty()) for queue in self._all]

    def unsynced(self) -> None:
        """See Keeper."""
        for queue in self._all:
            queue.log.unsynced()

    def close(self) -> None:
        """Let go of the files."""
        for queue in self._all:
            queue.log.close()


def bound_ms(queue: HopQueue) -> int:
    """Nothing that waits in this queue is due before this."""
    return FAR_MS if queue.head_ms is None else earliest_due_ms(queue.number, queue.head_ms)
