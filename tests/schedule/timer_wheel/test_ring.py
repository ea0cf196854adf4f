"""The reach of slots in time, and the ring compared with a dictionary, with restarts that rebuild it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.crash_files import CrashFiles

from timeball.io.files import File, RealFiles
from timeball.model import limits
from timeball.model.errors import OverLimit, SetupError
from timeball.model.message import Int64Array
from timeball.schedule import timer_wheel as ring_module
from timeball.schedule.timer_wheel import MARGIN_MS, RECORD, Ring, Slots

SLOTS = Slots(1_000, reach=30, count=41)
START = 1_000
ALL = 1 << 40


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use blocks and scans of a few slots."""
    monkeypatch.setattr(ring_module, "BLOCK", 8)
    monkeypatch.setattr(ring_module, "SCAN", 25)


def open_ring(files: CrashFiles | RealFiles, bound: int = START) -> Ring:
    return Ring(files, "ring", SLOTS, bound=bound)


def push(ring: Ring, *ends: tuple[int, int, int]) -> None:
    """Push links (slot, link, rows) in the order of their slots."""
    slots, last, rows = (np.array(column, dtype=np.int64) for column in zip(*sorted(ends), strict=True))
    ring.push(slots, last, rows)


def to_pairs(heads: tuple[Int64Array, Int64Array]) -> list[tuple[int, int]]:
    """Convert two columns to pairs."""
    return list(zip(*(column.tolist() for column in heads), strict=True))


class Machine(RuleBasedStateMachine):
    """Random pushes, openings and power cuts. After a cut the durable links are pushed again."""

    @initialize()
    def begin(self) -> None:
        self.files = CrashFiles()
        self.ring = open_ring(self.files)
        self.ends: dict[int, tuple[int, int]] = {}  # slot -> (last link, rows) of those not opened
        self.links: list[tuple[int, int]] = []  # (slot, rows) of each
        self.saved: tuple[int, dict[int, tuple[int, int]], int] | None = None

    @rule(
        ahead=st.lists(st.integers(0, SLOTS.reach - 1), min_size=1, max_size=6, unique=True),
        rows=st.integers(1, 9),
    )
    def push(self, ahead: list[int], rows: int) -> None:
        slots = sorted(self.ring.bound + each for each in ahead)
        ends = []
        for slot in slots:
            ends.append((slot, len(self.links), rows))
            self.ends[slot] = (len(self.links), self.ends.get(slot, (0, 0))[1] + rows)
            self.links.append((slot, rows))
        push(self.ring, *ends)

    @rule(slots=st.integers(0, 60), rows_max=st.integers(0, 30))
    def open(self, slots: int, rows_max: int) -> None:
        first, to = self.ring.first_used(), self.ring.bound + slots
        heads = self.ring.open(to, rows_max)
        passed = sorted(slot for slot in self.ends if slot < self.ring.bound)
        assert to_pairs(heads) == [(slot, self.ends[slot][0]) for slot in passed]
        rows = sum(self.ends.pop(slot)[1] for slot in passed)
        assert self.ring.bound <= to
        assert rows <= rows_max or len(passed) == 1
        assert self.ring.bound == to or (first is not None and first < self.ring.bound), (
            "the bound reaches `to`, or stops after a used slot"
        )

    @rule()
    def save(self) -> None:
        self.saved = (len(self.links), dict(self.ends), self.ring.bound)

    @precondition(lambda self: self.saved is not None)
    @rule(seed=st.none() | st.integers(0, 1_000))
    def crash(self, seed: int | None) -> None:
        """Rebuild the ring from the links of the checkpoint, which makes it equal to the saved one."""
        assert self.saved is not None
        links_end, ends, bound = self.saved
        self.ring.close()
        if seed is not None:
            self.files = self.files.crash(seed)
        self.ring = open_ring(self.files, bound)
        del self.links[links_end:]
        for link, (slot, rows) in enumerate(self.links):
            push(self.ring, (slot, link, rows))
        self.ends = dict(ends)

    @invariant()
    def knows_every_slot(self) -> None:
        if not hasattr(self, "ring"):
            return
        window = np.arange(self.ring.bound, self.ring.bound + SLOTS.reach, dtype=np.int64)
        last, rows = self.ring.heads(window)
        expected = [self.ends.get(slot, (-1, 0)) for slot in window.tolist()]
        assert list(zip(last.tolist(), rows.tolist(), strict=True)) == expected
        assert self.ring.first_used() == min(self.ends, default=None)
        assert (self.ring.used, self.ring.rows) == (
            len(self.ends),
            sum(rows for _, rows in self.ends.values()),
        )


def test_random_steps_keep_the_newest_link_of_every_slot() -> None:
    machine = Machine.TestCase
    machine.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)
    machine().runTest()


def test_slots_of_different_laps_are_distinguished() -> None:
    ring = open_ring(CrashFiles())
    push(ring, (START, 7, 2))
    later = START + SLOTS.count
    assert ring.heads(np.array([later]))[0].tolist() == [-1]
    ring.open(START + SLOTS.reach, ALL)
    push(ring, (later, 9, 1))
    assert ring.heads(np.array([START, later]))[0].tolist() == [-1, 9]
    assert ring.first_used() == later


def test_slot_overwritten_by_a_later_lap_is_skipped() -> None:
    ring = open_ring(CrashFiles())
    ring.open(START + SLOTS.reach, ALL)
    later = START + SLOTS.count
    push(ring, (later, 9, 1))
    push(ring, (START, 10, 5), (START + 1, 11, 5))
    assert ring.heads(np.array([START, START + 1, later]))[0].tolist() == [-1, 11, 9]
    assert (ring.used, ring.rows) == (1, 1), "opened slots are not counted"


def test_open_passes_few_rows_but_at_least_one_slot() -> None:
    ring = open_ring(CrashFiles())
    push(ring, *((START + n, n, 10) for n in range(6)))
    assert to_pairs(ring.open(START + 30, 25)) == [(START, 0), (START + 1, 1)]
    assert ring.bound == START + 2
    assert to_pairs(ring.open(START + 30, 3)) == [(START + 2, 2)]
    assert to_pairs(ring.open(START + 30, 30)) == [(START + n, n) for n in (3, 4, 5)]
    assert ring.bound > START + 5
    assert to_pairs(ring.open(START + 30, 30)) == []
    assert ring.bound == START + 30


def test_unused_slots_are_passed_at_once() -> None:
    ring = open_ring(CrashFiles())
    push(ring, (START + 29, 1, 1))
    assert to_pairs(ring.open(START + 29, ALL)) == []
    assert ring.bound == START + 29
    assert to_pairs(ring.open(START + 1_000_000, ALL)) == [(START + 29, 1)]
    assert to_pairs(ring.open(START + 1_000_000, ALL)) == []
    assert ring.bound == START + 1_000_000
    assert to_pairs(ring.open(START, ALL)) == []
    assert ring.bound == START + 1_000_000, "the bound never moves back"


def test_ring_of_an_earlier_run_is_replaced_by_an_empty_one() -> None:
    files = CrashFiles()
    ring = open_ring(files)
    push(ring, (START, 4, 2), (START + 3, 5, 2))
    ring.close()
    ring = open_ring(files)
    assert ring.heads(np.array([START, START + 3]))[0].tolist() == [-1, -1]
    assert (ring.first_used(), ring.used, ring.rows) == (None, 0, 0)


class FullFile:
    """A file on a full disk."""

    def __init__(self, file: File) -> None:
        self._file = file

    def allocate(self, size_bytes: int) -> None:
        raise OverLimit("disk full while allocating")

    def close(self) -> None:
        self._file.close()


class FullDisk(RealFiles):
    """A full disk."""

    def create(self, name: str) -> FullFile:  # type: ignore[override]
        return FullFile(super().create(name))


def test_full_disk_is_reported_with_a_remedy(tmp_path: Path) -> None:
    files = FullDisk(tmp_path)
    with pytest.raises(
        SetupError, match=rf"{SLOTS.count * 16} bytes, 41 slots of 1000 ms.*--timer-precision-ms"
    ):
        open_ring(files)  # type: ignore[arg-type]
    assert not files.exists("ring"), "the next start would use an incomplete ring"


def test_blocks_of_the_ring_are_reserved(tmp_path: Path) -> None:
    open_ring(RealFiles(tmp_path)).close()
    assert (tmp_path / "ring").stat().st_size == SLOTS.count * RECORD.itemsize
    assert (tmp_path / "ring").stat().st_blocks * 512 >= SLOTS.count * RECORD.itemsize


AHEAD_MS = 10_000
PRECISIONS_MS = [1, 10, 100, 1_000]


@pytest.mark.parametrize("precision_ms", PRECISIONS_MS)
@pytest.mark.parametrize("wheel_ms", [limits.MINUTE_MS, 3 * limits.DAY_MS, 30 * limits.DAY_MS, 61_234])
def test_the_reach_is_a_length_of_time(precision_ms: int, wheel_ms: int) -> None:
    slots = Slots.of(precision_ms, wheel_ms, AHEAD_MS)
    assert wheel_ms <= (slots.reach - 1) * precision_ms < wheel_ms + precision_ms
    assert slots.margin * precision_ms >= AHEAD_MS + MARGIN_MS


@given(
    precision_ms=st.sampled_from(PRECISIONS_MS),
    wheel_ms=st.integers(limits.MINUTE_MS, 3 * limits.DAY_MS),
    bound=st.integers(0, 1 << 41),
    ahead=st.lists(st.one_of(st.integers(0, 1 << 36), st.integers(0, 200_000)), min_size=1, max_size=20),
)
def test_each_message_gets_a_slot_within_reach(
    precision_ms: int, wheel_ms: int, bound: int, ahead: list[int]
) -> None:
    slots = Slots.of(precision_ms, wheel_ms, AHEAD_MS)
    due_slots = bound + np.array(ahead)
    placed = slots.choose_slots(due_slots, bound)
    assert (placed >= bound).all() and (placed < bound + slots.reach).all()
    is_within_reach = due_slots < bound + slots.reach
    assert (placed[is_within_reach] == due_slots[is_within_reach]).all()
    # A roll is never urgent: when its slot is opened, at least a third of the ring remains until the due time.
    assert (due_slots[~is_within_reach] - placed[~is_within_reach] >= slots.reach // 3).all()
    # And each roll covers at least half of the ring.
    assert (placed[~is_within_reach] - bound >= slots.reach // 2).all()


@given(
    precision_ms=st.sampled_from(PRECISIONS_MS),
    wheel_ms=st.integers(limits.MINUTE_MS, limits.DAY_MS),
    bound=st.integers(0, 1 << 41),
)
def test_slots_within_reach_have_distinct_positions(precision_ms: int, wheel_ms: int, bound: int) -> None:
    slots = Slots.of(precision_ms, wheel_ms, AHEAD_MS)
    first, last = bound - slots.margin, bound + slots.reach - 1
    slots_within_reach = np.unique(np.linspace(first, last, 1_000).astype(np.int64))
    assert last - first + 1 == slots.count
    assert len(np.unique(slots.index(slots_within_reach))) == len(slots_within_reach)


@pytest.mark.parametrize("precision_ms", PRECISIONS_MS)
def test_due_time_is_within_its_slot(precision_ms: int) -> None:
    slots = Slots.of(precision_ms, limits.DAY_MS, AHEAD_MS)
    for ms in (0, 1, 999, 1_000, 1_700_000_000_123, limits.INSTANT_MS_MAX):
        slot = slots.slot_at(ms)
        assert slots.begin_ms(slot) <= ms < slots.begin_ms(slot + 1)
        assert slots.slots_at(np.array([ms])).tolist() == [slot]


def test_ring_of_three_days_takes_4_mb_at_1_s_and_4_gb_at_1_ms() -> None:
    """The sizes that timer_wheel.py and the settings state."""
    sizes = {p: Slots.of(p, 3 * limits.DAY_MS, AHEAD_MS).count * 16 for p in (1_000, 1)}
    assert 4.1e6 < sizes[1_000] < 4.2e6
    assert 4.1e9 < sizes[1] < 4.2e9
