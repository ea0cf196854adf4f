"""Wrong schedulers and backlogs, each with one fault. The tests must catch each of them.

The machine catches those of `BY_CHANCE` with random steps. A test of the contract, named with its arguments, catches
each of `AT_AN_EDGE`.
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
from timeball.schedule import timer_wheel as wheel
from timeball.schedule.backlog import Backlog, Bools, Opened, Rewritten
from timeball.schedule.delay_levels import DelayLevels, LevelQueue, OpenedColumns
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.hour_log import HourLog
from timeball.schedule.level_cascade import CascadeState, LevelCascade, holds_last_hops
from timeball.schedule.locations import Waiting
from timeball.schedule.mapped_log import RecordArray
from timeball.schedule.outcomes import Settled, SettledPairs
from timeball.schedule.scheduler import Scheduler
from timeball.schedule.timer_wheel import Entries, Ring, TimerLog, TimerWheel, WheelState
from timeball.table.attachment import Attachment

# -- of the scheduler ------------------------------------------------------------------------------------------


class Early(Scheduler):
    """Hands out a millisecond before the due time."""

    def take_due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        return super().take_due(now_ms + 1, limit)


class Forgets(Scheduler):
    """Loses the last of several rows handed out."""

    def take_due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        rows = super().take_due(now_ms, limit)
        return rows if rows is None or rows.num_rows < 2 else rows.slice(0, rows.num_rows - 1)


class Doubles(Scheduler):
    """Hands out every third batch twice."""

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
    """Hands out the right rows in reverse order."""

    def take_due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        rows = super().take_due(now_ms, limit)
        return None if rows is None else rows.take(pa.array(np.arange(rows.num_rows)[::-1]))


class RoundsUp(Scheduler):
    """Hands out everything due in the current second, as if slots rounded due times."""

    def take_due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        return super().take_due(now_ms - now_ms % 1_000 + 999, limit)


class RoundsDown(Scheduler):
    """Hands out only when the second of a due time is over, as RocketMQ does."""

    def take_due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        return super().take_due(now_ms - now_ms % 1_000 - 1, limit)


class DeafToCancels(Scheduler):
    """Confirms a cancel and hands the message out nevertheless."""

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> Bools:
        before, self.outcomes._cancelled = self.outcomes._cancelled, SettledPairs()
        answers = super().cancel(due_ms, seq)
        self.outcomes._cancelled = before
        return answers


class CancelsAll(Scheduler):
    """Confirms every cancel, even of settled messages."""

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> Bools:
        return super().cancel(due_ms, seq) | True


class KeepsTheCancelled(Scheduler):
    """Stores the cancel and hands the message out nevertheless."""

    def take_due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        was_cancelled, self.outcomes.was_cancelled = (
            self.outcomes.was_cancelled,
            lambda due, seq: np.zeros(len(seq), np.bool_),
        )  # type: ignore[method-assign]
        rows = super().take_due(now_ms, limit)
        self.outcomes.was_cancelled = was_cancelled  # type: ignore[method-assign]
        return rows


class CancelsOnlyTheNear(Scheduler):
    """Refuses to cancel a message that is being rewritten."""

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> Bools:
        in_flight = [batch.opened.seq for batch in self.rewrites._in_flight]
        answers, not_moving = (
            np.zeros(len(seq), np.bool_),
            ~np.isin(seq, np.concatenate([seq[:0], *in_flight])),
        )
        answers[not_moving] = super().cancel(due_ms[not_moving], seq[not_moving])
        return answers


class SleepsTooLong(Scheduler):
    """Returns a next time that is a minute late."""

    def next_due_ms(self) -> int | None:
        upcoming = super().next_due_ms()
        return None if upcoming is None else upcoming + 60_000


class TurnsInPlace(Scheduler):
    """Returns "now" as the next time, even without work."""

    def next_due_ms(self) -> int | None:
        upcoming = super().next_due_ms()
        return None if upcoming is None else min(upcoming, 0)


class NeverWakes(Scheduler):
    """Does not wake the ticker when an earlier message arrives."""

    def add(self, backlog: Backlog, scheduled_rows: pa.RecordBatch) -> None:
        wake, self.on_earlier = self.on_earlier, lambda: None
        super().add(backlog, scheduled_rows)
        self.on_earlier = wake


class SleepsThroughOpenings(Scheduler):
    """Wakes the ticker for loaded messages but not for openings."""

    def _next_open_ms(self, backlog: Backlog) -> int:
        due_ms = self.loaded.first_due_ms()
        return super()._next_open_ms(backlog) if due_ms <= self._now_ms else FAR_MS

    def _open_if_needed(self, now_ms: int) -> None:
        for backlog in self.backlogs:
            if super()._next_open_ms(backlog) <= now_ms:
                self._start_opening(backlog, now_ms)


class SettlesTooMuch(Scheduler):
    """Saves checkpoints in which everything is settled up to a little after now."""

    @property
    def settled_before_ms(self) -> int:
        return self._now_ms + 10_000


class SettlesTheUnopened(Scheduler):
    """Saves checkpoints in which all messages before the loaded ones are settled."""

    @property
    def settled_before_ms(self) -> int:
        firsts = (self.outcomes.first_in_flight_ms, self.loaded.first_due_ms())
        return min(ms for ms in firsts if ms is not None)


class NotTheEarliest(Scheduler):
    """Hands out messages in memory although an earlier one is still on disk."""

    def _hand_out_bound_ms(self) -> int:
        return FAR_MS


class LosesOnTheWay(Scheduler):
    """Loses the last of many messages that a backlog has opened."""

    def _load_later(self, backlog: Backlog, near: Waiting) -> None:
        super()._load_later(
            backlog, near if len(near) < 6 else near.part(np.arange(len(near)) < len(near) - 1)
        )


class AttachesInAnOpening(Scheduler):
    """Attaches files without waiting for a running opening."""

    async def attach(self, attachment: Attachment, resumes: str = "", now_ms: int = 0) -> None:
        assert self._table is not None
        self._table.attach(attachment, now_ms)
        if attachment.job == "bulk":
            self.outcomes.exclude_from_mark(attachment.ranges)
        self._wake_for_opening(self._table)


class ForgetsAtARestart(Scheduler):
    """Restores the mark but not the settled pairs."""

    def restore(
        self, backlog: Backlog, state: msgspec.Struct | None, settled: Settled, waiting: Waiting, now_ms: int
    ) -> None:
        self.outcomes._cancelled = SettledPairs()
        super().restore(backlog, state, settled, waiting, now_ms)


class NeverGoesBack(Scheduler):
    """Never sets its time back."""

    _latest_ms = 0

    def take_due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        self._latest_ms = max(self._latest_ms, now_ms)
        return super().take_due(self._latest_ms, limit)


class WaitsForTheClock(Scheduler):
    """Stands still after a clock was set back, until the clock has reached the old time."""

    _latest_ms = 0

    def take_due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        self._latest_ms = max(self._latest_ms, now_ms)
        return super().take_due(now_ms, limit) if now_ms >= self._latest_ms else None

    def next_due_ms(self) -> int | None:
        upcoming = super().next_due_ms()
        return None if upcoming is None else max(upcoming, self._latest_ms)


# -- wrong rewrites --------------------------------------------------------------------------------------------


class MovesAgain(Scheduler):
    """Rewrites a message a second time while its first new row is in flight."""

    def take_rewrites(self, limit: int) -> pa.RecordBatch | None:
        rows, self._again = super().take_rewrites(limit), getattr(self, "_again", None)
        if rows is None and self._again is not None and self.rewrites.in_flight_rows:
            rows, self._again = self._again.slice(0, 1), None
            return rows
        self._again = rows
        return rows


class MovesTheCancelled(Scheduler):
    """Rewrites cancelled messages."""

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
    """Returns more rewrites than the limit."""

    def take_rewrites(self, limit: int) -> pa.RecordBatch | None:
        return super().take_rewrites(limit + 1)


class LosesBodiesOnTheMove(Scheduler):
    """Rewrites messages with another body."""

    def take_rewrites(self, limit: int) -> pa.RecordBatch | None:
        rows = super().take_rewrites(limit)
        if rows is None:
            return None
        index, body = rows.schema.get_field_index("body"), rows.schema.field("body")
        return rows.set_column(index, body, pa.array([b""] * rows.num_rows, body.type))


class MovesRows(Scheduler):
    """Hands out rows of the log instead of the messages in them."""

    def take_rewrites(self, limit: int) -> pa.RecordBatch | None:
        rows = super().take_rewrites(limit)
        if rows is None:
            return None
        index = rows.schema.get_field_index("store_ms")
        return rows.set_column(index, rows.schema.field("store_ms"), pa.array([self._now_ms] * rows.num_rows))


class SleepsOnTheMove(Scheduler):
    """Does not wake the ticker when a rewrite is durable."""

    def rewritten(self, seq: Int64Array, row_seq: Int64Array, now_ms: int) -> None:
        wake, self.on_earlier = self.on_earlier, lambda: None
        super().rewritten(seq, row_seq, now_ms)
        self.on_earlier = wake


class TurnsOnTheMove(Scheduler):
    """Returns "now" as the next time while a message is being rewritten."""

    def next_due_ms(self) -> int | None:
        return 0 if self.rewrites.rows else super().next_due_ms()


class LosesTheLast(Scheduler):
    """Loses the last of several rewritten messages."""

    def rewritten(self, seq: Int64Array, row_seq: Int64Array, now_ms: int) -> None:
        batch = self.rewrites._in_flight[0]
        all_but_last = np.arange(len(batch.opened)) < max(1, len(seq) - 1)
        add = batch.backlog.add

        def all_but_one(waiting: Waiting, now_ms: int, rewritten: Rewritten | None = None) -> Bools:
            mask = all_but_last[: len(waiting)]
            assert rewritten is not None
            opened = np.zeros(len(waiting), np.bool_)
            opened[mask] = add(
                waiting.part(mask), now_ms, Rewritten(rewritten.row_seq[mask], rewritten.note[mask])
            )
            return opened

        batch.backlog.add = all_but_one  # type: ignore[method-assign]
        super().rewritten(seq, row_seq, now_ms)
        batch.backlog.add = add  # type: ignore[method-assign]


class NeedsTheNewest(Scheduler):
    """Reports that no row of the log is needed."""

    def needed_seq(self) -> int | None:
        return None


# -- of the hour log -------------------------------------------------------------------------------------------


class BlindToLateFiles(HourLog):
    """Does not open near or overdue messages of an attached file."""

    def attach(self, attachment: Attachment, now_ms: int = 0) -> None:
        self.pending.attach(attachment, self._opened_ms, now_ms)
        opened = {entry.path: max(entry.min_due_ms, self._opened_ms) for entry in attachment.files}
        self.pending.set_opened(opened)
        if attachment.job == "compact":
            self._tail.drop_seqs_below(attachment.to_seq)


# -- of the timer wheel ----------------------------------------------------------------------------------------


class LooseLatch(TimerWheel):
    """Treats a slot as delivered once it has been opened, even if its messages are not settled."""

    def _advance(self, settled_ms: int) -> None:
        super()._advance(settled_ms)
        opened = self._ring.bound if self._opened is None else self._opened
        self._low = max(self._low, opened - 2)
        self._log.drop_before(self._low)


class OnlyTheLastBatch(TimerWheel):
    """Reads only the newest link of each slot, not the rest of the chain."""

    def _split_opened(self, entries: Entries) -> Opened:
        last = {
            slot: index for index, slot in zip(entries.index.tolist(), entries.slot.tolist(), strict=True)
        }
        keep = np.array(
            [
                abs(last[slot] - index) < 8
                for index, slot in zip(entries.index.tolist(), entries.slot.tolist(), strict=True)
            ],
            np.bool_,
        )
        return super()._split_opened(entries.part(keep))


class BeginsWithAnEmptyRing(TimerWheel):
    """Treats every slot as empty after a restart."""

    def _push_links(self) -> RecordArray:
        links, bound = super()._push_links(), self._ring.bound
        self._ring.close()
        self._ring = Ring(self._files, wheel.RING, self.slots, bound=bound)
        return links


class OpensOnce(TimerWheel):
    """Starts after the slots that were opened before a restart."""

    def restore(
        self, state: msgspec.Struct | None, settled: Settled, waiting: Waiting, now_ms: int
    ) -> Opened:
        if isinstance(state, WheelState):
            state = msgspec.structs.replace(state, low=state.bound)
        return super().restore(state, settled, waiting, now_ms)


class KeepsOnlyTheFar(TimerWheel):
    """Stores a message of an opened slot only in memory."""

    def add(self, waiting: Waiting, now_ms: int, rewritten: Rewritten | None = None) -> Bools:
        opened = super().add(waiting, now_ms, rewritten)
        if self._arrivals and opened.any() and len(self._arrivals[-1]) == len(waiting):
            self._arrivals[-1] = waiting.part(~opened)
        return opened


class UnmarkedLog(TimerLog):
    def mark_moved(self, index: Int64Array) -> None:
        pass


class LeavesItWhereItStood(TimerWheel):
    """Does not mark the old entry of a rolled message, so that a restart finds both."""

    def restore(
        self, state: msgspec.Struct | None, settled: Settled, waiting: Waiting, now_ms: int
    ) -> Opened:
        with unmarked_log():
            return super().restore(state, settled, waiting, now_ms)


@contextmanager
def unmarked_log() -> Iterator[None]:
    """Wheels that are restored within this context use `UnmarkedLog`."""
    wheel.TimerLog = UnmarkedLog  # type: ignore[misc]
    try:
        yield
    finally:
        wheel.TimerLog = TimerLog  # type: ignore[misc]


class WheelWithoutSync(TimerWheel):
    """Does not sync its files."""

    def files_to_sync(self) -> list[tuple[str, list[File]]]:
        super().files_to_sync()
        return []


# -- of the cascade --------------------------------------------------------------------------------------------


class StaysWhereItWas(LevelCascade):
    """Finds a rewritten message in its old row after a restart."""

    def _forget_old_rows(self, seq: Int64Array) -> None:
        pass


class SavesNoOldRows(LevelCascade):
    """Does not save which entries are superseded."""

    def state(self, settled_ms: int) -> CascadeState:
        state = super().state(settled_ms)
        for queue in state.queues:
            queue.gone = []
        return state


class ForgetsTheNear(LevelCascade):
    """Does not open messages again that were near before a restart."""

    def _reopen_near(self, now_ms: int) -> Opened:
        super()._reopen_near(now_ms)
        return Opened.nothing()


class ForgetsWhatCame(LevelCascade):
    """Starts from the checkpoint without the later messages."""

    def restore(
        self, state: msgspec.Struct | None, settled: Settled, waiting: Waiting, now_ms: int
    ) -> Opened:
        waiting = waiting if state is None else waiting.part(np.zeros(len(waiting), np.bool_))
        return super().restore(state, settled, waiting, now_ms)


class SleepsThroughHops(LevelCascade):
    """Is opened for near messages but not at the ends of hops."""

    def _update_first_due(self) -> None:
        queues, self.queues = self.queues, [queue for queue in self.queues if holds_last_hops(queue.number)]
        super()._update_first_due()
        self.queues = queues


class CascadeWithoutSync(LevelCascade):
    """Does not sync its files."""

    def files_to_sync(self) -> list[tuple[str, list[File]]]:
        super().files_to_sync()
        return []


# -- of the delay levels ---------------------------------------------------------------------------------------


class SavesTheEnd(DelayLevels):
    """Moves a queue's offset when a message is opened, not when its release is durable."""

    def _advance(self) -> None:
        for queue in self._queues.values():
            queue.low = min((stretch.next for stretch in queue.stretches), default=queue.added_to)


class SkipsToTheEnd(DelayLevels):
    """Starts after the messages that were accepted since the checkpoint."""

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
    """Assumes that a level's queue is always sorted by due time."""

    def _make_queue(self, number: int, index: Any) -> LevelQueue:
        queue = self._queues[number] = SortedQueue(number, index, self.table.durations_ms[number])
        return queue


class ForgetfulQueue(LevelQueue):
    def open(self, until_ms: int, rows_max: int) -> list[OpenedColumns]:
        return [
            (release_ms[:-1], due_ms[:-1], seq[:-1]) if len(seq) > 5 else (release_ms, due_ms, seq)
            for release_ms, due_ms, seq in super().open(until_ms, rows_max)
        ]


class LosesEntries(DelayLevels):
    """Loses the last of many opened entries."""

    def _make_queue(self, number: int, index: Any) -> LevelQueue:
        queue = self._queues[number] = ForgetfulQueue(number, index, self.table.durations_ms[number])
        return queue


class TrustsTheWheel(DelayLevels):
    """Keeps loaded bodies when the clock is set back, and opens the queues again as well."""

    def clock_stepped(self, now_ms: int, shift_of: Any) -> bool:
        super().clock_stepped(now_ms, shift_of)
        return False


# -- the list --------------------------------------------------------------------------------------------------

NewRig = Callable[[], Rig]


def _rigs_of(rig: type[HourLogRig], *wrongs: type, **options: Any) -> dict[str, NewRig]:
    """Return a function that makes a rig for each class, by its name. `wrongs` are schedulers and backlogs."""
    rigs: dict[str, NewRig] = {}
    for wrong in wrongs:
        if issubclass(wrong, Scheduler):
            rigs[wrong.__name__] = partial(rig, scheduler=wrong, **options)
        else:
            rigs[wrong.__name__] = partial(rig, wrong, **options)
    return rigs


WHEEL = {"slots": DEFAULT}

BY_CHANCE: dict[str, NewRig] = {
    **_rigs_of(
        HourLogRig, Early, Forgets, Doubles, Unsorted, DeafToCancels, CancelsAll, KeepsTheCancelled, SleepsTooLong,
        TurnsInPlace, NeverWakes, SettlesTooMuch, LosesOnTheWay, BlindToLateFiles,
        ForgetsAtARestart,
    ),
    **_rigs_of(
        WheelRig, RoundsUp, RoundsDown, SleepsThroughOpenings, LooseLatch, OnlyTheLastBatch, BeginsWithAnEmptyRing,
        OpensOnce, KeepsOnlyTheFar, **WHEEL,
    ),
    **_rigs_of(CascadeRig, LosesTheLast, SettlesTheUnopened, SleepsThroughHops),
    **_rigs_of(LevelsRig, NotTheEarliest, SavesTheEnd, SkipsToTheEnd, TakesQueuesForSorted, LosesEntries),
}  # fmt: skip

DUE_DURING_REWRITE = "test_message_due_during_its_rewrite_is_released_after_it"
PARTS, RESTART = (
    "test_rewrite_that_becomes_durable_in_parts_loses_nothing",
    "test_restart_during_a_rewrite_loses_nothing",
)
ROWS_NOT_REPORTED, STEP = {"saved": True, "unreported": True}, {"step_ms": -3_600_000, "restarts": False}
NEEDED_ROWS, RESTARTS = (
    "test_rows_before_rewritten_messages_are_not_needed",
    "test_repeated_restarts_lose_and_repeat_nothing",
)

AT_AN_EDGE: list[tuple[type, type[HourLogRig], str, dict[str, Any]]] = [
    (MovesAgain, WheelRig, PARTS, {"limit": 4}),
    (MovesTheCancelled, CascadeRig, "test_cancelled_message_is_not_rewritten", {}),
    (MovesTooMuch, WheelRig, PARTS, {"limit": 4}),
    (LosesBodiesOnTheMove, WheelRig, DUE_DURING_REWRITE, {}),
    (MovesRows, WheelRig, DUE_DURING_REWRITE, {}),
    (SleepsOnTheMove, WheelRig, DUE_DURING_REWRITE, {}),
    (TurnsOnTheMove, WheelRig, DUE_DURING_REWRITE, {}),
    (CancelsOnlyTheNear, CascadeRig, "test_message_being_rewritten_may_be_cancelled", {}),
    (NeedsTheNewest, CascadeRig, NEEDED_ROWS, {}),
    (NeedsTheNewest, WheelRig, NEEDED_ROWS, {}),
    (NeverGoesBack, HourLogRig, "test_wall_clock_step_is_waited_for_or_followed", STEP),
    (WaitsForTheClock, HourLogRig, "test_wall_clock_step_is_waited_for_or_followed", STEP),
    (LeavesItWhereItStood, WheelRig, RESTART, ROWS_NOT_REPORTED),
    (LooseLatch, WheelRig, RESTARTS, {}),
    (StaysWhereItWas, CascadeRig, RESTART, ROWS_NOT_REPORTED),
    (ForgetsTheNear, CascadeRig, RESTARTS, {}),
    (ForgetsWhatCame, CascadeRig, "test_restart_releases_a_message_that_came_too_late", {}),
    (AttachesInAnOpening, HourLogRig, "test_rewrite_attached_during_an_opening_opens_no_message_again", {}),
    (TrustsTheWheel, LevelsRig, "test_wall_clock_step_back_releases_no_near_message_early", {}),
]
