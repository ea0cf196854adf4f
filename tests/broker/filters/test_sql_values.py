"""Values: properties read from their text and columns, numbers read from properties, and the tables of outcomes."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.broker.filters.messages import Message, rows_of

from timeball.broker.filters import sql_conditions
from timeball.broker.filters.sql_conditions import (
    AND,
    EQUAL,
    ERROR,
    FALSE,
    IS_NULL,
    NOT,
    NULL,
    OR,
    TRUE,
    Values,
    as_double,
    as_long,
    constant,
)
from timeball.model.message import LOG_SCHEMA, build_rows, decode_properties

NAMES = frozenset({"a", "ab", "b"})


def texts(values: Values, name: str) -> list[str | None]:
    column: list[str | None] = values.text(name).to_pylist()
    return column


PLAIN = st.text(st.characters(exclude_characters="\1\2", codec="utf-8"), max_size=4)
MESSAGES = st.lists(
    st.one_of(st.none(), st.dictionaries(st.sampled_from(["a", "ab", "b", "c", ""]), PLAIN, max_size=5))
)


@given(MESSAGES)
def test_properties_have_the_values_that_were_encoded(messages: list[Message | None]) -> None:
    values = Values(rows_of(messages), NAMES)
    for name in NAMES:
        assert texts(values, name) == [(message or {}).get(name) for message in messages]


@given(st.lists(st.text(st.sampled_from("ab\1\2é"), max_size=12)), st.integers(1, 20))
def test_any_text_is_split_as_the_decoder_splits_it(properties: list[str], split_bytes: int) -> None:
    rows = build_rows(len(properties), properties=properties)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sql_conditions, "SPLIT_BYTES", split_bytes)  # a few rows at a time
        values = Values(rows, NAMES)
    for name in NAMES:
        assert texts(values, name) == [decode_properties(text).get(name) for text in properties]


def test_of_duplicate_properties_the_last_value_counts() -> None:
    rows = build_rows(2, properties=["a\x011\x02b\x012\x02a\x013\x02", "a\x01\x02"])
    assert texts(Values(rows, NAMES), "a") == ["3", ""]


def test_values_are_found_in_columns_or_in_the_text() -> None:
    messages: list[Message | None] = [{"TAGS": "t0", "KEYS": "k0"}, {"TAGS": "t1"}, {}, None]
    rows = rows_of(messages, tag=["t0", None, "t2", None], keys=["k0", "k1", None, None])
    values = Values(rows, frozenset({"TAGS", "KEYS", "UNIQ_KEY"}))
    assert texts(values, "TAGS") == ["t0", "t1", "t2", None]
    assert texts(values, "KEYS") == ["k0", "k1", None, None]
    assert texts(values, "UNIQ_KEY") == [None] * 4


def test_a_slice_of_rows_has_the_right_values() -> None:
    rows = rows_of([{"a": str(i)} for i in range(10)], tag=[f"t{i}" for i in range(10)]).slice(3, 4)
    values = Values(rows, frozenset({"a", "TAGS"}))
    assert texts(values, "a") == ["3", "4", "5", "6"]
    assert texts(values, "TAGS") == ["t3", "t4", "t5", "t6"]
    assert values.longs("a")[0].tolist() == [3, 4, 5, 6]


def test_the_own_columns_of_properties_are_columns_of_the_log() -> None:
    assert set(sql_conditions.OWN_COLUMNS.values()) <= set(LOG_SCHEMA.names)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0), ("-0", 0), ("+7", 7), ("-12", -12), ("007", 7), ("9223372036854775807", 2**63 - 1),
        ("-9223372036854775808", -(2**63)), ("0" * 40 + "1", 1), ("9223372036854775808", None),
        ("-9223372036854775809", None), ("", None), ("+", None), ("-", None), ("+-1", None), (" 1", None),
        ("1 ", None), ("1.0", None), ("1e3", None), ("1_0", None), ("0x10", None), ("1L", None), ("٣", None),
        ("²", None), ("abc", None), ("9" * 30_000, None),
    ],
)  # fmt: skip
def test_integers_are_those_of_java(text: str, value: int | None) -> None:
    assert as_long(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0.0), ("5.5", 5.5), (" 5.5\n", 5.5), ("5.", 5.0), (".5", 0.5), ("-1e3", -1000.0), ("1E-2", 0.01),
        ("+7", 7.0), ("1.5f", 1.5), ("1.5D", 1.5), ("1e999", float("inf")), ("9" * 30_000, float("inf")),
        ("", None), (".", None), ("e5", None), ("1e", None), ("1ef", None), ("f", None), ("1fd", None), ("nan", None),
        ("NaN", None), ("Infinity", None), ("inf", None), ("1_0", None), ("0x1p3", None), ("1 2", None),
        ("\u00a01", None), ("٣", None), ("--1", None), ("1.2.3", None),
    ],
)  # fmt: skip
def test_decimal_numbers_are_those_of_java(text: str, value: float | None) -> None:
    assert as_double(text) == value


@given(st.integers(-(2**70), 2**70))
def test_any_64_bit_integer_is_parsed(value: int) -> None:
    assert as_long(str(value)) == (value if -(2**63) <= value < 2**63 else None)


def test_a_column_has_numbers_and_a_state_for_each_message() -> None:
    values = Values(rows_of([{"a": "5"}, {"a": "x"}, {}, {"a": "2.5"}, {"a": "5"}]), NAMES)
    longs, state = values.longs("a")
    assert state.tolist() == [TRUE, ERROR, NULL, ERROR, TRUE]
    assert longs[state == TRUE].tolist() == [5, 5]
    doubles, state = values.doubles("a")
    assert state.tolist() == [TRUE, ERROR, NULL, TRUE, TRUE]
    assert doubles[state == TRUE].tolist() == [5.0, 2.5, 5.0]


OUTCOMES = [FALSE, TRUE, NULL, ERROR]


def from_left(left: int, right: int, decisive: int) -> int:
    """Evaluate AND (`decisive` is FALSE) or OR (`decisive` is TRUE) from left to right."""
    for side in (left, right):
        if side in (ERROR, decisive):
            return side
    return NULL if NULL in (left, right) else NOT[decisive]


@pytest.mark.parametrize(("left", "right"), list(product(OUTCOMES, repeat=2)))
def test_the_tables_of_and_or_and_equal_match_their_definitions(left: int, right: int) -> None:
    assert AND[left, right] == from_left(left, right, FALSE)
    assert OR[left, right] == from_left(left, right, TRUE)
    if ERROR in (left, right):
        assert EQUAL[left, right] == ERROR
    elif NULL in (left, right):
        assert EQUAL[left, right] == NULL
    else:
        assert EQUAL[left, right] == (TRUE if left == right else FALSE)


@pytest.mark.parametrize(("left", "right"), list(product([FALSE, TRUE, NULL], repeat=2)))
def test_without_errors_the_laws_of_de_morgan_hold(left: int, right: int) -> None:
    assert NOT[AND[left, right]] == OR[NOT[left], NOT[right]]


def test_the_tables_of_not_and_is_null() -> None:
    assert [NOT[outcome] for outcome in OUTCOMES] == [TRUE, FALSE, NULL, ERROR]
    assert [IS_NULL[outcome] for outcome in OUTCOMES] == [FALSE, FALSE, TRUE, ERROR]
    assert constant(NULL, 3).tolist() == [NULL] * 3
