"""SQL filters: their use of the index, and their evaluation with and without a compiler."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.broker.filters.messages import entries_of, rows_of

from timeball.broker.filters import sql_conditions, sql_filter
from timeball.broker.filters.sql_conditions import SameText
from timeball.broker.filters.sql_filter import SqlFilter, parse
from timeball.model.errors import InvalidFilter


def test_the_index_excludes_no_message_for_an_sql_filter() -> None:
    filter_ = SqlFilter(" a = 1 ")
    assert filter_.text == "a = 1"
    assert not filter_.matches_all
    assert filter_.candidates(entries_of([0, 1, -5])).tolist() == [True] * 3
    assert filter_.exact(rows_of([])).tolist() == []


@pytest.mark.skipif(sql_filter.Program is None, reason="built without a compiler")
def test_the_compiled_evaluation_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sql_conditions, "matches")
    assert SqlFilter("a = 1").exact(rows_of([{"a": "1"}, {}])).tolist() == [True, False]


def test_without_a_compiler_the_reference_evaluates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_filter, "Program", None)
    filter_ = SqlFilter("a > 1 OR a IS NULL")
    assert filter_.exact(rows_of([{"a": "1"}, {"a": "2"}, None])).tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("text", "equal_text"),
    [
        ("a = 1 or b = 2 and c = 3", "a = 1 OR (b = 2 AND c = 3)"),
        ("a=1 and b=2 or c=3", "(a = 1 AND b = 2) OR c = 3"),
        ("NOT (a = 1) AND b = 2", "(NOT (a = 1)) AND b = 2"),
        ("NOT (a = 1) = TRUE", "(NOT (a = 1)) = TRUE"),
        ("a > 1 = TRUE", "(a > 1) = TRUE"),
        ("a > 1 IS NULL", "(a > 1) IS NULL"),
        ("a BETWEEN 1 AND 2 AND b = 3", "(a BETWEEN 1 AND 2) AND b = 3"),
        ("a NOT BETWEEN -1 AND +2", "a < -1 OR a > 2"),
        ("a BETWEEN 1 AND b", "a >= 1 AND a <= b"),
        ("((a)) > (1)", "a > 1"),
        ("a = - - 1", "a = 1"),
        ("1 = a", "a = 1"),
        ("a <> 'x'", "NOT (a = 'x')"),
        ("a NOT IN ('x', 'y')", "NOT (a IN ('y', 'x', 'x'))"),
        ("a IS NOT NULL", "NOT (a IS NULL)"),
        ("a NOT CONTAINS 'x'", "NOT (a CONTAINS 'x')"),
        ("a NOT CONTAINS ''", "a CONTAINS ''"),
        ("a = 5L", "a = 5"),
        ("a = 5.0", "a = 5."),
        ("1 = 1", "TRUE"),
        ("2 > 2.5 ", "FALSE"),
        ("'a' = 'a' and 1 <> 2", "TRUE AND NOT(FALSE)"),
        ("5 IS NULL", "FALSE"),
        ("NULL IS NULL", "TRUE"),
        ("a is not null and (b) in('x')or c endswith'y'", "a IS NOT NULL AND b IN ('x') OR c ENDSWITH 'y'"),
        ("Between1 = fAlSe", "Between1 = FALSE"),
        *[
            (f"a = {written}", f"a = {value}")
            for written, value in (("12l", "12"), ("1.", "1.0"), (".5", "0.5"))
        ],
        *[(f"a = {written}", f"a = {value}") for written, value in (("1e3", "1000.0"), ("1.E+3", "1e3"))],
        ("a = 007.5", "a = 7.5"),
        *[(text, "a = 1") for text in ("a--x\n=--\r1", "a/**/=/***/1", "a/*=*/ = /* it's -- */1", "a =1--")],
        ("\t\f\r\na\n=1", "a = 1"),
    ],
)
def test_two_texts_with_one_meaning_are_parsed_to_equal_conditions(text: str, equal_text: str) -> None:
    assert parse(text) == parse(equal_text)


def test_parse_returns_the_names_of_all_properties() -> None:
    assert parse("(a = 1 OR $b IS NULL) AND 'c' = TAGS AND 1 = 1")[1] == {"a", "$b", "TAGS"}
    assert parse("TRUE")[1] == frozenset()


@pytest.mark.parametrize(
    ("text", "reason", "position"),
    [
        ("", "expected a property, a constant or a parenthesis, found the end", 1),
        ("a =", "found the end", 4),
        ("a = 1 b", "expected AND, OR or the end, found 'b'", 7),
        ("a = 1 = 1", "expected AND, OR or the end, found '='", 7),
        ("a LIKE 'x'", "expected a comparison, found 'LIKE'", 3),
        ("(a = 1", "expected ), found the end", 7),
        ("( a 'x'", "expected ), found 'x'", 5),
        ("a IN ('x') 'y'", "expected AND, OR or the end, found 'y'", 12),
        ("a )", "expected a comparison, found ')'", 3),
        ("a = 1)", "expected AND, OR or the end, found ')'", 6),
        ("AND", "found 'AND'", 1),
        ("a AND b = 1", "a is a property and no condition: compare it, as in a = TRUE", 1),
        ("a", "no condition", 1),
        ("NOT a = 5", "NOT goes before a condition in parentheses: NOT (a", 5),
        ("NOT (a)", "no condition", 5),
        ("NOT 5", "a constant is no condition", 5),
        ("'x'", "a constant is no condition", 1),
        ("a > 'x'", "> compares numbers; 'x' is none", 3),
        ("a <= TRUE", "<= compares numbers; TRUE is none", 3),
        ("NULL < a", "< compares numbers; NULL is none", 6),
        ("a = NULL", "write IS NULL or IS NOT NULL", 3),
        ("NULL <> a", "write IS NULL", 6),
        ("(a = 1) > 2", "a condition is neither larger nor smaller", 1),
        ("1 < (a = 1)", "a condition is neither larger nor smaller", 5),
        ("(a = 1) = 5", "5 is never TRUE or FALSE", 9),
        ("TRUE = 'x'", "'x' is never TRUE or FALSE", 6),
        ("1 = 'x'", "1 and 'x' are of different kinds", 3),
        ("a BETWEEN 2 AND 1", "BETWEEN 2 AND 1: the first must not be the larger", 3),
        ("a BETWEEN 'x' AND 'y'", "compares numbers", 3),
        ("a BETWEEN 1 OR 2", "expected AND, found 'OR'", 13),
        ("a IN (1)", "expected a string in single quotes, found '1'", 7),
        ("a IN ()", "expected a string in single quotes, found ')'", 7),
        ("a IN ('x' 'y')", "expected ), found 'y'", 11),
        ("'a' IN ('x')", "IN stands behind the name of a property", 1),
        ("(a = 1) CONTAINS 'x'", "CONTAINS stands behind the name of a property", 1),
        ("a CONTAINS 1", "expected a string in single quotes", 12),
        ("a NOT = 1", "expected BETWEEN, IN, CONTAINS, STARTSWITH or ENDSWITH, found '='", 7),
        ("a IS 1", "expected NULL, found '1'", 6),
        ("a = -b", "expected a number behind the sign, found 'b'", 6),
        ("a = -(1)", "expected a number behind the sign, found '('", 6),
        ("a = 9223372036854775808", "does not fit into 64 bits", 5),
        ("a = 1e999", "too large for a double", 5),
    ],
)
def test_a_refused_text_has_an_error_with_reason_and_position(text: str, reason: str, position: int) -> None:
    with pytest.raises(InvalidFilter) as error_info:
        parse(text)
    assert reason in str(error_info.value)
    assert error_info.value.position == position
    assert f"at character {position}" in str(error_info.value)


def test_the_smallest_64_bit_integer_is_accepted_and_the_next_smaller_one_refused() -> None:
    assert parse("a = -9223372036854775808") == parse("a = - 9223372036854775808L")
    with pytest.raises(InvalidFilter):
        parse("a = -9223372036854775809")


def test_the_error_of_a_long_text_is_short() -> None:
    for text in (
        "x" * 10_000,
        "a = '" + "y" * 10_000 + "' z",
        "a = 1 " + "z" * 10_000,
        "a > '" + "y" * 10_000 + "'",
    ):
        with pytest.raises(InvalidFilter) as error_info:
            parse(text)
        assert len(str(error_info.value)) < 400


@pytest.mark.parametrize(
    ("text", "reason", "position"),
    [
        ("a = 007", "begins with 0", 5),
        ("12abc", "runs into 'a'", 1),
        ("1e", "runs into 'e'", 1),
        ("1e+", "runs into 'e'", 1),
        ("1.2.3", "runs into '.'", 1),
        ("12Lx", "runs into 'x'", 1),
        ("a = 'open", "the string that begins at character 5 has no end", 5),
        ("'it''", "the string that begins at character 1", 1),
        ("a /* open", "the comment that begins at character 3", 3),
        ("/*/", "the comment that begins at character 1", 1),
        ("a != 1", "unexpected '!' at character 3: not equal is <>", 3),
        ('a = "x"', "a string stands in single quotes", 5),
        ("a;", "without a semicolon", 2),
        ("a % 2", "unexpected '%'", 3),
        ("ä = 1", "unexpected 'ä'", 1),
        ("a\x00", "unexpected", 2),
        ("a\u00a0= 1", "unexpected", 2),
    ],
)
def test_a_text_that_is_no_token_is_refused_with_its_position(text: str, reason: str, position: int) -> None:
    with pytest.raises(InvalidFilter) as error_info:
        parse(text)
    assert reason in str(error_info.value)
    assert error_info.value.position == position


@given(st.text())
def test_a_quoted_text_is_parsed_to_the_text(text: str) -> None:
    assert parse("a = '" + text.replace("'", "''") + "'") == (SameText("a", text), frozenset("a"))


@pytest.mark.parametrize("name", ["a", "A", "_", "$", "$a1", "order_id", "Between1", "nots", "ORDER"])
def test_the_case_of_names_is_kept(name: str) -> None:
    assert parse(f"{name} = 'x'") == (SameText(name, "x"), frozenset([name]))
