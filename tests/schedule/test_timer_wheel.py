"""Tests of `timer_wheel` beyond the contract and the random walk of questions.py."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from tests.schedule.moves import release_all_pending, sleep_through
from tests.schedule.rigs import AHEAD_MS, DEFAULT, MINUTE, WheelRig
from tests.schedule.world import World

from timeball.model.errors import Corrupt, OverLimit, SetupError
from timeball.model.limits import DAY_MS, MINUTE_MS
from timeball.schedule import loaded, timer_wheel
from timeball.schedule.due_index import FAR_MS
from timeball.schedule.timer_wheel import Slots, TimerWheel, WheelState, check


def open_world(slots: Slots = DEFAULT, congest_rows: int = 0, arrivals_max: int = 8) -> World:
    return World(
        WheelRig(slots=slots, congest_rows=congest_rows, arrivals_max=arrivals_max, gather_bytes=1 << 20)
    )


@pytest.fixture
def world() -> Iterator[World]:
    world = open_world()
    yield world
    world.close()


@pytest.fixture
def minute() -> Iterator[World]:
    world = open_world(MINUTE)
    yield world
    world.close()


def wheel_of(world: World) -> TimerWheel:
    assert isinstance(world.backlog, TimerWheel)
    return world.backlog


def needed_seq(world: World) -> int | None:
    return wheel_of(world).needed_seq(world.strategy.settled_ms)


def first_slot(world: World) -> int:
    first_ms = wheel_of(world).first_due_ms
    assert first_ms < FAR_MS
    return MINUTE.slot_at(first_ms)


# -- precision and reach


@pytest.mark.parametrize("precision_ms", [1, 10, 100, 1_000])
def test_precision_makes_no_message_early_or_late(precision_ms: int) -> None:
    world = open_world(Slots.of(precision_ms, MINUTE_MS, AHEAD_MS))
    due_ms = world.now_ms + 20_000 - world.now_ms % 1_000
    due_times = sorted(
        {due_ms + ms for ms in (-1, 0, 1, 9, 10, 11, 99, 100, 101, 500, 998, 999, 1_000, 1_001)}
    )
    seqs = world.admit(due_times)
    world.advance(due_times[0] - 1 - world.now_ms)
    for due, seq in zip(due_times, seqs, strict=True):
        world.advance(due - 1 - world.now_ms)
        assert world.drain() == []
        world.advance(1)
        assert world.drain() == [(due, seq)]
    world.close()


@pytest.mark.parametrize("precision_ms", [1, 10, 100, 1_000])
def test_reach_in_time_does_not_depend_on_the_precision(precision_ms: int) -> None:
    """A message due within `timer_wheel_ms` is never rolled. One due a little later always is. Slots do not matter."""
    wheel_ms = 10 * MINUTE_MS
    for beyond_ms, rolls in ((0, False), (AHEAD_MS + 2_000, True)):
        world = open_world(Slots.of(precision_ms, wheel_ms, AHEAD_MS))
        world.drain()
        (seq,) = world.admit([world.now_ms + wheel_ms + beyond_ms])
        assert [seq] == [seq for _, seq in sleep_through(world)]
        assert (world.strategy.statistics()["moved_rows"] > 0) == rolls
        world.close()


def test_roll_happens_long_before_the_due_time(minute: World) -> None:
    minute.drain()
    due_times = [minute.now_ms + AHEAD_MS + ms for ms in range(61_000, 200_000, 500)]
    minute.admit(due_times)
    margins = []
    while (upcoming := minute.strategy.next_due_ms()) is not None:
        minute.advance(upcoming - minute.now_ms)
        before = dict(minute.model.at)
        minute.drain()
        rolled_seqs = [seq for seq, row_seq in minute.model.at.items() if row_seq != before[seq]]
        margins += [minute.model.due_of(seq) - minute.now_ms for seq in rolled_seqs]
    assert margins and min(margins) >= 20_000, "a third of the ring"


# -- `low`, the first slot that a restart reads


def test_low_passes_a_slot_when_all_its_releases_are_durable(world: World) -> None:
    slot = DEFAULT.slot_at(world.now_ms) + 60
    first, second = world.admit([DEFAULT.begin_ms(slot) + ms for ms in (10, 20)])
    world.advance(59_000)
    world.drain()
    wheel = wheel_of(world)
    world.advance(DEFAULT.begin_ms(slot) + 15 - world.now_ms)
    assert [seq for _, seq in world.drain()] == [first]
    world.advance(5_000)
    assert [seq for _, seq in world.drain()] == [second]
    for _ in range(2):
        world.save()
        assert wheel._low == slot, "releases of the slot are not durable yet"
        world.release(1)
    world.save()
    assert wheel._low > slot


def test_low_passes_a_slot_when_its_rolls_are_durable(minute: World) -> None:
    minute.drain()
    seqs = minute.admit([minute.now_ms + 40 * MINUTE_MS] * 3)
    wheel, slot = wheel_of(minute), first_slot(minute)
    minute.advance(MINUTE.begin_ms(slot) - AHEAD_MS // 2 - minute.now_ms)
    minute.take()
    minute.settle()
    minute.take()
    assert minute.model.being_rewritten == set(seqs)
    minute.advance(AHEAD_MS)
    minute.take()
    minute.settle()
    for rows in (1, 2):
        minute.save()
        assert wheel._low == slot
        minute.finish_part_of_rewrite(rows)
    minute.save()
    assert wheel._low > slot
    minute.restart()
    assert [seq for _, seq in release_all_pending(minute)] == seqs


def marked_entries(world: World) -> int:
    entries = wheel_of(world)._log.entries
    return int((entries.read(entries.begin, entries.end)["row_seq"] < 0).sum())


def roll_some(world: World) -> None:
    """Roll three of five messages of one slot."""
    world.drain()
    world.admit([world.now_ms + 40 * MINUTE_MS] * 5)
    world.advance(MINUTE.begin_ms(first_slot(world)) - AHEAD_MS // 2 - world.now_ms)
    world.take()
    world.settle()
    world.take()
    world.finish_part_of_rewrite(3)


def test_entries_of_rolled_messages_are_marked_after_the_log_is_synced(minute: World) -> None:
    """A mark may reach the disk at once. With the mark and without the new row, a restart would not find a message."""
    minute.save()
    roll_some(minute)
    minute.begin_save()
    assert marked_entries(minute) == 0
    minute.finish_part_of_rewrite(1)
    minute.end_save()
    assert marked_entries(minute) == 3, "the row of the fourth message is newer than the state that was saved"
    minute.save()
    assert marked_entries(minute) == 4


def test_checkpoint_that_is_not_saved_leaves_its_marks_to_the_next_one(minute: World) -> None:
    roll_some(minute)
    minute.begin_save()
    minute.finish_part_of_rewrite(1)
    minute.save()
    assert marked_entries(minute) == 4
    seqs = sorted(minute.model.waiting)
    minute.restart(power_cut=1)
    assert [seq for _, seq in release_all_pending(minute)] == seqs


def test_entries_of_passed_slots_are_not_marked(minute: World) -> None:
    """Without checkpoints their number would grow."""
    roll_some(minute)
    minute.finish_rewrites()
    minute.advance(2 * AHEAD_MS)
    minute.drain()
    assert wheel_of(minute)._rolled
    needed_seq(minute)
    assert not wheel_of(minute)._rolled


def test_late_roll_keeps_low_at_its_slot(minute: World) -> None:
    """The broker was down until the due time: the message is in a slot that is not its own, and is near at once."""
    minute.drain()
    (seq,) = minute.admit([minute.now_ms + 10 * MINUTE_MS])
    minute.save()
    minute.advance(11 * MINUTE_MS)
    minute.restart()
    assert [seq for _, seq in minute.drain()] == [seq]
    minute.save()
    minute.restart(power_cut=3)
    assert [seq for _, seq in minute.drain()] == [seq], "its release was not durable"
    minute.release()
    minute.save()
    minute.restart(power_cut=3)
    assert minute.drain() == []
    assert needed_seq(minute) is None


# -- restarts


@pytest.mark.parametrize("seed", range(6))
def test_ring_entries_after_the_checkpoint_are_ignored_by_a_restart(seed: int) -> None:
    """Seed 0: only the process died, so the kernel has written the whole ring."""
    world = open_world(arrivals_max=1)
    world.drain()
    now_ms = world.now_ms
    due_times = [now_ms + 60_000 + 1_000 * (n % 7) for n in range(40)]
    seqs = world.admit(due_times)
    world.save()
    seqs += world.admit(due_times)
    world.restart(power_cut=seed if seed else None)
    assert [seq for _, seq in release_all_pending(world)] == [
        seq for _, seq in sorted(zip([*due_times, *due_times], seqs, strict=True))
    ]
    world.close()


@pytest.mark.parametrize("turns", [1.5, 3, 500])
def test_restart_after_longer_than_the_ring_releases_all_messages(minute: World, turns: float) -> None:
    """Overdue messages are handed out at the start, all others at their due times."""
    minute.drain()
    now_ms = minute.now_ms
    due_times = [now_ms + round(ms) for ms in np.geomspace(20_000, 600 * MINUTE_MS, 60)]
    seqs = minute.admit(due_times)
    minute.save()
    minute.advance(round(turns * MINUTE_MS))
    minute.restart(power_cut=1)
    late = [seq for due, seq in zip(due_times, seqs, strict=True) if due <= minute.now_ms]
    assert late
    assert [seq for _, seq in minute.drain()] == late
    assert [seq for _, seq in release_all_pending(minute)] == seqs[len(late) :]


def test_many_messages_are_opened_in_steps(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_wheel, "OPEN_ROWS", 50)
    monkeypatch.setattr(loaded, "OPENED_ROWS_MAX", 50)
    due_times = [world.now_ms + 30_000 + 100 * n for n in range(2_000)]
    seqs = world.admit(due_times)
    world.save()
    world.advance(DAY_MS)
    world.restart()
    index_rows_max = 0
    taken: list[int] = []
    while len(taken) < len(seqs):
        taken += [seq for _, seq in world.take(20) or []]
        world.settle()
        index_rows_max = max(index_rows_max, world.strategy.loaded.index_rows)
    assert taken == seqs
    assert index_rows_max <= 110, "one step has no bodies yet when the next one is opened"


def test_damaged_link_stops_the_broker(world: World) -> None:
    world.admit([world.now_ms + MINUTE_MS])
    world.save()
    (generation,) = (name for name in world.files.list_dir("timer_wheel") if name.isdigit())
    world.files.open(f"timer_wheel/{generation}/links/00000000.log").write_at(8, b"\x55")
    world.advance(MINUTE_MS)
    with pytest.raises(AssertionError):
        world.drain()
    assert [type(error) for error in world.failures] == [Corrupt]
    world.failures.clear()


# -- flow control


def is_refused(world: World, due_times: list[int]) -> bool:
    try:
        wheel_of(world).check_capacity(np.array(due_times, dtype=np.int64))
    except OverLimit:
        return True
    return False


def test_slot_accepts_messages_up_to_its_limit() -> None:
    """A hard threshold. RocketMQ's probabilistic curve is not supported."""
    world = open_world(congest_rows=100)
    world.drain()
    begin_ms = DEFAULT.begin_ms(DEFAULT.slot_at(world.now_ms) + 60)
    assert not is_refused(world, [begin_ms + n % 1_000 for n in range(100)])
    assert is_refused(world, [begin_ms + n % 1_000 for n in range(101)])
    for n in range(100):
        assert not is_refused(world, [begin_ms + n])
        world.admit([begin_ms + n])
        if n == 50:
            world.save()  # some arrivals are in the files, others in memory
    assert is_refused(world, [begin_ms]) and is_refused(world, [begin_ms + 999])
    assert is_refused(world, [begin_ms - 1, begin_ms + 5_000, begin_ms])
    assert not is_refused(world, [begin_ms - 1] * 100 + [begin_ms + 1_000] * 100), (
        "its neighbours are not full"
    )
    assert not is_refused(world, [])
    world.restart()
    assert is_refused(world, [begin_ms])
    world.close()


def test_refusal_names_the_slot_and_the_setting() -> None:
    world = open_world(congest_rows=2)
    world.drain()
    slot = DEFAULT.slot_at(1_700_000_060_000)
    world.admit([1_700_000_060_123] * 2)
    with pytest.raises(OverLimit) as refusal:
        wheel_of(world).check_capacity(np.array([1_700_000_060_999]))
    assert str(refusal.value) == (
        f"slot {slot} (1000 ms from 2023-11-14T22:14:20.000000Z on) holds 2 messages, 1 more would exceed "
        "--timer-congest-num-each-slot 2: choose other instants, or raise it"
    )
    world.close()


def test_late_and_far_messages_are_not_refused() -> None:
    world = open_world(MINUTE, congest_rows=2)
    world.drain()
    world.admit([world.now_ms - 1] * 5 + [world.now_ms + DAY_MS] * 5)
    assert not is_refused(world, [world.now_ms - 1] * 5 + [world.now_ms + DAY_MS] * 5)
    world.close()


def test_without_a_limit_no_message_is_refused(world: World) -> None:
    world.admit([world.now_ms + MINUTE_MS] * 5_000)
    assert not is_refused(world, [world.now_ms + MINUTE_MS] * 5_000)


# -- memory and statistics


def test_memory_does_not_grow_with_pending_messages(world: World) -> None:
    world.drain()
    memory_rows = []
    for day in range(1, 6):
        world.admit([world.now_ms + day * DAY_MS // 2 + 17 * n for n in range(5_000)])
        world.save()
        memory_rows.append(world.memory())
    assert memory_rows == [0] * 5
    assert wheel_of(world).statistics()["waiting_rows"] == 25_000
    world.restart()
    assert world.memory() == 0
    world.advance(DAY_MS // 2 - 5_000)
    world.drain()
    assert 0 < world.memory() < 1_000, "only the messages of some seconds are in memory"


def test_needed_seq_covers_rows_of_pending_messages(minute: World) -> None:
    assert needed_seq(minute) is None
    seqs = minute.admit([minute.now_ms + 5_000, minute.now_ms + 10 * MINUTE_MS])
    assert needed_seq(minute) == seqs[0]
    minute.advance(2 * MINUTE_MS)
    minute.drain()
    minute.release()
    minute.save()
    oldest_row = needed_seq(minute)
    assert oldest_row is not None and oldest_row > seqs[1], "it has been rolled"
    minute.advance(10 * MINUTE_MS)
    minute.drain()
    minute.release()
    assert needed_seq(minute) is None


def test_statistics_count_messages_and_slots(minute: World) -> None:
    minute.drain()
    now_ms = minute.now_ms
    seqs = minute.admit([now_ms + 1_000, now_ms + 30_000, now_ms + 30_500, now_ms + 10 * MINUTE_MS])
    minute.cancel(seqs[1:2])
    minute.save()
    counts = minute.strategy.statistics()
    assert (counts["near_rows"], counts["moving_rows"], counts["cancelled_rows"]) == (1, 0, 1)
    assert wheel_of(minute).statistics() == {"waiting_rows": 3, "slots": 2}
    minute.advance(2 * MINUTE_MS)
    minute.drain()
    minute.release()
    minute.save()
    counts = minute.strategy.statistics()
    assert (counts["near_rows"], counts["moved_rows"], counts["cancelled_rows"]) == (0, 1, 0)
    assert wheel_of(minute).statistics() == {"waiting_rows": 1, "slots": 1}


def test_arrivals_wait_in_memory_and_are_saved_with_the_next_checkpoint(world: World) -> None:
    world.admit([world.now_ms + DAY_MS] * 5)
    assert wheel_of(world).arrival_rows == 5
    world.save()
    assert wheel_of(world).arrival_rows == 0
    world.admit([world.now_ms + DAY_MS] * 8)
    assert wheel_of(world).arrival_rows == 0, "8 arrivals are a batch, which is written at once"


def test_new_generation_removes_the_old_one_and_differs_from_it(world: World) -> None:
    """After a start that could not use the state, its files belong to no state."""
    seqs = world.admit([world.now_ms + DAY_MS] * 20)
    world.save()
    old = world.checkpoints.pop()
    world.restart()
    state = wheel_of(world).state(0)
    assert isinstance(old.state, dict) and state.generation > old.state["generation"]
    assert world.files.list_dir(f"timer_wheel/{old.state['generation']:08d}/links") == []
    assert [seq for _, seq in release_all_pending(world)] == seqs


def test_state_with_other_ring_dimensions_is_refused(world: World) -> None:
    state = wheel_of(world).state(0)
    assert isinstance(state, WheelState)
    check(world.files, DEFAULT, state)
    with pytest.raises(SetupError, match="--timer-precision-ms"):
        check(world.files, MINUTE, state)


@pytest.mark.parametrize("ring_exists", [True, False])
def test_each_start_makes_an_empty_ring(world: World, ring_exists: bool) -> None:
    """The ring's file is ignored, whether it exists or not."""
    seqs = world.admit([world.now_ms + MINUTE_MS + 1_000 * n for n in range(20)])
    world.save()
    if not ring_exists:
        world.files.remove("timer_wheel/ring")
    world.restart()
    assert [seq for _, seq in release_all_pending(world)] == seqs


def test_message_of_an_overwritten_slot_is_found_after_a_restart(minute: World) -> None:
    """The slot is opened but not settled, and a slot of a later lap has its position in the ring."""
    minute.drain()
    (seq,) = minute.admit([minute.now_ms + 20_000])
    minute.save()
    minute.advance(21_000)
    minute.drain()
    later = minute.admit([minute.now_ms + 60_000 - 1_000 * n for n in range(20)])
    minute.save()
    minute.restart()
    assert [number for _, number in minute.drain()] == [seq], "its release was not durable"
    assert sorted(number for _, number in release_all_pending(minute)) == sorted(later)


def test_rows_of_the_log_are_unchanged(world: World) -> None:
    world.admit([world.now_ms])
    rows = next(iter(world.reader.rows(1, 2)))
    assert wheel_of(world).encode_for_log(rows, world.now_ms) is rows
