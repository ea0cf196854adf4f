"""Segments: look-ups, preparation of a spare, removal by retention, and the restarts of the log."""

from __future__ import annotations

import asyncio
import threading
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.crash_files import CrashFiles, PowerCut
from tests.log.small_log import AtOnce, batch, opened, read_all, reopened

from timeball.io.files import Files, RealFiles
from timeball.log import format as fmt
from timeball.log import recovery
from timeball.log.key_index import KeyIndex
from timeball.log.reader import LogReader
from timeball.log.segment import (
    FOLDER,
    Segment,
    Segments,
    begin_segment,
    last_epoch,
    prepare,
    segment_name,
    starts,
)
from timeball.model.answers import Start
from timeball.model.errors import Corrupt, DiskFailed, OutOfRange, OverLimit
from timeball.model.message import Kind, build_rows

BLANK = pa.py_buffer(bytes(64))


def frame(position: int, first_seq: int, span: int, *, append_ms: int = 0) -> fmt.Frame:
    """Build the header of a frame of 128 bytes and `span` rows."""
    return fmt.Frame(
        position=position, length=128, rows=span, first_seq=first_seq, span=span, append_ms=append_ms, epoch=1,
        payload=64, synced_to=position,
    )  # fmt: skip


def segment_with(ordinal: int, first_seq: int, spans: list[int]) -> Segment:
    """Make a segment with a frame for each of these numbers of rows."""
    segment = Segment(ordinal, first_seq, BLANK)
    for span in spans:
        segment.add(frame(segment.end, segment.next_seq, span))
    return segment


def test_segment_names_sort_like_ordinals() -> None:
    assert segment_name(7) == "log/0000000007.log"
    assert sorted(map(segment_name, [100, 9, 2_000_000_000])) == list(
        map(segment_name, [9, 100, 2_000_000_000])
    )


def test_frame_is_found_by_any_of_its_numbers() -> None:
    segment = segment_with(1, 5, [3, 100, 1])
    positions = [segment.frame_position_of(seq) for seq in (5, 7, 8, 107, 108)]
    assert positions == [64, 64, 192, 192, 320]
    assert (segment.next_seq, segment.end) == (109, 448)


def test_frame_that_leaves_a_gap_fails_an_assertion() -> None:
    segment = segment_with(1, 5, [3])  # the next frame begins at byte 192, with seq 8
    for wrong in (frame(64, 8, 1), frame(192, 9, 1)):
        with pytest.raises(AssertionError):
            segment.add(wrong)


def three_segments() -> Segments:
    return Segments([segment_with(1, 1, [4]), segment_with(2, 5, [2, 2]), segment_with(3, 9, [1])])


def test_holding_finds_the_segment_of_a_number() -> None:
    segments = three_segments()
    assert [segments.find_segment(seq).ordinal for seq in range(1, 10)] == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert (segments.first_seq, segments.next_seq, segments.last.ordinal) == (1, 10, 3)
    assert segments.size_bytes == 192 + 320 + 192


@pytest.mark.parametrize("seq", [-1, 0, 10, 10**18])
def test_number_outside_the_log_raises_out_of_range_with_the_kept_range(seq: int) -> None:
    with pytest.raises(OutOfRange, match="keeps 1 to 9"):
        three_segments().find_segment(seq)


def test_only_the_oldest_segments_may_be_dropped_and_never_all() -> None:
    segments = three_segments()
    first, second, last = segments.all
    for wrong in ([second], [second, first], [first, second, last]):
        with pytest.raises(AssertionError):
            segments.drop(wrong)
    list_of_a_reader = segments.all
    segments.drop([first])
    assert segments.first_seq == 5
    assert [segment.ordinal for segment in list_of_a_reader] == [1, 2, 3], (
        "the list was replaced, not changed"
    )


def test_a_segment_begun_while_another_is_dropped_is_not_forgotten() -> None:
    class Slow(list[Segment]):
        """A list that lets the event loop's thread run between its read and its replacement."""

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            result = list.__getitem__(self, key)
            if isinstance(key, slice) and key.start:
                adder.start()
                adder.join(0.2)  # with the lock, the thread waits until the list is replaced
            return result

    segments = Segments(Slow(three_segments().all))
    adder = threading.Thread(target=lambda: segments.add(segment_with(4, 10, [1])))
    segments.drop(segments.all[:1])
    adder.join()
    assert [segment.ordinal for segment in segments.all] == [2, 3, 4]


# ---- spares ----------------------------------------------------------------------------------------------


def empty_folder() -> CrashFiles:
    files = CrashFiles()
    files.make_dir(FOLDER)
    return files


def test_a_spare_is_durable_and_blank() -> None:
    files = empty_folder()
    prepare(files, 1, 4096)
    after = files.crash(survival="nothing")
    assert after.content(segment_name(1)) == bytes(4096)
    assert fmt.read_segment_header(after.map_readonly(segment_name(1))) is None


def test_a_segment_is_begun_durably() -> None:
    files = empty_folder()
    segment = begin_segment(prepare(files, 1, 4096), 17, 5)
    assert (segment.first_seq, segment.next_seq, segment.end) == (17, 17, 64)
    after = files.crash(survival="nothing")
    assert fmt.read_segment_header(after.map_readonly(segment_name(1))) == 17


@pytest.mark.parametrize("error", [OverLimit("full"), DiskFailed("broken")])
def test_failed_preparation_leaves_no_file(error: OverLimit | DiskFailed) -> None:
    without_failure = empty_folder()
    calls_before = without_failure.calls
    prepare(without_failure, 1, 4096)
    failed = 0
    for call in range(calls_before + 1, without_failure.calls + 1):
        files = empty_folder()
        files.fail_at(call, type(error)(*error.args))
        try:
            prepare(files, 1, 4096)
        except type(error):
            failed += 1
            assert not files.exists(segment_name(1))
    assert failed >= 2


def test_power_cut_during_a_preparation_leaves_a_spare_or_nothing() -> None:
    uncut = empty_folder()
    calls_before = uncut.calls
    begin_segment(prepare(uncut, 1, 4096), 17, 5)
    for call in range(calls_before + 1, uncut.calls + 1):
        files = empty_folder()
        files.crash_at = call
        with pytest.raises(PowerCut):
            begin_segment(prepare(files, 1, 4096), 17, 5)
        for seed in range(5):
            after = files.crash(seed)
            if after.exists(segment_name(1)):
                assert fmt.read_segment_header(after.map_readonly(segment_name(1))) in (None, 17)


SMALL = 4096  # bytes of a segment


def segments_of(spans_and_times: list[tuple[int, int]]) -> Segments:
    """Make segments of one frame each, with these numbers of rows and times of append."""
    segments, first_seq = [], 1
    for ordinal, (span, append_ms) in enumerate(spans_and_times, 1):
        segment = Segment(ordinal, first_seq, BLANK)
        segment.add(frame(segment.end, first_seq, span, append_ms=append_ms))
        first_seq = segment.next_seq
        segments.append(segment)
    return Segments(segments)


# ---- expired segments ------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 100)), min_size=1, max_size=8),
    st.integers(0, 200),
    st.integers(0, 100),
    st.integers(0, 50),
)
def test_expired_lists_old_unneeded_segments_before_the_first_one_that_stays(
    spans_and_times: list[tuple[int, int]], now_ms: int, retention_ms: int, needed_from_seq: int
) -> None:
    segments = segments_of(spans_and_times)
    expired = segments.expired(now_ms=now_ms, retention_ms=retention_ms, needed_from_seq=needed_from_seq)
    assert expired == segments.all[: len(expired)], "the oldest, in order"
    assert len(expired) < len(segments.all)

    def is_removable(segment: Segment) -> bool:
        """Check one segment alone. A time in the future is replaced by the next one that is not in the future."""
        times_ms = [append_ms for _, append_ms in spans_and_times[segments.all.index(segment) :]]
        append_ms = next((append_ms for append_ms in times_ms if append_ms <= now_ms), now_ms)
        return segment.next_seq <= needed_from_seq and now_ms - append_ms >= retention_ms

    assert all(map(is_removable, expired))
    following = segments.all[len(expired)]
    assert following is segments.last or not is_removable(following)


@pytest.mark.parametrize(
    ("now_ms", "needed_from_seq", "count"),
    [  # the segments end before seq 4, 7 and 10, and were written at 100, 200 and 300 ms
        (1_099, 99, 0),
        (1_100, 99, 1),
        (1_200, 99, 2),
        (9_999, 99, 2),
        (9_999, 3, 0),
        (9_999, 4, 1),
        (9_999, 7, 2),
    ],
)
def test_expired_is_exact_in_time_and_number(now_ms: int, needed_from_seq: int, count: int) -> None:
    segments = segments_of([(3, 100), (3, 200), (3, 300)])
    expired = segments.expired(now_ms=now_ms, retention_ms=1_000, needed_from_seq=needed_from_seq)
    assert len(expired) == count


def test_young_segment_keeps_the_segments_after_it() -> None:
    """The clock was set back after the first segment. Segments are removed in their order, without a gap."""
    segments = segments_of([(3, 1_500), (3, 100), (3, 300)])
    assert segments.expired(now_ms=2_000, retention_ms=1_000, needed_from_seq=99) == []


@pytest.mark.parametrize(("now_ms", "count"), [(299, 0), (1_299, 0), (1_300, 3), (1_399, 3), (1_400, 4)])
def test_a_time_in_the_future_is_bounded_by_the_next_segment(now_ms: int, count: int) -> None:
    """The clock was ahead for a moment. Rows with such a time are at least as old as the next row with a right time."""
    segments = segments_of([(3, 9_000), (3, 8_000), (3, 300), (3, 400), (3, 9_500)])
    expired = segments.expired(now_ms=now_ms, retention_ms=1_000, needed_from_seq=99)
    assert len(expired) == count


def test_an_empty_newest_segment_does_not_bound_the_age_of_others() -> None:
    segments = segments_of([(3, 9_000)])
    segments.add(Segment(2, 4, BLANK))
    assert segments.expired(now_ms=2_000, retention_ms=1_000, needed_from_seq=99) == []


# ---- removing --------------------------------------------------------------------------------------------


def written(files: Files, *, caches: bool = True) -> Segments:
    """Write a log of at least four segments, with the key runs and frame indexes of a broker if `caches`."""

    async def write() -> Segments:
        async with opened(files, disk=AtOnce(), segment_bytes=SMALL) as log:
            for number in range(8):
                await log.append(batch(3 * number))
            if caches:
                KeyIndex(files, log.segments, log.reader).find_rows(np.array([1], np.uint64))
                recovery.save_sealed(files, log.segments)
            return log.segments

    segments = asyncio.run(write())
    assert len(segments.all) >= 4
    return segments


@pytest.mark.parametrize("make", [lambda path: CrashFiles(), RealFiles], ids=["crash", "real"])
def test_remove_deletes_a_segment_and_its_caches_only(make, tmp_path) -> None:  # type: ignore[no-untyped-def]
    files: Files = make(tmp_path)
    segments = written(files)
    rows, removed = read_all(segments), segments.all[:2]
    names_before = files.list_dir(FOLDER)
    segments.remove(files, removed)
    first_seq = segments.first_seq
    assert first_seq == removed[-1].next_seq
    assert set(names_before) - set(files.list_dir(FOLDER)) == {
        f"{ordinal:010d}.{kind}" for ordinal in (1, 2) for kind in ("log", "keys", "frames")
    }
    assert read_all(segments) == {seq: body for seq, body in rows.items() if seq >= first_seq}
    recovered = reopened(files, segment_bytes=SMALL)
    assert read_all(recovered.segments) == read_all(segments)
    recovered.file.file.close()


def test_remove_of_no_segments_does_nothing() -> None:
    files = CrashFiles()
    segments = written(files)
    calls = files.calls
    segments.remove(files, [])
    assert files.calls == calls


def test_the_last_segment_and_one_in_the_middle_are_never_removed() -> None:
    files = CrashFiles()
    segments = written(files)
    calls = files.calls
    for wrong in (segments.all, segments.all[1:2], segments.all[1::-1]):
        with pytest.raises(AssertionError):
            segments.remove(files, wrong)
    assert files.calls == calls


def test_mapping_of_a_removed_segment_stays_readable() -> None:
    files = CrashFiles()
    segments = written(files)
    reading = LogReader(segments).rows(1, 1_000)
    first = next(reading)
    segments.remove(files, segments.all[:-1])
    read_seqs = [seq for rows in (first, *reading) for seq in rows.column("seq").to_pylist()]
    assert read_seqs == list(range(1, 25))


def images(*, forget_sync_dir: bool = False) -> list[CrashFiles]:
    """List the disks after a power cut at each call of a removal."""
    uncut = CrashFiles(forget_sync_dir=forget_sync_dir)
    segments = written(uncut)
    calls_before = uncut.calls
    segments.remove(uncut, segments.all[:-1])
    disks = []
    for cut in range(calls_before + 1, uncut.calls + 1):
        files = CrashFiles(forget_sync_dir=forget_sync_dir)
        segments = written(files)
        files.crash_at = cut
        with pytest.raises(PowerCut):
            segments.remove(files, segments.all[:-1])
        disks += [files.crash(seed) for seed in range(6)]
    return disks


def test_power_cut_during_removal_leaves_no_gap() -> None:
    rows = read_all(written(CrashFiles()))
    first_seqs = set()
    for image in images():
        segments = reopened(image, segment_bytes=SMALL).segments
        assert read_all(segments) == {seq: body for seq, body in rows.items() if seq >= segments.first_seq}
        assert segments.next_seq == 25
        first_seqs.add(segments.first_seq)
    assert len(first_seqs) > 2, "the cuts fell between the removals, too"


def test_removal_without_folder_syncs_is_noticed() -> None:
    """The control: without syncs in between, a later name may be removed and an earlier one be back."""
    refused = 0
    for image in images(forget_sync_dir=True):
        try:
            segments = reopened(image, segment_bytes=SMALL).segments
            refused += segments.next_seq != 25
        except Corrupt:
            refused += 1
    assert refused > 0


def test_kept_segments_keep_their_names() -> None:
    files = CrashFiles()
    segments = written(files, caches=False)
    segments.remove(files, segments.all[:1])
    names = [segment.name for segment in segments.all]
    assert names == list(map(segment_name, range(2, 2 + len(names))))


# ---- restarts of the broker ------------------------------------------------------------------------------

END_SEQ = 1 << 62  # after any row


class Written(NamedTuple):
    """A frame of one row."""

    seq: int
    append_ms: int


def log_of_runs(frame_counts: list[int]) -> tuple[CrashFiles, list[Written]]:
    """Write a log in several runs with these numbers of frames. Returns it and its frames."""
    files, frames = CrashFiles(), []

    async def run(number: int, frame_count: int) -> None:
        async with opened(files, disk=AtOnce(), segment_bytes=SMALL) as log:
            log.clock.advance(1_000 * number)
            for _ in range(frame_count):
                log.clock.advance(10)
                rows = build_rows(1, kind=int(Kind.MESSAGE), topic="t", body=b"x" * 400)
                await log.writer.append(rows)[1]
                frames.append(Written(log.segments.next_seq - 1, log.segments.last.newest_append_ms))

    for number, frame_count in enumerate(frame_counts):
        asyncio.run(run(number, frame_count))
    return files, frames


def expected_starts(frame_counts: list[int], frames: list[Written]) -> list[Start]:
    """List the first frame of each run that wrote any, except the first run."""
    restarts, first = [], 0
    for frame_count in frame_counts:
        if frame_count and first:
            restarts.append(Start(frames[first].seq, frames[first].append_ms, frames[first - 1].append_ms))
        first += frame_count
    return restarts


def segments_in(files: CrashFiles) -> Segments:
    return reopened(files, segment_bytes=SMALL).segments


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=5), st.booleans(), st.data())
def test_starts_lists_every_run_that_wrote_a_frame_but_the_first(
    frame_counts: list[int], is_indexed: bool, data: st.DataObject
) -> None:
    files, frames = log_of_runs(frame_counts)
    log = segments_in(files)
    if is_indexed:
        recovery.save_sealed(files, log)
    expected = expected_starts(frame_counts, frames)
    assert starts(log, 0, END_SEQ) == expected
    assert last_epoch(log) == sum(count > 0 for count in frame_counts)
    low, high = sorted(data.draw(st.tuples(st.integers(0, 70), st.integers(0, 70))))
    assert starts(log, low, high) == [start for start in expected if low <= start.first_seq < high]


def test_starts_omits_the_run_of_the_oldest_kept_frame() -> None:
    files, frames = log_of_runs([12, 12, 3])
    log = segments_in(files)
    first_kept_seq = log.all[2].first_seq
    expected = [start for start in expected_starts([12, 12, 3], frames) if start.first_seq > first_kept_seq]
    log.drop(log.all[:2])
    assert starts(log, 0, END_SEQ) == expected


def test_blank_frame_raises_corrupt() -> None:
    files, _ = log_of_runs([1, 1])
    log = segments_in(files)
    name, position = log.last.name, int(log.last.frame_positions[-1])
    file = files.open(name)
    file.write_at(position, bytes(fmt.ALIGN))
    log.last.buffer = files.map_readonly(name)
    with pytest.raises(Corrupt, match="has become blank"):
        starts(log, 0, END_SEQ)


def test_a_log_without_frames_has_no_epoch() -> None:
    assert last_epoch(segments_in(CrashFiles())) == 0
