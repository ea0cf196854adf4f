"""Conditions by example: the messages that each condition selects. Random conditions: test_compiler.py."""

from __future__ import annotations

import pytest
from tests.broker.filters.messages import Message, matches, rows_of

from timeball.broker.filters import sql_conditions
from timeball.broker.filters.sql_conditions import Constant, Mismatch, Property, equal, ordered

MESSAGES: list[Message | None] = [
    {"n": "5", "s": "abc", "f": "TRUE"},  # 0
    {"n": "7", "s": "bcd", "f": "no"},  # 1
    {"n": "5.5", "s": "5"},  # 2
    {"n": "x", "s": ""},  # 3
    {"s": "it's"},  # 4
    {},  # 5
    None,  # 6
]
ALL = list(range(7))


@pytest.mark.parametrize(
    ("text", "delivered"),
    [
        ("n = 5", [0]),
        ("n <> 5", [1]),  # ERROR for 5.5 and x, NULL for a missing value
        ("NOT (n = 5)", [1]),
        ("n >= 5", [0, 1]),  # 5.5 is no integer
        ("n >= 5.0", [0, 1, 2]),
        ("n > 5 OR s = '5'", [1]),  # for message 2, ERROR on the left ends the evaluation
        ("s = '5' OR n > 5", [1, 2]),
        ("n < 5 AND s = 'abc'", []),
        ("n BETWEEN 5 AND 6", [0]),
        ("n BETWEEN 5.0 AND 6", [0]),  # <= 6 reads 5.5 as an integer
        ("n BETWEEN 5.0 AND 6.0", [0, 2]),
        ("n NOT BETWEEN 5 AND 6", [1]),
        ("n > s", [2]),  # both read as decimal numbers
        ("n >= s AND s = '5'", [2]),
        ("n = 'x'", [3]),
        ("s = 'it''s'", [4]),
        ("s <> 'abc'", [1, 2, 3, 4]),
        ("s = n", []),
        ("s IN ('abc', '')", [0, 3]),
        ("s NOT IN ('abc', '')", [1, 2, 4]),
        ("NOT (s IN ('abc', ''))", [1, 2, 4]),
        ("s IS NULL", [5, 6]),
        ("s IS NOT NULL", [0, 1, 2, 3, 4]),
        ("(n = 5) IS NULL", [4, 5, 6]),
        ("nobody IS NULL", ALL),
        ("S IS NULL", ALL),  # names are case-sensitive
        ("f = TRUE", [0]),
        ("f = false", [1]),
        ("f <> TRUE", [1]),
        ("TRUE = f", [0]),
        ("(n = 7) = f", []),
        ("(n = 5) = f", [0, 1]),
        ("(n = 5) = TRUE", [0]),
        ("s CONTAINS 'bc'", [0, 1]),
        ("s STARTSWITH 'bc'", [1]),
        ("s ENDSWITH 'bc'", [0]),
        ("s NOT CONTAINS 'bc'", [2, 3, 4]),
        ("s NOT STARTSWITH 'bc'", [0, 2, 3, 4]),
        ("s NOT ENDSWITH 'bc'", [1, 2, 3, 4]),
        ("NOT (s CONTAINS 'bc')", [2, 3, 4]),
        ("s CONTAINS ''", []),
        ("s NOT CONTAINS ''", []),
        ("TRUE", ALL),
        ("NULL", []),
        ("FALSE OR 1 = 1", ALL),
        ("NULL OR TRUE", ALL),
        ("NOT (NULL)", []),
    ],
)
def test_a_filter_selects_the_listed_messages(text: str, delivered: list[int]) -> None:
    mask = matches(text, rows_of(MESSAGES))
    assert [index for index in ALL if mask[index]] == delivered


def test_large_integers_are_compared_exactly() -> None:
    rows = rows_of([{"n": "9007199254740993"}, {"n": "9007199254740992"}, {"n": "9223372036854775807"}])
    assert matches("n = 9007199254740992", rows) == [False, True, False]
    assert matches("n > 9223372036854775806", rows) == [False, False, True]


def test_searches_take_special_characters_literally() -> None:
    rows = rows_of([{"s": "a.c"}, {"s": "abc"}, {"s": "a%c"}, {"s": "éa.cé"}])
    assert matches("s CONTAINS 'a.c'", rows) == [True, False, False, True]
    assert matches("s ENDSWITH 'é'", rows) == [False, False, False, True]


@pytest.mark.parametrize(
    ("sign", "value"), [(">", "text"), ("<", True), (">=", None), ("<=", False), ("=", None)]
)
def test_comparisons_that_are_never_true_are_refused(sign: str, value: str | bool | None) -> None:
    with pytest.raises(Mismatch):
        if sign == "=":
            equal(Property("a"), Constant(value))
        else:
            ordered(sign, Property("a"), Constant(value))


def test_the_searches_are_contains_startswith_and_endswith() -> None:
    assert set(sql_conditions.SEARCHES) == {"CONTAINS", "STARTSWITH", "ENDSWITH"}
