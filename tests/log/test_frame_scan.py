"""Bytes of the log that the disk cannot read are damage with a name: no torn commit, and not the end of the process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.bad_disk import PAGE, BadDisk
from tests.log.small_log import AtOnce, batch, opened, reopened

from timeball.log import checkpoint as cp
from timeball.log import format as fmt
from timeball.log.reader import LogReader
from timeball.log.recovery import last_written, read_replica, save_sealed, whole_frames
from timeball.log.segment import Segments, segment_name
from timeball.model.errors import Corrupt

SEGMENT_BYTES = 32 * PAGE
FIRST, LAST = segment_name(1), segment_name(2)


@pytest.fixture
def files(tmp_path: Path) -> BadDisk:
    """A log of two segments with frames of three pages."""
    files = BadDisk(tmp_path)

    async def write() -> None:
        async with opened(files, disk=AtOnce(), segment_bytes=SEGMENT_BYTES) as log:
            while log.segments.last.ordinal < 2 or len(log.segments.last.frame_seqs) < 4:
                await log.append(batch(log.segments.next_seq, 1, body_bytes=2 * PAGE))
            save_sealed(files, log.segments)

    asyncio.run(write())
    return files


def segments(files: BadDisk, durable_before_seq: int = 0) -> Segments:
    return reopened(files, segment_bytes=SEGMENT_BYTES, durable_before_seq=durable_before_seq).segments


def page_in_frame(files: BadDisk, name: str, frame_number: int) -> int:
    """Find the position of a page that lies inside a frame of a segment."""
    (segment,) = (segment for segment in segments(files).all if segment.name == name)
    return int(segment.frame_positions[frame_number]) // PAGE * PAGE + PAGE


@pytest.mark.parametrize(("name", "number"), [(FIRST, 2), (LAST, 1), (LAST, 3)])
def test_a_start_and_a_replica_name_the_unreadable_byte(files: BadDisk, name: str, number: int) -> None:
    bad_byte = page_in_frame(files, name, number)
    files.bad = {name: [bad_byte + 17]}
    with pytest.raises(Corrupt, match=f"{name}: the disk cannot read byte {bad_byte}; restore this file"):
        segments(files)
    read_segments, damage = read_replica(files, batch_bytes=8 << 20)
    assert damage.startswith(f"{name}")
    assert f"the disk cannot read byte {bad_byte}" in damage
    assert read_segments[-1].name == name


@pytest.mark.parametrize("torn", [b"", b"a torn commit"])
def test_an_unreadable_page_behind_the_last_frame_is_no_torn_commit(files: BadDisk, torn: bytes) -> None:
    end = segments(files).last.end
    files.open(LAST).write_at(end, torn)
    files.bad = {LAST: [end + 5 * PAGE]}
    bad_byte = (end + 5 * PAGE) // PAGE * PAGE
    with pytest.raises(Corrupt, match=f"{LAST}: the disk cannot read byte {bad_byte}"):
        segments(files)
    assert read_replica(files, batch_bytes=8 << 20)[1] == f"{LAST}: the disk cannot read byte {bad_byte}"


def test_a_segment_with_an_unreadable_header_is_refused(files: BadDisk) -> None:
    files.bad = {FIRST: [0]}
    with pytest.raises(Corrupt, match=f"{FIRST}: the disk cannot read byte 0"):
        segments(files)


def test_an_unreadable_row_of_a_segment_that_the_start_did_not_read_raises_corrupt(files: BadDisk) -> None:
    bad_byte, next_seq = page_in_frame(files, FIRST, 2), segments(files).next_seq
    files.bad = {FIRST: [bad_byte]}
    reader = LogReader(segments(files, durable_before_seq=next_seq))
    assert len(list(reader.rows(1, 3))) == 2
    with pytest.raises(Corrupt, match=f"{FIRST}: the disk cannot read byte {bad_byte}; restore this file"):
        list(reader.rows(1, 4))


def test_whole_frames_are_found_before_and_after_an_unreadable_one(files: BadDisk) -> None:
    positions = [int(position) for position in segments(files).last.frame_positions]
    files.bad = {LAST: [page_in_frame(files, LAST, 1)]}
    frames = whole_frames(files.map_readonly(LAST), fmt.ALIGN)
    assert [frame.position for frame in frames] == positions[:1] + positions[2:]


def test_an_unreadable_page_counts_as_written(files: BadDisk) -> None:
    files.bad = {LAST: [SEGMENT_BYTES - PAGE]}
    assert last_written(files.map_readonly(LAST), fmt.ALIGN) == SEGMENT_BYTES


def test_an_unreadable_checkpoint_is_not_used(files: BadDisk) -> None:
    files.replace(cp.NAME, bytes(100 * 1024))
    files.bad = {cp.NAME: [80 * 1024]}
    with pytest.raises(Corrupt, match="cannot read byte"):
        cp.read(files)
    assert cp.load(files) is None
