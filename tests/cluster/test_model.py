"""Spin searches the model of the replication protocol with small bounds, and finds each bug that is made on purpose.

`make model` searches with the large bounds.
"""

from __future__ import annotations

import pytest
from tests.cluster.model.spin import BUG_BOUNDS, BUGS, QUICK, STEP_BOUNDS, STEPS, Bounds, read, search

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("spin")]


@pytest.mark.parametrize("bounds", QUICK, ids=str)
def test_the_model_keeps_its_rules(bounds: Bounds) -> None:
    result = search(bounds)
    assert result.is_exhaustive and not result.error, result


@pytest.mark.parametrize("bug", BUGS)
def test_a_broken_model_is_noticed(bug: str) -> None:
    result = search(BUG_BOUNDS[bug], bug=bug, optimize=False)
    assert "assertion violated" in result.error, result


@pytest.mark.parametrize("step", STEPS)
def test_the_bounds_allow_each_step(step: str) -> None:
    """The control: a model in which nothing happens would keep all rules."""
    result = search(STEP_BOUNDS[step], step=step, optimize=False)
    assert "assertion violated" in result.error, result


def test_a_search_that_reached_its_depth_limit_is_not_exhaustive() -> None:
    text = "error: max search depth too small\n 5 states, stored\npan: elapsed time 1 seconds\n"
    text += " 2.0 total actual memory usage\n"
    assert not read(text).is_exhaustive
