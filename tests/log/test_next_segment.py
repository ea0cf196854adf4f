"""The next segment is prepared before it is needed, and announced bytes are warmed once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.crash_files import CrashFiles
from tests.log.small_log import SEGMENT_BYTES, AtOnce, batch, eventually, opened, read_all, run

from timeball.io.files import RealFiles
from timeball.log import writer
from timeball.log.segment import STEP_BYTES, segment_name
from timeball.model.errors import OverLimit

LARGE = 3 * STEP_BYTES


class Warmed(CrashFiles):
    """Files that record the warmed ranges."""

    def __init__(self) -> None:
        super().__init__()
        self.warmed: list[tuple[str, int, int]] = []

    def warm(self, name: str, begin: int, end: int) -> None:
        self.warmed.append((name, begin, end))


def test_announced_bytes_within_the_segment_are_warmed_once() -> None:
    async def work() -> None:
        files = Warmed()
        async with opened(files, disk=AtOnce()) as log:
            first = segment_name(1)
            await log.writer.next_segment.make_ready(4_000)
            await log.writer.next_segment.make_ready(4_000)
            begin = log.segments.last.end
            assert files.warmed == [(first, begin, begin + 4_000)]
            await log.append(batch(1, 1, body_bytes=1_000))
            await log.writer.next_segment.make_ready(4_000)
            assert files.warmed[1:] == [(first, begin + 4_000, log.segments.last.end + 4_000)]
            assert not files.exists(segment_name(2)), "the segment has enough space"

    run(work())


def test_announced_bytes_beyond_the_segment_prepare_the_next_one() -> None:
    async def work() -> None:
        files = Warmed()
        async with opened(files, disk=AtOnce()) as log:
            await log.writer.next_segment.make_ready(SEGMENT_BYTES)
            await eventually(lambda: log.writer.next_segment.spare)
            await log.writer.next_segment.make_ready(SEGMENT_BYTES)
            begin = log.segments.last.end
            assert files.warmed == [(segment_name(1), begin, SEGMENT_BYTES), (segment_name(2), 0, begin)]
            await log.append(batch(1, 1, body_bytes=SEGMENT_BYTES // 2))
            await log.append(batch(2, 1, body_bytes=SEGMENT_BYTES // 2))
            assert [segment.ordinal for segment in log.segments.all] == [1, 2]
            assert len(read_all(log.segments)) == 2
            # The warmed segment is now the current one, and its warmed pages still count.
            await log.writer.next_segment.make_ready(100)
            end = log.segments.last.end + 100
            assert files.warmed[2:] == [(segment_name(2), max(begin, log.segments.last.end), end)]

    run(work())


def test_a_stopped_log_prepares_nothing_more() -> None:
    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce()) as log:
            await log.writer.next_segment.stop()
            await log.writer.next_segment.make_ready(SEGMENT_BYTES)
            assert log.writer.next_segment.spare is None and not files.exists(segment_name(2))

    run(work())


class Filling(CrashFiles):
    """Files of a disk with a given number of free bytes."""

    free = 1 << 40

    def free_bytes(self) -> int:
        return self.free


def test_disk_space_is_reserved_a_step_ahead(tmp_path: Path) -> None:
    """Checks the blocks of the file system, not the file's length."""

    def allocated_bytes(ordinal: int) -> int:
        return (tmp_path / segment_name(ordinal)).stat().st_blocks * 512  # a block has 512 bytes

    async def work() -> None:
        files = RealFiles(tmp_path)
        async with opened(files, disk=AtOnce(), segment_bytes=LARGE) as log:
            assert files.size(segment_name(1)) == LARGE
            slack = STEP_BYTES // 8  # for the file system's own blocks
            assert STEP_BYTES <= allocated_bytes(1) < STEP_BYTES + slack
            await log.append(batch(1, 1, body_bytes=1_000))
            await eventually(lambda: allocated_bytes(1) >= 2 * STEP_BYTES)
            assert allocated_bytes(1) < 2 * STEP_BYTES + slack and not files.exists(segment_name(2))
            # A commit that is larger than the reserved space reserves more itself.
            await log.append(batch(2, 1, body_bytes=2 * STEP_BYTES))
            await eventually(lambda: files.exists(segment_name(2)))
            assert STEP_BYTES <= allocated_bytes(2) < STEP_BYTES + slack
            assert [*read_all(log.segments)] == [1, 2] and log.failures == []

    run(work())


def test_disk_space_of_announced_bytes_is_reserved() -> None:
    async def work() -> None:
        async with opened(CrashFiles(), disk=AtOnce(), segment_bytes=LARGE) as log:
            await log.writer.next_segment.make_ready(STEP_BYTES)
            assert log.writer.next_segment.current.reserved_to == 2 * STEP_BYTES
            await log.writer.next_segment.make_ready(LARGE)
            assert log.writer.next_segment.current.reserved_to == LARGE

    run(work())


def test_admission_is_closed_while_half_a_segment_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "DISK_FULL_RETRY_S", 0.001)

    async def work() -> None:
        files = Filling()
        async with opened(files, disk=AtOnce(), segment_bytes=LARGE) as log:
            files.free = LARGE // 2 - 1
            await log.append(batch(1, 1))
            await eventually(lambda: log.writer.no_room)
            with pytest.raises(OverLimit, match=f"disk full but for {files.free} bytes"):
                log.writer.check_admission()
            # Releases and cancels are not refused, and may use more than the reserved space.
            await log.append(batch(2, 1, body_bytes=STEP_BYTES))
            files.free = LARGE // 2
            await eventually(lambda: not log.writer.no_room)
            assert len(read_all(log.segments)) == 2 and log.failures == []

    run(work())


def test_log_opens_on_a_full_disk_and_uses_its_reserved_space() -> None:
    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce(), segment_bytes=LARGE) as log:
            await log.append(batch(1, 1, body_bytes=STEP_BYTES))
        files.fail_at(1, OverLimit("disk full"), forever=True)
        async with opened(files, disk=AtOnce(), segment_bytes=LARGE) as log:
            assert log.writer.next_segment.current.reserved_to == 2 * STEP_BYTES
            await log.append(batch(2, 1))
            await eventually(lambda: log.writer.no_room)
            assert len(read_all(log.segments)) == 2 and log.failures == []

    run(work())
