"""The texts of the views without a broker: which views a query names, events of rows of the log, bulk attaches."""

from __future__ import annotations

import duckdb
import pyarrow as pa
import pytest
from tests.pipeline.traffic import log_rows

from timeball.message import NO_INSTANT_MS, Kind
from timeball.pipeline.log_events import EVENT_SCHEMA
from timeball.pipeline.views import view_sql


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
    assert view_sql.needed_bases(["pending", "promises"]) == ["waiting_rows", "ledger_events"]
    assert view_sql.needed_bases([]) == []


def test_milliseconds_have_a_twin_unless_there_is_a_column_of_that_name() -> None:
    found = view_sql.definitions(
        "spark", {"table_rows": ["seq", "due_ms", "born_ms", "born", "late_outage_ms"]}
    )
    assert found == {"pending_table": "select *, timestamp_millis(due_ms) as due from table_rows"}


def test_promises_need_both_of_their_bases() -> None:
    assert "promises" not in view_sql.definitions("duckdb", {"ledger_events": ["at_ms"]})
    assert "promises" in view_sql.definitions(
        "duckdb", {"ledger_events": ["at_ms"], "waiting_rows": ["due_ms"]}
    )


def events(rows: pa.RecordBatch) -> list[dict[str, object]]:
    with duckdb.connect() as db:
        db.register("event_rows", pa.table(rows))
        db.register("span_rows", EVENT_SCHEMA.empty_table())
        found = db.sql(view_sql.events_sql()).to_arrow_table()
    assert found.schema == EVENT_SCHEMA
    return found.to_pylist()


def test_a_release_says_where_and_how_late() -> None:
    rows = log_rows(
        Kind.RELEASE, 1, topic="t", due_ms=1_000, store_ms=1_007, source_seq=5, queue_id=2, queue_offset=9,
        reconsume_times=1,
    )  # fmt: skip
    assert events(rows) == [
        {
            "event": "released", "first_seq": 5, "rows": 1, "topic": "t", "unique_key": None, "due_ms": 1_000,
            "at_ms": 1_007, "lateness_ms": 7, "queue_id": 2, "queue_offset": 9, "attempt": 2, "event_seq": 1,
        }
    ]  # fmt: skip


def test_a_half_message_and_its_end_are_no_events() -> None:
    for kind in (Kind.PROMISE, Kind.RELEASE, Kind.CANCEL):
        assert events(log_rows(kind, 1, topic="t", store_ms=1_007, source_seq=5)) == []


def test_a_half_message_is_accepted_by_its_first_move_and_moved_by_others() -> None:
    for from_due_ms, event in ((NO_INSTANT_MS, "accepted"), (900, "moved")):
        row = log_rows(Kind.MOVED, 1, due_ms=1_000, store_ms=500, source_seq=8, from_due_ms=from_due_ms)
        (found,) = events(row)
        assert (found["event"], found["first_seq"], found["event_seq"]) == (event, 8, 1)
    assert events(log_rows(Kind.MOVED, 1, due_ms=1_000, store_ms=500, source_seq=8)) == []


def test_what_is_accepted_or_cancelled_has_no_lateness_and_no_place() -> None:
    for kind, event, number in ((Kind.PROMISE, "accepted", 1), (Kind.CANCEL, "cancelled", 8)):
        rows = log_rows(kind, 1, due_ms=1_000, store_ms=2_000, source_seq=8, queue_id=-1)
        (found,) = events(rows)
        assert (found["event"], found["first_seq"], found["at_ms"]) == (event, number, 2_000)
        assert found["lateness_ms"] is found["queue_id"] is found["queue_offset"] is None
