"""The smallest list of what makes a run fail."""

from __future__ import annotations

import pytest
from tests.cluster.shrinking import shrink


@pytest.mark.parametrize("needed", [set(), {0}, {99}, {3, 4}, {0, 17, 50, 99}, set(range(0, 100, 7))])
def test_only_what_is_needed_is_kept(needed: set[int]) -> None:
    runs = []

    def fails(items: list[int]) -> bool:
        runs.append(items)
        return needed <= set(items)

    assert shrink(range(100), fails) == sorted(needed)
    assert len(runs) < 100 * (len(needed) + 1)


def test_nothing_that_is_kept_can_be_left_out() -> None:
    def fails(items: list[int]) -> bool:
        return sum(items) >= 100 and len(items) != 7

    kept = shrink(range(40), fails)
    assert fails(kept)
    assert not any(fails([item for item in kept if item != one]) for one in kept)
