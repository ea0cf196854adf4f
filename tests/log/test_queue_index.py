"""The queue index keeps every entry, whatever is appended, sealed, removed, damaged or reopened."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.crash_files import CrashFiles

from timeball.io.files import Files, RealFiles
from timeball.log import queue_index
from timeball.log.format import ENTRY
from timeball.log.queue_index import Part, QueueIndex, QueueIndexes, file_name, first_offsets
from timeball.model.errors import Corrupt, OutOfRange
from timeball.model.message import Int64Array

Queue = tuple[str, int]
QUEUES: list[Queue] = [("a", 0), ("a", 1), ("b", 0)]


def seqs_from(first: int, count: int) -> Int64Array:
    return np.arange(first, first + count, dtype=np.int64)


def append(queue: QueueIndex, seqs: Int64Array) -> None:
    """Append an entry for each row. Its size and tag follow from the row, so that `seqs_of` can check them."""
    queue.append(seqs, seqs % 1_000, -seqs)


def save(indexes: QueueIndexes, next_seq: int, *, seals: bool = False) -> None:
    """Write the open range, as a checkpoint of the rows below `next_seq` does. `seals`: also seal it."""
    flush = indexes.flush(next_seq)
    # A broker seals only large ranges (SEAL_ENTRIES): two files of an empty range would have the same name.
    flush.seals |= seals and flush.first_seq < flush.next_seq
    flush.write()
    indexes.finish(flush)


def seqs_of(queue: QueueIndex) -> list[int]:
    """Read all entries of a queue, and check their sizes and tags. Returns the rows."""
    entries = queue.read(queue.min_offset, queue.max_offset)
    assert entries["size"].tolist() == [seq % 1_000 for seq in entries["seq"].tolist()]
    assert entries["tag"].tolist() == [-seq for seq in entries["seq"].tolist()]
    return [int(seq) for seq in entries["seq"]]


def flip(files: Files, name: str, position: int) -> None:
    """Flip a bit of a file."""
    data = bytearray(files.map_readonly(name))
    data[position] ^= 8
    files.replace(name, bytes(data))


class Log:
    """The rows of each queue in a log, of which those below `first_seq` have been removed."""

    def __init__(self) -> None:
        self.rows: dict[Queue, list[tuple[int, int]]] = {queue: [] for queue in QUEUES}  # (offset, seq)
        self.next_seq = self.first_seq = 1

    def rebuild(self, first_seq: int, next_seq: int) -> list[Part]:
        """Build the entries of rows [first_seq, next_seq) that the log keeps, as a Rebuild does."""
        parts = []
        for (topic, queue_id), rows in self.rows.items():
            remaining = [
                (offset, seq) for offset, seq in rows if max(first_seq, self.first_seq) <= seq < next_seq
            ]
            entries = np.empty(len(remaining), ENTRY)
            seqs = np.array([seq for _, seq in remaining], np.int64)
            entries["seq"], entries["size"], entries["tag"] = seqs, seqs % 1_000, -seqs
            if remaining:
                first_offset, _ = remaining[0]
                parts.append(Part(topic, queue_id, first_offset, entries))
        return parts


class Machine(RuleBasedStateMachine):
    """Three queues, compared with lists, through seals, crashes and damage."""

    @initialize()
    def begin(self) -> None:
        self.files, self.log = CrashFiles(), Log()
        # The checkpoint: the row that follows it, and the end offset of each queue.
        self.checkpoint: tuple[int, dict[Queue, int]] = (1, {})
        self.open()

    def open(self) -> None:
        """Open the index as recovery does: load the files, replay the rows after them, and remove old files."""
        self.indexes = QueueIndexes(self.files, self.log.rebuild)
        checkpoint_seq, ends = self.checkpoint
        covered = self.indexes.load(self.log.first_seq, checkpoint_seq)
        for part in self.log.rebuild(covered, self.log.next_seq):
            index = self.indexes.queue(part.topic, part.queue_id)
            if index.max_offset < part.first_offset and index.min_offset == index.max_offset:
                index.start_at(part.first_offset)
            index.extend(part.entries)
        for queue, end in ends.items():
            index = self.indexes.queue(*queue)
            if index.min_offset == index.max_offset < end:
                index.start_at(end)
        self.indexes.forget(self.log.first_seq)

    @rule(queue=st.sampled_from(QUEUES), count=st.integers(1, 35), gap=st.integers(0, 3))
    def append(self, queue: Queue, count: int, gap: int) -> None:
        index = self.indexes.queue(*queue)
        seqs = self.log.next_seq + np.arange(count) * (1 + gap)
        offsets = index.max_offset + np.arange(count)
        append(index, seqs)
        self.log.rows[queue] += list(zip(offsets.tolist(), seqs.tolist(), strict=True))
        self.log.next_seq = int(seqs[-1]) + 1

    @rule(share=st.floats(0, 1))
    def remove_old_rows(self, share: float) -> None:
        """Remove this share of the rows before the checkpoint, as retention does."""
        checkpoint_seq, _ = self.checkpoint
        self.log.first_seq = max(self.log.first_seq, int(checkpoint_seq * share))
        for name in self.indexes.forget(self.log.first_seq):
            self.files.remove(name)

    @rule(seals=st.booleans())
    def save(self, seals: bool) -> None:
        save(self.indexes, self.log.next_seq, seals=seals)
        ends = {queue: self.indexes.queue(*queue).max_offset for queue in QUEUES}
        self.checkpoint = (self.log.next_seq, ends)

    @rule(file_number=st.integers(0, 9), position=st.integers(0, 10_000))
    def damage(self, file_number: int, position: int) -> None:
        """Flip a bit in a file. A start or a read finds it."""
        names = self.files.list_dir("queues")
        if names:
            name = f"queues/{names[file_number % len(names)]}"
            file = self.files.open(name)
            position %= self.files.size(name)
            file.write_at(position, bytes([self.files.content(name)[position] ^ 1]))
            # The tables before the entries are checked only at a start. So damage to them must be followed by one.
            tables_end = (
                64 + 24 * len(QUEUES) + 50
            )  # the header, the runs, at most 50 bytes of the other tables
            if position < tables_end or file_number % 3 == 0:
                self.open()

    @rule(file_number=st.integers(0, 9))
    def remove_a_file(self, file_number: int) -> None:
        names = self.files.list_dir("queues")
        if names:
            self.files.remove(f"queues/{names[file_number % len(names)]}")
            self.open()

    @rule(seed=st.integers(0, 2**16))
    def crash(self, seed: int) -> None:
        self.files = self.files.crash(seed)
        self.open()

    @invariant()
    def queues_equal_the_log(self) -> None:
        for queue in QUEUES if hasattr(self, "indexes") else ():
            index = self.indexes.queue(*queue)
            kept_seqs = [seq for _, seq in self.log.rows[queue] if seq >= self.log.first_seq]
            assert seqs_of(index) == kept_seqs
            assert index.max_offset == len(self.log.rows[queue])


def test_random_steps_keep_the_entries_of_the_log() -> None:
    machine = Machine.TestCase
    machine.settings = settings(max_examples=60, stateful_step_count=15, deadline=None)
    machine().runTest()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 30), max_size=6), st.integers(0, 80), st.integers(0, 80), st.booleans())
def test_any_range_can_be_read(counts: list[int], offset: int, count: int, seals: bool) -> None:
    indexes = QueueIndexes(CrashFiles())
    queue = indexes.queue("t", 0)
    for appended in counts:
        append(queue, seqs_from(1 + queue.max_offset, appended))
        save(indexes, 1 + queue.max_offset, seals=seals and appended % 2 == 0)
    total = sum(counts)
    if offset > total:
        with pytest.raises(OutOfRange, match=f"keeps 0 to {total}"):
            queue.read(offset, count)
    else:
        expected = list(range(1 + offset, 1 + min(total, offset + count)))
        assert queue.read(offset, count)["seq"].tolist() == expected


def queue_of_900_entries(files: Files) -> tuple[QueueIndexes, QueueIndex]:
    """Make one queue with two sealed runs and one in memory, of 300 entries each. Offset n has row n + 1."""
    indexes = QueueIndexes(files)
    queue = indexes.queue("t", 0)
    for first_seq, seals in ((1, True), (301, True), (601, False)):
        append(queue, seqs_from(first_seq, 300))
        save(indexes, first_seq + 300, seals=seals)
    return indexes, queue


@pytest.mark.parametrize("offsets", [[], [7], [899, 7, 7, 301, 600, 0, 255, 256, 899]])
def test_at_returns_the_entries_of_the_offsets(offsets: list[int]) -> None:
    _, queue = queue_of_900_entries(CrashFiles())
    positions = np.array(offsets, np.int64)
    assert queue.at(positions).tolist() == [queue.read(offset, 1)[0].item() for offset in offsets]


@pytest.mark.parametrize("begin, end", [(10, 20), (290, 310), (590, 620), (0, 900), (700, 720), (900, 910)])
def test_read_returns_entries_in_the_byte_order_of_the_file(begin: int, end: int) -> None:
    """Compiled readers take the bytes. numpy returns the native order when it concatenates parts."""
    _, queue = queue_of_900_entries(CrashFiles())
    entries = queue.read(begin, end - begin)
    assert entries.dtype == ENTRY
    assert entries["seq"].tobytes() == np.arange(begin + 1, min(end, 900) + 1, dtype=">i8").tobytes()


def test_read_numbers_returns_the_present_entries_also_when_its_last_result_was_cached() -> None:
    indexes = QueueIndexes(CrashFiles())
    index = indexes.queue("t", 0)

    def append(first: int, count: int) -> None:
        """Append entries whose size is the row plus 10."""
        seqs = np.arange(first, first + count)
        index.append(seqs, 10 + seqs, np.zeros(count, np.int64))

    append(100, 3)
    assert index.read_numbers(1, 32) == ([101, 102], [111, 112])
    append(200, 2)
    assert index.read_numbers(1, 32) == ([101, 102, 200, 201], [111, 112, 210, 211])
    assert index.read_numbers(1, 2) == index.read_numbers(1, 2) == ([101, 102], [111, 112])
    index.hide(200)
    with pytest.raises(OutOfRange):
        index.read_numbers(1, 2)
    index.clear()
    append(300, 3)
    assert index.read_numbers(1, 2) == ([301, 302], [311, 312])


def test_read_returns_a_copy() -> None:
    queue = QueueIndexes(CrashFiles()).queue("t", 0)
    append(queue, seqs_from(1, 2))
    entries = queue.read(0, 2)
    append(queue, seqs_from(3, 30))
    entries["seq"] = 0
    assert seqs_of(queue) == list(range(1, 33))


def test_large_range_is_sealed_and_its_memory_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queue_index, "SEAL_ENTRIES", 10)
    files = CrashFiles()
    indexes = QueueIndexes(files)
    queue = indexes.queue("t", 0)
    unsealed = []
    for first_seq in range(1, 21, 4):
        append(queue, seqs_from(first_seq, 4))
        save(indexes, first_seq + 4)
        unsealed.append(indexes.unsealed)
    assert unsealed == [4, 8, 0, 4, 8]
    assert files.list_dir("queues") == [file_name(seq).split("/")[1] for seq in (1, 13)]
    assert seqs_of(queue) == list(range(1, 21))


def test_entries_appended_during_a_flush_stay_in_memory() -> None:
    indexes = QueueIndexes(CrashFiles())
    queue = indexes.queue("t", 0)
    append(queue, seqs_from(1, 5))
    flush = indexes.flush(6)
    flush.seals = True
    append(queue, seqs_from(6, 3))
    append(indexes.queue("another", 0), seqs_from(9, 1))
    flush.write()
    indexes.finish(flush)
    assert indexes.unsealed == 4
    assert seqs_of(queue) == list(range(1, 9))
    save(indexes, 10, seals=True)
    assert indexes.unsealed == 0
    assert seqs_of(queue) == list(range(1, 9))


def test_lengths_are_those_at_the_time_of_the_flush() -> None:
    indexes, sealed = queue_of_900_entries(CrashFiles())
    growing = indexes.queue("u", 3)
    append(growing, seqs_from(901, 2))
    save(indexes, 903, seals=True)
    append(growing, seqs_from(903, 1))
    flush = indexes.flush(904)
    # These entries come after the flush.
    for queue in (sealed, growing):
        append(queue, seqs_from(1_000, 40))
    append(indexes.queue("v", 0), seqs_from(2_000, 1))
    assert flush.lengths() == {"t": {0: (0, 900)}, "u": {3: (0, 3)}}
    assert [part.entries["seq"].tolist() for part in flush.parts] == [[903]]


def test_queue_without_its_first_entries_starts_at_the_offset_of_its_rows() -> None:
    queue = QueueIndexes(CrashFiles()).queue("t", 0)
    queue.start_at(25)
    append(queue, seqs_from(7, 2))
    assert (queue.min_offset, queue.max_offset) == (25, 27)
    with pytest.raises(AssertionError):
        queue.start_at(30)


def test_forget_hides_the_entries_before_a_row_and_returns_the_files_that_have_no_others() -> None:
    indexes, queue = queue_of_900_entries(CrashFiles())
    assert indexes.forget(450) == [file_name(1)]
    assert (queue.min_offset, queue.max_offset) == (449, 900)
    assert indexes.forget(5) == []
    assert queue.min_offset == 449, "entries stay hidden"
    assert indexes.forget(10_000) == [file_name(301)]
    assert (queue.min_offset, queue.max_offset) == (900, 900)
    append(queue, seqs_from(10_000, 3))
    assert seqs_of(queue) == [10_000, 10_001, 10_002]


def test_offsets_are_hidden_before_their_file_is_forgotten() -> None:
    indexes, queue = queue_of_900_entries(CrashFiles())
    assert indexes.find_queues_before(1) == []
    assert indexes.find_queues_before(450) == [queue]
    assert first_offsets([queue], 450) == [449]
    queue.hide_before(449)
    queue.hide_before(3)
    assert (queue.min_offset, queue.max_offset) == (449, 900) and seqs_of(queue)[0] == 450
    assert indexes.forget_files(450) == [file_name(1)]


def test_a_reader_whose_entries_were_hidden_meanwhile_gets_out_of_range() -> None:
    """The offsets were visible when the reader began. It must not take the missing entries for damage."""
    indexes, queue = queue_of_900_entries(CrashFiles())
    offsets = np.array([5])
    assert queue.at(offsets)["seq"].tolist() == [6]
    indexes.forget(450)
    with pytest.raises(OutOfRange, match="offset 5: this queue keeps 449 to 900"):
        queue.at(offsets)


@pytest.mark.parametrize("make", [lambda path: CrashFiles(), RealFiles], ids=["crash", "real"])
def test_damaged_file_is_rebuilt_at_a_read(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    files: Files = make(tmp_path)
    queue_of_900_entries(files)
    log = Log()
    log.rows = {("t", 0): [(number, number + 1) for number in range(900)]}
    indexes = QueueIndexes(files, log.rebuild)
    size = files.size(file_name(1))
    flip(files, file_name(1), size - 13)  # in the last entry
    flip(files, file_name(301), size - 20 * 290)  # in one of the first entries, of 20 bytes each
    assert indexes.load(1, 901) == 901
    assert seqs_of(indexes.queue("t", 0)) == list(range(1, 901))
    without_a_log = QueueIndexes(files)
    without_a_log.load(1, 901)
    assert seqs_of(without_a_log.queue("t", 0)) == list(range(1, 901)), "the files were replaced"


def test_without_a_rebuild_function_damage_raises_corrupt() -> None:
    """The control of the test above."""
    files = CrashFiles()
    queue_of_900_entries(files)
    flip(files, file_name(1), files.size(file_name(1)) - 13)
    indexes = QueueIndexes(files)
    indexes.load(1, 901)
    with pytest.raises(Corrupt, match="do not match their checksum"):
        indexes.queue("t", 0).read(0, 900)


def test_files_with_a_gap_in_a_queue_are_corrupt() -> None:
    files = CrashFiles()
    queue_of_900_entries(files)
    # The first file is replaced by one of the same rows, with 5 entries instead of 300.
    other = CrashFiles()
    indexes = QueueIndexes(other)
    append(indexes.queue("t", 0), seqs_from(1, 5))
    save(indexes, 301)
    files.replace(file_name(1), other.content(file_name(1)))
    with pytest.raises(Corrupt, match="no entry for offset 5"):
        QueueIndexes(files).load(1, 901)


def test_without_a_sync_a_crash_loses_entries() -> None:
    """The control of the crashes above: files must be written before a checkpoint relies on them."""
    files = CrashFiles()
    append(QueueIndexes(files).queue("t", 0), seqs_from(1, 9))
    after = QueueIndexes(files.crash(survival="nothing"))
    assert (after.load(1, 10), after.queue("t", 0).max_offset) == (1, 0)


def test_queue_without_entries_is_not_registered() -> None:
    files = CrashFiles()
    indexes = QueueIndexes(files)
    calls = files.calls
    queues = [indexes.queue("t", queue_id) for queue_id in range(100)]
    assert list(indexes.used()) == []
    append(queues[7], seqs_from(1, 1))
    assert list(indexes.used()) == [queues[7]]
    assert files.calls == calls, "neither makes a call of the disk"
