"""A queue of hops: opened, settled and superseded entries, and restarts that find each message once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.crash_files import CrashFiles

from timeball.model.errors import Corrupt
from timeball.model.message import Int64Array
from timeball.schedule import mapped_log
from timeball.schedule.level_cascade import RECORD, HopQueue
from timeball.schedule.locations import CHUNK

FOLDER = "cascade/00000001"
NONE = np.empty(0, np.int64)
FAR = 1 << 62


def rows_of(queue: HopQueue) -> int:
    return queue.unopened_rows + queue.opened_rows


def none_settled(due: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
    return np.zeros(len(seq), dtype=np.bool_)


def records(hop_end_ms: int, seqs: list[int], row_seqs: list[int] | None = None) -> np.ndarray:
    """Build records of messages due a second after their hop, with their own number as remaining list."""
    records = np.empty(len(seqs), RECORD)
    records["hop_end_ms"], records["due_ms"] = hop_end_ms, hop_end_ms + 1_000
    records["seq"], records["row_seq"], records["hops"] = seqs, row_seqs or seqs, seqs
    return records


def save(files: CrashFiles, queue: HopQueue) -> HopQueue:
    """Reopen the queue from a checkpoint after a power cut."""
    state = queue.state()
    for file in queue.log.files_to_sync():
        file.sync()
    if state.end:
        files.sync_dir(queue.log.folder)
    surviving = files.crash(1)
    mapped_log.check_generation(surviving, FOLDER, [state.bounds()])
    return HopQueue(surviving, FOLDER, queue.number, state)


def test_entries_whose_hops_are_over_are_taken_in_order() -> None:
    queue = HopQueue(CrashFiles(), FOLDER, 3)
    assert queue.head_ms is None
    for hop_end_ms, seqs in ((100, [1, 2]), (100, [3]), (250, [4, 5, 6])):
        queue.append(records(hop_end_ms, seqs))
    assert (queue.head_ms, rows_of(queue), queue.first_row_seq) == (100, 6, 1)
    assert len(queue.take_due(99, 10)) == 0
    assert queue.take_due(100, 2).seq.tolist() == [1, 2]
    taken = queue.take_due(249, 10)
    assert (taken.seq.tolist(), taken.index.tolist(), taken.hops.tolist()) == ([3], [2], [3])
    assert (queue.head_ms, rows_of(queue), queue.first_row_seq) == (250, 3, 4)
    assert queue.take_due(250, 10).due_ms.tolist() == [1_250] * 3
    assert (queue.head_ms, rows_of(queue), queue.first_row_seq) == (None, 0, None)


def test_thousands_are_taken_in_a_few_reads() -> None:
    queue = HopQueue(CrashFiles(), FOLDER, 1)
    for number in range(10):
        queue.append(records(number, list(range(1 + 10_000 * number, 10_001 + 10_000 * number))))
    assert len(queue.take_due(4, 1 << 20)) == 50_000
    assert len(queue.take_due(9, 7)) == 7
    assert queue.head_ms == 5
    assert len(queue.take_due(9, 1 << 20)) == 49_993


def test_entries_added_before_a_clock_step_do_not_block_others() -> None:
    queue = HopQueue(CrashFiles(), FOLDER, 1)
    queue.append(records(9_000, [1, 2]))
    queue.append(records(500, [3]))
    queue.append(records(600, [4]))
    queue.append(records(9_500, [5]))
    assert queue.head_ms == 500
    assert queue.take_due(8_000, 10).seq.tolist() == [3, 4]
    assert queue.head_ms == 9_000
    assert [queue.take_due(9_999, 10).seq.tolist() for _ in range(2)] == [[1, 2], [5]]


def test_entries_out_of_log_order_keep_their_rows_needed() -> None:
    queue = HopQueue(CrashFiles(), FOLDER, 1)
    queue.append(records(100, [50, 60]))
    queue.append(records(100, [7, 8], row_seqs=[3, 4]))
    assert queue.first_row_seq == 3
    queue.keep_opened(queue.take_due(100, 10))
    assert queue.first_row_seq == 3
    queue.keep_opened(queue.take_due(100, 10))
    queue.advance(none_settled, np.array([3, 4]))
    assert queue.first_row_seq == 50


def test_low_stays_at_the_oldest_unsettled_entry() -> None:
    queue = HopQueue(CrashFiles(), FOLDER, 1)
    queue.append(records(100, [1, 2, 3, 4]))
    queue.keep_opened(queue.take_due(100, 10))
    queue.advance(lambda due, seq: seq == 2, np.array([3]))
    assert (queue.low, rows_of(queue), queue.opened_rows, queue.state().gone) == (0, 2, 2, [(2, 1)])
    queue.advance(lambda due, seq: seq == 1, NONE)
    assert (queue.low, rows_of(queue), queue.state().gone) == (3, 1, [])
    queue.advance(none_settled, np.array([4]))
    state = queue.state()
    assert (queue.low, rows_of(queue), state.low, state.end, state.cuts, state.gone) == (4, 0, 4, 4, [], [])


def test_entries_settled_before_their_hop_ends_are_skipped() -> None:
    queue = HopQueue(CrashFiles(), FOLDER, 1)
    queue.append(records(100, [1, 2, 3]))
    queue.append(records(250, [4]))
    queue.append(records(50, [5]))
    queue.advance(lambda due, seq: (seq <= 2) | (seq == 5), NONE)
    assert (queue.low, queue.head_ms, queue.unopened_rows, queue.first_row_seq) == (2, 100, 2, 3)
    queue.advance(lambda due, seq: seq == 3, NONE)
    assert (queue.low, queue.head_ms, queue.unopened_rows, queue.first_row_seq) == (3, 250, 1, 4)
    assert queue.take_due(FAR, 10).seq.tolist() == [4]
    many = HopQueue(CrashFiles(), FOLDER, 1)
    many.append(records(100, list(range(1, CHUNK + 11))))
    many.advance(lambda due, seq: seq <= CHUNK + 9, NONE)
    assert many.low == CHUNK + 1, "one call passes at most this many"
    many.advance(lambda due, seq: seq <= CHUNK + 9, NONE)
    assert (many.low, many.head_ms) == (CHUNK + 9, 100)


def test_restart_finds_opened_entries_but_no_superseded_ones() -> None:
    files = CrashFiles()
    queue = HopQueue(files, FOLDER, 5)
    queue.append(records(100, [1, 2, 3, 4]))
    queue.append(records(50, [5]))
    queue.keep_opened(queue.take_due(100, 10))
    queue.keep_opened(queue.take_due(100, 10))
    queue.advance(none_settled, np.array([2, 3]))
    queue = save(files, queue)
    queue.append(records(100, [6]))
    assert rows_of(queue) == 4
    assert [queue.take_due(100, 10).seq.tolist() for _ in range(2)] == [[5, 6], [1, 4]]


def test_entries_after_the_saved_end_are_cut() -> None:
    files = CrashFiles()
    queue = HopQueue(files, FOLDER, 5)
    queue.append(records(100, [1]))
    reopened = save(files, queue)
    queue.append(records(100, [2]))
    assert reopened.take_due(FAR, 10).seq.tolist() == [1]
    reopened.append(records(100, [3]))
    assert reopened.take_due(FAR, 10).seq.tolist() == [3]


def test_superseded_entries_are_found_once() -> None:
    queue = HopQueue(CrashFiles(), FOLDER, 1)
    queue.append(records(100, [1, 2, 3, 4]))
    queue.keep_opened(queue.take_due(100, 2))
    queue.advance(none_settled, np.array([2]))
    indexes, end = queue.find_entries(np.array([2, 3, 9]), queue.low)
    assert (indexes.tolist(), end) == ([2], 4)
    queue.mark_superseded(indexes)
    assert queue.take_due(FAR, 10).seq.tolist() == [4]


def test_missing_files_and_damaged_entries_are_noticed() -> None:
    files = CrashFiles()
    queue = HopQueue(files, FOLDER, 5)
    queue.append(records(100, [1, 2]))
    state, name = queue.state(), f"{FOLDER}/05/00000000.log"
    mapped_log.check_generation(files, FOLDER, [state.bounds()])
    content = files.content(name)
    files.open(name).write_at(60, bytes([content[60] ^ 1]))
    with pytest.raises(Corrupt, match=f"{name} does not match its checksums"):
        mapped_log.check_generation(files, FOLDER, [state.bounds()])
    with pytest.raises(Corrupt, match=f"{name} does not match its checksums"):
        queue.take_due(FAR, 10)
    files.remove(name)
    with pytest.raises(Corrupt, match=f"{name} is missing"):
        mapped_log.check_generation(files, FOLDER, [state.bounds()])
    mapped_log.check_generation(files, FOLDER, [HopQueue(files, FOLDER, 6).state().bounds()])


STEPS = st.one_of(
    st.tuples(st.just("append"), st.integers(0, 500), st.integers(1, 5)),
    st.tuples(st.just("take"), st.integers(0, 500), st.integers(1, 7)),
    st.tuples(st.just("settle"), st.integers(0, 200), st.integers(0, 40)),
    st.tuples(st.just("move"), st.integers(0, 200), st.integers(0, 40)),
    st.tuples(st.just("restart"), st.just(0), st.just(0)),
)


@given(st.lists(STEPS, max_size=40))
def test_each_message_is_taken_once_in_random_steps(steps: list[tuple[str, int, int]]) -> None:
    """The model tracks unopened, opened and done messages. A rewritten message gets the row 1000 + number."""
    files = CrashFiles()
    queue = HopQueue(files, FOLDER, 2)
    waiting: dict[int, int] = {}  # number -> hop end
    opened: set[int] = set()
    settled: set[int] = set()
    last_seq = 0

    def is_settled(due: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        return np.isin(seq, list(settled))

    for step, first, count in steps:
        if step == "append":
            seqs = list(range(last_seq + 1, last_seq + count + 1))
            last_seq += count
            queue.append(records(first, seqs, row_seqs=[1_000 + seq for seq in seqs]))
            waiting |= dict.fromkeys(seqs, first)
        elif step == "take" and queue.head_ms is not None:
            assert queue.head_ms == min(waiting.values())
            entries = queue.take_due(first, count)
            taken = set(entries.seq.tolist())
            assert len(taken) == len(entries) <= count
            assert all(waiting.pop(seq) <= first for seq in taken)
            if not taken:
                assert min(waiting.values()) > first
            queue.keep_opened(entries.part(~is_settled(entries.due_ms, entries.seq)))
            opened |= taken - settled
        elif step == "settle":
            settled |= opened & set(range(first, first + count))
            opened -= settled
        elif step == "move":
            moved = opened & set(range(first, first + count))
            opened -= moved
            queue.advance(is_settled, np.array([1_000 + seq for seq in sorted(moved)], dtype=np.int64))
            assert rows_of(queue) == len(waiting) + len(opened)
            assert queue.first_row_seq == min((1_000 + seq for seq in (*waiting, *opened)), default=None)
        else:
            queue.advance(is_settled, NONE)
            queue = save(files, queue)
            files = queue.log._files  # type: ignore[assignment]
            # Settled entries may be returned. The caller skips them.
            unread = {
                seq for seq in range(1, last_seq + 1) if seq in waiting or seq in opened or seq in settled
            }
            saved_seqs = set(unread)
            waiting = {}
            opened = set()
            while queue.head_ms is not None:
                entries = queue.take_due(FAR, 1 << 20)
                taken = set(entries.seq.tolist())
                assert len(taken) == len(entries) and taken <= unread
                unread -= taken
                queue.keep_opened(entries.part(~is_settled(entries.due_ms, entries.seq)))
                opened |= taken - settled
            assert unread <= settled, f"lost: {unread - settled}"
            assert opened <= saved_seqs
