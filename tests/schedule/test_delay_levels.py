"""Tests of `delay_levels` beyond the contract and the random walk of questions.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.crash_files import CrashFiles
from tests.schedule.contract import MANY
from tests.schedule.rigs import AHEAD_MS, LEVELS, LevelsRig
from tests.schedule.stage import Built, Restart
from tests.schedule.world import World

from timeball.log.checkpoint import LevelFacts
from timeball.log.queue_index import QueueIndexes
from timeball.model import limits
from timeball.model.config import Settings
from timeball.model.errors import Corrupt, InvalidMessage, SetupError
from timeball.model.limits import DAY_MS, HOUR_MS, MINUTE_MS, SECOND_MS
from timeball.model.message import (
    SCHEDULE_TOPIC,
    Int64Array,
    Kind,
    build_rows,
    decode_properties,
    encode_properties,
    int64,
    with_seq,
)
from timeball.schedule import locations
from timeball.schedule.delay_levels import (
    OVERRULED,
    DelayLevels,
    LevelQueue,
    LevelsState,
    LevelTable,
    with_level_properties,
    with_original_topics,
)
from timeball.schedule.locations import NOTHING
from timeball.schedule.outcomes import NOTHING_SETTLED, Outcomes


@pytest.fixture
def world() -> Iterator[World]:
    world_of_levels = World(LevelsRig())
    yield world_of_levels
    world_of_levels.close()


def levels_of(world: World) -> DelayLevels:
    assert isinstance(world.backlog, DelayLevels)
    return world.backlog


def offsets(world: World) -> dict[int, int]:
    return {number: facts.offset for number, facts in levels_of(world).state(0).levels.items()}


def test_pending_messages_take_no_memory(world: World) -> None:
    world.admit([world.now_ms + HOUR_MS] * MANY)
    assert world.memory() == 0
    assert levels_of(world).statistics() == {"waiting_rows": MANY}
    world.advance(HOUR_MS)
    assert len(world.drain()) == MANY
    world.release()
    world.advance(1)
    world.drain()
    world.save()
    assert world.memory() == 0
    assert sum(offsets(world).values()) == MANY


def test_message_due_soon_is_loaded_without_a_second_read() -> None:
    world = World(LevelsRig(gather_bytes=1 << 30))
    world.admit([world.now_ms + 5_000] * 100)
    world.reader_thread.is_open = False
    world.advance(5_000)
    assert len(world.take() or []) == 100
    assert not len(world.reader_thread)
    world.close()


def test_more_messages_due_at_once_than_fit_into_memory_are_all_released(world: World) -> None:
    due_times = sorted(world.now_ms + 1 + number % 7 for number in range(MANY))
    world.admit(due_times)
    world.advance(7)
    assert [due for due, _ in world.drain()] == due_times


def test_clock_step_during_a_read_of_bodies_keeps_each_message_once(world: World) -> None:
    now_ms = world.now_ms
    world.admit([now_ms + 20_000] * 200)
    world.reader_thread.is_open = False
    world.advance(19_000)
    world.take()
    assert world.strategy.is_busy
    world.manual.step_wall(-60_000)
    world.take()
    world.reader_thread.is_open = True
    assert world.drain() == []
    world.advance(61_000)
    assert len(world.drain()) == 200


class ShortRig(LevelsRig):
    """Three levels, the first of ten seconds."""

    def build(self, world: World, restart: Restart, outcomes: Outcomes) -> Built:
        built = super().build(world, restart, outcomes)
        assert isinstance(built.backlog, DelayLevels)
        built.backlog.table = LevelTable((10_000, 3 * limits.DELAY_MS_MAX, 3 * limits.DELAY_MS_MAX))
        return built


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("loaded", [False, True])
def test_after_a_step_back_no_message_waits_longer_than_its_level(loaded: bool, restarts: bool) -> None:
    """Otherwise it would also wait for the length of the step."""
    world = World(ShortRig())
    due_ms = world.now_ms + 10_000
    (seq,) = world.admit([due_ms])  # queue 0
    if loaded:
        world.advance(9_000)
        assert world.drain() == []
    else:
        world.take()
    world.manual.step_wall(-limits.DAY_MS)
    world.take()
    world.advance(9_999)
    assert world.drain() == []
    world.advance(1)
    rows = take_due_rows(world)
    assert rows.column("seq").to_pylist() == [seq]
    assert rows.column("due_ms").to_pylist() == [world.now_ms], (
        "the row contains the time at which the message counted as due"
    )
    assert rows.column("from_due_ms").to_pylist() == [due_ms]
    world.model.in_flight.append({seq: world.model.waiting.pop(seq)})
    world.run(append_releases(world, rows))
    if restarts:
        world.restart()
    assert world.drain() == []
    world.advance(2 * limits.DAY_MS)
    assert world.drain() == [], "it is not released again at its original due time"
    assert offsets(world)[0] == 1
    world.close()


def take_due_rows(world: World) -> pa.RecordBatch:
    for _ in range(100):
        rows = world.run(take_due(world))
        world.settle()
        if rows is not None:
            return rows
    raise AssertionError("nothing is due")


async def take_due(world: World) -> pa.RecordBatch | None:
    return world.strategy.take_due(world.now_ms, 1_000)


async def append_releases(world: World, rows: pa.RecordBatch) -> None:
    """Append RELEASE rows as older brokers did: with the time at which a message counted as due."""
    seq, due = int64(rows.column("seq")), int64(rows.column("due_ms"))
    await world._settle_rows(Kind.RELEASE, due, seq, lambda: world.strategy.released(seq))
    world.model.released |= {number: batch[number][0] for batch in world.model.in_flight for number in batch}
    world.model.in_flight.clear()


def test_cancelled_message_is_not_released_after_a_step_back() -> None:
    world = World(ShortRig())
    (seq,) = world.admit([world.now_ms + 10_000])
    world.advance(9_000)
    world.drain()
    assert world.cancel([seq]) == [True]
    world.manual.step_wall(-limits.DAY_MS)
    assert world.drain() == []
    assert offsets(world)[0] == 1
    world.close()


def restored_levels(
    world: World, state: dict[int, LevelFacts], *durations_ms: int, back_ms: int = 0
) -> DelayLevels:
    """Make a second backlog over the same log and queues. Its clock is `back_ms` behind that of `world`."""
    rig = world.rig
    assert isinstance(rig, LevelsRig)
    table = LevelTable(durations_ms or (HOUR_MS,) * 3)
    levels = DelayLevels(world.reader, table, lambda: rig.indexes, world.strategy.outcomes, ahead_ms=AHEAD_MS)
    levels.restore(LevelsState(state), NOTHING_SETTLED, NOTHING, world.now_ms - back_ms)
    return levels


def unshifted(seq: Int64Array) -> Int64Array:
    return np.zeros(len(seq), np.int64)


def test_shorter_level_table_releases_no_message_earlier(world: World) -> None:
    world.admit([world.now_ms + HOUR_MS])
    levels = restored_levels(world, levels_of(world).state(0).levels, 1_000)
    assert levels.first_due_ms == world.now_ms + HOUR_MS
    levels.clock_stepped(world.now_ms, unshifted)
    assert levels.first_due_ms == world.now_ms + HOUR_MS


def test_level_that_was_longer_for_a_while_releases_no_message_earlier(world: World) -> None:
    """The queue is one stretch. Its last message was accepted for two hours, its first one for an hour."""
    first_due_ms = world.now_ms + HOUR_MS
    world.admit([first_due_ms] * LEVELS)
    world.advance(MINUTE_MS)
    world.admit([world.now_ms + 2 * HOUR_MS] * LEVELS)
    levels = restored_levels(world, {})
    assert levels.first_due_ms == first_due_ms
    levels.clock_stepped(world.now_ms, unshifted)
    assert levels.first_due_ms == first_due_ms


@settings(max_examples=30)
@given(
    accepted=st.lists(
        st.tuples(st.integers(0, 120).map(lambda minutes: minutes * MINUTE_MS), st.integers(1, 4)),
        min_size=1,
        max_size=8,
    ),
    hours=st.integers(1, 4),
    back_ms=st.sampled_from([0, 0, MINUTE_MS, 5 * HOUR_MS]),
)
def test_no_sequence_of_tables_releases_a_message_earlier(
    accepted: list[tuple[int, int]], hours: int, back_ms: int
) -> None:
    """`accepted`: per message, the ms since the message before it, and the hours of its level when it was accepted."""
    due_times = dict[int, int]()
    with closing(World(LevelsRig())) as world:
        for gap_ms, level_hours in accepted:
            world.advance(gap_ms)
            due_ms = world.now_ms + level_hours * HOUR_MS
            due_times |= dict.fromkeys(world.admit([due_ms] * LEVELS), due_ms)
        now_ms = world.now_ms - back_ms
        levels = restored_levels(world, {}, *(hours * HOUR_MS,) * LEVELS, back_ms=back_ms)
        opened = world.run(levels.open(now_ms, now_ms + DAY_MS))
    assert sorted(opened.seq.tolist()) == sorted(due_times)
    longest_ms = max(hours, *(level_hours for _, level_hours in accepted)) * HOUR_MS
    for due_ms, seq in zip(opened.due_ms.tolist(), opened.seq.tolist(), strict=True):
        # After a step back a message waits for its remaining duration, so it may be due earlier, at most by the step.
        assert due_times[seq] - back_ms <= due_ms <= min(due_times[seq], now_ms + longest_ms)


def test_saved_offset_outside_its_queue_is_moved_into_it(world: World) -> None:
    seqs = world.admit([world.now_ms + HOUR_MS] * 6)
    states = [{}, {0: LevelFacts(1), 1: LevelFacts(-4), 2: LevelFacts(99)}]
    for state, expected in zip(states, [seqs, [seqs[1], seqs[3], seqs[4]]], strict=True):
        levels = restored_levels(world, state)
        assert levels.needed_seq(0) == expected[0]
        assert levels.statistics() == {"waiting_rows": len(expected)}


def test_message_sent_to_the_schedule_topic_is_not_delivered(world: World) -> None:
    """The topic existed before it was reserved. Its entries contain tag hashes, which look like due times in 1970."""
    rig = world.rig
    assert isinstance(rig, LevelsRig)

    async def append() -> int:
        rows = build_rows(
            1,
            kind=int(Kind.MESSAGE),
            topic=SCHEDULE_TOPIC,
            queue_id=0,
            queue_offset=0,
            body=b"old",
            store_ms=1,
        )
        seq, durable = world.writer.append(rows)
        await durable
        return seq

    seq = world.run(append())
    rig.indexes[0].append(np.array([seq]), np.array([91]), np.array([94_756_344]))
    rig._next[0] += 1
    world.save()
    world.restart()
    world.admit([world.now_ms + 5] * 3)
    world.advance(5)
    assert len(world.drain()) == 3
    world.release()
    assert offsets(world)[0] == 2, "the offset passes the old entry"


def test_default_table_equals_rocketmqs() -> None:
    table = LevelTable.parse(Settings().delay_levels)
    minutes_ms = [MINUTE_MS * minutes for minutes in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30)]
    seconds_ms = [SECOND_MS * seconds for seconds in (1, 5, 10, 30)]
    assert list(table.durations_ms) == [*seconds_ms, *minutes_ms, HOUR_MS, 2 * HOUR_MS]
    assert len(table) == table.queues == 18


UNITS = {"s": SECOND_MS, "m": MINUTE_MS, "h": HOUR_MS, "d": DAY_MS}


@given(st.lists(st.tuples(st.integers(0, 3_000), st.sampled_from(sorted(UNITS))), min_size=1, max_size=30))
def test_level_n_is_the_nth_item_even_if_levels_do_not_ascend(items: list[tuple[int, str]]) -> None:
    table = LevelTable.parse(" ".join(f"{count}{unit}" for count, unit in items))
    assert list(table.durations_ms) == [count * UNITS[unit] for count, unit in items]
    assert table.queues == max(18, len(items))
    levels = np.arange(1, len(items) + 1)
    assert table.delay_ms(levels).tolist() == list(table.durations_ms)


def test_levels_above_the_last_are_clamped_to_the_last() -> None:
    table = LevelTable.parse("1s +2m 3h ")
    assert table.clamp(np.array([0, 1, 3, 4, 1_959])).tolist() == [0, 1, 3, 3, 3]


@pytest.mark.parametrize(
    "text",
    [
        "",
        " 1s",
        "1s  5s",
        "1s 5",
        "5ms",
        "s",
        "1S",
        "1.5s",
        "-1s",
        "1s,5s",
        "1s\t5s",
        "٣s",
        "3654d",
        "9" * 19 + "s",
    ],
)
def test_invalid_table_is_refused_with_the_name_of_the_item(text: str) -> None:
    with pytest.raises(SetupError, match="--delay-levels"):
        LevelTable.parse(text)


def test_more_levels_than_a_topic_has_queues_are_refused() -> None:
    LevelTable.parse("1s " * 1_024)
    with pytest.raises(SetupError, match="--delay-levels: 1025 levels"):
        LevelTable.parse("1s " * 1_025)


LEVEL_NAMES = {"DELAY", "REAL_TOPIC", "REAL_QID", *OVERRULED}
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02"), max_size=12)
NAMES = st.one_of(st.sampled_from(sorted(LEVEL_NAMES)), TEXT.filter(bool))
PROPERTIES = st.dictionaries(NAMES, TEXT, max_size=6)


def add_level_properties(
    texts: list[str | None], level: int = 3, topic: str = "orders", queue: int = -1
) -> list[str]:
    """Convert properties to those of a pending message of a level."""
    count = len(texts)
    return with_level_properties(
        pa.array(texts, pa.string()), np.full(count, level), pa.array([topic] * count),
        pa.array([queue] * count, pa.int32()),
    ).to_pylist()  # fmt: skip


def pending_rows(texts: list[str]) -> pa.RecordBatch:
    """Build pending messages of a level with these properties, with the numbers 40, 41, …."""
    rows = build_rows(
        len(texts), kind=int(Kind.SCHEDULED), topic=SCHEDULE_TOPIC, queue_id=2, body=b"b", properties=texts,
        queue_offset=list(range(len(texts))), due_ms=7, store_ms=5,
    )  # fmt: skip
    return with_seq(rows, 40)


@given(st.lists(PROPERTIES, min_size=1, max_size=5), st.booleans())
def test_other_properties_keep_their_order_and_level_properties_occur_once(
    sent_properties: list[dict[str, str]], ends: bool
) -> None:
    texts = [
        encode_properties(each) if ends else encode_properties(each).removesuffix("\x02")
        for each in sent_properties
    ]
    for before, after in zip(sent_properties, add_level_properties([*texts]), strict=True):
        other_properties = {name: value for name, value in before.items() if name not in LEVEL_NAMES}
        expected = {**other_properties, "DELAY": "3", "REAL_TOPIC": "orders", "REAL_QID": "-1"}
        assert list(decode_properties(after).items()) == list(expected.items())
        assert after == encode_properties(expected)


def test_message_without_properties_gets_only_the_level_properties() -> None:
    assert (
        add_level_properties([None, "", "\x02"])
        == ["DELAY\x013\x02REAL_TOPIC\x01orders\x02REAL_QID\x01-1\x02"] * 3
    )


def test_properties_that_become_too_long_are_refused_with_the_row() -> None:
    with pytest.raises(InvalidMessage, match="properties of row 1"):
        add_level_properties(["a\x01b", "a\x01" + "x" * 32_760])


@given(st.text("abcXYZ019_-%|", min_size=1, max_size=30), st.integers(-1, 1_023))
def test_restored_message_equals_the_original(topic: str, queue: int) -> None:
    rows = pending_rows(add_level_properties(["k\x01v", None], topic=topic, queue=queue))
    restored = with_original_topics(rows)
    assert restored.column("topic").to_pylist() == [topic] * 2
    assert restored.column("queue_id").to_pylist() == [queue] * 2
    assert restored.column("queue_offset").null_count == 2, (
        "its offset in the original queue is not known yet"
    )
    assert restored.column("due_ms").equals(rows.column("due_ms"))
    assert set(restored.column("kind").to_pylist()) == {Kind.SCHEDULED}, (
        "the row must not be indexed in a level's queue"
    )
    assert restored.column("properties").equals(rows.column("properties"))


@pytest.mark.parametrize("text", ["", "REAL_TOPIC\x01orders\x02", "REAL_TOPIC\x01t\x02REAL_QID\x01x\x02"])
def test_row_without_its_original_topic_is_corrupt(text: str) -> None:
    with pytest.raises(Corrupt, match="seq 41"):
        good = "REAL_TOPIC\x01t\x02REAL_QID\x010\x02"
        with_original_topics(pending_rows([good, text]))


WAIT_MS = 100
FAR_MS = 1 << 40


def queue_of(due_times: list[int], duration_ms: int | None = WAIT_MS, first_seq: int = 10) -> LevelQueue:
    """Make a queue whose entry n is due at due_times[n] and has the sequence number first_seq + 3 n."""
    index = QueueIndexes(CrashFiles()).queue("t", 0)
    count = len(due_times)
    index.append(first_seq + 3 * np.arange(count), np.full(count, 91), np.array(due_times, np.int64))
    queue = LevelQueue(2, index, duration_ms)
    queue.rebuild()
    return queue


def stretches(queue: LevelQueue) -> list[tuple[int, int, bool]]:
    """List the stretches as (next, end, whether they are shifted)."""
    return [(s.next, s.end, s.shift_ms != 0) for s in queue.stretches]


DUES = st.lists(st.integers(0, 50), min_size=1, max_size=40)


@given(DUES)
def test_stretches_are_sorted_and_cover_the_queue(due_times: list[int]) -> None:
    queue = queue_of(due_times)
    ends = [0]
    for stretch in queue.stretches:
        assert stretch.next == ends[-1] and stretch.end > stretch.next
        part = due_times[stretch.next : stretch.end]
        assert part == sorted(part)
        assert (stretch.head_ms, stretch.last_ms) == (part[0], part[-1])
        ends.append(stretch.end)
    assert ends[-1] == len(due_times)
    assert len(queue.stretches) == 1 + sum(b < a for a, b in pairwise(due_times))
    assert queue.first_due_ms() == min(due_times)


@given(DUES, st.lists(st.integers(1, 7), max_size=10), st.integers(-1, 51))
def test_new_entries_are_opened_or_extend_the_last_stretch_or_begin_another(
    due_times: list[int], cuts: list[int], near_ms: int
) -> None:
    queue, index = queue_of([]), QueueIndexes(CrashFiles()).queue("t", 0)
    queue.index, opened, begin = index, 0, 0
    for step in [*cuts, len(due_times)]:
        part = np.array(due_times[begin : begin + step], np.int64)
        seq = 10 + 3 * np.arange(begin, begin + len(part))
        index.append(seq, np.full(len(part), 91), part)
        begin += len(part)
        near = queue.add_new(near_ms)
        assert (near is None or not near.tolist()) or near.tolist() == [
            10 + 3 * at for at in range(opened, opened + len(near))
        ]
        opened += 0 if near is None else len(near)
    assert all(due <= near_ms for due in due_times[:opened]), "only near entries are opened"
    assert opened == len(due_times) or due_times[opened] > near_ms, (
        "and all near entries before the first far one"
    )
    whole = queue_of(due_times[opened:])
    assert stretches(queue) == [(b + opened, e + opened, is_shifted) for b, e, is_shifted in stretches(whole)]


@given(DUES, st.integers(0, 52), st.integers(1, 50), st.sampled_from([1, 3, 4_096]))
def test_open_returns_due_entries_in_order_up_to_the_limit(
    due_times: list[int], until_ms: int, rows_max: int, probe: int
) -> None:
    queue = queue_of(due_times)
    expected, left = [], []
    for begin, end, _ in stretches(queue):
        due = [at for at in range(begin, end) if due_times[at] < until_ms][:rows_max]
        if due:
            expected.append(([due_times[at] for at in due], [10 + 3 * at for at in due]))
        if begin + len(due) < end:
            left.append((begin + len(due), end, False))
    previous_probe, locations.PROBE = locations.PROBE, probe
    try:
        opened_columns = queue.open(until_ms, rows_max)
    finally:
        locations.PROBE = previous_probe
    assert [(due.tolist(), seq.tolist()) for _, due, seq in opened_columns] == expected
    assert stretches(queue) == left
    assert queue.first_due_ms() == min((due_times[begin] for begin, _, _ in left), default=None)


@given(DUES, st.integers(0, 40), st.lists(st.integers(0, 140), max_size=12))
def test_find_due_times_finds_numbers_from_the_offset_on(
    due_times: list[int], low: int, wanted: list[int]
) -> None:
    queue = queue_of(due_times)
    queue.low = min(low, len(due_times))
    seqs = [10 + 3 * at for at in range(len(due_times))]
    expected = [due_times[seqs.index(seq)] if seq in seqs[queue.low :] else -1 for seq in wanted]
    assert queue.find_due_times(np.array(wanted, np.int64)).tolist() == expected


@given(
    due_times=st.lists(st.integers(0, 500), min_size=1, max_size=30).map(sorted), now_ms=st.integers(0, 500)
)
def test_no_entry_waits_longer_than_its_level(due_times: list[int], now_ms: int) -> None:
    queue = queue_of(due_times)
    queue.shorten_long_waits(now_ms)
    shift_ms = min(0, now_ms + WAIT_MS - due_times[-1])
    opened = {
        seq: due
        for released, _, seqs in queue.open(now_ms + 1, 1_000)
        for due, seq in zip(released.tolist(), seqs.tolist(), strict=True)
    }
    assert opened == {
        10 + 3 * at: due + shift_ms for at, due in enumerate(due_times) if due + shift_ms <= now_ms
    }


@given(
    due_times=st.lists(st.integers(0, 500), min_size=1, max_size=30),
    cut=st.integers(0, 30),
    now_ms=st.integers(0, 500),
)
def test_entries_are_due_at_their_shifted_times(due_times: list[int], cut: int, now_ms: int) -> None:
    queue = queue_of(due_times, duration_ms=None)
    shifts = [-40 if at < cut else 7 for at in range(len(due_times))]
    queue.rebuild(lambda seq: np.array([shifts[(number - 10) // 3] for number in seq.tolist()], np.int64))
    opened = {
        seq: (released, due)
        for parts in queue.open(now_ms + 1, 1_000)
        for released, due, seq in zip(*(column.tolist() for column in parts), strict=True)
    }
    assert opened.keys() <= {10 + 3 * at for at in range(len(due_times))}
    for at, (due, shift_ms) in enumerate(zip(due_times, shifts, strict=True)):
        # An entry also waits for each entry before it in its stretch.
        if (times_ms := opened.get(10 + 3 * at)) is not None:
            assert times_ms == (due + shift_ms, due) and due + shift_ms <= now_ms
        else:
            assert due + shift_ms > now_ms
    assert queue.first_postponed_ms() >= min(
        due for due, shift_ms in zip([*due_times, 999], [*shifts, 1], strict=True) if shift_ms > 0
    )


def test_entries_added_after_a_clock_step_are_not_shifted() -> None:
    queue = queue_of([1_000, 1_001])
    queue.shorten_long_waits(10)
    queue.shorten_long_waits(10)
    assert stretches(queue) == [(0, 2, True)]
    queue.index.append(np.array([90, 91]), np.full(2, 91), np.array([110, 1_200]))
    queue.add_new(0)
    assert stretches(queue) == [(0, 2, True), (2, 4, False)]


def test_entries_of_a_removed_level_keep_their_due_times() -> None:
    queue = queue_of([FAR_MS], duration_ms=None)
    queue.shorten_long_waits(0)
    assert queue.open(FAR_MS, 9) == []
    assert queue.open(FAR_MS + 1, 9)[0][0].tolist() == [FAR_MS]


def test_extended_duration_is_kept_with_a_shorter_table() -> None:
    queue = queue_of([500])
    queue.extend_duration(600)
    queue.shorten_long_waits(0)
    assert stretches(queue) == [(0, 1, False)]


def test_needed_seq_is_the_row_at_the_offset() -> None:
    queue = queue_of([5, 6])
    assert (queue.needed_seq(), queue.waiting_rows) == (10, 2)
    queue.low = 1
    assert (queue.needed_seq(), queue.waiting_rows) == (13, 1)
    queue.low = 2
    assert (queue.needed_seq(), queue.waiting_rows) == (None, 0)


def test_offset_advances_to_the_first_unsettled_entry() -> None:
    queue, outcomes = queue_of([5, 6, 7, 8]), Outcomes()
    queue.open(8, 9)
    outcomes.add_settled(np.array([6, 7]), np.array([13, 16]))
    queue.advance(outcomes)
    assert queue.low == 0
    outcomes.add_settled(np.array([5, 8]), np.array([10, 19]))
    queue.advance(outcomes)
    assert queue.low == 3, "unopened entries are not checked"
    queue.open(9, 9)
    queue.advance(outcomes)
    assert queue.low == 4
