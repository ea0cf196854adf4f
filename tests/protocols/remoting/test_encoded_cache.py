"""The cache of stored messages: the same bytes as without it, bounded, and never of a row that nobody may see."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.on_node import batch, on_node
from tests.crash.world import World

from timeball.errors import OutOfRange
from timeball.protocols.remoting import encoded_cache as module
from timeball.protocols.remoting.codec.implementation import codec_of
from timeball.protocols.remoting.codec.records import Host, encode_each
from timeball.protocols.remoting.encoded_cache import StoredMessages

HERE, THERE = Host(bytes([10, 0, 0, 1]), 1), Host(bytes([10, 0, 0, 2]), 2)


def plain(world: World, seqs: list[int], host: Host) -> list[bytes]:
    """The reference, of the rows read by themselves; the cache may have the compiled codec."""
    rows = world.broker.parts.reader.read_rows(np.array(seqs, dtype=np.int64))
    return encode_each(rows, store_host=host)


@given(
    sends=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    picks=st.lists(
        st.tuples(st.floats(0, 1), st.floats(0, 1), st.booleans(), st.booleans()), min_size=1, max_size=8
    ),
    stretch=st.sampled_from([1, 7, 256]),
    bytes_max=st.sampled_from([1, 2_000, 1 << 20]),
)
@settings(max_examples=40)
@on_node(queues_per_topic=1)
async def test_the_same_bytes(
    world: World, sends: list[int], picks: list[tuple[float, float, bool, bool]], stretch: int, bytes_max: int
) -> None:
    """Stretches grow while they are read, are dropped and made again, for several hosts."""
    before = module.STRETCH_ROWS, module.CACHE_BYTES_MAX
    module.STRETCH_ROWS, module.CACHE_BYTES_MAX = stretch, bytes_max
    try:
        cache = StoredMessages(world.broker.parts, codec_of("auto"))
        seqs: list[int] = []
        for rows in sends:
            accepted = await world.broker.send(batch(rows))
            seqs += range(accepted.first_seq, accepted.first_seq + rows)
            for begin, end, here, at_once in picks:
                low, high = sorted((int(begin * len(seqs)), int(end * len(seqs))))
                wanted, host = seqs[low:high], HERE if here else THERE
                chosen = np.array(wanted, dtype=np.int64)
                found = cache.get_now(chosen, host) if at_once else await cache.get(chosen, host)
                assert found == plain(world, wanted, host)
        held = sum(stretch.size_bytes for stretch in cache._stretches.values())
        assert held == cache._size_bytes
        assert held <= bytes_max or len(cache._stretches) == 1
    finally:
        module.STRETCH_ROWS, module.CACHE_BYTES_MAX = before


@on_node()
async def test_what_waits_is_not_there(world: World) -> None:
    later = await world.broker.send(batch(1, delay_ms=[60_000]))
    cache = StoredMessages(world.broker.parts, codec_of("auto"))
    with pytest.raises(OutOfRange, match="no visible message"):
        cache.get_now(np.array([later.first_seq]), HERE)
    with pytest.raises(OutOfRange, match="no visible message"):
        await cache.get(np.array([later.first_seq]), HERE)


@on_node(queues_per_topic=1)
async def test_the_old_is_not_read_on_the_loop(world: World) -> None:
    first = await world.broker.send(batch(3))
    cache = StoredMessages(world.broker.parts, codec_of("auto"))
    before, module.FRESH_ROWS = module.FRESH_ROWS, 0
    try:
        await world.broker.send(batch(3))
        old = np.array([first.first_seq])
        assert cache.get_now(old, HERE) is None
        assert await cache.get(old, HERE) == cache.get_now(old, HERE), "it is there now"
    finally:
        module.FRESH_ROWS = before


@on_node(queues_per_topic=1)
async def test_a_stretch_that_is_let_go_while_its_rest_is_read_has_no_hole(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CACHE_BYTES_MAX", 1)
    early = np.arange(3) + (await world.broker.send(batch(3))).first_seq
    cache = StoredMessages(world.broker.parts, codec_of("auto"))
    cache.get_now(early, HERE)
    late = np.array([(await world.broker.send(batch(1))).first_seq])
    reading = asyncio.ensure_future(cache.get(late, HERE))
    await asyncio.sleep(0)
    cache.get_now(early, THERE)  # takes the room
    assert not reading.done()
    await reading
    assert cache.get_now(early, HERE) == plain(world, early.tolist(), HERE)
    assert sum(stretch.size_bytes for stretch in cache._stretches.values()) == cache._size_bytes


@on_node(queues_per_topic=1)
async def test_where_rows_are_large_only_what_is_asked_for_is_read(world: World) -> None:
    """A stretch of bodies of 4 MiB would be a gigabyte, made on the loop."""
    body = b"x" * 2 * module.ROW_BYTES_MAX
    large = (await world.broker.send(batch(3, body=[body] * 3))).first_seq
    later = (await world.broker.send(batch(1, delay_ms=[60_000], body=[body]))).first_seq
    cache = StoredMessages(world.broker.parts, codec_of("auto"))
    assert cache.get_now(np.array([large + 1]), HERE) is None
    assert await cache.get(np.array([large, large + 2]), HERE) == plain(world, [large, large + 2], HERE)
    assert not cache._stretches
    with pytest.raises(OutOfRange, match="no visible message"):
        await cache.get(np.array([later]), HERE)


@on_node(queues_per_topic=1)
async def test_what_records_take_beside_their_bytes_counts(world: World) -> None:
    """Of messages without a body, the objects are more than the bytes."""
    seqs = np.arange(256) + (await world.broker.send(batch(256, body=[b""] * 256))).first_seq
    cache = StoredMessages(world.broker.parts, codec_of("auto"))
    tracemalloc.start()
    try:
        await cache.get(seqs, HERE)
        gc.collect()
        held = sum(
            trace.size
            for trace in tracemalloc.take_snapshot().statistics("filename")
            if trace.traceback[0].filename.endswith(("encoded_cache.py", "records.py"))
        )
    finally:
        tracemalloc.stop()
    assert 0 < held <= cache._size_bytes
