"""The texts of the views without a broker: which views a query names, which relations they need."""

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
    assert view_sql.named(text) == views


def test_bases_are_each_needed_once() -> None:
    assert view_sql.needed_bases(["pending", "scheduled"]) == ["waiting_rows", "ledger_events"]
    assert view_sql.needed_bases([]) == []


def test_milliseconds_have_a_twin_unless_there_is_a_column_of_that_name() -> None:
    found = view_sql.definitions(
        "spark", {"table_rows": ["seq", "due_ms", "born_ms", "born", "late_outage_ms"]}
    )
    assert found == {"pending_table": "select *, timestamp_millis(due_ms) as due from table_rows"}


def test_scheduled_messages_need_both_of_their_bases() -> None:
    assert "scheduled" not in view_sql.definitions("duckdb", {"ledger_events": ["at_ms"]})
    assert "scheduled" in view_sql.definitions(
        "duckdb", {"ledger_events": ["at_ms"], "waiting_rows": ["due_ms"]}
    )
