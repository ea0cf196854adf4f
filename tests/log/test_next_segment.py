"""The next segment is there before it is needed, and what is about to be written has been warmed once."""

from __future__ import annotations

from tests.crash_files import CrashFiles
from tests.log.small_log import SEGMENT_BYTES, AtOnce, batch, eventually, opened, read_all, run

from timeball.log.segment import segment_name


class Warmed(CrashFiles):
    """Files that note what was warmed."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[tuple[str, int, int]] = []

    def warm(self, name: str, begin: int, end: int) -> None:
        self.parts.append((name, begin, end))


def test_what_fits_into_the_segment_is_warmed_once() -> None:
    async def work() -> None:
        files = Warmed()
        async with opened(files, disk=AtOnce()) as log:
            first = segment_name(1)
            await log.writer.next_segment.make_ready(4_000)
            await log.writer.next_segment.make_ready(4_000)
            begin = log.segments.last.end
            assert files.parts == [(first, begin, begin + 4_000)]
            await log.append(batch(1, 1, body_bytes=1_000))
            await log.writer.next_segment.make_ready(4_000)
            assert files.parts[1:] == [(first, begin + 4_000, log.segments.last.end + 4_000)]
            assert not files.exists(segment_name(2)), "there is room enough"

    run(work())


def test_what_does_not_fit_gets_the_next_segment_ahead_of_its_time() -> None:
    async def work() -> None:
        files = Warmed()
        async with opened(files, disk=AtOnce()) as log:
            await log.writer.next_segment.make_ready(SEGMENT_BYTES)
            await eventually(lambda: log.writer.next_segment.spare)
            await log.writer.next_segment.make_ready(SEGMENT_BYTES)
            begin = log.segments.last.end
            assert files.parts == [(segment_name(1), begin, SEGMENT_BYTES), (segment_name(2), 0, begin)]
            await log.append(batch(1, 1, body_bytes=SEGMENT_BYTES // 2))
            await log.append(batch(2, 1, body_bytes=SEGMENT_BYTES // 2))
            assert [s.ordinal for s in log.segments.all] == [1, 2] and len(read_all(log.segments)) == 2
            # The one that was warmed is the one at hand: what has been warmed of it counts.
            await log.writer.next_segment.make_ready(100)
            end = log.segments.last.end + 100
            assert files.parts[2:] == [(segment_name(2), max(begin, log.segments.last.end), end)]

    run(work())


def test_a_stopped_log_prepares_nothing_more() -> None:
    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce()) as log:
            await log.writer.next_segment.stop()
            await log.writer.next_segment.make_ready(SEGMENT_BYTES)
            assert log.writer.next_segment.spare is None and not files.exists(segment_name(2))

    run(work())
