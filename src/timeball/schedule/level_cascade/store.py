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
from timeball.schedule import generations
from timeball.schedule.level_cascade import timing_list
from timeball.schedule.level_cascade.hops import FAR_MS, following, is_last, lead_ms_of
from timeball.schedule.level_cascade.levels import plan
from timeball.schedule.level_cascade.queue import Entries, HopQueue, QueueState, check_queue
from timeball.schedule.level_cascade.queues import Queues, bound_ms
from timeball.schedule.moves import Moves
from timeball.schedule.near import Near
from timeball.schedule.places import Placed
from timeball.schedule.settling import Settling
from timeball.schedule.strategy import Settled

SET_BACK_MS = 1_000  # less is no step of the clock: the scheduler's holds still
MARK_EVERY_MS = 1_000
FOLDER = "cascade"
MOVES_SHARE = 8  # of the memory for bodies


class CascadeState(msgspec.Struct):
    """What a restart needs besides the queues' files."""

    generation: int  # the folder of the files
    known_seq: int  # every promise and place below it has its entry
    queues: list[QueueState]


def check(files: Files, state: CascadeState) -> None:
    """Raise Corrupt with the file's name when an entry that a saved state vouches for is missing or damaged."""
    for queue in state.queues:
        check_queue(files, generations.folder_of(FOLDER, state.generation), queue)


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
        self._queues = Queues(files, FOLDER, None, self._lead_ms)
        self._generation = self._known_seq = 0
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
        opens_ms = self._queues.heads().opens_ms
        if not self._has_room():
            opens_ms = min(map(self._queues.opens_ms, filter(self._may_open, self._queues)), default=FAR_MS)
        near_ms = self._near.next_due_ms(self._below_ms())
        next_ms = min(opens_ms, FAR_MS if near_ms is None else near_ms)
        if self._moves.ready:
            next_ms = min(next_ms, self._now_ms)
        return None if next_ms == FAR_MS else next_ms

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
        """See Strategy. A cancelled promise waits until its hop is over; `moved_rows` are hops since the start."""
        unopened, near, moving = self._queues.unopened_rows, len(self._near), len(self._moves)
        return {
            "waiting_rows": unopened + near + moving,
            "wheel_rows": self._near.wheel_rows,
            "near_rows": near,
            "moving_rows": moving,
            "moved_rows": self.moved_rows,
            "cancelled_rows": self._settling.cancelled_rows,
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
        return self._queues.first_at

    def state(self) -> CascadeState:
        """See Keeper."""
        self._let_go()
        return CascadeState(self._generation, self._known_seq, self._queues.state())

    def take_dirty(self) -> list[tuple[str, list[File]]]:
        """See Keeper."""
        return self._queues.take_dirty()

    def unsynced(self) -> None:
        """See Keeper."""
        self._queues.unsynced()

    def restore(self, state: msgspec.Struct | None, settled: Settled, waiting: Placed, now_ms: int) -> None:
        """See Keeper. What stands in a row that the state does not know is entered anew, wherever it stood."""
        assert state is None or isinstance(state, CascadeState)
        self._generation = generations.begin(self._files, FOLDER, None if state is None else state.generation)
        saved = CascadeState(self._generation, 0, []) if state is None else state
        self._now_ms = self._entry_ms = now_ms
        folder = generations.folder_of(FOLDER, self._generation)
        self._queues = Queues(self._files, folder, saved.queues, self._lead_ms)
        self._known_seq = saved.known_seq
        waiting = waiting.part(waiting.at >= self._known_seq)
        self._queues.forget_old_places(waiting.seq[waiting.seq < self._known_seq])
        self._look_at_the_near()
        order = np.argsort(waiting.at, kind="stable")  # a queue is sorted by place as well
        waiting = Placed(waiting.due_ms[order], waiting.seq[order], waiting.at[order])
        self._enter_lying(waiting, plan(waiting.due_ms - now_ms), now_ms)

    async def close(self) -> None:
        """See Keeper."""
        await self._near.close()
        await self._moves.close()
        self._queues.close()

    # -- entering queues -------------------------------------------------------------------------------------

    def _enter_at(self, ms: int) -> int:
        """When a hop begins that begins now: not before the one entered last, unless the clock was set back."""
        self._entry_ms = ms if ms < self._entry_ms - SET_BACK_MS else max(ms, self._entry_ms)
        return self._entry_ms

    def _enter(
        self, due: Int64Array, seq: Int64Array, at: Int64Array, hops: Int64Array, entry_ms: int
    ) -> npt.NDArray[np.bool_]:
        self._known_seq = max(self._known_seq, int(at.max()) + 1, int(seq.max()) + 1)
        return self._queues.enter(due, seq, at, hops, entry_ms)

    def _enter_lying(self, promises: Placed, hops: Int64Array, entry_ms: int) -> None:
        """As `_enter`, of promises whose bodies are in the log; those that are near are expected."""
        if len(promises):
            near = promises.part(self._enter(promises.due_ms, promises.seq, promises.at, hops, entry_ms))
            self._near.expect(near.due_ms, near.seq, near.at)

    # -- opening queues --------------------------------------------------------------------------------------

    def _has_room(self) -> bool:
        """Whether any queue may be opened."""
        return self._has_room_to_move() and len(self._near) < self.near_rows_max

    def _has_room_to_move(self) -> bool:
        return len(self._moves) - self._in_flight_rows < self.moving_rows_max

    def _may_open(self, queue: HopQueue) -> bool:
        """Whether there is room for what it would give up. What blocks all that is near has room always."""
        if queue.head_ms is None:
            return False
        if not is_last(queue.number):
            return self._has_room_to_move()
        if len(self._near) < self.near_rows_max:
            return True
        first_ms = self._near.first_due_ms
        return first_ms is None or first_ms >= bound_ms(queue)

    def _open(self, now_ms: int) -> None:
        if now_ms < self._queues.heads().opens_ms:
            return
        for queue in self._queues:
            while self._may_open(queue) and self._queues.opens_ms(queue) <= now_ms:
                self._open_some(queue, now_ms)

    def _open_some(self, queue: HopQueue, now_ms: int) -> None:
        entries = self._queues.open(queue, now_ms, self.open_rows)
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
        in_queues_ms, moving_ms = self._queues.heads().bound_ms, self._moves.first_due_ms
        return in_queues_ms if moving_ms is None else min(in_queues_ms, moving_ms)

    def _wake_if_earlier(self, before: int | None) -> None:
        after = self.next_due_ms()
        if after is not None and (before is None or after < before):
            self._on_change()

    # -- what is done, and what a restart finds ----------------------------------------------------------------

    def _let_go(self) -> None:
        self._queues.advance(self._settling.is_settled, self._moved_from)
        self._moved_from = []

    def _look_at_the_near(self) -> None:
        """Those that were near; or are not, after a clock that was set back."""
        queue, again = self._queues.near, list[Entries]()
        while queue.head_ms is not None:
            entries = self._queues.take(queue, FAR_MS, self.open_rows)
            entries = entries.part(~self._settling.is_settled(entries.due_ms, entries.seq))
            near = entries.due_ms - self._now_ms <= self._lead_ms
            queue.hold(entries.part(near))
            self._near.expect(entries.due_ms[near], entries.seq[near], entries.at[near])
            again.append(entries.part(~near))
            queue.forget(again[-1].index)
        for part in again:  # an entry that is near would join the queue that is looked at
            promises = Placed(part.due_ms, part.seq, part.at)
            self._enter_lying(promises, plan(part.due_ms - self._now_ms), self._now_ms)
