"""Stored messages from frames of the log: the same bytes as `encode_each`, a limited cache, and only visible rows."""

from __future__ import annotations

import asyncio
import threading
from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.on_node import batch, on_node
from tests.crash.world import World

from timeball.edges.remoting.codec.implementation import CODEC, PYTHON, Codec
from timeball.edges.remoting.codec.records import Host, encode_each
from timeball.edges.remoting.handlers import pulls as module
from timeball.edges.remoting.handlers.pulls import StoredFrames
from timeball.model.errors import Corrupt, OutOfRange

HOST, OTHER_HOST = Host(bytes([10, 0, 0, 1]), 1), Host(bytes([10, 0, 0, 2]), 2)
ANY_BYTES = 1 << 30  # an answer may be as long as its messages are


def encode_rows(world: World, seqs: list[int], host: Host) -> list[bytes]:
    """Encode rows with `encode_each`, one by one."""
    rows = world.broker.log.reader.read_rows(np.array(seqs, dtype=np.int64))
    return encode_each(rows, store_host=host)


def join_fitting(records: list[bytes], bytes_max: int) -> tuple[int, bytes]:
    """Return the number of records that fit into an answer, at least one, and their bytes."""
    count = sum(end <= bytes_max for end in accumulate(map(len, records)))
    count = max(count, min(1, len(records)))
    return count, b"".join(records[:count])


def frames_of(world: World, codec: Codec = PYTHON) -> StoredFrames:
    return StoredFrames(codec, reader=world.broker.log.reader, reader_thread=world.broker.threads.reader)


@pytest.mark.parametrize("codec", [CODEC, PYTHON], ids=["installed", "python"])
@given(
    sends=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    picks=st.lists(
        st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(1, 3), st.booleans(), st.booleans()),
        min_size=1,
        max_size=8,
    ),
    fresh_rows=st.sampled_from([0, 20, 1 << 20]),
    bytes_max=st.sampled_from([1, 700, 1 << 20]),
)
@settings(max_examples=40)
@on_node(queues_per_topic=1)
async def test_stored_frames_give_the_same_bytes_as_encode_each(
    world: World,
    codec: Codec,
    sends: list[int],
    picks: list[tuple[float, float, int, bool, bool]],
    fresh_rows: int,
    bytes_max: int,
) -> None:
    """The log grows by each of `sends` rows, and then each of `picks` gets rows.

    A pick is the begin and the end of the rows as fractions of all rows, the step between them, which of the two hosts
    is used, and whether the rows are first tried from memory.
    """
    before, module.FRESH_ROWS = module.FRESH_ROWS, fresh_rows
    try:
        source = frames_of(world, codec)
        seqs: list[int] = []
        for rows in sends:
            accepted = await world.broker.send(batch(rows))
            seqs += range(accepted.first_seq, accepted.first_seq + rows)
            for begin, end, step, is_other_host, from_memory in picks:
                low, high = sorted((int(begin * len(seqs)), int(end * len(seqs))))
                picked, host = seqs[low:high:step], OTHER_HOST if is_other_host else HOST
                result = source.get_from_memory(picked, host, bytes_max) if from_memory else None
                if result is None:
                    assert fresh_rows < 1 << 20 or not from_memory
                    result = await source.get(picked, host, bytes_max)
                assert result == join_fitting(encode_rows(world, picked, host), bytes_max)
    finally:
        module.FRESH_ROWS = before


@pytest.mark.parametrize("codec", [CODEC, PYTHON], ids=["installed", "python"])
@on_node()
async def test_a_pending_message_is_out_of_range(world: World, codec: Codec) -> None:
    pending = await world.broker.send(batch(1, delay_ms=[60_000]))
    source = frames_of(world, codec)
    for seq in (pending.first_seq, pending.first_seq + 100):
        with pytest.raises(OutOfRange):
            source.get_from_memory([seq], HOST, ANY_BYTES)
        with pytest.raises(OutOfRange):
            await source.get([seq], HOST, ANY_BYTES)


@on_node(queues_per_topic=1)
async def test_an_old_frame_is_not_opened_on_the_loop(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    first = (await world.broker.send(batch(3))).first_seq
    second = (await world.broker.send(batch(3))).first_seq
    source = frames_of(world)
    monkeypatch.setattr(module, "FRESH_ROWS", 0)
    assert source.get_from_memory([first], HOST, ANY_BYTES) is None
    assert await source.get([first], HOST, ANY_BYTES) == source.get_from_memory([first], HOST, ANY_BYTES), (
        "the frame is open"
    )
    assert source.get_from_memory([first, second], HOST, ANY_BYTES) is not None, (
        "the following frame is open, too"
    )


@on_node(queues_per_topic=1)
async def test_a_large_frame_is_not_opened_on_the_loop(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    large = (await world.broker.send(batch(2, body=[b"x" * 600_000] * 2))).first_seq
    source = frames_of(world)
    assert source.get_from_memory([large], HOST, ANY_BYTES) is None
    count, body = await source.get([large, large + 1], HOST, 700_000)
    assert (count, body) == (1, encode_rows(world, [large], HOST)[0])


@on_node(queues_per_topic=1)
async def test_concurrent_pulls_of_the_same_frames_share_one_opening(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    seqs = [(await world.broker.send(batch(2))).first_seq for _ in range(4)]
    monkeypatch.setattr(module, "FRESH_ROWS", 0)
    source = frames_of(world)
    gate = threading.Event()
    world.broker.threads.reader.submit(gate.wait)  # the reader thread waits until all three pulls have asked
    waiting = [
        asyncio.ensure_future(source.get([seqs[0] + n, seqs[3] + n], HOST, ANY_BYTES)) for n in (0, 1, 0)
    ]
    await asyncio.sleep(0)
    assert len(source._opening) == 1
    gate.set()
    waiting[0].cancel()  # its client has disconnected, but the others still wait for the frames
    result = await asyncio.gather(*waiting[1:])
    for n, (count, body) in zip((1, 0), result, strict=True):
        assert (count, body) == (2, b"".join(encode_rows(world, [seqs[0] + n, seqs[3] + n], HOST)))
    assert not source._opening


@on_node(queues_per_topic=1)
async def test_a_corrupt_following_frame_fails_only_pulls_that_need_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = (await world.broker.send(batch(1))).first_seq
    second = (await world.broker.send(batch(1))).first_seq
    monkeypatch.setattr(module, "FRESH_ROWS", 0)
    segment = world.broker.log.reader.segments.find_segment(second)
    world.broker.files.open(segment.name).write_at(segment.frame_position_of(second) + 300, b"rot")
    source = frames_of(world)
    assert (await source.get([first], HOST, ANY_BYTES))[0] == 1
    with pytest.raises(Corrupt, match="restore this file"):
        await source.get([second], HOST, ANY_BYTES)
    assert not source._opening


@on_node(queues_per_topic=1)
async def test_the_number_of_open_frames_is_limited(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHE_FRAMES_MAX", 2)
    monkeypatch.setattr(module, "FRESH_ROWS", 0)
    source = frames_of(world, PYTHON)
    seqs = [(await world.broker.send(batch(1))).first_seq for _ in range(5)]
    assert (await source.get(seqs, HOST, ANY_BYTES))[0] == 5
    assert len(source._frames) == 2


@on_node(queues_per_topic=1)
async def test_the_last_used_frame_is_dropped_with_its_segment(world: World) -> None:
    source, segments = frames_of(world, PYTHON), world.broker.log.reader.segments
    seq = (await world.broker.send(batch(1))).first_seq
    expected = encode_rows(world, [seq], HOST)
    for _ in range(2):
        assert source.get_from_memory([seq], HOST, ANY_BYTES) == (1, expected[0])
    assert source._last_frame is not None
    for forget in segments.on_drop:
        forget([segments.last])
    assert source._last_frame is None and not len(source._frames)
