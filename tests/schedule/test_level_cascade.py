"""Tests of `level_cascade` beyond the contract and the random walk of questions.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import msgspec
import numpy as np
import pytest
from tests.schedule.moves import sleep_through, sleep_until_rewriting
from tests.schedule.rigs import CascadeRig
from tests.schedule.world import World
from tests.schedule.wrong import SavesNoOldRows

from timeball.broker.accepting.delivery import release_rows, without_timing_lists
from timeball.edges.remoting.codec.delays import next_timing_ms
from timeball.log.row_encoder import pairs_of
from timeball.model import limits
from timeball.model.errors import Corrupt, SetupError
from timeball.model.limits import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS
from timeball.model.message import Kind, build_rows, decode_properties, encode_properties, with_seq
from timeball.schedule.level_cascade import FOLDER, NAMES, CascadeState, LevelCascade, check

TIMING = encode_properties({"TIMING": "08:00:00", "UNIQ_KEY": "k"})
# 3h 50m 9m 50s 7s 1s. The last hop is near when the previous one ends.
LONG_MS = 3 * HOUR_MS + 59 * MINUTE_MS + 58 * SECOND_MS


@pytest.fixture
def world() -> Iterator[World]:
    world = World(CascadeRig())
    yield world
    world.close()


def cascade(world: World) -> LevelCascade:
    assert isinstance(world.backlog, LevelCascade)
    return world.backlog


def state_of(world: World) -> CascadeState:
    return cascade(world).state(world.strategy.settled_ms)


def admit(world: World, due_ms: int, properties: str | None = TIMING) -> int:
    """Append one scheduled message in the form in which the broker stores it."""
    now_ms = world.now_ms
    rows = build_rows(
        1, kind=int(Kind.SCHEDULED), topic="t", queue_id=-1, body=[b"b"], properties=[properties], due_ms=[due_ms],
        store_ms=now_ms,
    )  # fmt: skip
    rows, seq = cascade(world).encode_for_log(rows, now_ms), world.writer.next_seq

    def on_durable() -> None:
        world.model.accepted[seq] = now_ms
        world.model.waiting[seq] = (due_ms, b"b")
        scheduled_rows = with_seq(rows, seq)
        world.strategy.add(world.backlog, scheduled_rows, pairs_of(scheduled_rows), now_ms)

    async def append() -> None:
        await world.writer.append(rows, on_durable=on_durable)[1]

    world.run(append())
    return seq


def timing_lists(world: World) -> list[list[str]]:
    """List TIMING-LIST of all rows of scheduled messages in the log, as names of levels."""
    level_lists = []
    for rows in world.reader.rows(
        world.reader.first_seq, world.reader.next_seq, [Kind.SCHEDULED, Kind.MOVED]
    ):
        for text in rows["properties"].to_pylist():
            numbers = decode_properties(text or "").get("TIMING-LIST", "")
            level_lists.append([NAMES[int(number) - 1] for number in numbers.split(",") if number])
    return level_lists


def released_properties(world: World) -> list[str | None]:
    """Release what is due now. Returns the properties that consumers see."""
    world.settle()
    rows = world.strategy.take_due(world.now_ms, 1_000)
    assert rows is not None
    world.model.hand_out(rows, world.now_ms, 1_000)
    offsets = np.arange(rows.num_rows)
    released = release_rows(
        without_timing_lists(rows), now_ms=world.now_ms, queue_id=offsets, queue_offset=offsets
    )
    properties: list[str | None] = released["properties"].to_pylist()
    return properties


# -- hops in the rows of the log -------------------------------------------------------------------------------


def test_rows_contain_the_remaining_levels_and_the_released_message_none(world: World) -> None:
    due_ms = world.now_ms + LONG_MS
    admit(world, due_ms)
    while (upcoming := world.strategy.next_due_ms()) is not None and upcoming < due_ms:
        world.advance(max(0, upcoming - world.now_ms))
        assert world.drain() == []
    assert timing_lists(world) == [
        ["50m", "9m", "50s", "7s", "1s"],
        ["9m", "50s", "7s", "1s"],
        ["50s", "7s", "1s"],
        ["7s", "1s"],
        ["1s"],
    ]
    world.advance(due_ms - world.now_ms)
    assert released_properties(world) == [TIMING]


@pytest.mark.parametrize(
    "properties", [None, "", "a\x01b", TIMING, encode_properties({"TIMING-LIST": "1,2"})]
)
def test_released_properties_equal_the_sent_ones_without_timing_list(
    world: World, properties: str | None
) -> None:
    admit(world, world.now_ms + 61 * SECOND_MS, properties)
    for _ in range(3):
        sleep_until_rewriting(world)
        world.finish_rewrites()
    world.advance(61 * SECOND_MS)
    (text,) = released_properties(world)
    expected = {k: v for k, v in decode_properties(properties or "").items() if k != "TIMING-LIST"}
    assert decode_properties(text or "") == expected


def test_message_due_beyond_a_day_takes_hops_of_twenty_hours(world: World) -> None:
    admit(world, world.now_ms + 60 * DAY_MS)
    assert [len(sleep_through(world)), world.model.moved_rows] == [1, 71]
    assert timing_lists(world)[:3] == [[], [], []]


# -- drift -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late_ms", [0, 1, 90, 450, 3_000, 10 * MINUTE_MS])
def test_delays_of_hops_are_compensated_by_the_last_hop(world: World, late_ms: int) -> None:
    due_ms = world.now_ms + LONG_MS
    seq = admit(world, due_ms)
    while world.now_ms + late_ms < due_ms:
        sleep_until_rewriting(world)
        if not world.model.moving:
            break
        world.advance(min(late_ms, due_ms - 1 - world.now_ms))
        world.finish_rewrites()
    assert world.model.moved_rows >= 2
    world.advance(due_ms - 1 - world.now_ms)
    assert world.drain() == []
    world.advance(1)
    assert world.drain() == [(due_ms, seq)]


def test_slightly_late_hops_keep_the_list(world: World) -> None:
    admit(world, world.now_ms + LONG_MS)
    for _ in range(4):
        sleep_until_rewriting(world)
        world.advance(100)
        world.finish_rewrites()
    lists = timing_lists(world)
    assert [lists[0][at + 1 :] for at in range(len(lists) - 1)] == lists[1:]


def test_long_stop_replaces_the_list(world: World) -> None:
    due_ms = world.now_ms + LONG_MS
    seq = admit(world, due_ms)
    world.save()
    world.advance(3 * HOUR_MS + 30 * MINUTE_MS)
    world.restart()
    assert world.drain() == []
    assert timing_lists(world)[1] == ["9m", "50s", "7s", "1s"], "after 20m, which were not in the list before"
    assert sleep_through(world) == [(due_ms, seq)]


# -- restarts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved", ["always", "before the move", "never"])
@pytest.mark.parametrize("stop", ["between", "in the move", "in the move, unreported"])
@pytest.mark.parametrize("hop", range(5))
def test_restart_at_any_hop_releases_the_message_on_time(
    world: World, hop: int, stop: str, saved: str
) -> None:
    due_times = [world.now_ms + LONG_MS + 100 * n for n in range(3)]
    pairs = list(zip(due_times, world.admit(due_times), strict=True))
    for _ in range(hop):
        sleep_until_rewriting(world)
        world.finish_rewrites()
    if saved == "before the move":
        world.save()
    sleep_until_rewriting(world)
    if stop == "between":
        world.finish_rewrites()
    elif hop % 2:
        world.finish_part_of_rewrite(1)
    if saved == "always":
        world.save()
    before = world.model.moved_rows
    world.restart(power_cut=hop, unreported="unreported" in stop)
    assert sleep_through(world) == pairs
    assert before <= world.model.moved_rows <= 3 * 9


@pytest.mark.parametrize("strategy", [LevelCascade, SavesNoOldRows])
def test_superseded_entries_are_known_after_several_restarts(strategy: type[LevelCascade]) -> None:
    """The first entry of a queue is unopened, and later ones are superseded. Every checkpoint must list these again."""
    world = World(CascadeRig(strategy))
    first_ms = world.now_ms + LONG_MS
    pairs = [(first_ms, *world.admit([first_ms]))]
    world.manual.step_wall(-HOUR_MS)  # another stretch of the same queue, and its hops are over before
    for n in range(3):
        due_ms = world.now_ms + LONG_MS + n
        pairs.append((due_ms, *world.admit([due_ms])))
    sleep_until_rewriting(world)
    world.finish_rewrites()
    assert any(queue.gone for queue in state_of(world).queues) == (strategy is LevelCascade)
    with (
        nullcontext()
        if strategy is LevelCascade
        else pytest.raises(AssertionError, match=r"to be rewritten while|rewritten twice")
    ):
        for _ in range(3):
            world.save()
            world.restart()
            assert world.drain() == []
        assert sleep_through(world) == sorted(pairs)
    world.close()


def test_without_its_files_the_cascade_starts_from_all_pending_messages(world: World) -> None:
    seqs = world.admit([world.now_ms + LONG_MS] * 3)
    state = state_of(world)
    check(world.files, state, cascade(world).lead_ms)
    folder = f"{FOLDER}/{state.generation:08d}"
    (queue,) = world.files.list_dir(folder)
    (name,) = world.files.list_dir(f"{folder}/{queue}")
    world.files.remove(f"{folder}/{queue}/{name}")
    with pytest.raises(Corrupt, match=rf"{folder}/{queue}/{name} is missing"):
        check(world.files, state, cascade(world).lead_ms)
    world.restart()
    assert [seq for _, seq in sleep_through(world)] == seqs


def test_state_survives_the_json_of_a_checkpoint(world: World) -> None:
    world.admit([world.now_ms + ms for ms in (0, LONG_MS, 2 * LONG_MS)])
    state = state_of(world)
    assert len(state.queues) == 3
    text = msgspec.json.encode(msgspec.to_builtins(state))
    assert msgspec.convert(msgspec.json.decode(text), CascadeState) == state


# -- clocks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_hop", [0, 1, 3])
@pytest.mark.parametrize("step_ms", [-DAY_MS, -HOUR_MS, -2_000, 2_000, HOUR_MS, DAY_MS])
def test_clock_step_between_hops_keeps_the_due_time(world: World, at_hop: int, step_ms: int) -> None:
    due_ms = world.now_ms + LONG_MS
    (seq,) = world.admit([due_ms])
    for _ in range(at_hop):
        sleep_until_rewriting(world)
        world.finish_rewrites()
    world.manual.step_wall(step_ms)
    (later,) = world.admit([due_ms + 1])
    assert sleep_through(world) == [(due_ms, seq), (due_ms + 1, later)]


def test_message_due_after_midnight_is_released_on_time() -> None:
    """At 23:50 in Berlin for 00:10, and for 02:50 in the night in which that hour is skipped."""
    evening_ms = 1_711_839_000_000  # 2024-03-30T23:50 there
    world = World(CascadeRig(), wall_ms=evening_ms)
    due_times = [next_timing_ms(f"{text} Europe/Berlin", evening_ms) for text in ("00:10:00", "02:50:00")]
    assert [due - evening_ms for due in due_times] == [20 * MINUTE_MS, 130 * MINUTE_MS]
    seqs = [admit(world, due_ms) for due_ms in due_times]
    assert sleep_through(world) == list(zip(due_times, seqs, strict=True))
    assert timing_lists(world)[:2] == [[], ["10m"]]
    world.close()


# -- costs -----------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_pending_messages(world: World) -> None:
    for _ in range(10):
        world.admit((world.now_ms + np.arange(HOUR_MS, HOUR_MS + 5_000_000, 1_000)).tolist())
        world.advance(1_000)
        assert world.drain() == []
    state_of(world)
    assert world.memory() == 0
    assert cascade(world).statistics() == {"waiting_rows": 50_000}


def test_statistics_count_messages_by_state(world: World) -> None:
    near, *far = world.admit([world.now_ms + ms for ms in (3_000, LONG_MS, LONG_MS, LONG_MS)])

    def counts() -> tuple[int, ...]:
        statistics = world.strategy.statistics()
        names = ("near_rows", "moving_rows", "moved_rows", "cancelled_rows")
        return (cascade(world).statistics()["waiting_rows"], *(statistics[name] for name in names))

    assert counts() == (3, 1, 0, 0, 0)
    world.cancel(far[:1])
    assert counts() == (3, 1, 0, 0, 1), "its hop is not over"
    world.advance(3_000)
    assert world.drain() == [(world.now_ms, near)]
    sleep_until_rewriting(world)
    assert counts() == (0, 0, 2, 0, 1), "the cancelled message was skipped at the end of its hop"
    world.finish_rewrites()
    assert counts() == (2, 0, 0, 2, 1)


def test_state_with_another_lead_time_is_refused(world: World) -> None:
    state = state_of(world)
    check(world.files, state, state.lead_ms)
    with pytest.raises(SetupError, match="loaded ahead has changed"):
        check(world.files, state, state.lead_ms + 1)


def test_queues_are_empty_after_all_messages_are_settled(world: World) -> None:
    world.admit([world.now_ms + ms for ms in range(0, 2 * LONG_MS, 100_000)])
    cancelled = world.admit([world.now_ms + LONG_MS] * 5)
    world.cancel(cancelled)
    sleep_through(world)
    world.release()
    state = state_of(world)
    assert all(queue.low == queue.end and not queue.cuts and not queue.gone for queue in state.queues)
    assert cascade(world).needed_seq(0) is None
    assert cascade(world).statistics() == {"waiting_rows": 0}
    world.advance(limits.DAY_MS)
    assert world.drain() == []
    assert world.memory() == 0


def test_message_due_in_a_year_needs_no_old_rows_of_the_log(world: World) -> None:
    admit(world, world.now_ms + 365 * DAY_MS)
    for _ in range(20):
        sleep_until_rewriting(world)
        world.finish_rewrites()
    assert cascade(world).needed_seq(0) == world.reader.next_seq - 1
