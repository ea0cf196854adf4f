"""Cycles are collected in short pauses: a collection visits few objects. Frozen garbage waits for a quiet time."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from timeball.io import cycle_collection
from timeball.io.cycle_collection import YOUNG_OBJECTS, CycleCollection

SECOND_NS = 1_000_000_000


class Process:
    """The CPU time and the time of a process, which a test sets."""

    def __init__(self) -> None:
        self.cpu_ns = self.now_ns = 0

    def run(self, seconds: float, share: float) -> None:
        """Let time pass, of which the process uses this share of CPU time."""
        self.now_ns += int(seconds * SECOND_NS)
        self.cpu_ns += int(seconds * SECOND_NS * share)


class Ring:
    """An object that only a collection frees."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _same_collector_around_each_test() -> Iterator[None]:
    cycle_collection.CYCLES.stop()  # a test of a command may have started it in this process
    yield
    gc.freeze()  # as tests/conftest.py does


@pytest.fixture
def process() -> Process:
    return Process()


@pytest.fixture
def cycles(process: Process) -> Iterator[CycleCollection]:
    collection = CycleCollection(lambda: process.cpu_ns, lambda: process.now_ns)
    collection.start()
    yield collection
    collection.stop()


@pytest.fixture
def early_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a full collection worth its pause after few objects."""
    monkeypatch.setattr(cycle_collection, "IDLE_GROWTH_BLOCKS", 10_000)
    monkeypatch.setattr(cycle_collection, "GROWTH_BLOCKS_MAX", 150_000)


def make_state(objects: int) -> list[list[int]]:
    return [[number] for number in range(objects)]


def freeze_ring() -> weakref.ref[Ring]:
    """Make a cycle that is garbage only after it was frozen."""
    ring = Ring()
    state = make_state(10 * YOUNG_OBJECTS)  # two collections and more
    del state
    gc.freeze()
    return weakref.ref(ring)


def visited_objects() -> int:
    """Count the objects that a collection of any generation would visit."""
    return sum(len(gc.get_objects(generation)) for generation in range(3))


def test_a_collection_visits_few_objects_whatever_the_state_holds(cycles: CycleCollection) -> None:
    state = make_state(200_000)
    assert visited_objects() < 4 * YOUNG_OBJECTS
    # The control: Python's own collector would visit all of them.
    cycles.stop()
    assert visited_objects() > len(state)


def test_cycles_among_young_objects_are_collected(cycles: CycleCollection) -> None:
    rings = [weakref.ref(Ring()) for _ in range(10)]
    state = make_state(4 * YOUNG_OBJECTS)
    assert not any(ring() for ring in rings) and state


@pytest.mark.usefixtures("early_collections")
def test_an_idle_process_collects_frozen_garbage(cycles: CycleCollection, process: Process) -> None:
    ring = freeze_ring()
    state = make_state(50_000)
    process.run(10, share=0.01)
    assert cycles.collect_if_due(None) and ring() is None
    process.run(10, share=0.01)
    assert not cycles.collect_if_due(None)  # nothing has grown since
    assert state


@pytest.mark.usefixtures("early_collections")
@pytest.mark.parametrize(
    ("share", "next_due_in_ms"), [(0.5, None), (0.01, 0), (0.01, 500)], ids=["busy", "due", "soon due"]
)
def test_no_full_collection_begins_shortly_before_a_message_is_due(
    cycles: CycleCollection, process: Process, share: float, next_due_in_ms: int | None
) -> None:
    ring = freeze_ring()
    state = make_state(50_000)
    process.run(10, share)
    assert not cycles.collect_if_due(next_due_in_ms) and ring() is not None
    # An hour away is time enough.
    process.run(10, share=0.01)
    assert cycles.collect_if_due(3_600_000) and ring() is None
    assert state


@pytest.mark.usefixtures("early_collections")
def test_a_busy_process_collects_after_the_largest_growth(cycles: CycleCollection, process: Process) -> None:
    ring = freeze_ring()
    state = make_state(150_000)
    process.run(10, share=1)
    assert cycles.collect_if_due(0) and ring() is None
    assert state


@pytest.mark.usefixtures("early_collections")
def test_growth_is_measured_from_the_smallest_number_of_blocks(process: Process) -> None:
    state = make_state(200_000)
    cycles = CycleCollection(lambda: process.cpu_ns, lambda: process.now_ns)
    cycles.start()
    try:
        state.clear()
        process.run(10, share=1)
        assert not cycles.collect_if_due(0)
        ring = freeze_ring()
        state = make_state(150_000)
        process.run(10, share=1)
        assert cycles.collect_if_due(0) and ring() is None
    finally:
        cycles.stop()
    assert state


def test_without_a_start_nothing_is_collected(process: Process, monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_threshold()
    collection = CycleCollection(lambda: process.cpu_ns, lambda: process.now_ns)
    calls = list[str]()
    for name in ("collect", "freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: calls.append(name))
    assert not collection.collect_if_due(None)
    collection.stop()
    assert (gc.get_threshold(), calls) == (before, [])


def test_stop_restores_pythons_collector() -> None:
    before = gc.get_threshold()
    collection = CycleCollection()
    collection.start()
    collection.start()
    collection.stop()
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0
    assert cycle_collection._freeze_survivors not in gc.callbacks
