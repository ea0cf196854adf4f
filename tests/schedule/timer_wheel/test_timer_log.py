"""The timer log, compared with lists: walks of chains, marks, dropped spans, and broken links."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.crash_files import CrashFiles

from timeball.model.errors import Corrupt
from timeball.schedule import mapped_log, timer_wheel
from timeball.schedule.locations import Waiting
from timeball.schedule.mapped_log import MappedLog
from timeball.schedule.timer_wheel import ENTRIES, LINKS, Entries, LogState, TimerLog

FOLDER = "wheel"
REACH = 640  # a span ends after ten slots


class ChainedLog:
    """A timer log, with the newest link of each slot as the ring stores it."""

    def __init__(self, files: CrashFiles | None = None) -> None:
        self.files = files or CrashFiles()
        self.log = TimerLog(self.files, FOLDER, REACH, None)
        self.ends: dict[int, int] = {}
        self.next_seq = 1

    def append(self, slots: list[int], bound: int = 0) -> list[int]:
        """Append a batch with one message due in each of these slots. Returns their numbers, in the given order."""
        order = np.argsort(np.array(slots), kind="stable")
        distinct, rows = np.unique(np.array(slots), return_counts=True)
        seq = self.next_seq + np.arange(len(slots))
        self.next_seq += len(slots)
        due = np.array(slots) * 1_000 + seq % 1_000
        prev = np.array([self.ends.get(slot, -1) for slot in distinct.tolist()])
        last = self.log.append(distinct, rows, prev, Waiting(due[order], seq[order], seq[order] + 100), bound)
        self.ends |= dict(zip(distinct.tolist(), last.tolist(), strict=True))
        return seq.tolist()

    def walk(self, slots: list[int]) -> Entries:
        """Read the entries of `slots`. Slots without entries are skipped."""
        used = np.array([slot for slot in slots if slot in self.ends], dtype=np.int64)
        return self.log.walk(used, np.array([self.ends[slot] for slot in used.tolist()], dtype=np.int64))


def pairs(entries: Entries) -> list[tuple[int, int]]:
    assert ((entries.due_ms // 1_000) == entries.slot).all()
    assert (entries.row_seq == entries.seq + 100).all()
    return sorted(zip(entries.slot.tolist(), entries.seq.tolist(), strict=True))


@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=12), max_size=12),
    slots=st.lists(st.integers(0, 9), unique=True),
    marked_seqs=st.sets(st.integers(1, 144)),
)
def test_walk_finds_exactly_the_unmarked_entries_of_the_slots(
    batches: list[list[int]], slots: list[int], marked_seqs: set[int]
) -> None:
    chained = ChainedLog()
    entries = [
        (slot, seq) for batch in batches for slot, seq in zip(batch, chained.append(batch), strict=True)
    ]
    walked = chained.walk(sorted(slots))
    assert pairs(walked) == sorted((slot, seq) for slot, seq in entries if slot in slots)
    marked = np.array(
        [
            index
            for index, seq in zip(walked.index.tolist(), walked.seq.tolist(), strict=True)
            if seq in marked_seqs
        ]
    )
    chained.log.mark_moved(marked.astype(np.int64))
    expected = sorted((slot, seq) for slot, seq in entries if slot in slots and seq not in marked_seqs)
    assert pairs(chained.walk(sorted(slots))) == expected
    if slots:
        low, high = min(slots), max(slots) + 1
        expected = sorted(
            (slot, seq)
            for slot, seq in entries
            if low <= slot < high and not (seq in marked_seqs and slot in slots)
        )
        links = [np.empty(0, LINKS.fields), *(links for _, links in chained.log.links.parts())]
        all_links = np.concatenate(links)
        chosen = (all_links["slot"] >= low) & (all_links["slot"] < high)
        assert pairs(chained.log.read_entries(all_links[chosen])) == expected


def test_entries_are_marked_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapped_log, "CHECK_ROWS", 7)
    chained = ChainedLog()
    seqs = [seq for _ in range(5) for seq in chained.append([3, 1, 3, 2])]
    moved_seqs = np.array([*seqs[::-3], 9_999])
    assert chained.log.mark_moved_by_seq(moved_seqs) == len(moved_seqs) - 1
    unmarked_seqs = {seq for _, seq in pairs(chained.walk([1, 2, 3]))}
    assert unmarked_seqs == set(seqs) - set(moved_seqs.tolist())
    assert chained.log.mark_moved_by_seq(np.empty(0, np.int64)) == 0


def test_batch_becomes_one_link_per_slot() -> None:
    chained = ChainedLog()
    chained.append([5] * 1_000 + [6] * 10)
    chained.append([6])
    assert (chained.log.links.end, chained.log.entries.end) == (3, 1_011)
    assert chained.log.links.read(0, 3)["rows"].tolist() == [1_000, 10, 1]
    assert chained.log.links.read(0, 3)["prev"].tolist() == [-1, -1, 1]


def test_spans_are_dropped_after_their_last_slot() -> None:
    chained = ChainedLog()
    log = chained.log
    chained.append([5, 30])
    chained.append([12], bound=9)
    chained.append([25], bound=10)  # a new span
    chained.append([200], bound=11)
    assert log.first_row_seq == 101
    log.drop_before(30)
    assert (log.first_row_seq, log.links.begin) == (101, 0), "slot 30 itself is not passed"
    log.drop_before(31)
    assert (log.first_row_seq, log.links.begin, log.entries.begin) == (104, 3, 3)
    assert pairs(chained.walk([25, 200])) == [(25, 4), (200, 5)]
    log.drop_before(201)
    assert (log.first_row_seq, log.links.begin, log.links.end) == (None, 5, 5)
    chained.append([300], bound=202)
    assert (log.first_row_seq, log.links.begin) == (106, 5)


def test_span_ends_at_its_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer_wheel, "SPAN_ENTRIES", 10)
    chained = ChainedLog()
    for slot in range(5):
        chained.append([slot] * 6)
    assert [span.first_entry for span in chained.log.state().spans] == [0, 12, 24]
    chained.log.drop_before(2)
    assert chained.log.entries.begin == 12


def test_restored_log_equals_the_saved_one() -> None:
    chained = ChainedLog()
    chained.append([1, 2, 2])
    chained.append([3], bound=50)
    log = chained.log
    state = log.state()
    for mapped in (log.links, log.entries):
        for file in mapped.files_to_sync():
            file.sync()
        chained.files.sync_dir(mapped.folder)
    before = chained.ends.copy()
    chained.append([2, 4])
    assert state.spans[-1].last_slot == 3, "a saved state does not change"
    chained.files = chained.files.crash(1)
    mapped_log.check_generation(chained.files, FOLDER, state.logs())
    chained.log, chained.ends, chained.next_seq = TimerLog(chained.files, FOLDER, REACH, state), before, 5
    assert chained.log.state() == state
    assert pairs(chained.walk([1, 2, 3, 4])) == [(1, 1), (2, 2), (2, 3), (3, 4)]
    chained.append([2], bound=51)
    assert pairs(chained.walk([2])) == [(2, 2), (2, 3), (2, 5)]


@pytest.mark.parametrize("part", ["links", "entries"])
def test_missing_file_and_flipped_bit_are_reported_with_the_file(part: str) -> None:
    chained = ChainedLog()
    chained.append([1])
    state, name = chained.log.state(), f"{FOLDER}/{part}/00000000.log"
    mapped_log.check_generation(chained.files, FOLDER, state.logs())
    chained.files.open(name).write_at(8, bytes([chained.files.content(name)[8] ^ 0x10]))
    with pytest.raises(Corrupt, match=f"{name} does not match its checksums: start the broker again"):
        mapped_log.check_generation(chained.files, FOLDER, state.logs())
    with pytest.raises(Corrupt, match=f"{name} does not match its checksums: start the broker again"):
        chained.walk([1])
    chained.files.remove(name)
    with pytest.raises(Corrupt, match=f"{name} is missing"):
        mapped_log.check_generation(chained.files, FOLDER, state.logs())
    mapped_log.check_generation(chained.files, FOLDER, LogState((0, 0), (0, 0), []).logs())


@pytest.mark.parametrize(
    ("field", "value"), [("slot", 8), ("prev", 1), ("prev", 7), ("rows", 0), ("rows", -1)]
)
def test_broken_chain_is_an_error_with_a_remedy(field: str, value: int) -> None:
    chained = ChainedLog()
    for _ in range(3):
        chained.append([7])
    links = chained.log.links.read(1, 2)
    links[field] = value
    MappedLog(chained.files, chained.log.links.folder, LINKS, end=1).append(links)
    with pytest.raises(Corrupt, match=r"start the broker again, and the ring is made anew"):
        chained.walk([7])


def test_record_sizes_equal_those_in_the_docstring() -> None:
    assert [records.checked.itemsize for records in (LINKS, ENTRIES)] == [40, 32]
