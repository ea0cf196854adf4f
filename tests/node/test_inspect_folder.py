"""Reports have their selection, and all damage that was found. tests/cli/test_data_folder.py tests the rest."""

from __future__ import annotations

import asyncio
import struct
from pathlib import Path

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.crash_files import CrashFiles
from tests.log.small_log import AtOnce, batch, bodies, fill, opened, read_all, reopened

from timeball.io.files import Files, RealFiles
from timeball.log import checkpoint as cp
from timeball.log import format as fmt
from timeball.log import recovery
from timeball.log.key_index import KeyIndex
from timeball.log.queue_index import QueueFile, QueueIndexes, encode, file_name
from timeball.log.recovery import open_log
from timeball.log.segment import FOLDER, begin_segment, prepare, segment_name
from timeball.model import key_hash
from timeball.model.errors import Corrupt, NotFound, SetupError
from timeball.model.key_hash import KeyRun
from timeball.model.message import Kind, build_rows
from timeball.node import inspect_folder as module
from timeball.node.inspect_folder import (
    CacheCheck,
    Damage,
    FolderDump,
    InspectedFrame,
    Selection,
    Torn,
    WalkResult,
    describe_rows,
    find_rows,
    kind_counts,
    summarise,
)

SEGMENT_BYTES = 4096  # has room for two frames


def walk_all(files: Files) -> list[WalkResult]:
    """Walk over the whole folder. Returns its damage, then the results of all segments."""
    folder = FolderDump(files)
    return [*folder.damage, *(result for segment in folder.segments for result in folder.walk(segment))]


def rows_by_seq(results: list[WalkResult]) -> dict[int, bytes]:
    """Collect the bodies of all rows in whole frames, by sequence number."""
    rows: dict[int, bytes] = {}
    for result in results:
        if isinstance(result, InspectedFrame):
            rows.update(enumerate(bodies([result.rows]), result.frame.first_seq))
    return rows


def damage(results: list[WalkResult]) -> list[Damage]:
    return [result for result in results if isinstance(result, Damage)]


def flip(files: CrashFiles, name: str, position: int) -> None:
    """Flip all bits of one byte of a file."""
    file = files.open(name)
    file.write_at(position, bytes([files.content(name)[position] ^ 0xFF]))
    file.close()


def save_checkpoint(files: Files, seq: int) -> None:
    """Save a checkpoint that covers the rows below `seq`."""
    nothing = np.empty(0, np.int64)
    cp.save(files, cp.encode(cp.Checkpoint(cp.Facts(seq=seq), nothing, nothing)))


def three_segments() -> tuple[CrashFiles, list[bytes]]:
    """Write a log of three segments. Returns it and the bodies of its rows."""
    files = CrashFiles()
    expected = fill(files, 20)
    assert len(reopened(files).segments.all) == 3, "the fixture is too small"
    return files, expected


# ---- a whole log -----------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2_000)), max_size=12))
def test_a_walk_finds_the_frames_and_rows_that_recovery_finds(commits: list[tuple[int, int]]) -> None:
    files = CrashFiles()

    async def write() -> None:
        async with opened(files, disk=AtOnce(), segment_bytes=SEGMENT_BYTES) as log:
            for rows, body_bytes in commits:
                await log.append(batch(log.writer.next_seq, rows, body_bytes=body_bytes))

    asyncio.run(write())
    results = walk_all(files)
    segments = open_log(files, segment_bytes=SEGMENT_BYTES, now_ms=0).segments
    frames = [
        (result.segment.ordinal, result.frame.position, result.frame.first_seq)
        for result in results
        if isinstance(result, InspectedFrame)
    ]
    assert frames == [
        (segment.ordinal, position, seq)
        for segment in segments.all
        for position, seq in zip(segment.frame_positions, segment.frame_seqs, strict=True)
    ]
    assert len(frames) == len(results)
    assert rows_by_seq(results) == read_all(segments)


def test_segments_have_their_numbers_and_are_last_or_spare() -> None:
    files, _ = three_segments()
    first, second, third = reopened(files).segments.all
    prepare(files, 4, SEGMENT_BYTES)
    results = FolderDump(files).segments
    assert [(segment.ordinal, segment.is_last, segment.is_spare) for segment in results] == [
        (1, False, False), (2, False, False), (3, True, False), (4, False, True),
    ]  # fmt: skip
    assert [(segment.first_seq, segment.until_seq) for segment in results] == [
        (1, second.first_seq), (second.first_seq, third.first_seq), (third.first_seq, None), (None, None),
    ]  # fmt: skip
    assert results[0].name == first.name and results[0].size_bytes == first.buffer.size
    assert results[0].created_ms and results[3].created_ms is None


def test_a_frame_has_its_kinds_of_rows_and_its_span() -> None:
    files = CrashFiles()
    mixed = build_rows(3, kind=pa.array([Kind.SCHEDULED, Kind.CANCEL, Kind.SCHEDULED], pa.int8()), topic="t")

    async def write() -> None:
        async with opened(files, disk=AtOnce()) as log:
            await log.append(mixed)
            await log.writer.append(build_rows(1, kind=int(Kind.TABLE), body=b"9"), span=10)[1]

    asyncio.run(write())
    first, second = (result for result in walk_all(files) if isinstance(result, InspectedFrame))
    assert first.kinds() == {"SCHEDULED": 2, "CANCEL": 1}
    assert (second.kinds(), second.frame.rows, second.frame.span) == ({"TABLE": 1}, 1, 10)
    assert kind_counts(build_rows(2, kind=99)) == {"99": 2}, "an unknown kind is named by its number"


def test_an_empty_or_a_new_folder_has_no_frames_and_no_damage() -> None:
    files = CrashFiles()
    assert walk_all(files) == []
    reopened(files)
    assert walk_all(files) == []


def test_a_walk_over_damage_changes_no_file() -> None:
    files, _ = three_segments()
    save_checkpoint(files, 5)
    flip(files, segment_name(2), 500)
    flip(files, segment_name(3), 64 + 300)
    calls = files.calls
    assert damage(walk_all(files))
    assert files.calls == calls


# ---- torn or damaged -------------------------------------------------------------------------------------


def test_a_torn_tail_is_no_damage_and_has_the_bytes_that_recovery_cuts() -> None:
    files = CrashFiles()
    expected = fill(files, 3)
    position = reopened(files).segments.last.frame_positions[-1]
    flip(files, segment_name(1), position + 300)
    *frames, torn = walk_all(files)
    assert isinstance(torn, Torn)
    assert (torn.file, torn.position) == (segment_name(1), position)
    assert list(rows_by_seq(frames).values()) == expected[:6]
    assert reopened(files).cut_bytes == torn.size_bytes
    assert len(walk_all(files)) == 2, "recovery has removed the torn tail"


def test_a_damaged_frame_that_was_acknowledged_is_reported_and_skipped() -> None:
    files = CrashFiles()
    expected = fill(files, 4)
    position = reopened(files).segments.last.frame_positions[1]
    flip(files, segment_name(1), position + 300)
    (flaw,) = damage(results := walk_all(files))
    assert (flaw.file, flaw.position) == (segment_name(1), position)
    assert "checksum" in flaw.text and "acknowledged" in flaw.text
    assert list(rows_by_seq(results).values()) == expected[:3] + expected[6:]
    assert [type(result) for result in results] == [InspectedFrame, Damage, InspectedFrame, InspectedFrame]


def test_damage_in_a_sealed_segment_hides_one_frame_only() -> None:
    files, expected = three_segments()
    segment = reopened(files).segments.all[1]
    position, seq = segment.frame_positions[-1], segment.frame_seqs[-1]
    flip(files, segment_name(2), position + 70)
    results = walk_all(files)
    assert [flaw.position for flaw in damage(results)] == [position, None], (
        "the frame, and that the segment ends too early"
    )
    assert rows_by_seq(results) == {
        number: body for number, body in enumerate(expected, 1) if not seq <= number < seq + 3
    }


def test_a_frame_of_another_position_is_damage() -> None:
    files, _ = three_segments()
    segment = reopened(files).segments.all[0]
    first, second, third, fourth = segment.frame_positions[:4]
    assert second - first == fourth - third, "one frame must fit into the place of the other"
    content = files.content(segment_name(1))
    file = files.open(segment_name(1))
    file.write_at(third, content[first:second])
    (flaw,) = damage(walk_all(files))
    assert flaw.position == third and "begins with seq 1, expected 7" in flaw.text


def test_a_damaged_segment_header_hides_no_frame() -> None:
    files, expected = three_segments()
    for ordinal, position in ((1, 3), (2, 17), (3, 60)):  # magic, first_seq, checksum
        damaged = files.crash(survival="everything")
        flip(damaged, segment_name(ordinal), position)
        results = walk_all(damaged)
        assert (segment_name(ordinal), 0) in [(flaw.file, flaw.position) for flaw in damage(results)]
        assert list(rows_by_seq(results).values()) == expected


def test_rows_that_cannot_be_decoded_are_damage_although_their_checksum_is_right() -> None:
    files = CrashFiles()
    fill(files, 1)
    content = bytearray(files.content(segment_name(1)))
    (length,) = struct.unpack_from("<I", content, 64 + 8)
    content[128:140] = b"no message !"
    struct.pack_into("<I", content, 64 + 52, 0)
    struct.pack_into("<I", content, 64 + 52, google_crc32c.value(bytes(content[64 : 64 + length])))
    files.open(segment_name(1)).write_at(0, bytes(content))
    (flaw,) = damage(walk_all(files))
    assert flaw.position == 64 and "the rows cannot be decoded" in flaw.text


def test_for_any_flipped_byte_a_walk_agrees_with_recovery() -> None:
    """If recovery refuses the log, there is damage. If it accepts the log, the rows are the same."""
    files = CrashFiles()

    async def write() -> None:
        async with opened(files, disk=AtOnce(), segment_bytes=SEGMENT_BYTES) as log:
            for number in range(5):
                await log.append(batch(1 + 2 * number, 2))

    asyncio.run(write())
    expected = read_all(open_log(files, segment_bytes=SEGMENT_BYTES, now_ms=0).segments)
    refused = accepted = 0
    for name in [f"{FOLDER}/{name}" for name in files.list_dir(FOLDER)]:
        content = files.content(name)
        for position in range(0, len(content), 5):
            flip(files, name, position)
            results = walk_all(files)
            assert rows_by_seq(results).items() <= expected.items(), (name, position)
            try:
                rows = read_all(open_log(files, segment_bytes=SEGMENT_BYTES, now_ms=0).segments)
            except (Corrupt, SetupError):
                assert damage(results), (name, position)
                refused += 1
            else:
                assert not damage(results) and rows_by_seq(results) == rows, (name, position)
                accepted += 1
            files.open(name).write_at(0, content)
    assert refused > 700 and accepted > 70


# ---- files -----------------------------------------------------------------------------------------------


def test_a_missing_segment_is_damage_with_its_name() -> None:
    files, _ = three_segments()
    files.remove(segment_name(2))
    flaws = damage(walk_all(files))
    assert segment_name(2) in [flaw.file for flaw in flaws]


def test_a_blank_segment_between_others_and_one_with_a_blank_header_are_damage() -> None:
    files, _ = three_segments()
    blank = files.crash(survival="everything")
    blank.open(segment_name(2)).write_at(0, bytes(blank.size(segment_name(2))))
    assert (segment_name(2), 0) in [(flaw.file, flaw.position) for flaw in damage(walk_all(blank))]
    files.open(segment_name(2)).write_at(0, bytes(64))
    assert "its header is blank" in damage(walk_all(files))[0].text


def test_a_last_segment_with_a_torn_header_and_no_frames_is_a_spare() -> None:
    files = CrashFiles()
    fill(files, 1)
    begin_segment(prepare(files, 2, SEGMENT_BYTES), 4, 0)
    flip(files, segment_name(2), 20)
    assert not damage(walk_all(files))
    assert FolderDump(files).segments[1].is_spare


def test_a_segment_of_a_newer_format_is_refused() -> None:
    files = CrashFiles()
    fill(files, 1)
    header = bytearray(files.content(segment_name(1))[:60])
    struct.pack_into("<I", header, 8, 2)
    files.open(segment_name(1)).write_at(
        0, bytes(header) + struct.pack("<I", google_crc32c.value(bytes(header)))
    )
    with pytest.raises(SetupError, match="newer"):
        FolderDump(files)


def test_a_log_that_ends_before_the_checkpoint_is_damage() -> None:
    files, _ = three_segments()
    save_checkpoint(files, 61)
    assert walk_all(files) and not damage(walk_all(files))
    save_checkpoint(files, 62)
    (flaw,) = damage(walk_all(files))
    assert flaw.file == segment_name(3) and "covers seq 61" in flaw.text
    empty = CrashFiles()
    save_checkpoint(empty, 62)
    assert [flaw.text for flaw in damage(walk_all(empty))] == [
        "the log is missing, but the checkpoint covers seq 61"
    ]


def test_a_damaged_checkpoint_is_damage_and_a_missing_one_only_without_the_first_segment() -> None:
    files, _ = three_segments()
    save_checkpoint(files, 10)
    flip(files, cp.NAME, 30)
    assert [flaw.file for flaw in damage(walk_all(files))] == [cp.NAME]
    assert FolderDump(files).checkpoint is None
    files.remove(cp.NAME)
    assert not damage(walk_all(files)), "the whole log is there: it is only replayed"
    files.remove(segment_name(1))
    assert ["restore it" in flaw.text for flaw in damage(walk_all(files))] == [True]


# ---- while a broker writes -------------------------------------------------------------------------------


def test_segments_that_retention_removes_during_the_listing_are_no_damage() -> None:
    class Retention(CrashFiles):
        """Removes the oldest segments between a listing and the first mapping of a file."""

        names_to_remove: list[str]

        def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer:
            if name.endswith(".log") and self.names_to_remove:
                self.remove(self.names_to_remove.pop(0))
            return super().map_readonly(name)

    files, expected = three_segments()
    files.__class__ = Retention
    files.names_to_remove = [segment_name(1), segment_name(2)]  # type: ignore[attr-defined]
    save_checkpoint(files, 61)
    results = walk_all(files)
    assert not damage(results)
    assert list(rows_by_seq(results).values()) == expected[-len(rows_by_seq(results)) :]
    assert [segment.ordinal for segment in FolderDump(files).segments] == [3]


def test_a_listing_ends_although_files_are_removed_in_each_attempt() -> None:
    class Restless(CrashFiles):
        """Each listed file has been removed when it is mapped."""

        def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer:
            raise NotFound(name)

    files, _ = three_segments()
    files.__class__ = Restless
    with pytest.raises(NotFound, match="faster than they can be listed"):
        FolderDump(files)


def test_a_commit_that_is_completed_during_the_walk_is_no_damage() -> None:
    class Writing(CrashFiles):
        """At the first mapping the middle frame is half written. At the second it is whole."""

        def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer:
            written = super().map_readonly(name)
            self.mappings = getattr(self, "mappings", 0) + name.endswith(".log")
            if self.mappings != 1:
                return written
            half = bytearray(written)
            half[middle + 600 : last] = bytes(last - middle - 600)
            return pa.py_buffer(bytes(half))

    files = CrashFiles()
    expected = fill(files, 3)
    _, middle, last = reopened(files).segments.last.frame_positions
    files.__class__ = Writing
    assert list(rows_by_seq(walk_all(files)).values()) == expected
    assert files.mappings == 2, "the position was read again"  # type: ignore[attr-defined]


@pytest.mark.parametrize("begins", [True, False])
def test_a_segment_that_a_broker_begins_between_two_reads_is_no_damage(
    monkeypatch: pytest.MonkeyPatch, begins: bool
) -> None:
    """With a control: frames behind a header that stays blank are damage."""
    files = CrashFiles()
    fill(files, 3)
    data = bytearray(files.content(segment_name(1)))
    header = bytes(data[: fmt.ALIGN])
    data[: fmt.ALIGN] = bytes(fmt.ALIGN)
    holds_frames = module._holds_frames

    def begin_meanwhile(buffer: pa.Buffer) -> bool:
        holds = holds_frames(buffer)
        if begins:
            data[: fmt.ALIGN] = header
        return holds

    monkeypatch.setattr(module, "_holds_frames", begin_meanwhile)
    first_seq, damaged = module._read_header(1, pa.py_buffer(data), is_final=True)
    assert (first_seq, damaged is None) == ((1, True) if begins else (None, False))


def test_while_a_broker_writes_a_walk_finds_no_damage_and_all_acknowledged_rows(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)

    async def work() -> None:
        async with opened(files) as log:
            acknowledged = 0

            async def write() -> None:
                nonlocal acknowledged
                for _ in range(30):
                    await log.append(batch(1 + acknowledged, 3))
                    acknowledged += 3

            writing = asyncio.ensure_future(write())
            while not writing.done():
                before = acknowledged
                results = await asyncio.to_thread(walk_all, RealFiles(tmp_path))
                assert not damage(results)
                rows = rows_by_seq(results)
                assert list(rows) == list(range(1, len(rows) + 1)) and len(rows) >= before
            await writing
            assert log.writer.statistics.rolls > 1

    asyncio.run(asyncio.wait_for(work(), 60))


@pytest.fixture(scope="module")
def files() -> CrashFiles:
    """Three segments."""
    files = CrashFiles()
    fill(files, 20)
    return files


def seqs(files: CrashFiles, selection: Selection) -> list[int]:
    """List the numbers of the rows that a selection reports."""
    frames = [
        result for result in find_rows(FolderDump(files), selection) if isinstance(result, InspectedFrame)
    ]
    return [row["seq"] for frame in frames for row in describe_rows(frame, selection)]


def test_a_selection_limits_segments_sequence_numbers_and_kinds(files: CrashFiles) -> None:
    all_seqs = seqs(files, Selection())
    assert all_seqs == list(range(1, len(all_seqs) + 1))
    assert seqs(files, Selection(from_seq=4, to_seq=9)) == [4, 5, 6, 7, 8]
    second = seqs(files, Selection(segments=frozenset([2])))
    assert 0 < len(second) < len(all_seqs) and second == all_seqs[second[0] - 1 : second[-1]]
    assert seqs(files, Selection(kinds=frozenset([int(Kind.CANCEL)]))) == []


def test_a_summary_counts_the_rows_of_the_tables_in_the_checkpoint(files: CrashFiles) -> None:
    two, three = (np.ones((4, rows), np.int64) for rows in (2, 3))
    cp.save(
        files,
        cp.encode(cp.Checkpoint(cp.Facts(seq=2), np.ones(1, np.int64), np.ones(1, np.int64), two, three)),
    )
    fields = summarise(FolderDump(files), Selection()).document()["checkpoint"]
    assert (fields["settled_rows"], fields["moved_rows"], fields["woken_rows"]) == (1, 2, 3)
    assert "moved" not in fields


def test_a_summary_counts_the_rows_of_the_selection(files: CrashFiles) -> None:
    whole, part = (summarise(FolderDump(files), Selection(to_seq=end)) for end in (None, 2))
    assert sum(segment.rows for segment in whole.segments) == len(seqs(files, Selection()))
    assert len(part.segments) == 1 and part.segments[0].rows < whole.segments[0].rows
    assert whole.flaws == [] and whole.document()["damage"] == []


def test_damage_is_reported_although_it_is_outside_the_selection(files: CrashFiles) -> None:
    broken = CrashFiles()
    fill(broken, 20)
    first = FolderDump(broken).segments[0]
    file = broken.open(first.name)
    file.write_at(5_000, b"\xff" * 64)
    file.close()
    summary = summarise(FolderDump(broken), Selection())
    assert summary.damage and summary.document()["damage"][0]["file"] == first.name
    results = list(find_rows(FolderDump(broken), Selection(kinds=frozenset([int(Kind.CANCEL)]))))
    assert [type(result) for result in results] == [Damage]


KEYS, FRAMES, QUEUE = "log/0000000001.keys", "log/0000000001.frames", file_name(1)
SECOND = file_name(31)


def folder_with_caches() -> CrashFiles:
    """Write three segments with messages in four queues of `orders`, and all caches of a broker."""
    files = CrashFiles()

    async def write() -> None:
        async with opened(files, disk=AtOnce()) as log:
            for number in range(20):
                await log.append(batch(3 * number, 3))
            KeyIndex(files, log.segments, log.reader).find_rows(np.array([1], np.uint64))
            assert recovery.save_sealed(files, log.segments) == 2

    asyncio.run(write())
    indexes = QueueIndexes(files)
    for first, end in ((0, 30), (30, 60)):  # message n has seq n + 1 and is in queue n % 4
        for queue in range(4):
            seqs = np.arange(first, end)[np.arange(first, end) % 4 == queue] + 1
            indexes.queue("orders", queue).append(seqs, seqs, seqs)
        flush = indexes.flush(end + 1)
        flush.seals = True
        flush.write()
        indexes.finish(flush)
    save_checkpoint(files, 61)
    return files


def check(files: CrashFiles) -> list[Damage]:
    """Compare the caches with the log. Returns all damage of the folder and of the caches."""
    folder = FolderDump(files)
    caches = CacheCheck(folder)
    flaws = list(folder.damage)
    for segment in folder.segments:
        for result in folder.walk(segment):
            if isinstance(result, InspectedFrame):
                caches.add(result)
        flaws += caches.finish(segment)
    return flaws


def overwrite(files: CrashFiles, name: str, position: int, data: bytes) -> None:
    files.open(name).write_at(position, data)


def test_the_caches_of_a_broker_have_no_damage_and_are_not_changed() -> None:
    files = folder_with_caches()
    calls = files.calls
    assert check(files) == []
    assert files.calls == calls


@pytest.mark.parametrize("name", [KEYS, FRAMES])
def test_a_missing_key_run_or_frame_index_is_no_damage(name: str) -> None:
    files = folder_with_caches()
    files.remove(name)
    assert check(files) == []


@pytest.mark.parametrize("name", [KEYS, FRAMES])
def test_a_key_run_or_frame_index_with_a_wrong_checksum_is_damage(name: str) -> None:
    files = folder_with_caches()
    overwrite(files, name, 30, b"?")
    assert [flaw.file for flaw in check(files)] == [name]


def test_a_key_run_and_a_frame_index_of_another_segment_are_damage() -> None:
    files = folder_with_caches()
    for kind in ("keys", "frames"):
        files.replace(f"log/0000000001.{kind}", files.content(f"log/0000000002.{kind}"))
    assert {flaw.file for flaw in check(files)} == {KEYS, FRAMES}


def test_a_key_run_with_a_lost_swapped_or_unsorted_pair_is_damage() -> None:
    files = folder_with_caches()
    hashes, rows = KeyRun(files.map_readonly(KEYS)).columns()
    swapped = rows.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    for pairs in ((hashes[1:], rows[1:]), (hashes, swapped)):
        files.replace(KEYS, b"".join(key_hash.encode([pairs])))
        assert [flaw.file for flaw in check(files)] == [KEYS]
    files.replace(KEYS, b"".join(key_hash.encode([(hashes[::-1], rows[::-1])])))
    assert [flaw.file for flaw in check(files)] == [KEYS], "the right pairs, but not sorted"


@pytest.mark.parametrize("position", [20, -13], ids=["header", "entries"])
def test_a_queue_file_with_a_flipped_bit_is_damage(position: int) -> None:
    files = folder_with_caches()
    data = bytearray(files.content(QUEUE))
    data[position] ^= 4
    files.replace(QUEUE, bytes(data))
    (flaw,) = check(files)
    assert flaw.file == QUEUE and "checksum" in flaw.text and "delete it" in flaw.text


def test_a_queue_file_with_a_wrong_entry_is_damage() -> None:
    files = folder_with_caches()
    parts = QueueFile(QUEUE, files.content(QUEUE)).parts()
    parts[0].entries["seq"][3] += 1
    files.replace(QUEUE, encode(1, 31, parts))
    (flaw,) = check(files)
    assert (
        flaw.file == QUEUE and "offset 3 of queue 0 of 'orders' should name seq 13, and names 14" in flaw.text
    )


def test_a_missing_queue_file_is_damage() -> None:
    files = folder_with_caches()
    files.remove(QUEUE)
    assert {(flaw.file, "missing" in flaw.text) for flaw in check(files)} == {(QUEUE, True)}


def test_a_queue_file_that_is_being_written_is_no_damage() -> None:
    files = folder_with_caches()
    file = files.create(f"{SECOND}.new")
    file.write_at(0, files.content(SECOND)[:50])
    file.close()
    assert check(files) == []


def test_a_queue_file_that_retention_removes_during_the_check_is_no_damage() -> None:
    class Retention(CrashFiles):
        """Removes the oldest queue file between its listing and its mapping."""

        def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer:
            if name == QUEUE and self.exists(name):
                self.remove(name)
            return super().map_readonly(name)

    files = folder_with_caches()
    files.__class__ = Retention
    assert check(files) == []


def test_queue_files_after_the_checkpoint_are_not_compared() -> None:
    files = folder_with_caches()
    files.remove(SECOND)
    assert [flaw.file for flaw in check(files)] == [SECOND] * 2, "once for each segment with rows of the file"
    save_checkpoint(files, 31)
    assert check(files) == []
    files.remove(cp.NAME)
    files.remove(QUEUE)
    assert check(files) == []
