"""Which files of the queue index a start can use: those that follow each other from the first row kept."""

from __future__ import annotations

import numpy as np
import pytest
from tests.crash_files import CrashFiles

from timeball.log.queue_file import ENTRY, Part, encode
from timeball.log.queue_files import Opened, file_name, open_files, remove_all


def stretch(files: CrashFiles, first: int, end: int, *, flip: int | None = None) -> None:
    entries = np.zeros(end - first, ENTRY)
    entries["seq"] = np.arange(first, end)
    data = bytearray(encode(first, end, [Part("t", 0, first, entries)]))
    if flip is not None:
        data[flip] ^= 1
    files.make_dir("queues")
    files.replace(file_name(first), bytes(data))


def found(opened: Opened) -> tuple[list[int], list[int], int, int]:
    """First rows of the sealed files, rows in memory, where the open stretch begins, and how far they go."""
    rows = [seq for part in opened.tail for seq in part.entries["seq"].tolist()]
    return [file.first_seq for file in opened.sealed], rows, opened.open_seq, opened.covered_seq


def three() -> CrashFiles:
    files = CrashFiles()
    for first, end in ((1, 11), (11, 21), (21, 26)):
        stretch(files, first, end)
    return files


def test_the_newest_goes_into_memory() -> None:
    assert found(open_files(three(), 1, 26)) == ([1, 11], [21, 22, 23, 24, 25], 21, 26)


@pytest.mark.parametrize(
    ("to_seq", "rows", "kept"), [(23, [21, 22], 3), (21, [*range(11, 21)], 2), (1, [], 0)]
)
def test_what_the_checkpoint_does_not_know_of_is_cut(to_seq: int, rows: list[int], kept: int) -> None:
    files = three()
    opened = open_files(files, 1, to_seq)
    assert found(opened)[1:] == (rows, max(1, rows[0] if rows else 1), to_seq)
    assert len(files.list_dir("queues")) == kept


def test_what_the_log_has_let_go_is_removed() -> None:
    files = three()
    assert found(open_files(files, 15, 26)) == ([11], [21, 22, 23, 24, 25], 21, 26)
    assert files.list_dir("queues") == [file_name(11).split("/")[1], file_name(21).split("/")[1]]


@pytest.mark.parametrize(("first", "end", "covered"), [(1, 11, 1), (11, 21, 11), (21, 26, 21)])
@pytest.mark.parametrize("how", ["removed", "header", "entries"])
def test_a_hole_ends_what_can_be_used(first: int, end: int, covered: int, how: str) -> None:
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


def test_one_that_overlaps_is_not_used() -> None:
    files = three()
    stretch(files, 16, 26)
    assert found(open_files(files, 1, 26)) == ([1, 11], [21, 22, 23, 24, 25], 21, 26)


def test_all_can_be_removed() -> None:
    files = three()
    files.replace("queues/else", b"")
    remove_all(files)
    assert files.list_dir("queues") == ["else"]
