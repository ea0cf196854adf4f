"""One segment, the row of them, and how a spare becomes one."""

from __future__ import annotations

import threading

import pyarrow as pa
import pytest
from tests.crash_files import CrashFiles, PowerCut

from timeball.errors import DiskFailed, OutOfRange, OverLimit
from timeball.log import format as fmt
from timeball.log.segment import FOLDER, Segment, Segments, begin, prepare, segment_name

BLANK = pa.py_buffer(bytes(64))


def frame(position: int, first_seq: int, span: int, *, append_ms: int = 0) -> fmt.Frame:
    return fmt.Frame(position, 128, span, first_seq, span, append_ms, 1, 64, position)


def filled(ordinal: int, first_seq: int, spans: list[int]) -> Segment:
    segment = Segment(ordinal, first_seq, BLANK)
    for span in spans:
        segment.add(frame(segment.end, segment.next_seq, span))
    return segment


def test_names_sort_as_their_ordinals() -> None:
    assert segment_name(7) == "log/0000000007.log"
    assert sorted(map(segment_name, [100, 9, 2_000_000_000])) == list(
        map(segment_name, [9, 100, 2_000_000_000])
    )


def test_a_frame_is_found_by_any_of_its_numbers() -> None:
    segment = filled(1, 5, [3, 100, 1])
    positions = [segment.frame_position_of(seq) for seq in (5, 7, 8, 107, 108)]
    assert positions == [64, 64, 192, 192, 320]
    assert (segment.next_seq, segment.end) == (109, 448)


def test_a_frame_that_does_not_follow_is_our_own_mistake() -> None:
    segment = filled(1, 5, [3])
    for wrong in (frame(64, 8, 1), frame(192, 9, 1)):
        with pytest.raises(AssertionError):
            segment.add(wrong)


def three() -> Segments:
    return Segments([filled(1, 1, [4]), filled(2, 5, [2, 2]), filled(3, 9, [1])])


def test_the_segment_that_holds_a_number() -> None:
    segments = three()
    assert [segments.holding(seq).ordinal for seq in range(1, 10)] == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert (segments.first_seq, segments.next_seq, segments.last.ordinal) == (1, 10, 3)
    assert segments.size_bytes == 192 + 320 + 192


@pytest.mark.parametrize("seq", [-1, 0, 10, 10**18])
def test_a_number_that_is_not_kept_says_which_are(seq: int) -> None:
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
        """A list that lets the event loop's thread in between the reading of a list and its replacement."""

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            found = list.__getitem__(self, key)
            if isinstance(key, slice) and key.start:
                adder.start()
                adder.join(0.2)  # with a lock it has to wait; what it waits for is over then
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
    segment = begin(prepare(files, 1, 4096), 1, 17, 5)
    assert (segment.first_seq, segment.next_seq, segment.end) == (17, 17, 64)
    after = files.crash(survival="nothing")
    assert fmt.read_segment_header(after.map_readonly(segment_name(1))) == 17


@pytest.mark.parametrize("error", [OverLimit("full"), DiskFailed("broken")])
def test_half_a_spare_has_no_name(error: OverLimit | DiskFailed) -> None:
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


def test_a_spare_cut_anywhere_is_a_spare_or_nothing() -> None:
    whole = folder()
    before = whole.calls
    begin(prepare(whole, 1, 4096), 1, 17, 5)
    for call in range(before + 1, whole.calls + 1):
        files = folder()
        files.crash_at = call
        with pytest.raises(PowerCut):
            begin(prepare(files, 1, 4096), 1, 17, 5)
        for seed in range(5):
            after = files.crash(seed)
            if after.exists(segment_name(1)):
                assert fmt.read_segment_header(after.map_readonly(segment_name(1))) in (None, 17)
