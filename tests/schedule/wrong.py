"""Schedules that are wrong, each in one way: the suites must notice every one of them.

`BY_CHANCE` are found by the machine, sooner or later; `AT_AN_EDGE` stand in the way of one test of the contract, with
its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from tests.schedule.rigs import DEFAULT, CascadeRig, HourLogRig, LevelsRig, WheelRig
from tests.schedule.stage import Rig

from timeball.io.files import File
from timeball.model.message import Int64Array
from timeball.schedule.backlog import Backlog, Bools, Opened, Rewritten
from timeball.schedule.delay_levels.backlog import DelayLevels
from timeball.schedule.delay_levels.queue import Columns, LevelQueue
from timeball.schedule.due_index import FAR_MS, DueIndex
from timeball.schedule.hour_log.backlog import HourLog
from timeball.schedule.level_cascade.backlog import CascadeState, LevelCascade
from timeball.schedule.level_cascade.placement import is_last
from timeball.schedule.locations import Waiting
from timeball.schedule.mapped_log import RecordArray
from timeball.schedule.outcomes import Settled
from timeball.schedule.scheduler import Scheduler
from timeball.schedule.timer_wheel import backlog as wheel
from timeball.schedule.timer_wheel.backlog import TimerWheel, WheelState
from timeball.schedule.timer_wheel.ring import Ring
from timeball.schedule.timer_wheel.timer_log import Entries, TimerLog
from timeball.table.attachment import Attachment

# -- of the scheduler ------------------------------------------------------------------------------------------


class Early(Scheduler):
    """Hands out a millisecond before the instant."""

    def take_due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        return super().take_due(now_ms + 1, limit)


class Forgets(Scheduler):
    """Loses the last of several rows handed out."""

    def take_due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        rows = super().take_due(now_ms, limit)
        return rows if rows is None or rows.num_rows < 2 else rows.slice(0, rows.num_rows - 1)


class Doubles(Scheduler):
    """Hands out every third batch once more."""

    _last: pa.RecordBatch | None = None
    _calls = 0

    def take_due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        self._calls += 1
        rows = super().take_due(now_ms, limit)
        if rows is None and self._calls % 3 == 0 and self._last is not None:
            rows, self._last = self._last, None
            return rows if rows.num_rows <= limit else None
        self._last = rows if rows is not None else self._last
        return rows


class Unsorted(Scheduler):
    """Hands out the right rows in reverse."""

    def take_due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        rows = super().take_due(now_ms, limit)
        return None if rows is None else rows.take(pa.array(np.arange(rows.num_rows)[::-1]))


class RoundsUp(Scheduler):
    """Hands out at the whole second after which it is due, as if a slot's precision were the scheduled message's."""

    def take_due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        return super().take_due(now_ms - now_ms % 1_000 + 999, limit)


class RoundsDown(Scheduler):
    """Hands out when the second is over, as RocketMQ does."""

    def take_due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        return super().take_due(now_ms - now_ms % 1_000 - 1, limit)


class DeafToCancels(Scheduler):
    """Says that a scheduled message is cancelled and hands it out all the same."""

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> Bools:
        before, self.outcomes._cancelled = self.outcomes._cancelled, DueIndex()
        answers = super().cancel(due_ms, seq)
        self.outcomes._cancelled = before
        return answers


class CancelsAll(Scheduler):
    """Says of every scheduled message that it was still waiting."""

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> Bools:
        return super().cancel(due_ms, seq) | True


class KeepsTheCancelled(Scheduler):
    """Remembers what is cancelled, and hands it out all the same."""

    def take_due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        was, self.outcomes.was_cancelled = (
            self.outcomes.was_cancelled,
            lambda due, seq: np.zeros(len(seq), np.bool_),
        )  # type: ignore[method-assign]
        rows = super().take_due(now_ms, limit)
        self.outcomes.was_cancelled = was  # type: ignore[method-assign]
        return rows


class CancelsOnlyTheNear(Scheduler):
    """Says that what is being written again cannot be cancelled."""

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> Bools:
        moving = [batch.scheduled_rows.seq for batch in self.rewrites._in_flight]
        answers, here = np.zeros(len(seq), np.bool_), ~np.isin(seq, np.concatenate([seq[:0], *moving]))
        answers[here] = super().cancel(due_ms[here], seq[here])
        return answers


class SleepsTooLong(Scheduler):
    """Wants to be called a minute late."""

    def next_due_ms(self) -> int | None:
        upcoming = super().next_due_ms()
        return None if upcoming is None else upcoming + 60_000


class TurnsInPlace(Scheduler):
    """Wants to be called again at once, whatever there is to do."""

    def next_due_ms(self) -> int | None:
        upcoming = super().next_due_ms()
        return None if upcoming is None else min(upcoming, 0)


class NeverWakes(Scheduler):
    """Lets the ticker sleep through the arrival of something earlier."""

    def add(self, backlog: Backlog, scheduled_rows: pa.RecordBatch) -> None:
        wake, self.on_earlier = self.on_earlier, lambda: None
        super().add(backlog, scheduled_rows)
        self.on_earlier = wake


class SleepsThroughOpenings(Scheduler):
    """Wakes for what is loaded, and for no backlog."""

    def _open_ms(self, backlog: Backlog) -> int:
        due_ms = self.loaded.first_due_ms()
        return super()._open_ms(backlog) if due_ms <= self._now_ms else FAR_MS

    def _open_if_needed(self, now_ms: int) -> None:
        for backlog in self.backlogs:
            if super()._open_ms(backlog) <= now_ms:
                self._start_opening(backlog, now_ms)


class SettlesTooMuch(Scheduler):
    """Tells a checkpoint that all is settled up to now and a little further."""

    @property
    def settled_before_ms(self) -> int:
        return self._now_ms + 10_000


class SettlesTheUnopened(Scheduler):
    """Tells a checkpoint that all is settled before what is loaded."""

    @property
    def settled_before_ms(self) -> int:
        firsts = (self.outcomes.first_in_flight_ms, self.loaded.first_due_ms())
        return min(ms for ms in firsts if ms is not None)


class NotTheEarliest(Scheduler):
    """Hands out what is in memory, whatever earlier is still on disk."""

    def _below_ms(self) -> int:
        return FAR_MS


class LosesOnTheWay(Scheduler):
    """Loses the last of many scheduled messages that a backlog has given up."""

    def _expect_loaded(self, backlog: Backlog, near: Waiting) -> None:
        super()._expect_loaded(
            backlog, near if len(near) < 6 else near.part(np.arange(len(near)) < len(near) - 1)
        )


class AttachesInAnOpening(Scheduler):
    """Does not wait for an opening before rows change place."""

    async def attach(self, attachment: Attachment, resumes: str = "", now_ms: int = 0) -> None:
        assert self._table is not None
        self._table.attach(attachment, now_ms)
        if attachment.job == "bulk":
            self.outcomes.add_late(attachment.ranges)
        self._expect_opening(self._table)


class ForgetsAtARestart(Scheduler):
    """Starts from the mark alone, and not from the pairs that are settled besides."""

    def restore(
        self, backlog: Backlog, state: msgspec.Struct | None, settled: Settled, waiting: Waiting, now_ms: int
    ) -> None:
        self.outcomes._cancelled = DueIndex()
        super().restore(backlog, state, settled, waiting, now_ms)


class NeverGoesBack(Scheduler):
    """What was once the time stays it."""

    _latest_ms = 0

    def take_due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        self._latest_ms = max(self._latest_ms, now_ms)
        return super().take_due(self._latest_ms, limit)


class WaitsForTheClock(Scheduler):
    """Does nothing until the clock is where it was before it was set back."""

    _latest_ms = 0

    def take_due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        self._latest_ms = max(self._latest_ms, now_ms)
        return super().take_due(now_ms, limit) if now_ms >= self._latest_ms else None

    def next_due_ms(self) -> int | None:
        upcoming = super().next_due_ms()
        return None if upcoming is None else max(upcoming, self._latest_ms)


# -- of what is written again ----------------------------------------------------------------------------------


class MovesAgain(Scheduler):
    """Writes a second row while the first is on its way."""

    def take_rewrites(self, limit: int) -> pa.RecordBatch | None:
        rows, self._again = super().take_rewrites(limit), getattr(self, "_again", None)
        if rows is None and self._again is not None and self.rewrites.in_flight_rows:
            rows, self._again = self._again.slice(0, 1), None
            return rows
        self._again = rows
        return rows


class MovesTheCancelled(Scheduler):
    """Writes again what was cancelled."""

    _taken: pa.RecordBatch | None = None
    _was_cancelled = False

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> Bools:
        self._was_cancelled = True
        return super().cancel(due_ms, seq)

    def take_rewrites(self, limit: int) -> pa.RecordBatch | None:
        if self._was_cancelled and self._taken is not None:
            rows, self._taken = self._taken.slice(0, 1), None
            return rows
        rows = super().take_rewrites(limit)
        self._taken = rows if rows is not None else self._taken
        return rows


class MovesTooMuch(Scheduler):
    """Writes more again than it was asked for."""

    def take_rewrites(self, limit: int) -> pa.RecordBatch | None:
        return super().take_rewrites(limit + 1)


class LosesBodiesOnTheMove(Scheduler):
    """Writes something else again."""

    def take_rewrites(self, limit: int) -> pa.RecordBatch | None:
        rows = super().take_rewrites(limit)
        if rows is None:
            return None
        at, body = rows.schema.get_field_index("body"), rows.schema.field("body")
        return rows.set_column(at, body, pa.array([b""] * rows.num_rows, body.type))


class MovesRows(Scheduler):
    """Gives out rows of the log as they are, not the scheduled messages in them."""

    def take_rewrites(self, limit: int) -> pa.RecordBatch | None:
        rows = super().take_rewrites(limit)
        if rows is None:
            return None
        at = rows.schema.get_field_index("store_ms")
        return rows.set_column(at, rows.schema.field("store_ms"), pa.array([self._now_ms] * rows.num_rows))


class SleepsOnTheMove(Scheduler):
    """Nothing is woken when a rewrite is done."""

    def rewritten(self, seq: Int64Array, row_seq: Int64Array, now_ms: int) -> None:
        wake, self.on_earlier = self.on_earlier, lambda: None
        super().rewritten(seq, row_seq, now_ms)
        self.on_earlier = wake


class TurnsOnTheMove(Scheduler):
    """Wants to be called at once for what is being written again."""

    def next_due_ms(self) -> int | None:
        return 0 if self.rewrites.rows else super().next_due_ms()


class LosesTheLast(Scheduler):
    """Forgets the last of several scheduled messages that were written again."""

    def rewritten(self, seq: Int64Array, row_seq: Int64Array, now_ms: int) -> None:
        batch = self.rewrites._in_flight[0]
        few = np.arange(len(batch.scheduled_rows)) < max(1, len(seq) - 1)
        add = batch.backlog.add

        def all_but_one(waiting: Waiting, now_ms: int, rewritten: Rewritten | None = None) -> Bools:
            some = few[: len(waiting)]
            assert rewritten is not None
            kept = np.zeros(len(waiting), np.bool_)
            kept[some] = add(
                waiting.part(some), now_ms, Rewritten(rewritten.row_seq[some], rewritten.note[some])
            )
            return kept

        batch.backlog.add = all_but_one  # type: ignore[method-assign]
        super().rewritten(seq, row_seq, now_ms)
        batch.backlog.add = add  # type: ignore[method-assign]


class NeedsTheNewest(Scheduler):
    """Says that the log is needed from nowhere on."""

    def needed_seq(self) -> int | None:
        return None


# -- of the hour log -------------------------------------------------------------------------------------------


class BlindToLateFiles(HourLog):
    """Does not look for what a file brings that is near, or late already."""

    def attach(self, attachment: Attachment, now_ms: int = 0) -> None:
        self.pending.attach(attachment, self._opened_ms, now_ms)
        opened = {entry.path: max(entry.min_due_ms, self._opened_ms) for entry in attachment.files}
        self.pending.opened(opened)
        if attachment.job == "compact":
            self._tail.drop_seqs_below(attachment.to_seq)


# -- of the timer wheel ----------------------------------------------------------------------------------------


class LooseLatch(TimerWheel):
    """Counts a slot as delivered once it has been opened, whatever has become of what was in it."""

    def _advance(self, settled_ms: int) -> None:
        super()._advance(settled_ms)
        opened = self._ring.bound if self._opened is None else self._opened
        self._low = max(self._low, opened - 2)
        self._log.forget(self._low)


class OnlyTheLastBatch(TimerWheel):
    """Finds of each slot what came last, and does not follow the chain."""

    def _sorted_out(self, found: Entries) -> Opened:
        last = {slot: index for index, slot in zip(found.index.tolist(), found.slot.tolist(), strict=True)}
        keep = np.array(
            [abs(last[s] - i) < 8 for i, s in zip(found.index.tolist(), found.slot.tolist(), strict=True)],
            np.bool_,
        )
        return super()._sorted_out(found.part(keep))


class BeginsWithAnEmptyRing(TimerWheel):
    """Takes every slot for empty after a restart."""

    def _push_links(self) -> RecordArray:
        links, bound = super()._push_links(), self._ring.bound
        self._ring.close()
        self._ring = Ring(self._files, wheel.RING, self.slots, bound=bound)
        return links


class OpensOnce(TimerWheel):
    """Begins after a restart behind what had been opened before it."""

    def restore(
        self, state: msgspec.Struct | None, settled: Settled, waiting: Waiting, now_ms: int
    ) -> Opened:
        if isinstance(state, WheelState):
            state = msgspec.structs.replace(state, low=state.bound)
        return super().restore(state, settled, waiting, now_ms)


class KeepsOnlyTheFar(TimerWheel):
    """What comes when its slot is open already is in memory, and in no slot."""

    def add(self, waiting: Waiting, now_ms: int, rewritten: Rewritten | None = None) -> Bools:
        opened = super().add(waiting, now_ms, rewritten)
        if self._arrivals and opened.any() and len(self._arrivals[-1]) == len(waiting):
            self._arrivals[-1] = waiting.part(~opened)
        return opened


class UnmarkedLog(TimerLog):
    def gone(self, index: Int64Array) -> None:
        pass


class LeavesItWhereItStood(TimerWheel):
    """What has been rolled stays in its old slot as well, for a restart to find."""

    def restore(
        self, state: msgspec.Struct | None, settled: Settled, waiting: Waiting, now_ms: int
    ) -> Opened:
        with unmarked_log():
            return super().restore(state, settled, waiting, now_ms)


@contextmanager
def unmarked_log() -> Iterator[None]:
    """Wheels that are restored meanwhile have another log."""
    wheel.TimerLog = UnmarkedLog  # type: ignore[misc]
    try:
        yield
    finally:
        wheel.TimerLog = TimerLog  # type: ignore[misc]


class WheelWithoutSync(TimerWheel):
    """Its files reach the disk when the kernel pleases."""

    def files_to_sync(self) -> list[tuple[str, list[File]]]:
        super().files_to_sync()
        return []


# -- of the cascade --------------------------------------------------------------------------------------------


class StaysWhereItWas(LevelCascade):
    """Finds after a restart a scheduled message where it was, though it has been written again since."""

    def _forget_old_rows(self, seq: Int64Array) -> None:
        pass


class SavesNoOldRows(LevelCascade):
    """Does not save which entries' scheduled messages stand elsewhere."""

    def state(self, settled_ms: int) -> CascadeState:
        state = super().state(settled_ms)
        for queue in state.queues:
            queue.gone = []
        return state


class ForgetsTheNear(LevelCascade):
    """Does not look at those that were near before a restart."""

    def _open_the_near(self, now_ms: int) -> Opened:
        super()._open_the_near(now_ms)
        return Opened.nothing()


class ForgetsWhatCame(LevelCascade):
    """Begins from what the checkpoint knew."""

    def restore(
        self, state: msgspec.Struct | None, settled: Settled, waiting: Waiting, now_ms: int
    ) -> Opened:
        waiting = waiting if state is None else waiting.part(np.zeros(len(waiting), np.bool_))
        return super().restore(state, settled, waiting, now_ms)


class SleepsThroughHops(LevelCascade):
    """Is opened for what is near, and not for the ends of hops."""

    def _keep_first(self) -> None:
        queues, self.queues = self.queues, [queue for queue in self.queues if is_last(queue.number)]
        super()._keep_first()
        self.queues = queues


class CascadeWithoutSync(LevelCascade):
    """As the wheel."""

    def files_to_sync(self) -> list[tuple[str, list[File]]]:
        super().files_to_sync()
        return []


# -- of the delay levels ---------------------------------------------------------------------------------------


class SavesTheEnd(DelayLevels):
    """Moves a queue's offset when a scheduled message is opened, not when its release is durable."""

    def _advance(self) -> None:
        for queue in self._queues.values():
            queue.low = min((stretch.next for stretch in queue.stretches), default=queue.known)


class SkipsToTheEnd(DelayLevels):
    """Begins behind what was accepted since the checkpoint."""

    def restore(
        self, state: msgspec.Struct | None, settled: Settled, waiting: Waiting, now_ms: int
    ) -> Opened:
        opened = super().restore(state, settled, waiting, now_ms)
        for queue in self._queues.values():
            queue.stretches = queue.stretches[:1]
        return opened


class SortedQueue(LevelQueue):
    def _extend(self, offset: int, due: Int64Array, shift_ms: Int64Array | None = None) -> None:
        super()._extend(offset, np.maximum.accumulate(due), shift_ms)


class TakesQueuesForSorted(DelayLevels):
    """Trusts that a level's queue is always sorted by instant."""

    def _queue(self, number: int, index: Any) -> LevelQueue:
        queue = self._queues[number] = SortedQueue(number, index, self.table.durations_ms[number])
        return queue


class ForgetfulQueue(LevelQueue):
    def open(self, until_ms: int, rows_max: int) -> list[Columns]:
        return [
            (a[:-1], b[:-1], c[:-1]) if len(a) > 5 else (a, b, c)
            for a, b, c in super().open(until_ms, rows_max)
        ]


class LosesEntries(DelayLevels):
    """Loses the last of many entries that are opened."""

    def _queue(self, number: int, index: Any) -> LevelQueue:
        queue = self._queues[number] = ForgetfulQueue(number, index, self.table.durations_ms[number])
        return queue


class TrustsTheWheel(DelayLevels):
    """Keeps the bodies it has when the clock is set back, and opens the queues again all the same."""

    def clock_stepped(self, now_ms: int, shift_of: Any) -> bool:
        super().clock_stepped(now_ms, shift_of)
        return False


# -- the list --------------------------------------------------------------------------------------------------

NewRig = Callable[[], Rig]


def _of(rig: type[HourLogRig], *wrongs: type, **options: Any) -> dict[str, NewRig]:
    """A rig for each of these, by name; schedulers over the right backlog, and wrong backlogs."""
    found: dict[str, NewRig] = {}
    for wrong in wrongs:
        if issubclass(wrong, Scheduler):
            found[wrong.__name__] = partial(rig, scheduler=wrong, **options)
        else:
            found[wrong.__name__] = partial(rig, wrong, **options)
    return found


WHEEL = {"slots": DEFAULT}

BY_CHANCE: dict[str, NewRig] = {
    **_of(
        HourLogRig, Early, Forgets, Doubles, Unsorted, DeafToCancels, CancelsAll, KeepsTheCancelled, SleepsTooLong,
        TurnsInPlace, NeverWakes, SettlesTooMuch, LosesOnTheWay, BlindToLateFiles,
        ForgetsAtARestart,
    ),
    **_of(
        WheelRig, RoundsUp, RoundsDown, SleepsThroughOpenings, LooseLatch, OnlyTheLastBatch, BeginsWithAnEmptyRing,
        OpensOnce, KeepsOnlyTheFar, **WHEEL,
    ),
    **_of(CascadeRig, LosesTheLast, SettlesTheUnopened, SleepsThroughHops),
    **_of(LevelsRig, NotTheEarliest, SavesTheEnd, SkipsToTheEnd, TakesQueuesForSorted, LosesEntries),
}  # fmt: skip

COMES_DUE = "test_what_comes_due_on_the_move_waits_for_it"
PARTS, RESTART = "test_a_move_that_becomes_durable_in_parts", "test_restart_on_the_move"
UNHEARD, STEP = {"saved": True, "unheard": True}, {"step_ms": -3_600_000, "restarts": False}
LET_GO, AGAIN = "test_the_log_behind_what_has_moved_may_go", "test_restart_again_and_again"

AT_AN_EDGE: list[tuple[type, type[HourLogRig], str, dict[str, Any]]] = [
    (MovesAgain, WheelRig, PARTS, {"limit": 4}),
    (MovesTheCancelled, CascadeRig, "test_what_is_cancelled_is_not_moved", {}),
    (MovesTooMuch, WheelRig, PARTS, {"limit": 4}),
    (LosesBodiesOnTheMove, WheelRig, COMES_DUE, {}),
    (MovesRows, WheelRig, COMES_DUE, {}),
    (SleepsOnTheMove, WheelRig, COMES_DUE, {}),
    (TurnsOnTheMove, WheelRig, COMES_DUE, {}),
    (CancelsOnlyTheNear, CascadeRig, "test_what_is_on_the_move_may_be_cancelled", {}),
    (NeedsTheNewest, CascadeRig, LET_GO, {}),
    (NeedsTheNewest, WheelRig, LET_GO, {}),
    (NeverGoesBack, HourLogRig, "test_the_wall_is_set", STEP),
    (WaitsForTheClock, HourLogRig, "test_the_wall_is_set", STEP),
    (LeavesItWhereItStood, WheelRig, RESTART, UNHEARD),
    (LooseLatch, WheelRig, AGAIN, {}),
    (StaysWhereItWas, CascadeRig, RESTART, UNHEARD),
    (ForgetsTheNear, CascadeRig, AGAIN, {}),
    (ForgetsWhatCame, CascadeRig, "test_restart_with_what_came_too_late", {}),
    (AttachesInAnOpening, HourLogRig, "test_files_are_rewritten_in_the_middle_of_an_opening", {}),
    (TrustsTheWheel, LevelsRig, "test_the_wall_clock_is_set_back_while_something_is_near", {}),
]
