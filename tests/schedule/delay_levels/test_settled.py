"""What is settled, against a set: in turn or out of it, released or cancelled, saved and restored anywhere."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.crash_files import CrashFiles

from timeball.log.checkpoint import LevelFacts
from timeball.log.queue_index import QueueIndexes
from timeball.message import Int64Array
from timeball.schedule.delay_levels import settled as settled_module
from timeball.schedule.delay_levels.queue import LevelQueue
from timeball.schedule.delay_levels.rows import place_of
from timeball.schedule.delay_levels.settled import SettledPlaces

ROWS = 24
Place = tuple[int, int]  # queue, offset


class Two:
    """Two queues of ROWS entries; entry n of queue q has the sequence number 2 n + q."""

    numbers: ClassVar[tuple[int, int]] = (0, 17)

    def __init__(self) -> None:
        self.queues = {}
        for at, number in enumerate(self.numbers):
            index = QueueIndexes(CrashFiles()).queue("t", 0)
            index.append(2 * np.arange(ROWS) + at, np.full(ROWS, 91), np.arange(ROWS))
            self.queues[number] = LevelQueue(number, index, None)
        self.settled = SettledPlaces(self.queues)

    def check(self, done: set[Place]) -> None:
        everywhere = [(number, offset) for number in self.numbers for offset in range(ROWS)]
        found = self.settled.contains(places(everywhere)).tolist()
        assert {place for place, is_settled in zip(everywhere, found, strict=True) if is_settled} == done
        named = 0
        for number, queue in self.queues.items():
            low = next((n for n in range(ROWS) if (number, n) not in done), ROWS)
            assert queue.low == low
            named += sum(place[0] == number and place[1] > low for place in done)
        assert len(self.settled) == named, "who was passed is not named any more"


def places(of: list[Place]) -> Int64Array:
    numbers, offsets = np.array(of, np.int64).reshape(-1, 2).T
    return place_of(numbers, offsets)


PLACES = st.tuples(st.sampled_from(Two.numbers), st.integers(0, ROWS - 1))
STEPS = st.lists(st.tuples(st.booleans(), st.sets(PLACES, min_size=1, max_size=8)), max_size=12)


@pytest.mark.parametrize("chunk", [1, 3, 65_536])
@given(steps=STEPS)
def test_it_is_what_was_settled_and_low_is_where_it_ends(
    chunk: int, steps: list[tuple[bool, set[Place]]]
) -> None:
    two, done = Two(), set[Place]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settled_module, "CHUNK", chunk)
        for is_release, wanted in steps:
            fresh = sorted(wanted - done)
            if fresh:
                (two.settled.release if is_release else two.settled.cancel)(places(fresh))
            done |= wanted
            two.check(done)


@given(before=st.sets(PLACES), since=st.sets(PLACES), lose=st.booleans())
def test_a_restart_knows_what_was_saved_and_what_came_since(
    before: set[Place], since: set[Place], lose: bool
) -> None:
    two, again = Two(), Two()
    two.settled.cancel(places(sorted(before)))
    facts = {number: two.settled.facts(queue) for number, queue in two.queues.items()}
    for number, queue in again.queues.items():
        named = {offset for at, offset in before if at == number and offset >= facts[number].offset}
        assert {n for first, count in facts[number].settled for n in range(first, first + count)} == named
        seqs = [2 * offset + Two.numbers.index(at) for at, offset in since | (before if lose else set())]
        saved = LevelFacts(0) if lose else facts[number]
        again.settled.restore(queue, saved, np.array([*sorted(seqs), 1_000], np.int64))
    again.check(before | since)


@pytest.mark.parametrize(
    ("facts", "low", "named"),
    [
        (LevelFacts(99), ROWS, 0),
        (LevelFacts(-3), 5, 0),
        (LevelFacts(0, ((0, 7), (9, 2), (23, 40))), 7, 3),
        (LevelFacts(6, ((2, 3),)), 6, 0),
    ],
)
def test_what_lies_outside_the_queue_is_put_right(facts: LevelFacts, low: int, named: int) -> None:
    two = Two()
    queue = two.queues[0]
    queue.index.min_offset = 5  # retention has been here
    two.settled.restore(queue, facts, np.empty(0, np.int64))
    assert (queue.low, len(two.settled)) == (low, named)


def test_ranges_are_short() -> None:
    two = Two()
    two.settled.cancel(places([(0, n) for n in (1, 2, 3, 7, 9, 10)]))
    assert two.settled.facts(two.queues[0]) == LevelFacts(0, ((1, 3), (7, 1), (9, 2)))
    assert two.settled.facts(two.queues[17]) == LevelFacts(0)
    assert two.settled.cancelled_rows == 6
