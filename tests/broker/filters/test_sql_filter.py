"""SQL filters: the text, and what they say of the index."""

from __future__ import annotations

from tests.broker.filters.messages import entries_of, rows_of

from timeball.broker.filters.sql_filter import SqlFilter


def test_an_sql_filter_says_nothing_of_the_index() -> None:
    wanted = SqlFilter(" a = 1 ")
    assert wanted.text == "a = 1"
    assert not wanted.matches_all
    assert wanted.candidates(entries_of([0, 1, -5])).tolist() == [True] * 3
    assert wanted.exact(rows_of([])).tolist() == []
