"""Reading rows by number and by range: exactly the requested ones, checked at each decoding, in any thread."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.crash_files import CrashFiles
from tests.held_memory import allocated_bytes
from tests.log.small_log import AtOnce, batch, bodies, opened, reopened

from timeball.io.files import RealFiles
from timeball.log import reader as module
from timeball.log import row_encoder
from timeball.log.reader import FrameCache, LogReader
from timeball.log.segment import Segment, Segments, segment_name
from timeball.model.errors import Corrupt, OutOfRange
from timeball.model.message import LOG_SCHEMA, READ_SCHEMA, Kind, build_rows

SMALL = 4096  # bytes of a segment
RESERVED = 5  # numbers that a TABLE row reserves besides its own


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def log_of(frames: list[tuple[int, int]]) -> tuple[LogReader, dict[int, tuple[int, bytes]]]:
    """Write frames of (rows, kind) into small segments. Returns the reader, and (kind, body) of each row by number.

    The last of several rows is a CANCEL. A TABLE row reserves RESERVED numbers behind its own.
    """
    files = CrashFiles()
    rows: dict[int, tuple[int, bytes]] = {}

    async def write() -> None:
        async with opened(files, disk=AtOnce(), segment_bytes=SMALL) as log:
            for count, kind in frames:
                first_seq, span = log.writer.next_seq, count + RESERVED * (kind == Kind.TABLE)
                row_bodies = [f"{seq}".encode() for seq in range(first_seq, first_seq + count)]
                kinds = pa.array([kind] * (count - 1) + [Kind.CANCEL if count > 1 else kind], pa.int8())
                await log.writer.append(build_rows(count, kind=kinds, topic="t", body=row_bodies), span=span)[
                    1
                ]
                rows.update(enumerate(zip(kinds.to_pylist(), row_bodies, strict=True), first_seq))

    run(write())
    return LogReader(reopened(files, segment_bytes=SMALL).segments), rows


def reader_of_messages(commits: int) -> LogReader:
    """Make a reader of a log with this number of commits of three messages."""
    return log_of([(3, Kind.MESSAGE)] * commits)[0]


def seqs(batches: list[pa.RecordBatch]) -> list[int]:
    """List the sequence numbers of all rows. No batch may be empty."""
    assert all(rows.schema == READ_SCHEMA and rows.num_rows for rows in batches)
    return [seq for rows in batches for seq in rows.column("seq").to_pylist()]


kinds = st.sampled_from([Kind.MESSAGE, Kind.SCHEDULED, Kind.RELEASE, Kind.TABLE])
logs = st.lists(st.tuples(st.integers(1, 6), kinds), max_size=10)


# ---- values of a few rows ---------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(logs, st.sets(st.integers(1, 80), max_size=8))
def test_values_equal_the_rows_and_reserved_numbers_are_left_out(
    frames: list[tuple[int, int]], requested: set[int]
) -> None:
    reader, rows = log_of(frames)
    numbers = sorted(seq for seq in requested if seq < reader.next_seq)
    values = reader.read_values(numbers)
    if row_encoder.LOG_ENCODER is None:
        assert values is None or not numbers
        return
    columns = reader.read_rows(np.array([seq for seq in numbers if seq in rows], np.int64))
    assert values == [tuple(row.values()) for row in columns.to_pylist()]


def test_values_of_a_row_outside_the_log_raise_out_of_range() -> None:
    reader = reader_of_messages(2)
    with pytest.raises(OutOfRange):
        reader.read_values([1, reader.next_seq])


def test_values_of_a_damaged_frame_raise_corrupt() -> None:
    reader = reader_of_messages(2)
    segment = reader.segments.all[0]
    damaged = bytearray(segment.buffer)
    damaged[segment.frame_position_of(2) + 100] ^= 1
    segment.buffer = pa.py_buffer(bytes(damaged))
    with pytest.raises(Corrupt):
        reader.read_values([2])


def test_the_rows_of_a_large_frame_are_read_as_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_encoder, "READABLE_BYTES_MAX", 100)
    assert reader_of_messages(2).read_values([2, 5]) is None


def test_rows_with_large_bodies_are_read_as_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = reader_of_messages(2)
    if row_encoder.LOG_ENCODER is None:
        pytest.skip("without the compiled encoder all rows are read as columns")
    body_bytes = [len(body) for body in reader.read_rows(np.array([2, 5])).column("body").to_pylist()]
    monkeypatch.setattr(module, "VALUES_BYTES_MAX", sum(body_bytes))
    assert len(reader.read_values([2, 5]) or ()) == 2
    monkeypatch.setattr(module, "VALUES_BYTES_MAX", sum(body_bytes) - 1)
    assert reader.read_values([2, 5]) is None


# ---- ranges ----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    logs,
    st.integers(1, 70),
    st.integers(0, 80),
    st.none() | st.sets(st.sampled_from(Kind)),
    st.integers(1, 20),
)
def test_range_returns_its_rows_in_order_for_any_batch_size(
    frames: list[tuple[int, int]],
    from_seq: int,
    to_seq: int,
    chosen_kinds: set[Kind] | None,
    coalesce_rows: int,
) -> None:
    reader, rows = log_of(frames)
    expected = [
        (seq, kind, body)
        for seq, (kind, body) in rows.items()
        if from_seq <= seq < to_seq and (chosen_kinds is None or kind in chosen_kinds)
    ]
    for batches in (
        list(reader.rows(from_seq, to_seq, chosen_kinds)),
        list(reader.coalesced(from_seq, to_seq, chosen_kinds, coalesce_rows)),
    ):
        read_kinds = [kind for part in batches for kind in part.column("kind").to_pylist()]
        assert list(zip(seqs(batches), read_kinds, bodies(batches), strict=True)) == expected


@settings(max_examples=40, deadline=None)
@given(
    logs,
    st.none() | st.sets(st.sampled_from(Kind)),
    st.lists(st.sampled_from(["seq", "kind", "body", "topic", "due_ms"]), min_size=1, unique=True),
)
def test_selected_columns_equal_those_of_whole_rows(
    frames: list[tuple[int, int]], chosen_kinds: set[Kind] | None, columns: list[str]
) -> None:
    reader, _ = log_of(frames)
    all_columns = list(reader.coalesced(1, 80, chosen_kinds, 8))
    assert list(reader.coalesced(1, 80, chosen_kinds, 8, columns)) == [
        rows.select(columns) for rows in all_columns
    ]


def test_coalesced_batches_but_the_last_have_at_least_the_requested_rows() -> None:
    reader = reader_of_messages(20)
    sizes = [rows.num_rows for rows in reader.coalesced(1, 100, None, 8)]
    assert sizes == [9, 9, 9, 9, 9, 9, 6], "three frames of three rows each"


def test_rows_yields_a_batch_for_each_frame() -> None:
    assert [rows.num_rows for rows in reader_of_messages(20).rows(2, 6)] == [2, 2]


def test_frames_are_returned_whole() -> None:
    reader = reader_of_messages(20)
    assert [(seq, rows.num_rows) for seq, rows in reader.frames(5, 8)] == [(4, 3), (7, 3)]
    assert list(reader.frames(5, 5)) == []


def test_range_may_exceed_the_durable_rows_but_not_begin_before_the_kept_ones() -> None:
    reader = reader_of_messages(20)
    assert seqs(list(reader.rows(59, 10**18))) == [59, 60]
    assert list(reader.rows(61, 100)) == list(reader.rows(10**18, 10**18 + 1)) == []
    for before in (0, -5):
        with pytest.raises(OutOfRange, match="keeps 1 to 60"):
            list(reader.rows(before, 10))


def test_reserved_numbers_are_in_no_range() -> None:
    reader, _ = log_of([(2, Kind.MESSAGE), (1, Kind.TABLE), (2, Kind.MESSAGE)])
    assert seqs(list(reader.rows(1, 100))) == [1, 2, 3, 9, 10]
    assert list(reader.rows(4, 9)) == []


def test_rows_are_visible_once_they_are_durable() -> None:
    async def work() -> None:
        async with opened(CrashFiles(), disk=AtOnce()) as log:
            assert (log.reader.first_seq, log.reader.next_seq) == (1, 1)
            for number in range(12):
                await log.append(batch(3 * number))
                assert bodies(log.reader.rows(1, 1_000)) == bodies([batch(0, 3 * number + 3)])

    run(work())


# ---- single rows -----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(logs.filter(bool), st.data())
def test_read_rows_keeps_the_order_and_repetitions_of_numbers(
    frames: list[tuple[int, int]], data: st.DataObject
) -> None:
    reader, rows = log_of(frames)
    requested = data.draw(st.lists(st.sampled_from(sorted(rows)), max_size=20))
    read = reader.read_rows(np.array(requested, np.int64))
    assert read.schema == READ_SCHEMA
    assert read.column("seq").to_pylist() == requested
    assert bodies([read]) == [rows[seq][1] for seq in requested]


@pytest.mark.parametrize("requested", [[1, 1, 3], [1, 3, 3], [3, 1, 1], [2, 2], [1, 2, 2, 3, 3, 6]])
def test_repeated_number_returns_the_row_twice(requested: list[int]) -> None:
    reader, rows = log_of([(6, Kind.MESSAGE)])
    assert bodies([reader.read_rows(np.array(requested, np.int64))]) == [rows[seq][1] for seq in requested]


def test_a_row_that_is_not_kept_or_not_in_the_log_is_out_of_range() -> None:
    reader, _ = log_of([(2, Kind.MESSAGE), (1, Kind.TABLE), (2, Kind.MESSAGE)])
    for seq in (0, 11, 10**18):
        with pytest.raises(OutOfRange, match="keeps 1 to 10"):
            reader.read_rows(np.array([1, seq], np.int64))
    for seq in (4, 8):
        with pytest.raises(OutOfRange, match=f"seq {seq} was set aside for a bulk attach"):
            reader.read_rows(np.array([1, seq, 9], np.int64))


# ---- the cache -------------------------------------------------------------------------------------------


def test_number_of_cached_frames_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHE_FRAMES_MAX", 3)
    reader = reader_of_messages(20)
    for _ in range(2):
        for seq in range(1, 61):
            assert reader.read_rows(np.array([seq], np.int64)).column("seq").to_pylist() == [seq]
            assert len(reader._cache) <= 3


def test_least_recently_read_frame_is_dropped_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHE_FRAMES_MAX", 2)
    reader = reader_of_messages(20)
    for seq in (1, 4, 1, 7):
        reader.read_rows(np.array([seq], np.int64))
    assert [first for first, _ in reader._cache._frames.values()] == [1, 7]


def test_cache_is_bounded_by_memory() -> None:
    """A frame takes at most FRAME_BYTES. Frames of one row, each read once, as consumers read after small commits."""
    frames = 300
    reader = log_of([(1, Kind.MESSAGE)] * frames)[0]
    reader.read_rows(np.array([1], np.int64))  # the memory that only the first read needs
    before = allocated_bytes()
    for seq in range(2, frames + 1):
        reader.read_rows(np.array([seq], np.int64))
    for _, rows in reader._cache._frames.values():
        assert len(rows.columns) == len(LOG_SCHEMA)
    bytes_of_a_frame = (allocated_bytes() - before) / (frames - 1)
    assert bytes_of_a_frame > 1_000, "the measurement counts the frames"
    assert bytes_of_a_frame <= module.FRAME_BYTES
    assert module.CACHE_FRAMES_MAX * module.FRAME_BYTES <= 64 * 1024 * 1024


def test_removed_segment_is_not_cached() -> None:
    reader = reader_of_messages(40)
    segments = reader.segments
    assert len(segments.all) > 2
    for seq in range(1, 121):
        reader.read_rows(np.array([seq], np.int64))
    segment_ref = weakref.ref(segments.all[1])
    segments.drop(segments.all[:2])
    assert segment_ref() is None
    assert {ordinal for ordinal, _ in reader._cache._frames} == {segment.ordinal for segment in segments.all}


def test_reading_a_range_does_not_replace_cached_frames() -> None:
    reader = reader_of_messages(20)
    reader.read_rows(np.array([1], np.int64))
    assert len(list(reader.rows(1, 61))) == 20
    assert [first for first, _ in reader._cache._frames.values()] == [1]


# ---- opened frames -----------------------------------------------------------------------------------------


def empty_segments(count: int) -> Segments:
    return Segments([Segment(number, 1, pa.py_buffer(b"")) for number in range(1, count + 1)])


def test_frame_cache_drops_the_least_recently_used_frame() -> None:
    cache: FrameCache[str] = FrameCache(empty_segments(1), 2)
    cache.keep((1, 0), "a")
    cache.keep((1, 1), "b")
    assert cache.get((1, 0)) == "a", "a use"
    cache.keep((1, 2), "c")
    assert [cache.get((1, position)) for position in range(4)] == ["a", None, "c", None]
    assert len(cache) == 2


def test_frame_cached_twice_takes_no_more_memory() -> None:
    cache: FrameCache[str] = FrameCache(empty_segments(1), 2)
    for frame in "abc":
        cache.keep((1, 0), frame)
    cache.keep((1, 64), "d")
    assert (cache.get((1, 0)), cache.get((1, 64))) == ("c", "d")


def test_frames_of_removed_segments_are_forgotten() -> None:
    segments = empty_segments(3)
    cache: FrameCache[str] = FrameCache(segments, 9)
    for ordinal in (1, 2, 3):
        cache.keep((ordinal, 64), "frame")
    segments.drop(segments.all[:2])
    # Another thread has opened this frame before its segment was removed.
    cache.keep((2, 64), "frame")
    assert [cache.get((ordinal, 64)) for ordinal in (1, 2, 3)] == [None, None, "frame"]


# ---- damage ----------------------------------------------------------------------------------------------


def reader_of_a_damaged_frame(offset: int, data: bytes) -> LogReader:
    """Make a reader of a log whose second frame (rows 4 to 6) has `data` at this offset since the log was opened."""
    files = CrashFiles()

    async def write() -> None:
        async with opened(files, disk=AtOnce()) as log:
            for number in range(4):
                await log.append(batch(3 * number))

    run(write())
    segments = reopened(files).segments
    files.open(segment_name(1)).write_at(segments.last.frame_positions[1] + offset, data)
    return LogReader(segments)


@pytest.mark.parametrize(
    ("offset", "data"),
    [
        pytest.param(0, b"?", id="magic"),
        pytest.param(16, b"?", id="first seq"),
        pytest.param(300, b"?", id="payload"),
        pytest.param(52, bytes(4), id="checksum"),
        pytest.param(0, bytes(4_000), id="zeros over several frames"),
    ],
)
def test_damaged_row_is_an_error_and_never_a_message(offset: int, data: bytes) -> None:
    reader = reader_of_a_damaged_frame(offset, data)
    with pytest.raises(Corrupt):
        reader.read_rows(np.array([5], np.int64))
    read_before = []
    with pytest.raises(Corrupt):
        for rows in reader.rows(1, 13):
            read_before += seqs([rows])
    assert read_before == [1, 2, 3]
    if len(data) < 100:
        assert seqs(list(reader.rows(7, 13))) == list(range(7, 13)), "the other frames can be read"


def test_a_flipped_bit_in_any_byte_of_a_frame_is_an_error() -> None:
    files = CrashFiles()

    async def write() -> None:
        async with opened(files, disk=AtOnce()) as log:
            await log.append(batch(0))

    run(write())
    segments = reopened(files).segments
    content = files.content(segment_name(1))
    file = files.open(segment_name(1))
    for position in range(64, segments.last.end):
        file.write_at(position, bytes([content[position] ^ 0x10]))
        with pytest.raises(Corrupt):
            LogReader(segments).read_rows(np.array([1], np.int64))
        file.write_at(position, content[position : position + 1])
    assert LogReader(segments).read_rows(np.array([1], np.int64)).num_rows == 1


# ---- threads and retention -------------------------------------------------------------------------------


def test_readers_in_many_threads_see_correct_rows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "CACHE_FRAMES_MAX", 4)

    async def work() -> None:
        async with opened(RealFiles(tmp_path)) as log:
            await log.append(batch(1, 3))
            stop = threading.Event()

            def read(seed: int) -> int:
                random, reads = np.random.default_rng(seed), 0
                while not stop.is_set() or not reads:
                    requested = random.integers(1, log.reader.next_seq, 10)
                    rows = bodies([log.reader.read_rows(requested)])
                    assert rows == [f"{number}:".encode().ljust(20, b".") for number in requested]
                    reads += 1
                return reads

            with ThreadPoolExecutor(3) as threads:
                reading = [asyncio.wrap_future(threads.submit(read, seed)) for seed in range(3)]
                try:
                    for number in range(1, 30):
                        await log.append(batch(3 * number + 1))
                finally:
                    stop.set()
                assert all(await asyncio.gather(*reading))

    run(work())


def test_reader_finishes_its_range_during_retention(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)

    async def work() -> None:
        async with opened(files, segment_bytes=SMALL) as log:
            for number in range(10):
                await log.append(batch(3 * number))
            reading = log.reader.rows(1, 31)
            first = next(reading)
            log.segments.remove(files, log.segments.all[:3])
            assert seqs([first, *reading]) == list(range(1, 31))
            first_seq = log.reader.first_seq
            assert first_seq > 1 and seqs(list(log.reader.rows(first_seq, 31))) == list(range(first_seq, 31))
            with pytest.raises(OutOfRange, match=f"keeps {first_seq} to 30"):
                log.reader.read_rows(np.array([1], np.int64))

    run(work())


@given(
    frames=st.lists(st.tuples(st.integers(1, 9), st.just(Kind.MESSAGE)), min_size=1, max_size=12),
    ends=st.tuples(st.integers(0, 130), st.integers(0, 130)),
)
@settings(max_examples=40)
def test_row_bytes_is_the_average_of_the_frames(frames: list[tuple[int, int]], ends: tuple[int, int]) -> None:
    reader, _ = log_of(frames)
    low, high = sorted(min(reader.first_seq + end, reader.next_seq) for end in ends)
    rows = size_bytes = 0
    for segment in reader.segments.all:
        byte_ranges = pairwise([*segment.frame_positions, segment.end])
        seq_ranges = pairwise([*segment.frame_seqs, segment.next_seq])
        for (begin, end), (first_seq, next_seq) in zip(byte_ranges, seq_ranges, strict=True):
            if first_seq < high and low < next_seq:
                rows += next_seq - first_seq
                size_bytes += end - begin
    assert reader.row_bytes(low, high) == (size_bytes // rows if rows and low < high else 0)
