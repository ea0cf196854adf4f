"""The frame index of a sealed segment equals its frames. A faulty index is ignored."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tests.crash_files import CrashFiles
from tests.log.small_log import fill, read_all, reopened

from timeball.io.files import RealFiles
from timeball.log import recovery
from timeball.log.reader import LogReader
from timeball.log.recovery import ARRAYS_AT, HEADER, index_name, save_sealed
from timeball.log.segment import Segments
from timeball.model.errors import Corrupt


def log_with_indexes(files: CrashFiles) -> Segments:
    """Make a log with several sealed segments and their indexes."""
    fill(files, 60)
    segments = reopened(files).segments
    assert save_sealed(files, segments) == len(segments.all) - 1 > 2
    return segments


def damage(files: CrashFiles, name: str, position: int) -> None:
    """Change one byte of a file."""
    data = bytearray(files.content(name))
    data[position] ^= 0xFF
    files.replace(name, bytes(data))


def test_loaded_index_equals_the_frames() -> None:
    files = CrashFiles()
    indexed = log_with_indexes(files)
    scanned = reopened(files).segments  # without a checkpoint, recovery reads all frames
    assert not any(segment.is_indexed for segment in scanned.all)
    assert all(segment.is_indexed for segment in indexed.all[:-1]) and not indexed.last.is_indexed
    for from_index, from_frames in zip(indexed.all, scanned.all, strict=True):
        assert list(from_index.frame_positions) == list(from_frames.frame_positions)
        assert list(from_index.frame_seqs) == list(from_frames.frame_seqs)
        assert from_index.end == from_frames.end
        assert from_index.next_seq == from_frames.next_seq
        assert from_index.newest_append_ms == from_frames.newest_append_ms
    assert read_all(indexed) == read_all(scanned)


def test_only_sealed_segments_get_an_index_and_only_once() -> None:
    files = CrashFiles()
    segments = log_with_indexes(files)
    assert save_sealed(files, segments) == 0
    assert not files.exists(index_name(segments.last))


def test_start_reads_no_segment_below_the_checkpoint() -> None:
    files = CrashFiles()
    next_seq = log_with_indexes(files).next_seq
    first = reopened(files, durable_before_seq=next_seq).segments.all[0]
    assert first.is_indexed
    # A read finds damage in the segment. The start finds it only without the index.
    damage(files, first.name, first.end - 8)
    segments = reopened(files, durable_before_seq=next_seq).segments
    with pytest.raises(Corrupt):
        list(LogReader(segments).rows(1, segments.all[0].next_seq))
    files.remove(index_name(first))
    with pytest.raises(Corrupt, match="restore this file"):
        reopened(files, durable_before_seq=next_seq)


def test_start_reads_segments_that_a_replay_needs() -> None:
    files = CrashFiles()
    second = log_with_indexes(files).all[1]
    opened = reopened(files, durable_before_seq=second.first_seq + 1).segments
    assert [segment.is_indexed for segment in opened.all[:3]] == [True, False, False]


# A byte of the magic, the number of frames, the checksum, `first_seq`, `next_seq` and a position, and the last byte.
@pytest.mark.parametrize("position", [0, 8, HEADER.size - 1, HEADER.size, HEADER.size + 9, ARRAYS_AT + 3, -1])
def test_a_damaged_index_is_ignored_and_written_again(
    position: int, caplog: pytest.LogCaptureFixture
) -> None:
    files = CrashFiles()
    segments = log_with_indexes(files)
    name = index_name(segments.all[0])
    damage(files, name, position)
    with caplog.at_level(logging.WARNING):
        loaded = reopened(files, durable_before_seq=segments.next_seq).segments
    assert name in caplog.text
    assert [segment.is_indexed for segment in loaded.all[:2]] == [False, True]
    assert read_all(loaded) == read_all(segments)
    assert save_sealed(files, loaded) == 1


@pytest.mark.parametrize("size", [0, 10, ARRAYS_AT - 1, ARRAYS_AT + 8])
def test_an_index_cut_short_is_ignored(size: int) -> None:
    files = CrashFiles()
    segments = log_with_indexes(files)
    name = index_name(segments.all[0])
    files.replace(name, files.content(name)[:size])
    loaded = reopened(files, durable_before_seq=segments.next_seq).segments
    assert not loaded.all[0].is_indexed and read_all(loaded) == read_all(segments)


def test_an_index_of_another_segment_is_ignored() -> None:
    files = CrashFiles()
    segments = log_with_indexes(files)
    files.replace(index_name(segments.all[0]), files.content(index_name(segments.all[1])))
    loaded = reopened(files, durable_before_seq=segments.next_seq).segments
    assert not loaded.all[0].is_indexed and read_all(loaded) == read_all(segments)


def test_power_cut_after_the_indexes_were_saved_leaves_all_of_them() -> None:
    before = CrashFiles()
    log_with_indexes(before)
    expected = read_all(reopened(before).segments)
    for seed in range(10):
        files = before.crash(seed, "random")
        segments = reopened(files, durable_before_seq=1).segments
        assert read_all(segments) == expected
        for segment in segments.all[:-1]:
            assert recovery.load(files, segment, segment.next_seq)


def test_index_in_a_real_file_is_mapped(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)
    fill(files, 30)
    segments = reopened(files).segments
    before = read_all(segments)
    assert save_sealed(files, segments) and segments.all[0].is_indexed
    assert read_all(segments) == before
    assert read_all(reopened(files, durable_before_seq=segments.next_seq).segments) == before
