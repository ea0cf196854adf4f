"""Tests of the SQL texts of the views without a broker: views that a query names, relations that they need."""

from __future__ import annotations

import pytest

from timeball.spark.views import view_sql


@pytest.mark.parametrize(
    ("text", "views"),
    [
        ("select * from pending", ["pending"]),
        ('SELECT * FROM Pending p JOIN "ledger" using (seq)', ["pending", "ledger"]),
        ("from pending_table", ["pending_table"]),
        ("select log(2)", ["log"]),  # costs time, never an answer
        ("select 1 as pendings", []),
    ],
)
def test_views_that_a_query_names(text: str, views: list[str]) -> None:
    assert view_sql.views_in_query(text) == views


def test_base_relations_are_listed_once() -> None:
    assert view_sql.base_relations_of(["pending", "scheduled"]) == ["waiting_rows", "ledger_events"]
    assert view_sql.base_relations_of([]) == []


def test_millisecond_columns_get_a_timestamp_unless_the_name_is_used() -> None:
    result = view_sql.definitions(
        "spark", {"table_rows": ["seq", "due_ms", "born_ms", "born", "late_outage_ms"]}
    )
    assert result == {"pending_table": "select *, timestamp_millis(due_ms) as due from table_rows"}


def test_scheduled_messages_need_both_of_their_bases() -> None:
    assert "scheduled" not in view_sql.definitions("duckdb", {"ledger_events": ["at_ms"]})
    assert "scheduled" in view_sql.definitions(
        "duckdb", {"ledger_events": ["at_ms"], "waiting_rows": ["due_ms"]}
    )
