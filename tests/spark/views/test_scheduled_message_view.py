"""The view with one row per scheduled message and its lateness: both engines agree with a plain program."""

from __future__ import annotations

from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from timeball.model.message import SCHEDULE_TOPIC
from timeball.spark.jobs import ledger
from timeball.spark.log_events import EVENT_SCHEMA
from timeball.spark.source.spark_api import spark_schema
from timeball.spark.views.view_sql import COLUMNS, scheduled_sql

WAITING = pa.schema(
    [("seq", pa.int64()), ("topic", pa.string()), ("unique_key", pa.string()), ("due_ms", pa.int64())]
)
LATE = ("late_outage_ms", "late_burst_ms", "late_broker_ms")

Event = dict[str, Any]


def accepted(seq: int, at_ms: int, due_ms: int | None = None, rows: int = 1, **more: Any) -> Event:
    """Build the event of the acceptance of `rows` messages. `more`: other columns."""
    return {
        "event": "accepted",
        "first_seq": seq,
        "rows": rows,
        "at_ms": at_ms,
        "due_ms": due_ms,
        "attempt": 1,
        **more,
    }


def released(seq: int, due_ms: int, at_ms: int, **more: Any) -> Event:
    """Build the event of a release at `at_ms`. `more`: other columns, also to replace these."""
    late = {"lateness_ms": at_ms - due_ms, "attempt": 1}
    return {
        "event": "released",
        "first_seq": seq,
        "rows": 1,
        "at_ms": at_ms,
        "due_ms": due_ms,
        **late,
        **more,
    }


def started(before_ms: int, at_ms: int) -> Event:
    return {"event": "started", "first_seq": 1, "rows": 0, "at_ms": at_ms, "lateness_ms": at_ms - before_ms}


def fold(events: list[Event], waiting: list[dict[str, Any]] = []) -> dict[int, dict[str, Any]]:  # noqa: B006
    """Run the view in DuckDB on these events. Returns its rows by number."""
    with duckdb.connect() as db:
        db.register("events", pa.Table.from_pylist(events, EVENT_SCHEMA))
        db.register("waiting", pa.Table.from_pylist(waiting, WAITING))
        result = db.sql(scheduled_sql("duckdb", events="events", waiting="waiting")).to_arrow_table()
    assert tuple(result.column_names) == COLUMNS
    return {row["seq"]: row for row in result.to_pylist()}


def why(row: dict[str, Any]) -> tuple[str | None, list[int | None]]:
    return row["cause"], [row[name] for name in LATE]


# ---- one cause at a time --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("events", "cause", "stages"),
    [
        ([accepted(1, 50, 100), released(1, 100, 100)], None, [None] * 3),
        ([accepted(1, 50, 100)], None, [None] * 3),
        ([accepted(1, 50, 100), released(1, 100, 103)], "broker", [0, 0, 3]),
        ([accepted(1, 160, 100), released(1, 100, 161)], "broker", [0, 0, 1]),
        ([started(90, 190), accepted(1, 50, 100), released(1, 100, 195)], "outage", [90, 0, 5]),
        ([started(90, 190), accepted(1, 50, 100), released(1, 100, 188)], "outage", [88, 0, 0]),
        ([started(20, 90), started(195, 300), accepted(1, 5, 100), released(1, 100, 104)], "broker", [0, 0, 4]),
        (
            [started(90, 120), started(130, 150), accepted(1, 50, 100), released(1, 100, 153)],
            "outage", [40, 0, 13],
        ),
        ([accepted(1, 50, 100), released(2, 90, 170), released(1, 100, 180)], "burst", [0, 70, 10]),
        ([accepted(1, 50, 100), released(2, 90, 99), released(1, 100, 180)], "broker", [0, 0, 80]),
        (
            [started(90, 150), accepted(1, 50, 100), released(2, 90, 170), released(1, 100, 180)],
            "outage", [50, 20, 10],
        ),
    ],
)  # fmt: skip
def test_cause_of_lateness_is_named(events: list[Event], cause: str | None, stages: list[int | None]) -> None:
    assert why(fold(events)[1]) == (cause, stages)


def test_a_message_due_before_its_acceptance_is_not_late() -> None:
    """The event of an older ledger counts from the instant."""
    (row,) = fold([accepted(1, 160, 100), released(1, 100, 160)]).values()
    assert (row["past_ms"], row["lateness_ms"], row["cause"]) == (60, 0, None)


def test_row_combines_its_events() -> None:
    rows = fold(
        [
            accepted(10, 50, rows=3),
            released(10, 100, 101, topic="orders", unique_key="a", attempt=2),
            {"event": "cancelled", "first_seq": 11, "rows": 1, "at_ms": 70, "due_ms": 200, "topic": "orders"},
            accepted(20, 60, 300, topic=SCHEDULE_TOPIC),
            released(20, 300, 300, topic="real"),
        ],
        [{"seq": 12, "topic": "orders", "unique_key": "c", "due_ms": 400}, {"seq": 99, "due_ms": 1}],
    )
    assert sorted(rows) == [10, 11, 12, 20]  # a row of the table without an event is older than the ledger
    assert (rows[10]["accepted_ms"], rows[10]["attempts"], rows[10]["unique_key"]) == (50, 2, "a")
    assert (rows[11]["cancelled_ms"], rows[11]["released_ms"], rows[11]["due_ms"]) == (70, None, 200)
    assert (rows[12]["due_ms"], rows[12]["unique_key"], rows[12]["released_ms"]) == (400, "c", None)
    assert rows[20]["topic"] == "real"


# ---- all at a time --------------------------------------------------------------------------------------------

instants = st.integers(0, 1_000)
lives = st.lists(st.tuples(instants, instants, instants, st.booleans()), min_size=1, max_size=8)


def lives_as_events(lives: list[tuple[int, int, int, bool]], stops: list[tuple[int, int]]) -> list[Event]:
    """Build the events of messages (accepted_ms, due_ms, lag_ms, is_settled) and of starts after `stops`."""
    events = [started(min(stop), max(stop)) for stop in stops]
    for seq, (accepted_ms, due_ms, lag_ms, is_settled) in enumerate(lives, 1):
        events.append(accepted(seq, accepted_ms, due_ms))
        if is_settled:
            events.append(released(seq, due_ms, max(accepted_ms, due_ms) + lag_ms))
    return events


@settings(max_examples=40, deadline=None)
@given(lives, st.lists(st.tuples(instants, instants), max_size=3))
def test_stages_of_lateness_add_up_and_are_not_negative(
    lives: list[tuple[int, int, int, bool]], stops: list[tuple[int, int]]
) -> None:
    rows = fold(lives_as_events(lives, stops))
    assert len(rows) == len(lives)
    for row in rows.values():
        stages = [row[name] for name in LATE]
        assert row["past_ms"] == max(0, row["accepted_ms"] - row["due_ms"])
        if row["released_ms"] is not None:
            assert row["lateness_ms"] == row["released_ms"] - max(row["due_ms"], row["accepted_ms"])
        if not row["lateness_ms"]:
            assert row["cause"] is None and stages == [None] * 3
            continue
        assert sum(stages) == row["lateness_ms"] and min(stages) >= 0
        assert row["cause"] == LATE[stages.index(max(stages))].split("_")[1]


@pytest.mark.spark
def test_spark_and_duckdb_agree(spark: SparkSession) -> None:
    stops = [(90, 190), (400, 420)]
    many = [((7 * i) % 500, (13 * i) % 600, (5 * i) % 90, i % 3 > 0) for i in range(200)]
    events = [*lives_as_events(many, stops), accepted(1_000, 300, rows=50), released(1_007, 250, 320)]
    waiting = [{"seq": 1_003, "topic": "later", "unique_key": "w", "due_ms": 9_000}]
    frames = (
        spark.createDataFrame(pa.Table.from_pylist(rows, schema), spark_schema(schema))
        for rows, schema in ((events, EVENT_SCHEMA), (waiting, WAITING))
    )
    result = {row.seq: row.asDict() for row in ledger.one_row_each(spark, *frames).collect()}
    assert result == fold(events, waiting)
    assert {row["cause"] for row in result.values()} == {None, "outage", "burst", "broker"}
