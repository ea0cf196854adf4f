"""A property that names its number of examples is tried with as many, and in `make test` with a few."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import QUICK, bound_examples

FEW = hypothesis.settings.get_profile(QUICK).max_examples


def with_examples(count: int, seen: list[int]) -> Callable[[], None]:
    @hypothesis.settings(max_examples=count, database=None)
    @given(st.integers())
    def counted(number: int) -> None:
        seen.append(number)

    return counted


@pytest.mark.parametrize(
    ("count", "profile", "tried"), [(60, QUICK, FEW), (60, "dev", 60), (FEW - 1, QUICK, FEW - 1)]
)
def test_a_property_is_tried_as_often_as_the_profile_says(count: int, profile: str, tried: int) -> None:
    seen: list[int] = []
    counted = with_examples(count, seen)
    bound_examples(counted, profile)
    counted()
    assert len(seen) == tried
