"""A property that names its number of examples is tried with as many, and in `make test` with a few."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import QUICK, bound_examples

FEW = hypothesis.settings.get_profile(QUICK).max_examples


def with_examples(count: int, numbers: list[int]) -> Callable[[], None]:
    """Return a property with this number of examples, which records them."""

    @hypothesis.settings(max_examples=count, database=None)
    @given(st.integers())
    def record(number: int) -> None:
        numbers.append(number)

    return record


@pytest.mark.parametrize(
    ("count", "profile", "tried"), [(60, QUICK, FEW), (60, "dev", 60), (FEW - 1, QUICK, FEW - 1)]
)
def test_the_profile_limits_the_examples_of_a_property(count: int, profile: str, tried: int) -> None:
    numbers: list[int] = []
    record = with_examples(count, numbers)
    bound_examples(record, profile)
    record()
    assert len(numbers) == tried
