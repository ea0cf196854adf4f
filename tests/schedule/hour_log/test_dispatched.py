"""What is left to a dispatcher keeps the contract of a schedule, whatever he does; and is late by the grace at most."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import partial

import hypothesis
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test
from tests.schedule import dispatch_rigs as rigs
from tests.schedule.contract import FAST, Variant, assert_caught, one_now
from tests.schedule.dispatch_rigs import DispatchRig, Times, Watched, bring
from tests.schedule.machine import Machine
from tests.schedule.rigs import AHEAD_MS, HourLogRig
from tests.schedule.stage import Rig
from tests.schedule.world import World

from timeball.limits import HOUR_MS
from timeball.schedule.hour_log import dispatched
from timeball.schedule.hour_log.dispatched import Window
from timeball.schedule.hour_log.store import GRACE_MS, HourLog

DUE_MS = 16_000  # from the beginning: beyond the first gather
NEAR_MS = 8_000  # then it is near


class TestContractWithADispatcher(Variant):
    """Who does everything that a dispatcher may do."""

    new_rig = partial(DispatchRig, rigs.anyhow)


class TestContractWithADispatcherWhoDoesAll(Variant):
    """Hardly anything is left to the wheel."""

    new_rig = DispatchRig
    examples = 8


class LeavesMuch(Machine):
    """What any machine does, and between it much is left to the dispatcher, second by second."""

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
            self.written = None  # of a time before this compaction
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


@pytest.mark.parametrize(
    "times",
    one_now([rigs.anyhow, rigs.nothing, rigs.half, rigs.twice, rigs.too_late]),
    ids=lambda times: times.__name__,
)
def test_anything_with_a_dispatcher(times: Times) -> None:
    run(DispatchRig(times))


@pytest.mark.parametrize(
    ("times", "brought"), [(rigs.everything, 100), (rigs.nothing, 0), (rigs.half, 50), (rigs.twice, 100)]
)
def test_a_dispatcher_is_at_work(times: Times, brought: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Watched, "brought", 0)
    monkeypatch.setattr(rigs, "PAUSE_MS", 0)
    with closing(World(DispatchRig(times))) as world:
        world.drain()
        world.admit([world.now_ms + 12_000 + 100 * i for i in range(100)])
        world.attach_now(world.prepare_compact())
        for _ in range(25):
            world.advance(1_000)
            world.drain()
        assert len(world.model.waiting) == 0
        assert Watched.brought == brought
        assert world.strategy.statistics()["fetched_rows"] == 100 - brought


@pytest.mark.slow
@pytest.mark.timeout(1_800)
@pytest.mark.parametrize("times", [rigs.nothing, rigs.half, rigs.too_late, rigs.anyhow])
def test_anything_with_a_dispatcher_for_long(times: Times) -> None:
    run(DispatchRig(times), 60, 60)
    run(DispatchRig(times, gather_bytes=1 << 30), 30, 60)


@pytest.mark.parametrize("wrong", one_now(rigs.WRONG_WITH_A_DISPATCHER), ids=lambda wrong: wrong.__name__)
def test_a_wrong_hour_log_with_a_dispatcher_is_caught(wrong: type[Watched]) -> None:
    assert_caught(partial(DispatchRig, rigs.anyhow, wrong))


# -- the lease, and the grace ----------------------------------------------------------------------------------


@pytest.fixture
def world() -> Iterator[World]:
    world = World(HourLogRig())
    yield world
    world.close()


def hour_log(world: World) -> HourLog:
    assert isinstance(world.strategy, HourLog)
    return world.strategy


def counts(world: World) -> tuple[int, int]:
    found = world.strategy.statistics()
    return found["wheel_rows"], found["dispatched_rows"]


def leave(world: World, dues: list[int], lease_ms: int = HOUR_MS) -> list[int]:
    """Promises in a file, left to a dispatcher; their instants are given from now."""
    world.drain()
    seqs = world.admit([world.now_ms + ms for ms in dues])
    world.attach_now(world.prepare_compact())
    hour_log(world).dispatched.lease(world.now_ms, lease_ms)
    world.advance(NEAR_MS)
    world.drain()
    assert counts(world) == (0, len(dues)), "no body is in memory"
    return seqs


def test_what_nobody_brings_is_late_by_the_grace(world: World) -> None:
    (seq,) = leave(world, [DUE_MS])
    due_ms = world.now_ms - NEAR_MS + DUE_MS
    assert world.strategy.next_due_ms() == due_ms + GRACE_MS
    world.advance(due_ms + GRACE_MS - 1 - world.now_ms)
    world.settle()
    assert world.take() is None
    world.advance(1)
    assert world.drain() == [(due_ms, seq)]
    assert hour_log(world).statistics()["fetched_rows"] == 1
    assert counts(world) == (0, 0)


@pytest.mark.parametrize("ends", ["by itself", "by his word"])
def test_after_the_lease_what_is_near_is_loaded_in_time(world: World, ends: str) -> None:
    left_ms = 1_000
    (seq,) = leave(world, [DUE_MS], NEAR_MS + left_ms)
    due_ms = world.now_ms - NEAR_MS + DUE_MS
    if ends == "by itself":
        assert world.strategy.next_due_ms() == due_ms - AHEAD_MS // 2
        world.advance(due_ms - AHEAD_MS // 2 - world.now_ms)
    else:
        hour_log(world).dispatched.lease(world.now_ms, 0)
        world.advance(left_ms * 3)
    assert world.drain() == []
    assert counts(world) == (1, 0)
    world.advance(due_ms - world.now_ms)
    assert world.drain() == [(due_ms, seq)]


def test_without_a_lease_nothing_is_left_to_anybody(world: World) -> None:
    with pytest.raises(AssertionError, match="no body"):
        leave(world, [DUE_MS], 0)
    assert counts(world) == (1, 0)


def test_a_lease_is_no_longer_than_it_may_be_though_the_clock_goes_back(world: World) -> None:
    it, now_ms = hour_log(world).dispatched, world.now_ms
    it.lease(now_ms, 1 << 60)
    assert it.is_leased(now_ms)
    assert it.is_leased(now_ms + HOUR_MS - 1)
    assert not it.is_leased(now_ms + HOUR_MS)
    assert not it.is_leased(now_ms - 1)


def test_what_is_overdue_already_is_left_to_nobody(world: World) -> None:
    world.admit([world.now_ms + DUE_MS])
    world.attach_now(world.prepare_compact())
    world.advance(HOUR_MS)
    hour_log(world).dispatched.lease(world.now_ms, HOUR_MS)
    assert len(world.drain()) == 1
    assert hour_log(world).statistics()["fetched_rows"] == 0


def test_what_he_brings_is_handed_out_once(world: World) -> None:
    first, second, third = leave(world, [DUE_MS, DUE_MS + 1, DUE_MS + 2])
    world.cancel([second])
    world.advance(DUE_MS + 2 - NEAR_MS)
    assert bring(world, [third, first, third, second]) == [first, third]
    assert bring(world, [first, second, third]) == []
    assert world.drain() == []
    world.release()
    world.save()
    world.restart()
    world.advance(HOUR_MS)
    assert world.drain() == []


def test_what_he_brings_of_the_tail_is_not_his(world: World) -> None:
    leave(world, [DUE_MS])
    seqs = world.admit([world.now_ms + 1])
    attachment = world.prepare_compact()
    world.attach_now(attachment)
    world.advance(1)
    assert bring(world, seqs) == [], "it was near before it came into a file: it is in the wheel"
    assert [seq for _, seq in world.drain()] == seqs


def test_it_may_be_brought_while_it_is_fetched(world: World) -> None:
    seqs = leave(world, [DUE_MS, DUE_MS])
    world.advance(DUE_MS + GRACE_MS - NEAR_MS)
    world.reader_thread.is_open = False
    world.take()
    world.turn()
    assert world.rig.is_busy(world.strategy)
    assert bring(world, seqs[:1]) == seqs[:1]
    assert world.cancel(seqs[1:]) == [True]
    world.reader_thread.is_open = True
    assert world.drain() == []


def test_a_checkpoint_does_not_call_settled_what_he_has(world: World) -> None:
    leave(world, [DUE_MS])
    world.advance(DUE_MS)
    assert hour_log(world).settled_before_ms == world.now_ms - NEAR_MS
    world.save()
    world.restart(power_cut=1)
    assert len(world.drain()) == 1


def test_what_was_cancelled_and_rewritten_away_is_missed_by_nobody(world: World) -> None:
    first, _ = leave(world, [DUE_MS, DUE_MS + 1])
    world.cancel([first])
    world.attach_now(world.prepare_rewrite())
    world.advance(DUE_MS + GRACE_MS + 1 - NEAR_MS)
    assert len(world.drain()) == 1
    assert counts(world) == (0, 0)


def test_what_lies_in_no_file_any_more_is_told(world: World) -> None:
    leave(world, [DUE_MS])
    hour_log(world).pending._live.clear()
    world.advance(DUE_MS + GRACE_MS)
    world.take()
    world.run(hour_log(world).dispatched.quiet())
    assert "in no file" in str(world.failures)
    world.failures.clear()


def test_the_horizon_waits_while_he_has_too_much(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatched, "ROWS_MAX", 5)
    seqs = leave(world, [DUE_MS] * 5)
    world.admit([world.now_ms + NEAR_MS + 2_500])
    world.attach_now(world.prepare_compact())
    world.advance(DUE_MS - NEAR_MS)
    assert world.take() is None
    world.settle()
    assert counts(world) == (0, 5)
    assert len(bring(world, seqs)) == 5
    assert world.drain() == []
    assert counts(world) == (0, 1)


PAIRS = st.sets(st.tuples(st.integers(0, 8), st.integers(0, 60)), max_size=40)


@given(PAIRS, st.lists(PAIRS, max_size=5))
def test_pairs_are_found_where_they_are(
    pairs: set[tuple[int, int]], asked: list[set[tuple[int, int]]]
) -> None:
    pairs = {(due, 100 * due + seq) for due, seq in pairs}
    due, seq = (
        (np.array(column, np.int64) for column in zip(*sorted(pairs), strict=True)) if pairs else ((), ())
    )
    window = Window(np.array(due, np.int64), np.array(seq, np.int64), np.ones(len(pairs), np.bool_))
    for some in asked:
        some = {(due, 100 * due + seq) for due, seq in some}
        if some:
            due, seq = (np.array(column, np.int64) for column in zip(*sorted(some), strict=True))
            rows, at = window.find(due, seq)
            assert set(zip(due[rows].tolist(), seq[rows].tolist(), strict=True)) == some & pairs
            assert (window.due[at] == due[rows]).all() and (window.seq[at] == seq[rows]).all()
