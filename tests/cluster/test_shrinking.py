"""Shrinking of a list of disturbances that makes a simulated run fail."""

from __future__ import annotations

import pytest
from tests.cluster.shrinking import shrink


@pytest.mark.parametrize("needed", [set(), {0}, {99}, {3, 4}, {0, 17, 50, 99}, set(range(0, 100, 7))])
def test_a_list_shrinks_to_exactly_the_items_that_the_failure_needs(needed: set[int]) -> None:
    runs = []

    def fails(items: list[int]) -> bool:
        runs.append(items)
        return needed <= set(items)

    assert shrink(range(100), fails) == sorted(needed)
    assert len(runs) < 100 * (len(needed) + 1)


def test_a_shrunk_list_passes_without_any_one_of_its_items() -> None:
    def fails(items: list[int]) -> bool:
        return sum(items) >= 100 and len(items) != 7

    shrunk = shrink(range(40), fails)
    assert fails(shrunk)
    assert not any(fails([item for item in shrunk if item != left_out]) for left_out in shrunk)
