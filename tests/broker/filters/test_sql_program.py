"""The compiled evaluation of SQL filters: its outcomes are those of the reference, for any rows and any numbers."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.broker.filters.messages import rows_of
from tests.broker.filters.reference import NAMES, TEXTS, TREES, Tree, show

from timeball.broker.filters import sql_conditions, sql_filter
from timeball.broker.filters.sql_conditions import Ordered, Property, as_double, as_long
from timeball.model.message import build_rows

needs_compiled = pytest.mark.skipif(sql_filter.Program is None, reason="built without a compiler")

# Also texts of properties that no client writes: without separators, with several separators, with names alone.
PARTS = st.sampled_from([*NAMES, *TEXTS, "", "aa", "\1", "\2", "\1\2", "é"])
PROPERTIES = st.one_of(
    st.none(),
    st.lists(PARTS, max_size=10).map("".join),
    st.lists(st.tuples(st.sampled_from([*NAMES, "x"]), st.sampled_from(TEXTS)), max_size=5).map(
        lambda pairs: "\2".join(f"{name}\1{value}" for name, value in pairs)
    ),
)
# The column of TAGS.
TAG_TEXTS = st.one_of(st.none(), st.sampled_from(TEXTS))
ROWS = st.lists(st.tuples(PROPERTIES, TAG_TEXTS), min_size=1, max_size=20)


def evaluate_compiled(text: str, rows: pa.RecordBatch) -> list[bool]:
    """Return for each row whether the compiled condition is TRUE."""
    return [bool(matched) for matched in sql_filter.Program(*sql_filter.parse(text)).matches(rows)]


@needs_compiled
@settings(max_examples=600, deadline=None)
@given(TREES, ROWS, st.integers(0, 19), st.integers(0, 20))
def test_a_program_matches_the_rows_of_the_reference(
    tree: Tree, values: list[tuple[str | None, str | None]], begin: int, count: int
) -> None:
    columns = {"properties": [text for text, _ in values], "tag": [tag for _, tag in values]}
    rows = build_rows(len(values), **columns).slice(begin, count)
    condition, names = sql_filter.parse(show(tree))
    assert evaluate_compiled(show(tree), rows) == sql_conditions.matches(condition, names, rows).tolist()


NUMBERS = st.one_of(
    st.text("0123456789.-+eEfd \n", max_size=24),
    st.integers(-(2**70), 2**70).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.decimals(-(10**9), 10**9, places=6).map(str),
    st.from_regex(r"-?0{0,20}[0-9]{1,20}\.?[0-9]{0,20}", fullmatch=True),
)


def compares(text: str, sign: str, number: float, *, decimal: bool) -> bool:
    """Check whether a property with this text compares with a number, in the compiled evaluation."""
    condition = Ordered(sign, Property("a"), number, decimal)
    (is_match,) = sql_filter.Program(condition, frozenset("a")).matches(rows_of([{"a": text}]))
    return bool(is_match)


@needs_compiled
@settings(max_examples=1_000, deadline=None)
@given(NUMBERS)
def test_the_program_reads_a_text_as_the_number_that_the_reference_reads(text: str) -> None:
    for decimal, read in ((False, as_long), (True, as_double)):
        number = read(text)
        # "=" also shows that a decimal number is rounded to the same double.
        assert compares(text, "=", 0 if number is None else number, decimal=decimal) is (number is not None)
        assert compares(text, ">", 0, decimal=decimal) is (number is not None and number > 0)


@needs_compiled
def test_an_empty_value_is_not_missing() -> None:
    rows = build_rows(2, tag=["", ""], properties=["a\1\2", "TAGS\1x"])
    assert evaluate_compiled("TAGS = ''", rows) == [True, True]
    assert evaluate_compiled("a IS NULL", rows) == [False, True]


@needs_compiled
def test_a_value_is_taken_from_its_own_column_or_else_the_last_one_of_the_text() -> None:
    rows = build_rows(3, tag=["z", None, None], properties=["TAGS\1x\2a\1\2TAGS\1y"] * 2 + ["a\1"])
    assert evaluate_compiled("TAGS = 'z'", rows) == [True, False, False]
    assert evaluate_compiled("TAGS = 'y'", rows) == [False, True, False]
    assert evaluate_compiled("TAGS IS NULL", rows) == [False, False, True]


@needs_compiled
def test_a_name_does_not_continue_in_the_next_row() -> None:
    rows = build_rows(2, properties=["b\x011\x02reg", "ion\x01eu\x02"])
    assert evaluate_compiled("region IS NULL", rows) == [True, True]


@needs_compiled
def test_a_text_that_is_not_utf8_is_an_error_where_a_number_is_needed() -> None:
    rows = build_rows(1, properties=pa.array([b"a\x01\xff"]).view(pa.string()))
    with pytest.raises(UnicodeDecodeError):
        evaluate_compiled("a > 1", rows)


@needs_compiled
def test_texts_that_are_not_plain_digits_are_read_by_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_conditions, "as_long", lambda text: None)
    assert not compares("+4", "=", 4, decimal=False)
    assert compares("4", "=", 4, decimal=False)
