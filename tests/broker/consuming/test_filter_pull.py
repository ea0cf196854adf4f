"""Selecting from a queue: nothing that matches is passed over, nothing else is chosen, and every look moves on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.on_node import batch, on_node
from tests.crash.world import World

from timeball.broker.consuming import filter_pull
from timeball.broker.filters import EVERYTHING, compile_filter
from timeball.errors import OutOfRange

TAGS = st.lists(st.sampled_from(["Aa", "BB", "C", None]), min_size=1, max_size=40)


@given(
    tags=TAGS,
    text=st.sampled_from(["*", "Aa", "BB || C", "nobody"]),
    rows=st.integers(1, 7),
    scan=st.integers(1, 9),
)
@settings(max_examples=60)
@on_node(queues_per_topic=1)
async def test_all_of_them_in_order(
    world: World, tags: list[str | None], text: str, rows: int, scan: int
) -> None:
    """ "Aa" and "BB" have one hash."""
    await world.broker.send(batch(len(tags), tag=tags))
    index = world.broker.parts.topics.get("orders").queues[0].index
    wanted = compile_filter(text)
    before, filter_pull.SCAN_ROWS_MAX = filter_pull.SCAN_ROWS_MAX, scan
    try:
        offset, found = 0, []
        while offset < index.max_offset:
            maybe = filter_pull.candidates(index, offset, rows, wanted)
            chosen = filter_pull.decide(maybe, world.broker.parts.reader, wanted)
            assert len(chosen.seqs) <= rows and chosen.next_offset > offset
            assert all(offset <= at < chosen.next_offset for at in chosen.offsets)
            found += chosen.offsets.tolist()
            offset = chosen.next_offset
    finally:
        filter_pull.SCAN_ROWS_MAX = before
    names = set(text.replace(" ", "").split("||"))
    assert found == [n for n, tag in enumerate(tags) if text == "*" or tag in names]


@on_node(queues_per_topic=1)
async def test_beyond_what_is_kept(world: World) -> None:
    await world.broker.send(batch(3))
    index = world.broker.parts.topics.get("orders").queues[0].index
    assert len(filter_pull.candidates(index, 3, 5, EVERYTHING).seqs) == 0
    with pytest.raises(OutOfRange):
        filter_pull.candidates(index, 4, 5, EVERYTHING)


@on_node(queues_per_topic=1)
async def test_nothing_to_decide(world: World) -> None:
    await world.broker.send(batch(2, tag=["A", "B"]))
    index = world.broker.parts.topics.get("orders").queues[0].index
    none = filter_pull.candidates(index, 0, 5, compile_filter("C"))
    assert filter_pull.decide(none, world.broker.parts.reader, compile_filter("C")) is none
    assert none.next_offset == 2 and none.seqs.dtype == np.int64


@on_node(queues_per_topic=1)
async def test_as_many_bytes_as_asked_but_at_least_one(world: World) -> None:
    await world.broker.send(batch(4, tag=["A", "B", "A", "A"], body=[b"x" * 1_000] * 4))
    index = world.broker.parts.topics.get("orders").queues[0].index
    size_bytes = int(index.read(0, 1)["size"][0])
    for text, of_two in (("*", [0, 1]), ("A", [0, 2])):
        for bytes_max, offsets in ((1, [0]), (2 * size_bytes - 1, [0]), (2 * size_bytes, of_two)):
            chosen = filter_pull.candidates(index, 0, 9, compile_filter(text), bytes_max=bytes_max)
            assert chosen.offsets.tolist() == offsets
            assert chosen.next_offset == offsets[-1] + 1
