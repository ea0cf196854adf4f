"""Messages left to an external dispatcher keep the contract, whatever it does, and are late by the grace at most.

The dispatcher acts between two ticks, as a request on the event loop does. Messages that it brings are handed out if
they are still pending and were left to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any, ClassVar

import hypothesis
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from tests.rounds import rounds
from tests.schedule.contract import FAST, Variant, assert_caught, split_by_target
from tests.schedule.machine import Machine
from tests.schedule.rigs import AHEAD_MS, HourLogRig
from tests.schedule.stage import Built, Restart, Rig
from tests.schedule.world import World

from timeball.model.limits import HOUR_MS
from timeball.model.message import Int64Array, int64
from timeball.schedule import loaded
from timeball.schedule.hour_log import HourLog, read_rows_between
from timeball.schedule.loaded import GRACE_MS, ExternalDelivery
from timeball.schedule.outcomes import Outcomes, SettledPairs
from timeball.schedule.scheduler import Scheduler

DUE_MS = 16_000  # after the start: later than the first opening
NEAR_MS = 12_000  # then it is near
LEASE_MS, PAUSE_MS = 9_000, 4_000  # the dispatcher works for so long, and pauses for so long
LATE_MS = 1_500
FIRST, LAST = (-(1 << 62), 0), (1 << 62, 0)

# How many times the dispatcher brings each message now, given columns of its lateness and its number.
Times = Callable[[Int64Array, Int64Array], Int64Array]


def everything(late_ms: Int64Array, seq: Int64Array) -> Int64Array:
    return np.ones(len(seq), np.int64)


def nothing(late_ms: Int64Array, seq: Int64Array) -> Int64Array:
    return np.zeros(len(seq), np.int64)


def half(late_ms: Int64Array, seq: Int64Array) -> Int64Array:
    return seq % 2


def twice(late_ms: Int64Array, seq: Int64Array) -> Int64Array:
    return np.full(len(seq), 2)


def too_late(late_ms: Int64Array, seq: Int64Array) -> Int64Array:
    return (late_ms >= LATE_MS).astype(np.int64)


def anyhow(late_ms: Int64Array, seq: Int64Array) -> Int64Array:
    """Of six messages: bring two once, and one each twice, never, too late, and only sometimes."""
    return np.choose(seq % 6, [1, 1, 2, 0, too_late(late_ms, seq), (late_ms % 2).astype(np.int64)])


class Watched(Scheduler):
    """A scheduler with a dispatcher that brings all messages, none, half of them, each twice, or too late."""

    times: Times = staticmethod(everything)
    brought: ClassVar[int] = 0  # messages of all instances that were handed out

    def take_due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        is_at_work = now_ms % (LEASE_MS + PAUSE_MS) < LEASE_MS
        if is_at_work and not self.external.is_leased(now_ms):
            self.lease(now_ms, LEASE_MS)
        for batch in self.read(now_ms, limit):
            taken = self.hand_out_dispatched(batch)
            if taken is not None:
                Watched.brought += taken.num_rows
                return taken
        return super().take_due(now_ms, limit)

    def read(self, now_ms: int, limit: int) -> list[pa.RecordBatch]:
        """Read due messages from the files, in parts of `limit`, and make rows of messages that do not exist."""
        assert self._table is not None
        rows = read_rows_between(self._table.pending.all(), FIRST, (now_ms + 1, 0))
        if rows is None:
            return []
        due, seq = int64(rows["due_ms"]), int64(rows["seq"])
        rows = rows.take(pa.array(np.repeat(np.arange(len(seq)), self.times(now_ms - due, seq))))
        first_rows = rows.slice(0, 3)
        parts = [rows.slice(at, limit) for at in range(0, rows.num_rows, limit)]
        return [*(other(first_rows, name) for name in ("seq", "due_ms")), *parts] if rows.num_rows else []


def other(rows: pa.RecordBatch, name: str) -> pa.RecordBatch:
    """Build the same rows with other numbers or other due times."""
    return rows.set_column(rows.schema.get_field_index(name), name, pc.subtract(rows[name], 1_000_000_007))


class DispatchRig(HourLogRig):
    """An hour log with a dispatcher. Messages that it does not bring at once are loaded."""

    hands = 2  # scheduler and dispatcher each hand out in order

    def __init__(self, times: Times = everything, scheduler: type[Watched] = Watched, **rest: Any) -> None:
        class Timed(scheduler):  # type: ignore[misc,valid-type]
            pass

        Timed.times = staticmethod(times)
        super().__init__(scheduler=Timed, **rest)

    def build(self, world: World, restart: Restart, outcomes: Outcomes) -> Built:
        world.external = ExternalDelivery(grace_ms=0)
        return super().build(world, restart, outcomes)


class TestContractWithADispatcher(Variant):
    """The dispatcher does everything that it may do."""

    new_rig = partial(DispatchRig, anyhow)


class TestContractWithADispatcherWhoDoesAll(Variant):
    """The dispatcher brings nearly all messages."""

    new_rig = DispatchRig
    examples = 8


class LeavesMuch(Machine):
    """The random steps of the contract, with many messages left to the dispatcher in between."""

    @rule(
        dues_ms=st.lists(st.integers(0, 3 * AHEAD_MS), min_size=1, max_size=30),
        steps_ms=st.lists(st.integers(1, AHEAD_MS // 2), min_size=1, max_size=8),
        cancels=st.integers(0, 3),
    )
    def leave(self, dues_ms: list[int], steps_ms: list[int], cancels: int) -> None:
        world = self.world
        self.drain(1_000_000)
        seqs = world.admit([world.now_ms + ms for ms in dues_ms])
        attachment = world.prepare_compact()
        if attachment is not None:
            world.attach(attachment)
            self.written = None  # written before this compaction, so outdated
        for step_ms in steps_ms:
            self.drain(1_000_000)
            world.cancel(seqs[:cancels])
            world.advance(step_ms)
        self.drain(1_000_000)


def run(rig: DispatchRig, max_examples: int = 15, step_count: int = 30) -> None:
    class Rigged(LeavesMuch):
        @staticmethod
        def new_rig() -> Rig:
            return rig

    settings = hypothesis.settings(FAST, max_examples=max_examples, stateful_step_count=step_count)
    run_state_machine_as_test(Rigged, settings=settings)


@pytest.mark.siege
@pytest.mark.parametrize(
    "times", split_by_target([anyhow, nothing, half, twice, too_late]), ids=lambda times: times.__name__
)
def test_random_steps_with_a_dispatcher_keep_the_contract(times: Times) -> None:
    run(DispatchRig(times))


@pytest.mark.parametrize(("times", "brought"), [(everything, 100), (nothing, 0), (half, 50), (twice, 100)])
def test_dispatcher_of_the_random_steps_delivers_messages(
    times: Times, brought: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watched, "brought", 0)
    monkeypatch.setattr("tests.schedule.test_external_delivery.PAUSE_MS", 0, raising=False)
    with closing(World(DispatchRig(times))) as world:
        world.drain()
        world.admit([world.now_ms + 12_000 + 100 * i for i in range(100)])
        world.attach_now(world.prepare_compact())
        for _ in range(25):
            world.advance(1_000)
            world.drain()
        assert len(world.model.waiting) == 0
        assert Watched.brought >= brought // 2 and (brought or not Watched.brought)


@pytest.mark.slow
@pytest.mark.siege
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("times", [nothing, half, too_late, anyhow])
def test_many_random_steps_with_a_dispatcher_keep_the_contract(times: Times) -> None:
    run(DispatchRig(times), rounds(3, 25), 60)
    run(DispatchRig(times, gather_bytes=1 << 30), rounds(2, 12), 60)


# -- negative controls -----------------------------------------------------------------------------------------


class BelievesHim(Watched):
    """A wrong scheduler: it hands out every message that the dispatcher brings."""

    def hand_out_dispatched(self, scheduled_rows: pa.RecordBatch) -> pa.RecordBatch | None:
        return scheduled_rows


class TakesTwice(Watched):
    """A wrong scheduler: it does not check whether a brought message is still pending."""

    def hand_out_dispatched(self, scheduled_rows: pa.RecordBatch) -> pa.RecordBatch | None:
        waits = self.outcomes.are_pending
        self.outcomes.are_pending = lambda due, seq: np.ones(len(seq), np.bool_)  # type: ignore[method-assign]
        try:
            return super().hand_out_dispatched(scheduled_rows)
        finally:
            self.outcomes.are_pending = waits  # type: ignore[method-assign]


class BringsTheCancelled(Scheduler):
    """A wrong scheduler: it does not check whether a brought message was cancelled."""

    def hand_out_dispatched(self, scheduled_rows: pa.RecordBatch) -> pa.RecordBatch | None:
        cancelled, self.outcomes._cancelled = self.outcomes._cancelled, SettledPairs()
        try:
            return super().hand_out_dispatched(scheduled_rows)
        finally:
            self.outcomes._cancelled = cancelled


class NeverLooksBehind(Watched):
    """A wrong scheduler: it never loads messages that the dispatcher does not bring."""

    def take_due(self, now_ms: int, limit: int) -> pa.RecordBatch | None:
        self.external.load_ms = lambda *arguments: 1 << 62  # type: ignore[method-assign]
        return super().take_due(now_ms, limit)


class SettlesWhatIsOut(Watched):
    """A wrong scheduler: it treats messages left to the dispatcher as settled."""

    @property
    def settled_before_ms(self) -> int:
        assert self._files is not None
        index, self._files.index = self._files.index, type(self._files.index)()
        before_ms = super().settled_before_ms
        self._files.index = index
        return before_ms


WRONG = [BelievesHim, TakesTwice, NeverLooksBehind, SettlesWhatIsOut]


@pytest.mark.siege
@pytest.mark.parametrize("wrong", split_by_target(WRONG), ids=lambda wrong: wrong.__name__)
def test_a_wrong_scheduler_with_a_dispatcher_is_caught(wrong: type[Watched]) -> None:
    assert_caught(partial(DispatchRig, anyhow, wrong))


# -- the lease, and the grace ----------------------------------------------------------------------------------


@pytest.fixture
def world() -> Iterator[World]:
    world = World(HourLogRig())
    yield world
    world.close()


def counts(world: World) -> tuple[int, int]:
    statistics = world.strategy.statistics()
    return statistics["wheel_rows"], statistics["dispatched_rows"]


def loaded_late(world: World) -> int:
    return world.strategy.statistics()["fetched_rows"]


def leave(world: World, due_times: list[int], lease_ms: int = HOUR_MS) -> list[int]:
    """Attach a file and leave its messages to the dispatcher. Their due times are given relative to now."""
    world.drain()
    seqs = world.admit([world.now_ms + ms for ms in due_times])
    world.attach_now(world.prepare_compact())
    world.strategy.lease(world.now_ms, lease_ms)
    world.advance(NEAR_MS)
    world.drain()
    assert counts(world) == (0, len(due_times)), "no body is in memory"
    return seqs


def bring(world: World, seqs: list[int]) -> list[int]:
    """Bring these messages in this order, as a dispatcher does. Returns the ones that were handed out."""
    rows = read_rows_between(world.live_files(), FIRST, LAST)
    assert rows is not None
    at = [int(np.flatnonzero(int64(rows["seq"]) == seq)[0]) for seq in seqs]
    taken = world.strategy.hand_out_dispatched(rows.take(pa.array(at, pa.int64()))) if seqs else None
    return [] if taken is None else [seq for _, seq in world.model.hand_out(taken, world.now_ms, len(seqs))]


def test_message_that_is_not_brought_is_late_by_the_grace_period(world: World) -> None:
    (seq,) = leave(world, [DUE_MS])
    due_ms = world.now_ms - NEAR_MS + DUE_MS
    assert world.strategy.next_due_ms() == due_ms + GRACE_MS
    world.advance(due_ms + GRACE_MS - 1 - world.now_ms)
    world.settle()
    assert world.take() is None
    world.advance(1)
    assert world.drain() == [(due_ms, seq)]
    assert loaded_late(world) == 1
    assert counts(world) == (0, 0)


def test_message_left_to_the_dispatcher_delays_no_other(world: World) -> None:
    """A message sent directly, due between the dispatcher's messages, is handed out in time."""
    leave(world, [DUE_MS, DUE_MS + 5])
    (seq,) = world.admit([world.now_ms - NEAR_MS + DUE_MS + 2])
    world.advance(DUE_MS + 2 - NEAR_MS)
    world.settle()
    assert [taken for _, taken in world.take() or []] == [seq]


@pytest.mark.parametrize("ends", ["by itself", "by the dispatcher"])
def test_after_the_lease_near_messages_are_loaded_in_time(world: World, ends: str) -> None:
    left_ms = 1_000
    (seq,) = leave(world, [DUE_MS], NEAR_MS + left_ms)
    due_ms = world.now_ms - NEAR_MS + DUE_MS
    if ends == "by itself":
        assert world.strategy.next_due_ms() == world.now_ms + left_ms
        world.advance(left_ms)
    else:
        world.strategy.lease(world.now_ms, 0)
        world.advance(left_ms * 3)
    assert world.drain() == []
    assert counts(world) == (1, 0)
    world.advance(due_ms - world.now_ms)
    assert world.drain() == [(due_ms, seq)]


def test_without_a_lease_all_messages_are_loaded_here(world: World) -> None:
    with pytest.raises(AssertionError, match="no body"):
        leave(world, [DUE_MS], 0)
    world.advance(NEAR_MS)
    assert len(world.drain()) == 1


def test_clock_set_back_does_not_extend_a_lease(world: World) -> None:
    external, now_ms = world.external, world.now_ms
    external.lease(now_ms, 1 << 60)
    assert external.is_leased(now_ms)
    assert external.is_leased(now_ms + HOUR_MS - 1)
    assert not external.is_leased(now_ms + HOUR_MS)
    assert not external.is_leased(now_ms - 1)


def test_long_overdue_message_is_loaded_despite_the_lease(world: World) -> None:
    world.admit([world.now_ms + DUE_MS])
    world.attach_now(world.prepare_compact())
    world.advance(HOUR_MS)
    world.strategy.lease(world.now_ms, HOUR_MS)
    assert len(world.drain()) == 1


def test_message_brought_twice_is_handed_out_once(world: World) -> None:
    first, second, third = leave(world, [DUE_MS, DUE_MS + 1, DUE_MS + 2])
    world.cancel([second])
    world.advance(DUE_MS + 2 - NEAR_MS)
    assert bring(world, [third, first, third, second]) == [first, third]
    assert bring(world, [first, second, third]) == []
    assert world.drain() == []
    world.release()
    world.save()
    assert counts(world) == (0, 0)
    world.restart()
    world.advance(HOUR_MS)
    assert world.drain() == []


def test_scheduler_that_takes_cancelled_messages_from_the_dispatcher_is_caught() -> None:
    with closing(World(HourLogRig(scheduler=BringsTheCancelled))) as world:
        with pytest.raises(AssertionError, match="handed out while cancelled"):
            test_message_brought_twice_is_handed_out_once(world)


def test_message_of_the_tail_is_not_taken_from_the_dispatcher(world: World) -> None:
    leave(world, [DUE_MS])
    seqs = world.admit([world.now_ms + 1])
    world.attach_now(world.prepare_compact())
    world.advance(1)
    assert bring(world, seqs) == [], "it was loaded into the wheel before the attach"
    assert [seq for _, seq in world.drain()] == seqs


def test_message_being_loaded_is_not_taken_from_the_dispatcher(world: World) -> None:
    seqs = leave(world, [DUE_MS, DUE_MS])
    world.advance(DUE_MS + GRACE_MS - NEAR_MS)
    world.reader_thread.is_open = False
    world.take()
    world.turn()
    assert world.strategy.is_busy
    assert bring(world, seqs[:1]) == []
    assert world.cancel(seqs[1:]) == [True]
    world.reader_thread.is_open = True
    assert [seq for _, seq in world.drain()] == seqs[:1]


def test_checkpoint_does_not_mark_messages_left_to_the_dispatcher_as_settled(world: World) -> None:
    leave(world, [DUE_MS])
    world.advance(DUE_MS)
    assert world.strategy.settled_before_ms == world.now_ms - NEAR_MS
    world.save()
    world.restart(power_cut=1)
    assert len(world.drain()) == 1


def test_cancelled_message_that_a_rewrite_removed_is_not_missed(world: World) -> None:
    first, _ = leave(world, [DUE_MS, DUE_MS + 1])
    world.cancel([first])
    world.attach_now(world.prepare_rewrite())
    world.advance(DUE_MS + GRACE_MS + 1 - NEAR_MS)
    assert len(world.drain()) == 1
    assert counts(world) == (0, 0)


def test_pending_message_in_no_file_is_reported_as_a_failure(world: World) -> None:
    leave(world, [DUE_MS])
    assert isinstance(world.backlog, HourLog)
    world.backlog.pending._live.clear()
    world.advance(DUE_MS + GRACE_MS)
    world.take()
    world.run(world.strategy.close())
    assert "in no file" in str(world.failures)
    world.failures.clear()


def test_backlog_is_not_opened_while_too_many_messages_are_left_to_the_dispatcher(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded, "LEASED_ROWS_MAX", 5)
    world.external.grace_ms = HOUR_MS
    seqs = leave(world, [DUE_MS] * 5)
    world.admit([world.now_ms + AHEAD_MS + 1_000])
    world.attach_now(world.prepare_compact())
    world.advance(AHEAD_MS - 1_000)
    assert world.take() is None
    world.settle()
    assert counts(world) == (0, 5)
    assert len(bring(world, seqs)) == 5
    world.release()
    world.save()
    assert world.drain() == []
    assert counts(world) == (0, 1)
