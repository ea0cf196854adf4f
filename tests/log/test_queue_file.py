"""The files of the queue index: they return the written entries or raise Corrupt, and a start uses those that fit."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.crash_files import CrashFiles

from timeball.log.format import ENTRY, EntryArray
from timeball.log.queue_index import (
    BLOCK_ENTRIES,
    Opened,
    Part,
    QueueFile,
    encode,
    file_name,
    open_files,
    remove_all,
)
from timeball.model.errors import Corrupt


def entries(first_seq: int, count: int) -> EntryArray:
    made = np.empty(count, ENTRY)
    seqs = np.arange(first_seq, first_seq + count)
    made["seq"], made["size"], made["tag"] = seqs, seqs % 1_000, -seqs
    return made


def parts() -> list[Part]:
    return [
        Part("orders", 0, 7, entries(1, 3)), Part("orders", 4, 0, entries(4, 2 * BLOCK_ENTRIES + 5)),
        Part("%RETRY%g", 0, 2**40, entries(900, BLOCK_ENTRIES)),
    ]  # fmt: skip


def said(found: list[Part]) -> list[tuple[str, int, int, bytes]]:
    return [(part.topic, part.queue_id, part.first_offset, part.entries.tobytes()) for part in found]


def test_written_entries_are_read_back() -> None:
    file = QueueFile("a.cq", encode(1, 2_000, parts()))
    assert (file.first_seq, file.next_seq, len(file)) == (1, 2_000, 3 * BLOCK_ENTRIES + 8)
    assert said(file.parts()) == said(parts())
    assert QueueFile("a.cq", encode(5, 9, [])).parts() == []


@given(st.integers(0, 2 * BLOCK_ENTRIES + 5), st.integers(0, 2 * BLOCK_ENTRIES + 5))
def test_any_range_of_a_run_can_be_read(begin: int, end: int) -> None:
    file = QueueFile("a.cq", encode(1, 2_000, parts()))
    assert file.read(1, begin, end).tolist() == parts()[1].entries[begin:end].tolist()


def test_entry_bytes_equal_rocketmqs() -> None:
    records = np.array([(5, 111, -2)], ENTRY)
    assert encode(1, 6, [Part("t", 0, 0, records)])[-20:] == struct.pack(">qiq", 5, 111, -2)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_flipped_bit_raises_corrupt_and_gives_no_entry(data: st.DataObject) -> None:
    whole = encode(1, 2_000, parts())
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    flipped = bytearray(whole)
    flipped[bit // 8] ^= 1 << bit % 8
    with pytest.raises(Corrupt):
        QueueFile("a.cq", bytes(flipped)).parts()


@pytest.mark.parametrize("size", [0, 1, 63, 64, 100, -1, -20])
def test_truncated_file_is_corrupt(size: int) -> None:
    with pytest.raises(Corrupt, match=r"^a.cq: "):
        QueueFile("a.cq", encode(1, 2_000, parts())[:size])


def test_native_entries_are_written_big_endian() -> None:
    joined = np.concatenate([entries(1, 2), entries(3, 2)])
    assert (
        QueueFile("a.cq", encode(1, 5, [Part("t", 0, 0, joined)])).parts()[0].entries.tolist()
        == joined.tolist()
    )


def stretch(files: CrashFiles, first: int, end: int, *, flip: int | None = None) -> None:
    entries = np.zeros(end - first, ENTRY)
    entries["seq"] = np.arange(first, end)
    data = bytearray(encode(first, end, [Part("t", 0, first, entries)]))
    if flip is not None:
        data[flip] ^= 1
    files.make_dir("queues")
    files.replace(file_name(first), bytes(data))


def found(opened: Opened) -> tuple[list[int], list[int], int, int]:
    """Summarize: first rows of the sealed files, rows in memory, first row of the open range, and the covered end."""
    rows = [seq for part in opened.tail for seq in part.entries["seq"].tolist()]
    return [file.first_seq for file in opened.sealed], rows, opened.open_seq, opened.covered_seq


def three() -> CrashFiles:
    files = CrashFiles()
    for first, end in ((1, 11), (11, 21), (21, 26)):
        stretch(files, first, end)
    return files


def test_entries_of_the_newest_file_go_to_memory() -> None:
    assert found(open_files(three(), 1, 26)) == ([1, 11], [21, 22, 23, 24, 25], 21, 26)


@pytest.mark.parametrize(
    ("to_seq", "rows", "kept"), [(23, [21, 22], 3), (21, [*range(11, 21)], 2), (1, [], 0)]
)
def test_entries_after_the_checkpoint_are_cut(to_seq: int, rows: list[int], kept: int) -> None:
    files = three()
    opened = open_files(files, 1, to_seq)
    assert found(opened)[1:] == (rows, max(1, rows[0] if rows else 1), to_seq)
    assert len(files.list_dir("queues")) == kept


def test_files_below_the_first_kept_row_are_removed() -> None:
    files = three()
    assert found(open_files(files, 15, 26)) == ([11], [21, 22, 23, 24, 25], 21, 26)
    assert files.list_dir("queues") == [file_name(11).split("/")[1], file_name(21).split("/")[1]]


@pytest.mark.parametrize(("first", "end", "covered"), [(1, 11, 1), (11, 21, 11), (21, 26, 21)])
@pytest.mark.parametrize("how", ["removed", "header", "entries"])
def test_files_after_a_gap_are_not_used(first: int, end: int, covered: int, how: str) -> None:
    files = three()
    if how == "removed":
        files.remove(file_name(first))
    else:
        stretch(files, first, end, flip=20 if how == "header" else -5)
    opened = open_files(files, 1, 26)
    if how == "entries" and first < 21:
        assert opened.covered_seq == 26, "found when it is read"
    else:
        assert opened.covered_seq == covered


def test_overlapping_file_is_not_used() -> None:
    files = three()
    stretch(files, 16, 26)
    assert found(open_files(files, 1, 26)) == ([1, 11], [21, 22, 23, 24, 25], 21, 26)


def test_remove_all_removes_all_files() -> None:
    files = three()
    files.replace("queues/else", b"")
    remove_all(files)
    assert files.list_dir("queues") == ["else"]
