"""The lexer: words, numbers, strings and signs, each with its place."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.broker.filters.sql_lexer import KEYWORDS, Sort, tokens
from timeball.errors import InvalidFilter


def read(text: str) -> list[tuple[Sort, str]]:
    return [(token.sort, token.text) for token in tokens(text)[:-1]]


def test_a_line_of_everything() -> None:
    assert [(t.sort.name, t.text, t.position) for t in tokens("a_1>=-2 and 'it''s' <> .5e-1")] == [
        ("NAME", "a_1", 1),
        ("SYMBOL", ">=", 4),
        ("SYMBOL", "-", 6),
        ("INTEGER", "2", 7),
        ("KEYWORD", "AND", 9),
        ("STRING", "it's", 13),
        ("SYMBOL", "<>", 21),
        ("DECIMAL", ".5e-1", 24),
        ("END", "", 29),
    ]


@pytest.mark.parametrize("word", sorted(KEYWORDS))
def test_keywords_in_any_case(word: str) -> None:
    assert read(word.lower()) == read(word.title()) == [(Sort.KEYWORD, word)]
    assert read(word + "s") == [(Sort.NAME, word + "s")]


@pytest.mark.parametrize("name", ["a", "A", "_", "$", "$a1", "order_id", "Between1"])
def test_names_are_kept_as_written(name: str) -> None:
    assert read(name) == [(Sort.NAME, name)]


@pytest.mark.parametrize(
    ("text", "sort", "value"),
    [
        ("0", Sort.INTEGER, "0"), ("12", Sort.INTEGER, "12"), ("12L", Sort.INTEGER, "12"),
        ("12l", Sort.INTEGER, "12"), ("1.5", Sort.DECIMAL, "1.5"), ("1.", Sort.DECIMAL, "1."),
        (".5", Sort.DECIMAL, ".5"), ("0.5", Sort.DECIMAL, "0.5"), ("1e3", Sort.DECIMAL, "1e3"),
        ("1.E+3", Sort.DECIMAL, "1.E+3"), ("007.5", Sort.DECIMAL, "007.5"),
    ],
)  # fmt: skip
def test_numbers(text: str, sort: Sort, value: str) -> None:
    assert read(text) == [(sort, value)]


@pytest.mark.parametrize(
    ("text", "said", "position"),
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
def test_what_is_no_token(text: str, said: str, position: int) -> None:
    with pytest.raises(InvalidFilter) as refused:
        tokens(text)
    assert said in str(refused.value)
    assert refused.value.position == position


@pytest.mark.parametrize(
    "text", ["a--x\n=--\r1", "a/**/=/***/1", "a/*=*/ = /* it's -- */1", "a =1--", "\t\f\r\na = 1"]
)
def test_comments_and_blanks_are_skipped(text: str) -> None:
    assert [value for _, value in read(text)] == ["a", "=", "1"]


@given(st.text())
def test_a_string_is_what_was_quoted(text: str) -> None:
    assert read("'" + text.replace("'", "''") + "'") == [(Sort.STRING, text)]


@given(st.lists(st.sampled_from(["a", "IS", "1", "2.5", "'s'", "<>", "(", "-"])))
def test_tokens_apart_are_the_tokens(words: list[str]) -> None:
    positions = [token.position for token in tokens("  ".join(words))]
    assert len(read("  ".join(words))) == len(words)
    assert positions == sorted(positions)
