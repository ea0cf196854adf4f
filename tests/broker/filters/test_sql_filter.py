"""SQL filters: what they say of the index, and their evaluation with and without a compiler."""

from __future__ import annotations

import pytest
from tests.broker.filters.messages import entries_of, rows_of

from timeball.broker.filters import sql_conditions, sql_filter
from timeball.broker.filters.sql_filter import SqlFilter


def test_an_sql_filter_says_nothing_of_the_index() -> None:
    wanted = SqlFilter(" a = 1 ")
    assert wanted.text == "a = 1"
    assert not wanted.matches_all
    assert wanted.candidates(entries_of([0, 1, -5])).tolist() == [True] * 3
    assert wanted.exact(rows_of([])).tolist() == []


@pytest.mark.skipif(sql_filter.Program is None, reason="built without a compiler")
def test_the_compiled_evaluation_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(sql_conditions, "matches")
    assert SqlFilter("a = 1").exact(rows_of([{"a": "1"}, {}])).tolist() == [True, False]


def test_without_a_compiler_the_reference_evaluates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql_filter, "Program", None)
    wanted = SqlFilter("a > 1 OR a IS NULL")
    assert wanted.exact(rows_of([{"a": "1"}, {"a": "2"}, None])).tolist() == [False, True, True]
