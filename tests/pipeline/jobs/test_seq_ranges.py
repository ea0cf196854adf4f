"""Tests of timeball.pipeline.jobs.seq_ranges."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.node_fixture import RunningNode
from tests.pipeline.campaigning import attach, campaign_of

from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.jobs import seq_ranges
from timeball.table.attachment import within

NUMBERS = st.sets(st.integers(0, 60), max_size=40)


@given(NUMBERS, st.lists(st.integers(0, 70), max_size=20))
def test_ranges_hold_the_numbers_they_are_made_of_and_no_others(numbers: set[int], asked: list[int]) -> None:
    ordered = np.array(sorted(numbers), np.int64)
    assert seq_ranges.ordered([ordered[::2], ordered[::-1], ordered[:0]]).tolist() == ordered.tolist()
    ranges = seq_ranges.as_ranges(ordered)
    assert [n for first, rows in ranges for n in range(first, first + rows)] == ordered.tolist()
    assert seq_ranges.count(ranges) == len(numbers)
    assert all(a + rows < b for (a, rows), (b, _) in itertools.pairwise(ranges)), "as few as can be"
    seq = np.array(asked, np.int64)
    wanted = [n in numbers for n in asked]
    assert within(seq, ranges).tolist() == wanted
    assert within(seq, ranges[::-1]).tolist() == wanted
    assert seq_ranges.is_in(seq, ordered).tolist() == wanted


def test_rows_of_the_table_by_number_and_by_instant(node: RunningNode, broker: Endpoint) -> None:
    one, other = campaign_of(node, "one"), campaign_of(node, "other")
    attach(one, 20)
    attach(other, 7)
    status = broker.status()
    ranges = next(event.ranges for event in one.events() if event.event == "attached")

    def rows(ranges: list[tuple[int, int]], due_from_ms: int = 0) -> list[dict[str, object]]:
        found = seq_ranges.table_rows(
            status.table.uri, status.table.version, ranges, ["seq", "due_ms", "keys"], due_from_ms
        )
        return [row for batch in found for row in batch.to_pylist()]

    assert {row["keys"] for row in rows(ranges)} == {f"k{n}" for n in range(20)}
    due = sorted(row["due_ms"] for row in rows(ranges))
    assert len(rows(ranges, due[5])) == 15
    first, _ = ranges[0]
    assert [row["seq"] for row in rows([(first + 2, 3)])] == [first + 2, first + 3, first + 4]
    assert rows([]) == rows([(10**9, 5)]) == []
