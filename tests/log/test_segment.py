"""Segments: look-ups, preparation of a spare, removal by retention, and the restarts of the log."""

from __future__ import annotations

import asyncio
import threading

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
    return fmt.Frame(position, 128, span, first_seq, span, append_ms, 1, 64, position)


def filled(ordinal: int, first_seq: int, spans: list[int]) -> Segment:
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
    segment = filled(1, 5, [3, 100, 1])
    positions = [segment.frame_position_of(seq) for seq in (5, 7, 8, 107, 108)]
    assert positions == [64, 64, 192, 192, 320]
    assert (segment.next_seq, segment.end) == (109, 448)


def test_frame_that_leaves_a_gap_fails_an_assertion() -> None:
    segment = filled(1, 5, [3])
    for wrong in (frame(64, 8, 1), frame(192, 9, 1)):
        with pytest.raises(AssertionError):
            segment.add(wrong)


def three() -> Segments:
    return Segments([filled(1, 1, [4]), filled(2, 5, [2, 2]), filled(3, 9, [1])])


def test_holding_finds_the_segment_of_a_number() -> None:
    segments = three()
    assert [segments.holding(seq).ordinal for seq in range(1, 10)] == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert (segments.first_seq, segments.next_seq, segments.last.ordinal) == (1, 10, 3)
    assert segments.size_bytes == 192 + 320 + 192


@pytest.mark.parametrize("seq", [-1, 0, 10, 10**18])
def test_number_outside_the_log_raises_out_of_range_with_the_kept_range(seq: int) -> None:
    with pytest.raises(OutOfRange, match="keeps 1 to 9"):
        three().holding(seq)


def test_only_the_oldest_may_be_dropped_and_never_all() -> None:
    segments = three()
    first, second, last = segments.all
    for wrong in ([second], [second, first], [first, second, last]):
        with pytest.raises(AssertionError):
            segments.drop(wrong)
    held = segments.all
    segments.drop([first])
    assert segments.first_seq == 5
    assert [s.ordinal for s in held] == [1, 2, 3], "a reader's list does not change under it"


def test_a_segment_begun_while_another_is_dropped_is_not_forgotten() -> None:
    class Slow(list[Segment]):
        """A list that lets the event loop's thread run between its read and its replacement."""

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            found = list.__getitem__(self, key)
            if isinstance(key, slice) and key.start:
                adder.start()
                adder.join(0.2)  # with the lock, it waits until the list is replaced
            return found

    segments = Segments(Slow(three().all))
    adder = threading.Thread(target=lambda: segments.add(filled(4, 10, [1])))
    segments.drop(segments.all[:1])
    adder.join()
    assert [s.ordinal for s in segments.all] == [2, 3, 4]


# ---- spares ----------------------------------------------------------------------------------------------


def folder() -> CrashFiles:
    files = CrashFiles()
    files.make_dir(FOLDER)
    return files


def test_a_spare_is_durable_and_blank() -> None:
    files = folder()
    prepare(files, 1, 4096)
    after = files.crash(survival="nothing")
    assert after.content(segment_name(1)) == bytes(4096)
    assert fmt.read_segment_header(after.map_readonly(segment_name(1))) is None


def test_a_segment_is_begun_durably() -> None:
    files = folder()
    segment = begin_segment(prepare(files, 1, 4096), 17, 5)
    assert (segment.first_seq, segment.next_seq, segment.end) == (17, 17, 64)
    after = files.crash(survival="nothing")
    assert fmt.read_segment_header(after.map_readonly(segment_name(1))) == 17


@pytest.mark.parametrize("error", [OverLimit("full"), DiskFailed("broken")])
def test_failed_preparation_leaves_no_file(error: OverLimit | DiskFailed) -> None:
    whole = folder()
    before = whole.calls
    prepare(whole, 1, 4096)
    failed = 0
    for call in range(before + 1, whole.calls + 1):
        files = folder()
        files.fail_at(call, type(error)(*error.args))
        try:
            prepare(files, 1, 4096)
        except type(error):
            failed += 1
            assert not files.exists(segment_name(1))
    assert failed >= 2


def test_power_cut_during_a_preparation_leaves_a_spare_or_nothing() -> None:
    whole = folder()
    before = whole.calls
    begin_segment(prepare(whole, 1, 4096), 17, 5)
    for call in range(before + 1, whole.calls + 1):
        files = folder()
        files.crash_at = call
        with pytest.raises(PowerCut):
            begin_segment(prepare(files, 1, 4096), 17, 5)
        for seed in range(5):
            after = files.crash(seed)
            if after.exists(segment_name(1)):
                assert fmt.read_segment_header(after.map_readonly(segment_name(1))) in (None, 17)


SMALL = 4096


def segments_of(spans_and_times: list[tuple[int, int]]) -> Segments:
    """Make one frame per segment, with these numbers of rows and times of append."""
    found, first_seq = [], 1
    for ordinal, (span, append_ms) in enumerate(spans_and_times, 1):
        segment = Segment(ordinal, first_seq, BLANK)
        segment.add(fmt.Frame(segment.end, 128, span, first_seq, span, append_ms, 1, 64, 0))
        first_seq = segment.next_seq
        found.append(segment)
    return Segments(found)


# ---- what may go -----------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 100)), min_size=1, max_size=8),
    st.integers(0, 200),
    st.integers(0, 100),
    st.integers(0, 50),
)
def test_expired_lists_old_unneeded_segments_before_the_first_kept(
    spans_and_times: list[tuple[int, int]], now_ms: int, retention_ms: int, needed_from_seq: int
) -> None:
    segments = segments_of(spans_and_times)
    gone = segments.expired(now_ms=now_ms, retention_ms=retention_ms, needed_from_seq=needed_from_seq)
    assert gone == segments.all[: len(gone)], "the oldest, in order"
    assert len(gone) < len(segments.all)

    def may_go(segment: Segment) -> bool:
        after = [append_ms for _, append_ms in spans_and_times[segments.all.index(segment) :]]
        append_ms = next((append_ms for append_ms in after if append_ms <= now_ms), now_ms)
        return segment.next_seq <= needed_from_seq and now_ms - append_ms >= retention_ms

    assert all(map(may_go, gone))
    following = segments.all[len(gone)]
    assert following is segments.last or not may_go(following)


@pytest.mark.parametrize(
    ("now_ms", "needed_from_seq", "count"),
    [
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


def test_young_segment_keeps_older_ones_after_it() -> None:
    """The clock was set back. Segments are removed by number, or the log would get a gap."""
    segments = segments_of([(3, 1_500), (3, 100), (3, 300)])
    assert segments.expired(now_ms=2_000, retention_ms=1_000, needed_from_seq=99) == []


@pytest.mark.parametrize(("now_ms", "count"), [(299, 0), (1_299, 0), (1_300, 3), (1_399, 3), (1_400, 4)])
def test_a_time_in_the_future_is_bounded_by_the_next_segment(now_ms: int, count: int) -> None:
    """The clock was ahead for a moment. The rows before that are as old as the first row with a right time after it."""
    segments = segments_of([(3, 9_000), (3, 8_000), (3, 300), (3, 400), (3, 9_500)])
    expired = segments.expired(now_ms=now_ms, retention_ms=1_000, needed_from_seq=99)
    assert len(expired) == count


def test_an_empty_newest_segment_says_nothing_of_the_age() -> None:
    segments = segments_of([(3, 9_000)])
    segments.add(Segment(2, 4, BLANK))
    assert segments.expired(now_ms=2_000, retention_ms=1_000, needed_from_seq=99) == []


# ---- removing --------------------------------------------------------------------------------------------


def written(files: Files, *, caches: bool = True) -> Segments:
    """Make a closed log of at least four segments, with the caches of a broker."""

    async def write() -> Segments:
        async with opened(files, disk=AtOnce(), segment_bytes=SMALL) as log:
            for n in range(8):
                await log.append(batch(3 * n))
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
    rows, gone = read_all(segments), segments.all[:2]
    calls = files.list_dir(FOLDER)
    segments.remove(files, gone)
    first_seq = segments.first_seq
    assert first_seq == gone[-1].next_seq
    assert set(calls) - set(files.list_dir(FOLDER)) == {
        f"{ordinal:010d}.{kind}" for ordinal in (1, 2) for kind in ("log", "keys", "frames")
    }
    assert read_all(segments) == {seq: body for seq, body in rows.items() if seq >= first_seq}
    found = reopened(files, segment_bytes=SMALL)
    assert read_all(found.segments) == read_all(segments)
    found.file.file.close()


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
    whole = CrashFiles(forget_sync_dir=forget_sync_dir)
    segments = written(whole)
    begun = whole.calls
    segments.remove(whole, segments.all[:-1])
    found = []
    for cut in range(begun + 1, whole.calls + 1):
        files = CrashFiles(forget_sync_dir=forget_sync_dir)
        segments = written(files)
        files.crash_at = cut
        with pytest.raises(PowerCut):
            segments.remove(files, segments.all[:-1])
        found += [files.crash(seed) for seed in range(6)]
    return found


def test_power_cut_during_removal_leaves_no_gap() -> None:
    rows = read_all(written(CrashFiles()))
    beginnings = set()
    for image in images():
        segments = reopened(image, segment_bytes=SMALL).segments
        assert read_all(segments) == {seq: body for seq, body in rows.items() if seq >= segments.first_seq}
        assert segments.next_seq == 25
        beginnings.add(segments.first_seq)
    assert len(beginnings) > 2


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
    assert [segment.name for segment in segments.all] == [
        segment_name(2 + at) for at in range(len(segments.all))
    ]


EVER = 1 << 62


def log_of_runs(lives: list[int]) -> tuple[CrashFiles, list[tuple[int, int]]]:
    """Make a log of several runs with these numbers of frames. Returns it and (first row, time) of each frame."""
    files, frames = CrashFiles(), []

    async def live(number: int, count: int) -> None:
        async with opened(files, disk=AtOnce(), segment_bytes=SMALL) as log:
            log.clock.advance(1_000 * number)
            for _ in range(count):
                log.clock.advance(10)
                rows = build_rows(1, kind=int(Kind.MESSAGE), topic="t", body=b"x" * 400)
                await log.writer.append(rows)[1]
                frames.append((log.segments.next_seq - 1, log.segments.last.newest_append_ms))

    for number, count in enumerate(lives):
        asyncio.run(live(number, count))
    return files, frames


def expected(lives: list[int], frames: list[tuple[int, int]]) -> list[Start]:
    found, at = [], 0
    for count in lives:
        if count and at:
            found.append(Start(frames[at][0], frames[at][1], frames[at - 1][1]))
        at += count
    return found


def segments(files: CrashFiles) -> Segments:
    return reopened(files, segment_bytes=SMALL).segments


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=5), st.booleans(), st.data())
def test_starts_lists_every_run_that_wrote_a_frame(
    lives: list[int], is_indexed: bool, data: st.DataObject
) -> None:
    files, frames = log_of_runs(lives)
    log = segments(files)
    if is_indexed:
        recovery.save_sealed(files, log)
    everything = expected(lives, frames)
    assert starts(log, 0, EVER) == everything
    assert last_epoch(log) == sum(count > 0 for count in lives)
    low, high = sorted(data.draw(st.tuples(st.integers(0, 70), st.integers(0, 70))))
    assert starts(log, low, high) == [one for one in everything if low <= one.first_seq < high]


def test_starts_omits_the_run_of_the_oldest_kept_frame() -> None:
    files, frames = log_of_runs([12, 12, 3])
    log = segments(files)
    kept = [one for one in expected([12, 12, 3], frames) if one.first_seq > log.all[2].first_seq]
    log.drop(log.all[:2])
    assert starts(log, 0, EVER) == kept


def test_blank_frame_raises_corrupt() -> None:
    files, _ = log_of_runs([1, 1])
    log = segments(files)
    name, position = log.last.name, int(log.last.frame_positions[-1])
    file = files.open(name)
    file.write_at(position, bytes(fmt.ALIGN))
    log.last.buffer = files.map_readonly(name)
    with pytest.raises(Corrupt, match="has become blank"):
        starts(log, 0, EVER)


def test_a_log_without_frames_has_no_epoch() -> None:
    assert last_epoch(segments(CrashFiles())) == 0
