"""Each life of the log is known by its frames, whichever segments they lie in."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.crash_files import CrashFiles
from tests.log.small_log import AtOnce, opened, reopened

from timeball.errors import Corrupt
from timeball.log import format as fmt
from timeball.log import frame_index
from timeball.log.segment import Segments
from timeball.log.starts import last_epoch, starts
from timeball.message import Kind, build_rows
from timeball.wire import Start

SMALL = 4096
EVER = 1 << 62


def lived(lives: list[int]) -> tuple[CrashFiles, list[tuple[int, int]]]:
    """A log whose writer was started so often, with so many frames each; (first row, its instant) of each frame."""
    files, frames = CrashFiles(), []

    async def live(number: int, count: int) -> None:
        async with opened(files, disk=AtOnce(), segment_bytes=SMALL) as log:
            log.clock.advance(1_000 * number)
            for _ in range(count):
                log.clock.advance(10)
                rows = build_rows(1, kind=int(Kind.MESSAGE), topic="t", body=b"x" * 400)
                await log.writer.append(rows)[1]
                frames.append((log.segments.next_seq - 1, log.segments.last.last_append_ms))

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
def test_every_life_that_wrote_is_found_and_none_other(
    lives: list[int], is_indexed: bool, data: st.DataObject
) -> None:
    files, frames = lived(lives)
    log = segments(files)
    if is_indexed:
        frame_index.save_sealed(files, log)
    everything = expected(lives, frames)
    assert starts(log, 0, EVER) == everything
    assert last_epoch(log) == sum(count > 0 for count in lives)
    low, high = sorted(data.draw(st.tuples(st.integers(0, 70), st.integers(0, 70))))
    assert starts(log, low, high) == [one for one in everything if low <= one.first_seq < high]


def test_of_the_oldest_frame_that_is_kept_nobody_can_tell() -> None:
    files, frames = lived([12, 12, 3])
    log = segments(files)
    kept = [one for one in expected([12, 12, 3], frames) if one.first_seq > log.all[2].first_seq]
    log.drop(log.all[:2])
    assert starts(log, 0, EVER) == kept


def test_a_frame_that_has_become_blank_is_an_error() -> None:
    files, _ = lived([1, 1])
    log = segments(files)
    name, position = log.last.name, int(log.last.frame_positions[-1])
    file = files.open(name)
    file.write_at(position, bytes(fmt.ALIGN))
    log.last.buffer = files.map_readonly(name)
    with pytest.raises(Corrupt, match="has become blank"):
        starts(log, 0, EVER)


def test_a_log_without_frames_has_no_epoch() -> None:
    assert last_epoch(segments(CrashFiles())) == 0
