"""The consume queue: dense from the first kept to the last, whatever is appended, trimmed or reopened."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.crash_files import CrashFiles

from timeball.errors import OutOfRange
from timeball.files import Files, RealFiles
from timeball.log import queue_index
from timeball.log.queue_index import ENTRY, FIRST_ALLOCATION, QueueIndex
from timeball.message import Int64Array

FOLDER = "queues/1/0"


def numbers(first: int, count: int) -> Int64Array:
    return np.arange(first, first + count, dtype=np.int64)


def append(queue: QueueIndex, seqs: Int64Array) -> None:
    queue.append(seqs, seqs % 1_000, -seqs)


def seqs_of(queue: QueueIndex) -> list[int]:
    entries = queue.read(queue.min_offset, queue.max_offset)
    assert entries["size"].tolist() == [seq % 1_000 for seq in entries["seq"].tolist()]
    assert entries["tag"].tolist() == [-seq for seq in entries["seq"].tolist()]
    return [int(seq) for seq in entries["seq"]]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of ten entries."""
    monkeypatch.setattr(queue_index, "FILE_ENTRIES", 10)
    monkeypatch.setattr(queue_index, "FIRST_ALLOCATION", 3)


# ---- the invariant ---------------------------------------------------------------------------------------


class Machine(RuleBasedStateMachine):
    """A queue beside a list. Synced and crashed at will, it holds what the checkpoint knew."""

    @initialize(start=st.integers(0, 25))
    def begin(self, start: int) -> None:
        self.files = CrashFiles()
        self.queue = QueueIndex(self.files, FOLDER)
        if start:
            self.queue.start_at(start)
        self.seqs: list[int] = []  # of the entries from min_offset on
        self.low, self.next_seq = start, 1
        self.checkpoint = (start, start)

    @rule(count=st.integers(0, 35), gap=st.integers(0, 3))
    def append(self, count: int, gap: int) -> None:
        fresh = self.next_seq + np.arange(count) * (1 + gap)
        append(self.queue, fresh)
        self.seqs += fresh.tolist()
        self.next_seq = max([self.next_seq, *(seq + 1 for seq in fresh.tolist())])

    @rule(share=st.floats(0, 1))
    def trim(self, share: float) -> None:
        first_seq = int(self.next_seq * share)
        self.queue.trim(first_seq)
        kept = [seq for seq in self.seqs if seq >= first_seq]
        self.low += len(self.seqs) - len(kept)
        self.seqs = kept

    @rule()
    def save(self) -> None:
        files = self.queue.take_dirty()
        for file in files:
            file.sync()
        if files:
            self.files.sync_dir(FOLDER)
        self.checkpoint = (self.queue.min_offset, self.queue.max_offset)

    @rule(seed=st.integers(0, 2**16))
    def crash(self, seed: int) -> None:
        """Recovery: what the checkpoint vouches for, less what retention has let go since."""
        low, high = self.checkpoint
        self.seqs = self.seqs[: max(0, high - self.low)]
        self.files = self.files.crash(seed)
        self.queue = QueueIndex(self.files, FOLDER, min_offset=low, max_offset=high)
        if self.low > low:
            self.queue.min_offset = min(self.low, high)
        self.low = self.queue.min_offset

    @invariant()
    def dense(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert self.queue.max_offset - self.queue.min_offset == len(self.seqs)
        assert self.queue.min_offset == self.low
        assert seqs_of(self.queue) == self.seqs


def test_it_holds_what_was_appended_less_what_was_let_go(small: None) -> None:
    machine = Machine.TestCase
    machine.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)
    machine().runTest()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=6), st.integers(0, 80), st.integers(0, 80))
def test_any_part_can_be_read(counts: list[int], offset: int, count: int) -> None:
    files = CrashFiles()
    queue = QueueIndex(files, FOLDER)
    for each in counts:
        append(queue, numbers(1 + queue.max_offset, each))
    total = sum(counts)
    if offset > total:
        with pytest.raises(OutOfRange, match=f"keeps 0 to {total}"):
            queue.read(offset, count)
    else:
        expected = list(range(1 + offset, 1 + min(total, offset + count)))
        assert queue.read(offset, count)["seq"].tolist() == expected


# ---- the bytes -------------------------------------------------------------------------------------------


def test_an_entry_is_rocketmq_s() -> None:
    files = CrashFiles()
    queue = QueueIndex(files, FOLDER)
    queue.append(*(np.array([n], np.int64) for n in (5, 111, -2)))
    assert files.content(f"{FOLDER}/00000000.cq")[:20] == struct.pack(">qiq", 5, 111, -2)


def test_a_file_begins_small_doubles_and_ends_at_its_size(small: None) -> None:
    files = CrashFiles()
    queue = QueueIndex(files, FOLDER)
    sizes = []
    for n in range(12):
        append(queue, numbers(n, 1))
        sizes.append(files.size(f"{FOLDER}/00000000.cq") // ENTRY.itemsize)
    assert sizes == [3, 3, 3, 6, 6, 6, *[10] * 6]
    assert files.list_dir(FOLDER) == ["00000000.cq", "00000001.cq"]
    assert FIRST_ALLOCATION * ENTRY.itemsize < 100_000, "a queue that is hardly used costs little"


def test_a_part_is_a_copy_that_stays_as_it_was(small: None) -> None:
    queue = QueueIndex(CrashFiles(), FOLDER)
    append(queue, numbers(1, 2))
    part = queue.read(0, 2)
    append(queue, numbers(3, 30))
    part["seq"] = 0
    assert seqs_of(queue) == list(range(1, 33))


# ---- retention -------------------------------------------------------------------------------------------


def test_files_wholly_behind_the_first_kept_are_removed(small: None) -> None:
    files = CrashFiles()
    queue = QueueIndex(files, FOLDER)
    append(queue, numbers(1, 35))
    queue.trim(20)
    assert (queue.min_offset, queue.max_offset) == (19, 35)
    assert files.list_dir(FOLDER) == [f"{n:08d}.cq" for n in (1, 2, 3)]
    with pytest.raises(OutOfRange, match="keeps 19 to 35"):
        queue.read(18, 1)
    queue.trim(5)
    assert queue.min_offset == 19, "it never goes back"
    queue.trim(1_000)
    assert (queue.min_offset, queue.max_offset) == (35, 35)
    assert files.list_dir(FOLDER) == ["00000003.cq"]
    append(queue, numbers(1_000, 3))
    assert seqs_of(queue) == [1_000, 1_001, 1_002]


def test_what_is_hidden_keeps_its_files_until_it_is_trimmed(small: None) -> None:
    files = CrashFiles()
    queue = QueueIndex(files, FOLDER)
    append(queue, numbers(1, 35))
    queue.hide(1_000)
    assert (queue.min_offset, queue.max_offset) == (35, 35)
    assert len(files.list_dir(FOLDER)) == 4
    assert seqs_of(QueueIndex(files, FOLDER, max_offset=35)) == list(range(1, 36)), "it can be taken back"
    queue.trim(2)
    assert files.list_dir(FOLDER) == ["00000003.cq"]


def test_files_that_an_earlier_run_left_are_removed_too(small: None) -> None:
    files = CrashFiles()
    append(QueueIndex(files, FOLDER), numbers(1, 35))
    again = QueueIndex(files, FOLDER, max_offset=35)
    again.trim(36)
    assert files.list_dir(FOLDER) == ["00000003.cq"]


def test_a_queue_whose_beginning_is_gone_starts_where_its_rows_say(small: None) -> None:
    files = CrashFiles()
    queue = QueueIndex(files, FOLDER)
    queue.start_at(25)
    append(queue, numbers(7, 2))
    assert (queue.min_offset, queue.max_offset) == (25, 27)
    assert files.list_dir(FOLDER) == ["00000002.cq"]
    with pytest.raises(AssertionError):
        queue.start_at(30)


# ---- checkpoints and crashes -----------------------------------------------------------------------------


def test_dirty_files_are_told_once(small: None) -> None:
    files = CrashFiles()
    queue = QueueIndex(files, FOLDER)
    append(queue, numbers(1, 25))
    assert len(queue.take_dirty()) == 3
    assert queue.take_dirty() == []
    append(queue, numbers(26, 1))
    assert len(queue.take_dirty()) == 1


def test_without_a_sync_a_crash_loses_entries(small: None) -> None:
    """The control: what the checkpoint vouches for has to be synced."""
    files = CrashFiles()
    queue = QueueIndex(files, FOLDER)
    append(queue, numbers(1, 9))
    after = QueueIndex(files.crash(survival="nothing"), FOLDER, max_offset=9)
    assert after.read(0, 9)["seq"].tolist() != list(range(1, 10))


def test_entries_behind_what_the_checkpoint_knows_are_written_again(small: None) -> None:
    files = CrashFiles()
    append(QueueIndex(files, FOLDER), numbers(1, 15))
    again = QueueIndex(files, FOLDER, max_offset=8)
    append(again, numbers(100, 4))
    assert seqs_of(again) == [*range(1, 9), 100, 101, 102, 103]


@pytest.mark.parametrize("make", [lambda path: CrashFiles(), RealFiles], ids=["crash", "real"])
def test_it_is_found_again(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    files: Files = make(tmp_path)
    queue = QueueIndex(files, FOLDER)
    append(queue, numbers(1, 5_000))
    for file in queue.take_dirty():
        file.sync()
    queue.close()
    again = QueueIndex(files, FOLDER, max_offset=5_000)
    append(again, numbers(5_001, 5_000))
    assert seqs_of(again) == list(range(1, 10_001))
    again.close()


@pytest.mark.parametrize("offsets", [[], [7], [31, 7, 7, 10, 9, 30]])
def test_entries_by_their_offsets(small: None, offsets: list[int]) -> None:
    queue = QueueIndex(CrashFiles(), FOLDER)
    queue.start_at(7)
    append(queue, numbers(100, 25))
    wanted = np.array(offsets, np.int64)
    assert queue.at(wanted).tolist() == [queue.read(offset, 1)[0].item() for offset in offsets]


def test_an_empty_queue_costs_nothing_on_the_disk(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)
    queue = QueueIndex(files, FOLDER)
    queue.trim(5)
    assert (queue.take_dirty(), files.exists(FOLDER)) == ([], False)
    append(queue, numbers(7, 2))
    assert (seqs_of(queue), files.exists(FOLDER)) == ([7, 8], True)
