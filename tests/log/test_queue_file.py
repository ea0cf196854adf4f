"""The files of the queue index: they return the written entries or raise Corrupt, and a start uses those that fit."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.crash_files import CrashFiles

from timeball.log.format import ENTRY, EntryArray
from timeball.log.queue_index import (
    BLOCK_ENTRIES,
    OpenedFiles,
    Part,
    QueueFile,
    encode,
    file_name,
    open_files,
    remove_all,
)
from timeball.model.errors import Corrupt


def entries(first_seq: int, count: int) -> EntryArray:
    """Build entries of consecutive rows."""
    array = np.empty(count, ENTRY)
    seqs = np.arange(first_seq, first_seq + count)
    array["seq"], array["size"], array["tag"] = seqs, seqs % 1_000, -seqs
    return array


def parts() -> list[Part]:
    """Build three parts: of less than a block, of more than two blocks, and of a whole block."""
    return [
        Part("orders", 0, 7, entries(1, 3)), Part("orders", 4, 0, entries(4, 2 * BLOCK_ENTRIES + 5)),
        Part("%RETRY%g", 0, 2**40, entries(900, BLOCK_ENTRIES)),
    ]  # fmt: skip


def comparable(parts: list[Part]) -> list[tuple[str, int, int, bytes]]:
    return [(part.topic, part.queue_id, part.first_offset, part.entries.tobytes()) for part in parts]


def test_written_entries_are_read_back() -> None:
    file = QueueFile("a.cq", encode(1, 2_000, parts()))
    assert (file.first_seq, file.next_seq, len(file)) == (1, 2_000, 3 * BLOCK_ENTRIES + 8)
    assert comparable(file.parts()) == comparable(parts())
    assert QueueFile("a.cq", encode(5, 9, [])).parts() == []


@given(st.integers(0, 2 * BLOCK_ENTRIES + 5), st.integers(0, 2 * BLOCK_ENTRIES + 5))
def test_any_range_of_a_run_can_be_read(begin: int, end: int) -> None:
    file = QueueFile("a.cq", encode(1, 2_000, parts()))
    assert file.read(1, begin, end).tolist() == parts()[1].entries[begin:end].tolist()


def test_entry_bytes_equal_those_of_rocketmqs_consume_queue() -> None:
    """With the row number in place of RocketMQ's position in its commit log."""
    seq = 1 << 40
    records = np.array([(seq, 111, -2)], ENTRY)
    assert encode(1, seq + 1, [Part("t", 0, 0, records)])[-20:] == struct.pack(">qiq", seq, 111, -2)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_flipped_bit_raises_corrupt_and_gives_no_entry(data: st.DataObject) -> None:
    undamaged = encode(1, 2_000, parts())
    bit = data.draw(st.integers(0, 8 * len(undamaged) - 1))
    flipped = bytearray(undamaged)
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Corrupt):
        QueueFile("a.cq", bytes(flipped)).parts()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 100, -1, -20])
def test_truncated_file_is_corrupt(size: int) -> None:
    with pytest.raises(Corrupt, match=r"^a.cq: "):
        QueueFile("a.cq", encode(1, 2_000, parts())[:size])


def test_native_entries_are_written_big_endian() -> None:
    native = np.concatenate([entries(1, 2), entries(3, 2)])  # numpy returns the byte order of the machine
    (part,) = QueueFile("a.cq", encode(1, 5, [Part("t", 0, 0, native)])).parts()
    assert part.entries.tolist() == native.tolist()


# ---- opening the files -----------------------------------------------------------------------------------


def write_file(files: CrashFiles, first: int, end: int, *, flip: int | None = None) -> None:
    """Write the file of one queue's entries for rows [first, end). `flip`: a byte in which a bit is flipped."""
    entries = np.zeros(end - first, ENTRY)
    entries["seq"] = np.arange(first, end)
    data = bytearray(encode(first, end, [Part("t", 0, first, entries)]))
    if flip is not None:
        data[flip] ^= 1
    files.make_dir("queues")
    files.replace(file_name(first), bytes(data))


class Summary(NamedTuple):
    """The result of `open_files`, in comparable form."""

    sealed: list[int]  # first rows of the sealed files
    in_memory: list[int]  # rows
    open_seq: int
    covered_seq: int


def summary(opened: OpenedFiles) -> Summary:
    in_memory = [seq for part in opened.tail for seq in part.entries["seq"].tolist()]
    return Summary([file.first_seq for file in opened.sealed], in_memory, opened.open_seq, opened.covered_seq)


def three_files() -> CrashFiles:
    """Write files for rows 1 to 10, 11 to 20 and 21 to 25."""
    files = CrashFiles()
    for first, end in ((1, 11), (11, 21), (21, 26)):
        write_file(files, first, end)
    return files


def test_entries_of_the_newest_file_go_to_memory() -> None:
    assert summary(open_files(three_files(), 1, 26)) == Summary([1, 11], [21, 22, 23, 24, 25], 21, 26)


@pytest.mark.parametrize(
    ("to_seq", "expected", "files_left"),
    [
        (23, Summary([1, 11], [21, 22], 21, 23), 3),
        (21, Summary([1], [*range(11, 21)], 11, 21), 2),
        (1, Summary([], [], 1, 1), 0),
    ],
)
def test_entries_after_the_checkpoint_are_cut(to_seq: int, expected: Summary, files_left: int) -> None:
    files = three_files()
    assert summary(open_files(files, 1, to_seq)) == expected
    assert len(files.list_dir("queues")) == files_left


def test_files_below_the_first_row_of_the_log_are_removed() -> None:
    files = three_files()
    assert summary(open_files(files, 15, 26)) == Summary([11], [21, 22, 23, 24, 25], 21, 26)
    assert files.list_dir("queues") == [file_name(11).split("/")[1], file_name(21).split("/")[1]]


IN_HEADER, IN_ENTRIES = 20, -5  # a byte of a file


@pytest.mark.parametrize(("first", "end"), [(1, 11), (11, 21), (21, 26)])
@pytest.mark.parametrize("damaged_byte", [None, IN_HEADER], ids=["removed", "header"])
def test_a_missing_file_or_damaged_header_ends_the_usable_files(
    first: int, end: int, damaged_byte: int | None
) -> None:
    files = three_files()
    if damaged_byte is None:
        files.remove(file_name(first))
    else:
        write_file(files, first, end, flip=damaged_byte)
    assert open_files(files, 1, 26).covered_seq == first


def test_damaged_entries_of_the_newest_file_are_not_used() -> None:
    files = three_files()
    write_file(files, 21, 26, flip=IN_ENTRIES)
    assert open_files(files, 1, 26).covered_seq == 21


@pytest.mark.parametrize(("first", "end"), [(1, 11), (11, 21)])
def test_damaged_entries_of_a_sealed_file_are_not_noticed_before_they_are_read(first: int, end: int) -> None:
    files = three_files()
    write_file(files, first, end, flip=IN_ENTRIES)
    opened = open_files(files, 1, 26)
    assert opened.covered_seq == 26
    (damaged,) = (file for file in opened.sealed if file.first_seq == first)
    with pytest.raises(Corrupt):
        damaged.parts()


def test_overlapping_file_is_not_used() -> None:
    files = three_files()
    write_file(files, 16, 26)
    assert summary(open_files(files, 1, 26)) == Summary([1, 11], [21, 22, 23, 24, 25], 21, 26)


def test_remove_all_removes_the_files_of_the_index_and_no_others() -> None:
    files = three_files()
    files.replace("queues/else", b"")
    remove_all(files)
    assert files.list_dir("queues") == ["else"]
