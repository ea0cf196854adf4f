"""The tables say what SQL says, and what a reading from left to right says of errors."""

from __future__ import annotations

from itertools import product

import pytest

from timeball.broker.filters.sql_truth import AND, EQUAL, ERROR, FALSE, IS_NULL, NOT, NULL, OR, TRUE, constant

OUTCOMES = [FALSE, TRUE, NULL, ERROR]
AS_PYTHON = {FALSE: False, TRUE: True, NULL: None}


def from_left(left: int, right: int, settles: int) -> int:
    """AND (settled by FALSE) and OR (settled by TRUE), as a program would evaluate them."""
    for side in (left, right):
        if side in (ERROR, settles):
            return side
    return NULL if NULL in (left, right) else NOT[settles]


@pytest.mark.parametrize(("left", "right"), list(product(OUTCOMES, repeat=2)))
def test_and_or_equal(left: int, right: int) -> None:
    assert AND[left, right] == from_left(left, right, FALSE)
    assert OR[left, right] == from_left(left, right, TRUE)
    if ERROR in (left, right):
        assert EQUAL[left, right] == ERROR
    elif NULL in (left, right):
        assert EQUAL[left, right] == NULL
    else:
        assert EQUAL[left, right] == (TRUE if left == right else FALSE)


@pytest.mark.parametrize(("left", "right"), list(product([FALSE, TRUE, NULL], repeat=2)))
def test_de_morgan_without_errors(left: int, right: int) -> None:
    assert NOT[AND[left, right]] == OR[NOT[left], NOT[right]]


def test_not_and_null() -> None:
    assert [NOT[o] for o in OUTCOMES] == [TRUE, FALSE, NULL, ERROR]
    assert [IS_NULL[o] for o in OUTCOMES] == [FALSE, FALSE, TRUE, ERROR]
    assert constant(NULL, 3).tolist() == [NULL] * 3
