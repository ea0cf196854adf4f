"""Opening the log after crashes and damage: one test for each rule of recovery.py."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from tests.crash_files import CrashFiles
from tests.log.crash_loop import problems_after_an_append
from tests.log.small_log import AtOnce, batch, fill, opened, read_all, reopened

from timeball.io.files import Files, RealFiles
from timeball.log import format as fmt
from timeball.log.recovery import open_log, whole_frames
from timeball.log.segment import FOLDER, begin_segment, prepare, segment_name
from timeball.model.errors import Corrupt, SetupError
from timeball.model.message import Kind, build_rows

SEGMENT_BYTES = 16 * 1024
# Byte positions in the header of a frame.
VERSION_AT, LENGTH_AT, CRC_AT, SYNCED_TO_AT = 4, 8, 52, 56
IN_BODY = 300  # a byte behind the header of a frame, counted from the begin of the frame


def seal(frame: bytearray) -> None:
    """Give a changed frame a valid checksum."""
    struct.pack_into("<I", frame, CRC_AT, 0)
    struct.pack_into("<I", frame, CRC_AT, google_crc32c.value(bytes(frame)))


def overwrite(files: Files, name: str, position: int, data: bytes) -> None:
    """Write bytes into a file durably."""
    file = files.open(name)
    file.write_at(position, data)
    file.sync()
    file.close()


def flip(files: CrashFiles, name: str, position: int, mask: int = 0xFF) -> None:
    """Flip the bits in `mask` of one byte of a file durably."""
    overwrite(files, name, position, bytes([files.content(name)[position] ^ mask]))


# ---- torn or damaged -------------------------------------------------------------------------------------


def last_frames(files: CrashFiles) -> list[int]:
    """List the positions of the frames of the last segment."""
    return list(reopened(files).segments.last.frame_positions)


def test_empty_folder_becomes_a_new_log() -> None:
    files = CrashFiles()
    recovered = reopened(files)
    assert (recovered.segments.first_seq, recovered.segments.next_seq, recovered.cut_bytes) == (1, 1, 0)
    assert reopened(files.crash(survival="nothing")).segments.next_seq == 1


def test_torn_last_commit_is_overwritten_with_zeros() -> None:
    files = CrashFiles()
    expected = fill(files, 3)
    name, position = segment_name(1), last_frames(files)[-1]
    flip(files, name, position + IN_BODY)
    recovered = reopened(files)
    assert recovered.cut_bytes > 0 and recovered.segments.next_seq == 7
    assert list(read_all(recovered.segments).values()) == expected[:6]
    after = files.crash(survival="nothing")
    assert not any(after.content(name)[position:]), "an old frame must never follow a new one"


def test_damage_before_the_last_commit_is_refused_without_a_checkpoint_and_changes_nothing() -> None:
    files = CrashFiles()
    fill(files, 3)
    before = files.content(segment_name(1))
    flip(files, segment_name(1), last_frames(files)[-2] + IN_BODY)
    with pytest.raises(Corrupt, match="proves that it was acknowledged"):
        reopened(files)
    after = files.content(segment_name(1))
    assert sum(byte != previous for byte, previous in zip(after, before, strict=True)) == 1, "only the damage"


def test_a_blank_hole_before_the_last_commit_is_refused() -> None:
    files = CrashFiles()
    fill(files, 3)
    first, second, third = last_frames(files)
    for begin in (first, second):
        damaged = files.crash()
        overwrite(damaged, segment_name(1), begin, bytes(third - begin))
        with pytest.raises(Corrupt, match="proves"):
            reopened(damaged)


def test_damage_to_the_last_commit_is_refused_if_a_checkpoint_covers_it_and_else_cut() -> None:
    files = CrashFiles()
    fill(files, 3)
    flip(files, segment_name(1), last_frames(files)[-1] + IN_BODY)
    with pytest.raises(Corrupt, match="checkpoint covers seq 9"):
        reopened(files, durable_before_seq=10)
    assert reopened(files, durable_before_seq=7).segments.next_seq == 7


def test_frames_of_one_commit_prove_nothing_about_each_other() -> None:
    """A commit with a reservation is two frames. If the first is torn, the second was not acknowledged either."""
    files = CrashFiles()

    async def write() -> None:
        async with opened(files, disk=AtOnce()) as log:
            await log.append(batch(1))
            first = log.writer.append(batch(4))[1]
            reservation = log.writer.append(batch(7, 1), span=10)[1]
            await asyncio.gather(first, reservation)
            assert log.writer.statistics.commits == 2 and log.writer.statistics.frames == 3

    asyncio.run(write())
    flip(files, segment_name(1), last_frames(files)[1] + IN_BODY)
    assert reopened(files).segments.next_seq == 4


def test_a_damaged_frame_proves_nothing_about_the_frames_before_it() -> None:
    files = CrashFiles()
    fill(files, 3)
    _, second, third = last_frames(files)
    flip(files, segment_name(1), second + IN_BODY)
    flip(files, segment_name(1), third + IN_BODY)
    assert reopened(files).segments.next_seq == 4
    with pytest.raises(Corrupt):
        reopened(files.crash(), durable_before_seq=10)


@pytest.mark.parametrize("version", [1, 2])
def test_a_frame_inside_a_torn_body_proves_nothing_about_the_torn_commit(version: int) -> None:
    """Messages that contain pieces of a log must not keep a broker from starting. Version 2 is a newer format."""
    files, large = CrashFiles(), 4 * SEGMENT_BYTES

    async def write(rows: pa.RecordBatch) -> fmt.Frame:
        async with opened(files, disk=AtOnce(), segment_bytes=large) as log:
            await log.append(rows)
            last = log.segments.last
            frame = fmt.read_frame(last.buffer, last.frame_positions[-1])
            assert frame is not None
            return frame

    first = asyncio.run(write(batch(1)))
    copy = bytearray(files.content(segment_name(1))[first.position : first.end])
    struct.pack_into("<H", copy, VERSION_AT, version)
    struct.pack_into("<Q", copy, SYNCED_TO_AT, first.end + 64)  # the torn frame would have been synced
    seal(copy)
    # Of copies that are shifted by 8 bytes each, one is aligned as a frame has to be.
    body = b"".join(bytes(copy) + bytes(8) for _ in range(8))
    torn = asyncio.run(write(build_rows(1, kind=int(Kind.MESSAGE), body=body)))
    assert torn.position == first.end
    frames_in_body = list(whole_frames(files.map_readonly(segment_name(1)), torn.position + 64))
    assert len(frames_in_body) == (1 if version == 1 else 0)
    flip(files, segment_name(1), torn.position + 100)
    assert reopened(files, segment_bytes=large).segments.next_seq == 4


def test_whole_frames_are_found_with_one_search_of_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames that follow each other, and frames between zeros, also at the ends of the steps of the search."""
    mib = 1 << 20
    data, rows = bytearray(3 * mib), batch(0, 1)

    def write_frame(position: int) -> int:
        """Write a frame. Returns its end."""
        frame, parts = fmt.encode_frame(
            rows, first_seq=1, span=1, append_ms=0, epoch=1, position=position, synced_to=0
        )
        data[position : frame.end] = b"".join(bytes(part) for part in parts)
        return frame.end

    size = write_frame(64) - 64
    neighbours = range(64, 64 + 200 * size, size)
    expected = [*neighbours, mib - 64, mib - 64 + size, 2 * mib - size, 2 * mib, 3 * mib - size]
    for position in expected:
        write_frame(position)
    searched_words: list[int] = []

    def count_words(values: np.ndarray) -> np.ndarray:
        searched_words.append(values.size)
        return flatnonzero(values)

    flatnonzero = np.flatnonzero
    monkeypatch.setattr(np, "flatnonzero", count_words)
    assert [frame.position for frame in whole_frames(pa.py_buffer(data), 64)] == expected
    # A word for each aligned position, and the bytes of the last page.
    assert sum(searched_words) <= len(data) // fmt.ALIGN + 4096


def test_frame_out_of_sequence_ends_the_log() -> None:
    """A valid frame at a wrong position, as after a misdirected write."""
    files = CrashFiles()
    fill(files, 2)
    first, second = last_frames(files)
    content = files.content(segment_name(1))
    overwrite(files, segment_name(1), second, content[first:second])
    assert reopened(files.crash()).segments.next_seq == 4
    with pytest.raises(Corrupt, match="expected 4"):
        reopened(files, durable_before_seq=7)


def test_frame_of_a_newer_version_raises_setup_error() -> None:
    files = CrashFiles()
    fill(files, 2)
    position = last_frames(files)[-1]
    content = files.content(segment_name(1))
    (length,) = struct.unpack_from("<I", content, position + LENGTH_AT)
    frame = bytearray(content[position : position + length])
    struct.pack_into("<H", frame, VERSION_AT, 2)
    seal(frame)
    overwrite(files, segment_name(1), position, bytes(frame))
    before = files.content(segment_name(1))
    with pytest.raises(SetupError, match="newer"):
        reopened(files)
    assert files.content(segment_name(1)) == before


def test_flipped_version_of_a_frame_is_damage_and_not_a_newer_version() -> None:
    files = CrashFiles()
    fill(files, 3)
    first, second = last_frames(files)[:2]
    content = bytearray(files.content(segment_name(1))[first:second])
    content[VERSION_AT + 1] ^= 1  # the high byte
    overwrite(files, segment_name(1), first, bytes(content))
    with pytest.raises(Corrupt, match="version 257"):
        reopened(files, durable_before_seq=7)


# ---- segments --------------------------------------------------------------------------------------------


def three_segments() -> tuple[CrashFiles, list[bytes]]:
    """Write a log of three segments. Returns it and the bodies of its rows."""
    files = CrashFiles()
    expected = fill(files, 20)
    ordinals = [segment.ordinal for segment in reopened(files).segments.all]
    assert ordinals == [1, 2, 3], "the fixture is too small"
    return files.crash(), expected


def test_a_sealed_segment_with_a_damaged_or_missing_last_frame_is_refused() -> None:
    files, _ = three_segments()
    last_frame = reopened(files).segments.all[0].frame_positions[-1]
    in_header, in_body = last_frame, last_frame + IN_BODY
    for position in (in_header, in_body):
        damaged = files.crash()
        flip(damaged, segment_name(1), position)
        with pytest.raises(Corrupt, match=r"0000000001\.log.*restore this file from a copy"):
            reopened(damaged)
    blank = files.crash()
    length = files.size(segment_name(1)) - last_frame
    overwrite(blank, segment_name(1), last_frame, bytes(length))
    with pytest.raises(Corrupt, match=r"ends at seq .* begins with"):
        reopened(blank)


def test_a_missing_first_segment_is_accepted_because_retention_removes_it() -> None:
    files, expected = three_segments()
    files.remove(segment_name(1))
    segments = reopened(files).segments
    assert list(read_all(segments).values()) == expected[segments.first_seq - 1 :]


def test_a_missing_segment_between_two_others_is_refused() -> None:
    files, _ = three_segments()
    files.remove(segment_name(2))
    with pytest.raises(Corrupt, match="missing"):
        reopened(files)


def test_a_missing_last_segment_is_refused_if_a_checkpoint_covers_one_of_its_rows() -> None:
    files, _ = three_segments()
    first_missing_seq = reopened(files).segments.last.first_seq
    files.remove(segment_name(3))
    files.sync_dir(FOLDER)
    with pytest.raises(Corrupt, match="checkpoint covers"):
        reopened(files.crash(), durable_before_seq=first_missing_seq + 1)
    assert reopened(files, durable_before_seq=first_missing_seq).segments.next_seq == first_missing_seq


def test_an_empty_folder_is_refused_if_a_checkpoint_covers_a_row() -> None:
    with pytest.raises(Corrupt, match="log is missing"):
        reopened(CrashFiles(), durable_before_seq=5)


def test_stale_spare_is_removed() -> None:
    files = CrashFiles()
    fill(files, 1)
    prepare(files, 2, SEGMENT_BYTES)
    files.remove(segment_name(2))  # without `sync_dir`, so a power cut brings the name back
    after = files.crash(survival="nothing")
    assert after.exists(segment_name(2))
    assert reopened(after).segments.next_seq == 4
    assert not after.exists(segment_name(2))
    assert not after.crash(survival="nothing").exists(segment_name(2)), "the removal is durable"


def test_a_blank_segment_between_two_others_is_refused() -> None:
    files, _ = three_segments()
    overwrite(files, segment_name(2), 0, bytes(files.size(segment_name(2))))
    with pytest.raises(Corrupt, match="missing or was never begun"):
        reopened(files)


@pytest.mark.parametrize("ordinal", [2, 3])
def test_data_behind_a_blank_header_is_refused(ordinal: int) -> None:
    files, _ = three_segments()
    overwrite(files, segment_name(ordinal), 0, bytes(64))
    with pytest.raises(Corrupt, match="holds data but its header is blank"):
        reopened(files)


def test_data_behind_a_damaged_header_is_refused() -> None:
    files, _ = three_segments()
    for field in (0, 8, 16, 60):  # magic, version, first_seq, checksum
        damaged = files.crash()
        flip(damaged, segment_name(3), field)
        with pytest.raises(Corrupt, match="header does not match"):
            reopened(damaged)


def test_a_segment_with_a_torn_header_and_no_frame_is_a_spare() -> None:
    files = CrashFiles()
    fill(files, 1)
    begin_segment(prepare(files, 2, SEGMENT_BYTES), 4, 0)
    flip(files, segment_name(2), 20)
    segments = reopened(files, durable_before_seq=4).segments
    assert [segment.ordinal for segment in segments.all] == [1] and segments.next_seq == 4


def test_the_log_continues_in_a_begun_segment_without_frames() -> None:
    files = CrashFiles()
    expected = fill(files, 1)
    begin_segment(prepare(files, 2, SEGMENT_BYTES), 4, 0)
    segments = reopened(files).segments
    assert (segments.last.ordinal, segments.next_seq) == (2, 4)
    assert problems_after_an_append(files.crash(survival="nothing")) == []
    assert list(read_all(segments).values()) == expected


# ---- every byte ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_flipped_byte_is_noticed_or_harmless(step: int) -> None:
    """No flip changes or loses a row, because the checkpoint covers all acknowledged rows."""
    small = 4096  # segments of two frames
    files = CrashFiles()

    async def write() -> None:
        async with opened(files, disk=AtOnce(), segment_bytes=small) as log:
            for number in range(5):
                await log.append(batch(1 + 2 * number, 2))

    asyncio.run(write())
    expected = read_all(open_log(files, segment_bytes=small, now_ms=0).segments)
    names = [f"{FOLDER}/{name}" for name in files.list_dir(FOLDER)]
    assert len(expected) == 10 and len(names) >= 3
    noticed = harmless = 0
    for name in names:
        content = files.content(name)
        for position in range(0, len(content), step):
            file = files.open(name)
            file.write_at(position, bytes([content[position] ^ 0xFF]))
            try:
                rows = read_all(
                    open_log(files, segment_bytes=small, now_ms=0, durable_before_seq=11).segments
                )
            except (Corrupt, SetupError):
                noticed += 1
            else:
                assert rows == expected, (name, position)
                # Harmless are only bytes behind the frames, and the last segment, which is cut there.
                assert not content[position] or name == names[-1], (name, position)
                harmless += 1
            file.write_at(0, content)
            file.close()
    assert noticed > 4_000 // step and harmless > 0


@pytest.mark.parametrize("durable_before_seq", [0, 10])
def test_flipped_byte_of_the_last_commit_loses_at_most_that_commit(durable_before_seq: int) -> None:
    """The known limit without a checkpoint: damage to the last commit looks like a torn commit."""
    files = CrashFiles()
    fill(files, 3)
    name = segment_name(1)
    expected = read_all(reopened(files).segments)
    content, last_frame = files.content(name), last_frames(files)[-1]
    for position in range(last_frame, reopened(files).segments.last.end):
        overwrite(files, name, position, bytes([content[position] ^ 0xFF]))
        try:
            bodies = read_all(reopened(files, durable_before_seq=durable_before_seq).segments)
            assert durable_before_seq == 0, "with a checkpoint the damage is refused"
            assert bodies == {seq: body for seq, body in expected.items() if seq < 7}, position
        except (Corrupt, SetupError):
            pass
        overwrite(files, name, 0, content)


# ---- a real folder ---------------------------------------------------------------------------------------


def test_recovery_in_a_real_folder_cuts_a_torn_commit(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)
    expected = fill(files, 20)
    recovered = reopened(files)
    assert list(read_all(recovered.segments).values()) == expected and len(recovered.segments.all) == 3
    recovered.file.file.close()
    last = recovered.segments.last
    with open(tmp_path / last.name, "r+b") as file:
        file.seek(last.frame_positions[-1] + IN_BODY)
        file.write(b"damage")
    recovered = reopened(files)
    assert recovered.cut_bytes > 0 and recovered.segments.next_seq == len(expected) - 2
    recovered.file.file.close()
