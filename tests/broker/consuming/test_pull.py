"""Pulls: the visible messages from each offset on, with a fair share for each queue, within limits."""

from __future__ import annotations

import asyncio

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.accepting.test_waiters import turns
from tests.broker.on_node import batch, column, on_node
from tests.broker.registry.test_topics import new_topics, visible
from tests.crash.world import SECOND_MS, World

from timeball.broker.consuming import pull
from timeball.broker.consuming.pull import find_seqs
from timeball.broker.filters import EVERYTHING, SQL92, compile_filter
from timeball.broker.registry.topics import Topic
from timeball.model import limits
from timeball.model.errors import NotFound, OutOfRange
from timeball.model.message import encode_properties


def topic_with(lengths: list[int]) -> Topic:
    """A topic with a queue of each of these lengths. Queue q contains the numbers 1000 q, 1000 q + 1, …"""
    topics = new_topics()
    topic = topics.ensure("a", len(lengths))
    for queue, length in enumerate(lengths):
        if length:
            topics.place(visible(["a"] * length, [queue] * length)).index(1_000 * queue)
    return topic


# ---- which rows ---------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data())
def test_a_pull_returns_the_requested_number_of_rows_from_each_offset_on_in_order(
    data: st.DataObject,
) -> None:
    lengths = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    offsets = {
        queue: data.draw(st.integers(0, length))
        for queue, length in enumerate(lengths)
        if data.draw(st.booleans())
    }
    rows = data.draw(st.integers(1, 40))
    seqs = find_seqs(topic_with(lengths), offsets, rows).tolist()
    available = {queue: lengths[queue] - offset for queue, offset in offsets.items()}
    assert len(seqs) == min(rows, sum(available.values()))
    for queue, offset in offsets.items():
        offsets_read = [seq - 1_000 * queue for seq in seqs if seq // 1_000 == queue]
        assert offsets_read == list(range(offset, offset + len(offsets_read)))
        # Fair: a queue gets its share, whatever the other queues contain.
        assert len(offsets_read) >= min(available[queue], rows // len(offsets))


@pytest.mark.parametrize("rows", [0, -5])
def test_a_pull_of_zero_or_fewer_rows_returns_none(rows: int) -> None:
    assert len(find_seqs(topic_with([3]), {0: 0}, rows)) == 0


def test_a_pull_is_limited_to_its_maximum_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PULL_ROWS_MAX", 4)
    assert len(find_seqs(topic_with([9]), {0: 0}, 1 << 40)) == 4


@pytest.mark.parametrize("offset", [-1, 4])
def test_the_error_of_an_offset_out_of_range_names_the_valid_offsets(offset: int) -> None:
    with pytest.raises(OutOfRange, match=r"keeps offsets 0 to 3, not"):
        find_seqs(topic_with([3]), {0: offset}, 1)


@pytest.mark.parametrize("queue", [-1, 1, 99])
def test_a_pull_of_a_queue_that_the_topic_does_not_have_is_refused(queue: int) -> None:
    with pytest.raises(NotFound, match="it has 1"):
        find_seqs(topic_with([3]), {queue: 0}, 1)


@on_node()
async def test_an_answer_is_limited_in_bytes_but_has_at_least_one_row(world: World) -> None:
    await world.broker.send(batch(8, body=[bytes(1_000)] * 8, queue_id=pa.array([0] * 8, pa.int32())))
    with pytest.MonkeyPatch.context() as patch:
        for bytes_max, expected in ((1 << 20, 8), (5_000, 4), (1, 1)):
            patch.setattr(limits, "PULL_BYTES_MAX", bytes_max)
            rows = pull.read(world.broker.log.reader, np.arange(1, 9))
            assert column(rows, "seq") == list(range(1, expected + 1))


# ---- waiting ------------------------------------------------------------------------------------------------


@on_node()
async def test_a_long_pull_ends_with_the_release(world: World) -> None:
    """The commit wakes the pull, which does not poll."""
    key = (await world.send("a", [SECOND_MS]))[0]
    waiting = asyncio.ensure_future(world.broker.pull("a", {0: 0, 1: 0}, 10, 60_000))
    await turns()
    assert not waiting.done()
    await world.advance(SECOND_MS)
    assert column(await waiting, "unique_key") == [key]


@on_node()
async def test_a_pull_without_waiting_returns_no_rows_at_once(world: World) -> None:
    await world.broker.create_topic("new")
    assert (await world.broker.pull("new", {0: 0}, 10, 0)).num_rows == 0


@on_node()
async def test_a_pull_creates_no_topic(world: World) -> None:
    with pytest.raises(NotFound, match="'mistyped' does not exist"):
        await world.broker.pull("mistyped", {0: 0}, 10, 0)
    assert (await world.broker.pull("mistyped", {0: 0}, 10, 1)).num_rows == 0
    assert "mistyped" not in world.broker.topics()


@on_node()
async def test_a_pull_of_a_missing_topic_waits_for_the_message_that_creates_it(world: World) -> None:
    waiting = asyncio.ensure_future(world.broker.pull("new", {0: 0}, 10, 60_000))
    await turns()
    await world.broker.send(batch(1, topic=["new"], queue_id=pa.array([1], pa.int32())))
    # The message is in queue 1. The pull of queue 0 is answered at once, so that the client can pull all queues.
    assert (await waiting).num_rows == 0
    assert (await world.broker.pull("new", {0: 0, 1: 0}, 10, 0)).num_rows == 1


@on_node()
async def test_a_waiting_pull_ends_with_an_error_when_its_topic_is_deleted(world: World) -> None:
    await world.broker.create_topic("a")
    waiting = asyncio.ensure_future(world.broker.pull("a", {0: 0}, 10, 60_000))
    await turns()
    world.broker.tables.topics.delete("a", world.broker.log.writer.next_seq)
    world.broker.waiters.wake(["a"])
    with pytest.raises(NotFound, match="'a' does not exist"):
        await waiting
    assert world.broker.topics() == {}


TAGS = st.lists(st.sampled_from(["Aa", "BB", "C", None]), min_size=1, max_size=40)


@given(
    tags=TAGS,
    text=st.sampled_from(["*", "Aa", "BB || C", "nobody"]),
    rows=st.integers(1, 7),
    scan=st.integers(1, 9),
)
@settings(max_examples=60)
@on_node(queues_per_topic=1)
async def test_filtered_pulls_find_all_matches_in_order(
    world: World, tags: list[str | None], text: str, rows: int, scan: int
) -> None:
    """The tags "Aa" and "BB" have the same hash."""
    await world.broker.send(batch(len(tags), tag=tags))
    index = world.broker.tables.topics.get("orders").queues[0].index
    wanted = compile_filter(text)
    before, pull.SCAN_ROWS_MAX = pull.SCAN_ROWS_MAX, scan
    try:
        offset, matches = 0, []
        while offset < index.max_offset:
            maybe = pull.candidates(index, offset, rows, wanted)
            chosen = pull.decide(maybe, world.broker.log.reader, wanted)
            assert len(chosen.seqs) <= rows and chosen.next_offset > offset
            assert all(offset <= match < chosen.next_offset for match in chosen.offsets)
            matches += chosen.offsets.tolist()
            offset = chosen.next_offset
    finally:
        pull.SCAN_ROWS_MAX = before
    names = set(text.replace(" ", "").split("||"))
    assert matches == [n for n, tag in enumerate(tags) if text == "*" or tag in names]


@given(
    numbers=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    rows=st.integers(1, 7),
    scan=st.integers(1, 9),
)
@settings(max_examples=30)
@on_node(queues_per_topic=1)
async def test_pulls_with_sql_find_all_matches_in_order(
    world: World, numbers: list[int], rows: int, scan: int
) -> None:
    """A pull reads more rows than it was asked for, because the index does not help this filter."""
    properties = [encode_properties({"n": str(number)}) for number in numbers]
    await world.broker.send(batch(len(numbers), properties=properties))
    index = world.broker.tables.topics.get("orders").queues[0].index
    wanted = compile_filter("n = 2", SQL92)
    before, pull.READ_ROWS_MAX = pull.READ_ROWS_MAX, scan
    try:
        offset, matches = 0, []
        while offset < index.max_offset:
            maybe = pull.candidates(index, offset, rows, wanted)
            assert len(maybe.seqs) == min(max(rows, scan), index.max_offset - offset)
            chosen = pull.decide(maybe, world.broker.log.reader, wanted)
            assert len(chosen.seqs) <= rows and chosen.next_offset > offset
            matches += chosen.offsets.tolist()
            offset = chosen.next_offset
    finally:
        pull.READ_ROWS_MAX = before
    assert matches == [n for n, number in enumerate(numbers) if number == 2]


@on_node(queues_per_topic=1)
async def test_offsets_outside_the_queue_raise_out_of_range(world: World) -> None:
    await world.broker.send(batch(3))
    index = world.broker.tables.topics.get("orders").queues[0].index
    assert len(pull.candidates(index, 3, 5, EVERYTHING).seqs) == 0
    with pytest.raises(OutOfRange):
        pull.candidates(index, 4, 5, EVERYTHING)


@on_node(queues_per_topic=1)
async def test_a_pull_without_candidates_reads_no_rows(world: World) -> None:
    await world.broker.send(batch(2, tag=["A", "B"]))
    index = world.broker.tables.topics.get("orders").queues[0].index
    none = pull.candidates(index, 0, 5, compile_filter("C"))
    assert pull.decide(none, world.broker.log.reader, compile_filter("C")) is none
    assert none.next_offset == 2 and none.seqs.dtype == np.int64


@on_node(queues_per_topic=1)
async def test_candidates_are_limited_in_bytes_but_contain_at_least_one_message(world: World) -> None:
    await world.broker.send(batch(4, tag=["A", "B", "A", "A"], body=[b"x" * 1_000] * 4))
    index = world.broker.tables.topics.get("orders").queues[0].index
    size_bytes = int(index.read(0, 1)["size"][0])
    for text, first_two in (("*", [0, 1]), ("A", [0, 2])):
        for bytes_max, offsets in ((1, [0]), (2 * size_bytes - 1, [0]), (2 * size_bytes, first_two)):
            chosen = pull.candidates(index, 0, 9, compile_filter(text), bytes_max=bytes_max)
            assert chosen.offsets.tolist() == offsets
            assert chosen.next_offset == offsets[-1] + 1


# ---- by time -------------------------------------------------------------------------------------------------------


@given(steps=st.lists(st.integers(0, 3), max_size=12), after_ms=st.integers(-2, 40))
@settings(max_examples=60)
@on_node(queues_per_topic=1)
async def test_the_offset_at_a_time_equals_that_of_a_scan(
    world: World, steps: list[int], after_ms: int
) -> None:
    """Messages are sent after `steps` ms each. The requested time is `after_ms` after the beginning."""
    time_ms = world.clock.wall_ms() + after_ms
    store_times_ms = []
    for step in steps:
        world.clock.advance(step)
        store_times_ms.append(world.broker.clock.now_ms())
        await world.broker.send(batch())
    index = world.broker.tables.topics.ensure("orders").queues[0].index
    first = next((n for n, ms in enumerate(store_times_ms) if ms >= time_ms), len(store_times_ms))
    assert pull.offset_at(world.broker.log.reader, index, time_ms) == first
    if store_times_ms:
        last = max((n for n, ms in enumerate(store_times_ms) if ms <= time_ms), default=0)
        assert pull.offset_at(world.broker.log.reader, index, time_ms, upper=True) == last
    assert pull.earliest_ms(world.broker.log.reader, index) == (store_times_ms[0] if store_times_ms else -1)
