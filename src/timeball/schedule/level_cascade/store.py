"""The strategy `level_cascade`: which queue a promise stands in, when it is opened, and what is near.

Every promise that is not settled has exactly one entry in one queue (queue.py), and the entry says where it lies.
As long as it is not opened, that is all there is of it. Opened, it is

    near          its instant is close: `Near` has it, and hands it out when it is due
    on the move   its hop is over and the instant far: `Moves` has it, and then it has another entry

A promise whose instant is close when it comes gets an entry all the same, opened at once: a restart finds them there.

What is not opened cannot be handed out, so nothing is handed out that is due after what may be in a queue: the end
of a hop bounds that from below (hops.py), for the arithmetic keeps each hop short of the instant. So order holds
across queues, and a backlog of hops delays what is behind it and disorders nothing.

A clock that is set back changes no entry. What was opened is moved, or waits near; what is entered from then on
begins another stretch of its queue; a list that no longer reaches is made anew.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.files import File, Files
from timeball.log.reader import LogReader
from timeball.message import Int64Array, int64
from timeball.schedule.level_cascade import timing_list
from timeball.schedule.level_cascade.hops import (
    FAR_MS,
    NEAR,
    QUEUES,
    earliest_due_ms,
    enter,
    following,
    is_last,
    lead_ms_of,
)
from timeball.schedule.level_cascade.levels import plan
from timeball.schedule.level_cascade.queue import RECORD, Entries, HopQueue, QueueState, is_there
from timeball.schedule.moves import Moves
from timeball.schedule.near import Near
from timeball.schedule.places import Placed
from timeball.schedule.settling import Settling
from timeball.schedule.strategy import Settled

SCAN_MS = 100  # RocketMQ's: the ends of hops are looked at so often, so that hops come in batches
SET_BACK_MS = 1_000  # less is no step of the clock: the scheduler's holds still
MARK_EVERY_MS = 1_000
MOVES_SHARE = 8  # of the memory for bodies

_NONE = np.empty(0, np.int64)


class CascadeState(msgspec.Struct):
    """What a restart needs besides the queues' files."""

    known_seq: int  # every promise and place below it has its entry
    queues: list[QueueState]


def usable(files: Files, state: CascadeState) -> bool:
    """Whether the files a saved state vouches for are there; if not, begin from all that waits."""
    return all(is_there(files, queue) for queue in state.queues)


class LevelCascade:
    """See the module's docstring; implements `strategy.Keeper`."""

    open_rows = 65_536  # entries opened in one go
    moving_rows_max = 131_072  # opened and not written yet; 40 bytes each, and some of the bodies
    near_rows_max = 1 << 20  # near at once, unless it must be; 40 bytes each

    def __init__(
        self,
        files: Files,
        reader: LogReader,
        reader_thread: Executor,
        settling: Settling,
        *,
        ahead_ms: int,
        gather_bytes: int,
        on_change: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`settling` is shared by all that keep promises; `on_change` and `on_failure` as for every strategy."""
        self._files, self._reader, self._settling = files, reader, settling
        self._on_change, self._lead_ms = on_change, lead_ms_of(ahead_ms)
        self._near = Near(
            reader, reader_thread, settling, ahead_ms=ahead_ms,
            gather_bytes=gather_bytes - gather_bytes // MOVES_SHARE, on_change=on_change, on_failure=on_failure,
        )  # fmt: skip
        self._moves = Moves(
            reader, reader_thread, settling, chunk_bytes=gather_bytes // MOVES_SHARE,
            on_change=on_change, on_failure=on_failure, dress=timing_list.moved_on,
        )  # fmt: skip
        self._queues: list[HopQueue] = []
        self._known_seq = 0
        self._now_ms = self._entry_ms = -FAR_MS
        self._marked_ms = -FAR_MS
        self._moved_from: list[Int64Array] = []  # places left since queues were last asked to let go of them
        self.moved_rows = self._in_flight_rows = 0
        settling.bounds.append(lambda: self.settled_before_ms)

    # -- the contract ------------------------------------------------------------------------------------

    def admit(self, promises: pa.RecordBatch) -> None:
        """See Strategy. What is near keeps its bodies."""
        due, seq = int64(promises.column("due_ms")), int64(promises.column("seq"))
        accepted_ms, before = int64(promises.column("store_ms")), self.next_due_ms()
        entry_ms = self._enter_at(int(accepted_ms[-1]))
        near = self._enter(due, seq, seq, plan(due - accepted_ms), entry_ms)
        if near.any():
            self._near.admit(promises if near.all() else promises.filter(pa.array(near)), entry_ms)
        self._wake_if_earlier(before)

    def due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        """See Strategy. What is handed out carries no list any more."""
        self._now_ms = now_ms
        if not 0 <= now_ms - self._marked_ms < MARK_EVERY_MS:
            self._marked_ms = now_ms
            # The mark never goes back: it may not be taken to what nobody has been promised yet.
            mark_ms = min(self.settled_before_ms, now_ms + self._lead_ms)
            self._settling.move_mark(mark_ms, self._reader.next_seq)
        self._open(now_ms)
        rows = self._near.due(now_ms, limit, self._below_ms())
        return None if rows is None else timing_list.undressed(rows)

    def released(self, due_ms: Int64Array, seq: Int64Array) -> None:
        """See Strategy."""
        self._settling.released(due_ms, seq)

    def moving(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        """See Strategy. The rows say what will be left when the next hop is over."""
        self._now_ms = now_ms
        self._open(now_ms)
        rows = self._moves.take(limit)
        self._in_flight_rows += 0 if rows is None else rows.num_rows
        return rows

    def moved(self, seq: Int64Array, at_seq: Int64Array) -> None:
        """See Strategy. The next hop begins."""
        before = self.next_due_ms()
        movers, at = self._moves.moved(seq, at_seq)
        self._moved_from.append(movers.at)
        self._in_flight_rows -= len(seq)
        self.moved_rows += len(seq)
        waits = ~self._settling.is_settled(movers.due_ms, seq)
        entry_ms = self._enter_at(self._now_ms)
        self._enter_lying(Placed(movers.due_ms[waits], seq[waits], at[waits]), movers.note[waits], entry_ms)
        self._wake_if_earlier(before)

    def next_due_ms(self) -> int | None:
        """See Strategy. For what waits on disk it is when a queue is to be opened."""
        candidates = [self._near.next_due_ms(self._below_ms())]
        candidates += [self._opens_ms(queue) for queue in self._queues if self._may_open(queue)]
        if self._moves.ready:
            candidates.append(self._now_ms)
        return min((ms for ms in candidates if ms is not None), default=None)

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """See Strategy. What is cancelled on the move holds up nobody any more."""
        before = self.next_due_ms() if len(self._moves) else -FAR_MS
        waited = self._settling.cancel(due_ms, seq)
        if len(self._moves):
            self._wake_if_earlier(before)
        return waited

    def was_cancelled(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        """See Strategy."""
        return self._settling.was_cancelled(due_ms, seq)

    def statistics(self) -> dict[str, int]:
        """See Strategy."""
        waiting = sum(queue.rows for queue in self._queues)
        return {
            "waiting_rows": max(0, waiting - self._settling.cancelled_rows),
            "wheel_rows": self._near.wheel_rows,
            "cancelled_rows": self._settling.cancelled_rows,
            "moved_rows": self.moved_rows,
        }

    # -- what a keeper does besides ------------------------------------------------------------------------

    def refuse(self, due_ms: Int64Array) -> None:
        """See Keeper. No instant is too far and none has too many promises."""

    def dress(self, promises: pa.RecordBatch, now_ms: int) -> pa.RecordBatch:
        """See Keeper."""
        return timing_list.dress(promises, now_ms)

    @property
    def settled_before_ms(self) -> int:
        """See Keeper."""
        candidates = (self._below_ms(), self._near.first_due_ms, self._settling.first_in_flight_ms)
        return min(ms for ms in candidates if ms is not None)

    @property
    def first_needed_seq(self) -> int | None:
        """See Keeper."""
        self._let_go()
        return min((at for queue in self._queues if (at := queue.first_at) is not None), default=None)

    def state(self) -> CascadeState:
        """See Keeper."""
        self._let_go()
        return CascadeState(self._known_seq, [queue.state() for queue in self._queues if queue.log.end])

    def take_dirty(self) -> list[tuple[str, list[File]]]:
        """See Keeper."""
        return [(queue.log.folder, queue.log.take_dirty()) for queue in self._queues]

    def unsynced(self) -> None:
        """See Keeper."""
        for queue in self._queues:
            queue.log.unsynced()

    def restore(self, state: msgspec.Struct | None, settled: Settled, waiting: Placed, now_ms: int) -> None:
        """See Keeper. What stands in a row that the state does not know is entered anew, wherever it stood."""
        assert state is None or isinstance(state, CascadeState)
        saved = {} if state is None else {queue.number: queue for queue in state.queues}
        self._now_ms = self._entry_ms = now_ms
        self._queues = [HopQueue(self._files, number, saved.get(number)) for number in range(QUEUES)]
        self._known_seq = 0 if state is None else state.known_seq
        waiting = waiting.part(waiting.at >= self._known_seq)
        self._forget_old_places(waiting.seq[waiting.seq < self._known_seq])
        self._look_at_the_near()
        order = np.argsort(waiting.at, kind="stable")  # a queue is sorted by place as well
        waiting = Placed(waiting.due_ms[order], waiting.seq[order], waiting.at[order])
        self._enter_lying(waiting, plan(waiting.due_ms - now_ms), now_ms)

    async def close(self) -> None:
        """See Keeper."""
        await self._near.close()
        await self._moves.close()
        for queue in self._queues:
            queue.log.close()

    # -- entering queues -------------------------------------------------------------------------------------

    def _enter_at(self, ms: int) -> int:
        """When a hop begins that begins now: not before the one entered last, unless the clock was set back."""
        self._entry_ms = ms if ms < self._entry_ms - SET_BACK_MS else max(ms, self._entry_ms)
        return self._entry_ms

    def _enter(
        self, due: Int64Array, seq: Int64Array, at: Int64Array, hops: Int64Array, entry_ms: int
    ) -> npt.NDArray[np.bool_]:
        """An entry for each promise, sorted by place; true for those that are near, which are opened here."""
        entered = enter(due, hops, entry_ms, self._lead_ms)
        order = np.argsort(entered.queue, kind="stable")
        records = np.empty(len(due), RECORD)
        records["hop_end_ms"], records["due_ms"] = entered.hop_end_ms[order], due[order]
        records["seq"], records["at"], records["hops"] = seq[order], at[order], entered.left[order]
        numbers = entered.queue[order]
        cuts = np.flatnonzero(np.diff(numbers)) + 1
        for begin, end in zip([0, *cuts.tolist()], [*cuts.tolist(), len(due)], strict=True):
            if end > begin:
                self._queues[int(numbers[begin])].append(records[begin:end])
        self._known_seq = max(self._known_seq, int(at.max(initial=0)) + 1, int(seq.max(initial=0)) + 1)
        near = np.asarray(entered.queue == NEAR)
        if near.any():
            queue = self._queues[NEAR]
            queue.hold(queue.take(FAR_MS, len(due)))
        return near

    def _enter_lying(self, promises: Placed, hops: Int64Array, entry_ms: int) -> None:
        """As `_enter`, of promises whose bodies are in the log; those that are near are expected."""
        if len(promises):
            near = promises.part(self._enter(promises.due_ms, promises.seq, promises.at, hops, entry_ms))
            self._near.expect(near.due_ms, near.seq, near.at)

    # -- opening queues --------------------------------------------------------------------------------------

    def _until_ms(self, queue: HopQueue, now_ms: int) -> int:
        """The hops of this queue that are over by then are opened now."""
        return now_ms + self._lead_ms if is_last(queue.number) else now_ms

    def _opens_ms(self, queue: HopQueue) -> int:
        """When a queue that has a head is opened: a scan's time after the end of a hop, or half the lead before."""
        assert queue.head_ms is not None
        if is_last(queue.number):
            return queue.head_ms - self._lead_ms // 2
        return -(-queue.head_ms // SCAN_MS) * SCAN_MS

    def _may_open(self, queue: HopQueue) -> bool:
        """Whether there is room for what it would give up. What blocks all that is near has room always."""
        if queue.head_ms is None:
            return False
        if not is_last(queue.number):
            return len(self._moves) - self._in_flight_rows < self.moving_rows_max
        if len(self._near) < self.near_rows_max:
            return True
        first_ms = self._near.first_due_ms
        return first_ms is None or first_ms >= earliest_due_ms(queue.number, queue.head_ms)

    def _open(self, now_ms: int) -> None:
        for queue in self._queues:
            while self._may_open(queue) and self._opens_ms(queue) <= now_ms:
                self._open_some(queue, now_ms)

    def _open_some(self, queue: HopQueue, now_ms: int) -> None:
        entries = queue.take(self._until_ms(queue, now_ms), self.open_rows)
        entries = entries.part(~self._settling.is_settled(entries.due_ms, entries.seq))
        queue.hold(entries)
        far = entries.due_ms - now_ms > self._lead_ms
        if is_last(queue.number):
            far[:] = False  # it was far when it was entered, by a cascade with another lead
        near, far_ones = entries.part(~far), entries.part(far)
        self._near.expect(near.due_ms, near.seq, near.at)
        if len(far_ones):
            hops = following(far_ones.due_ms, far_ones.hops, now_ms)
            self._moves.add(far_ones.due_ms, far_ones.seq, far_ones.at, hops)

    def _below_ms(self) -> int:
        """No promise that is neither near nor settled is due before this."""
        candidates = [
            earliest_due_ms(queue.number, queue.head_ms)
            for queue in self._queues
            if queue.head_ms is not None
        ]
        moving_ms = self._moves.first_due_ms
        if moving_ms is not None:
            candidates.append(moving_ms)
        return min(candidates, default=FAR_MS)

    def _wake_if_earlier(self, before: int | None) -> None:
        after = self.next_due_ms()
        if after is not None and (before is None or after < before):
            self._on_change()

    # -- what is done, and what a restart finds ----------------------------------------------------------------

    def _let_go(self) -> None:
        moved_from = np.concatenate([_NONE, *self._moved_from])
        self._moved_from = []
        for queue in self._queues:
            queue.advance(self._settling.is_settled, moved_from)

    def _forget_old_places(self, seq: Int64Array) -> None:
        """These were written again after the state was saved: each has an entry that says where it lay before.

        They were opened since, so they stand at the beginning of some stretch; the search ends with the last.
        """
        places = [(queue, queue.low) for queue in self._queues if queue.low < queue.log.end]
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

    def _look_at_the_near(self) -> None:
        """Those that were near; or are not, after a clock that was set back."""
        queue, again = self._queues[NEAR], list[Entries]()
        while queue.head_ms is not None:
            entries = queue.take(FAR_MS, self.open_rows)
            entries = entries.part(~self._settling.is_settled(entries.due_ms, entries.seq))
            near = entries.due_ms - self._now_ms <= self._lead_ms
            queue.hold(entries.part(near))
            self._near.expect(entries.due_ms[near], entries.seq[near], entries.at[near])
            again.append(entries.part(~near))
            queue.forget(again[-1].index)
        for part in again:  # an entry that is near would join the queue that is looked at
            promises = Placed(part.due_ms, part.seq, part.at)
            self._enter_lying(promises, plan(part.due_ms - self._now_ms), self._now_ms)
