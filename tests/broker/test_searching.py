"""A queue by time: the first offset at or after an instant, whatever the clock did."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.on_node import batch, on_node
from tests.crash.world import World

from timeball.broker import searching


@given(steps=st.lists(st.integers(0, 3), max_size=12), asked=st.integers(-2, 40))
@settings(max_examples=60)
@on_node(queues_per_topic=1)
async def test_bisection_finds_what_a_scan_finds(world: World, steps: list[int], asked: int) -> None:
    begun = world.clock.wall_ms()
    stored = []
    for step in steps:
        world.clock.advance(step)
        stored.append(world.broker.parts.clock.now_ms())
        await world.broker.send(batch())
    parts = world.broker.parts
    index = parts.topics.ensure("orders").queues[0].index
    instant = begun + asked
    first = next((n for n, ms in enumerate(stored) if ms >= instant), len(stored))
    assert searching.offset_at(parts.reader, index, instant) == first
    if stored:
        last = max((n for n, ms in enumerate(stored) if ms <= instant), default=0)
        assert searching.offset_at(parts.reader, index, instant, upper=True) == last
    assert searching.earliest_ms(parts.reader, index) == (stored[0] if stored else -1)
