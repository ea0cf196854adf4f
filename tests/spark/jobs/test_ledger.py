"""Tests of timeball.spark.jobs.ledger."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession
from tests.node_fixture import RunningNode, eventually, running_node
from tests.spark.traffic import send, send_due_now, visible

from timeball.io.clock import SystemClock
from timeball.model.errors import SetupError, StorageError
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs import audit, ledger
from timeball.spark.jobs.marked import Engine
from timeball.spark.log_events import EVENT_SCHEMA
from timeball.spark.run.session import SparkEngine
from timeball.spark.source.options import write_options
from timeball.spark.source.scheduled_writer import ScheduledTask, attach_all
from timeball.spark.table_store import sibling

pytestmark = pytest.mark.spark


def run_once(engine: Engine, node: RunningNode, **options: str) -> None:
    """Run the job until the ledger has the events of all rows of the log."""
    ledger.JOB.start(engine, node.endpoint, once=True, options=options).awaitTermination()


def recorded(broker: Endpoint) -> list[dict[str, object]]:
    """Read all events of the ledger beside the pending table."""
    return DeltaTable(sibling(broker.status().table.uri, "ledger")).to_pyarrow_table().to_pylist()


def test_every_event_is_recorded_once_over_restarts(
    engine: SparkEngine, node: RunningNode, broker: Endpoint
) -> None:
    send(node.endpoint, 20)
    send_due_now(node.endpoint, 5)
    with node.client() as ball:
        ball.cancel(ball.send("orders", b"x", after="1d").id)
    run_once(engine, node, max_rows_per_batch="10", rows_per_partition="4")
    run_once(engine, node)  # nothing is left to do
    result = recorded(broker)
    assert sorted(event["event"] for event in result) == ["accepted"] * 26 + ["cancelled"] + ["released"] * 5
    assert len({(event["event"], event["first_seq"]) for event in result}) == 32
    table = DeltaTable(sibling(broker.status().table.uri, "ledger"))
    assert ledger.bounds(table) == (1, broker.status().log.durable_seq)


@pytest.mark.smoke
def test_view_has_one_row_per_scheduled_message(
    spark: SparkSession, node: RunningNode, broker: Endpoint
) -> None:
    send_due_now(node.endpoint, 2)
    with node.client() as ball:
        pending, cancelled = (ball.send("orders", body, after="10d") for body in (b"x", b"y"))
        ball.cancel(cancelled.id)
    options = write_options({"endpoint": node.endpoint})
    due_ms = broker.status().now_ms + 10**9
    bulk = pa.table({"topic": ["later"], "body": ["b"], "due_ms": [due_ms]})
    written = ScheduledTask(options).write(iter(bulk.to_batches()))
    attach_all([written], options, "job", 0)
    uri = sibling(broker.status().table.uri, "ledger")
    ledger.extend(SparkEngine(spark), node.endpoint, uri, broker.status().log.durable_seq)
    rows = {row.seq: row for row in ledger.scheduled_rows(spark, node.endpoint).collect()}
    assert len(rows) == 5
    assert rows[pending.seq].due_ms == pending.due_ms
    assert rows[pending.seq].released_ms is rows[pending.seq].cancelled_ms is None
    assert rows[cancelled.seq].cancelled_ms >= rows[cancelled.seq].accepted_ms
    released = [row for row in rows.values() if row.released_ms]
    assert [row.released_ms - row.due_ms for row in released] == [row.lateness_ms for row in released]
    assert len(released) == 2
    of_bulk_write = rows[written.ranges[0][0]]
    assert (of_bulk_write.topic, of_bulk_write.due_ms, of_bulk_write.attempts) == ("later", due_ms, 1)


def test_another_delta_table_is_not_taken_for_a_ledger(tmp_path: Path) -> None:
    table = DeltaTable.create(str(tmp_path / "t"), pa.schema([("a", pa.int64())]))
    with pytest.raises(StorageError, match="is not a ledger"):
        ledger.bounds(table)
    with pytest.raises(StorageError, match="is not a ledger"):
        ledger.open_ledger(str(tmp_path / "t"), 1)
    assert DeltaTable(str(tmp_path / "t")).version() == 0


def test_missing_columns_are_added_to_an_older_ledger(
    engine: SparkEngine, node: RunningNode, broker: Endpoint
) -> None:
    """Otherwise Delta would drop their values when it joins files."""
    uri = sibling(broker.status().table.uri, "ledger")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "EVENT_SCHEMA", EVENT_SCHEMA.remove(len(EVENT_SCHEMA) - 1))
        ledger.open_ledger(uri, 1)
    send_due_now(node.endpoint, 2)
    run_once(engine, node)
    send_due_now(node.endpoint, 2)
    run_once(engine, node)
    table = DeltaTable(uri)
    table.optimize.compact()
    assert table.to_pyarrow_table().schema.names == EVENT_SCHEMA.names
    assert len(recorded(broker)) == 8


def test_the_ledger_of_another_log_is_refused(spark: SparkSession, node: RunningNode, tmp_path: Path) -> None:
    """It would get no event of this log up to the other log's mark."""
    ledger.open_ledger(str(tmp_path / "ledger"), 1_000)
    with pytest.raises(SetupError, match="has come to row 1000 but the broker's log ends at"):
        ledger.extend(SparkEngine(spark), node.endpoint, str(tmp_path / "ledger"), 5)


def test_lateness_during_an_outage_has_the_cause_outage(spark: SparkSession, tmp_path: Path) -> None:
    with running_node(tmp_path / "data", compact_rows=0) as first, first.client() as ball:
        late = ball.send("orders", b"x", after="3s")  # the broker stops in less than 3 s
        ball.send("orders", b"y", after="1d")
    threading.Event().wait(max(0, late.due_ms + 50 - SystemClock().wall_ms()) / 1000)
    with running_node(tmp_path / "data", compact_rows=0) as second:
        with second.client() as ball:
            eventually(lambda: visible(ball, "orders") == 1, "it is released")
            ball.send("orders", b"z", after="1d")
        with Endpoint(second.endpoint) as broker:
            uri = sibling(broker.status().table.uri, "ledger")
            end = broker.status().log.durable_seq
        for to_seq in (end - 1, end, end):  # in two steps, then repeated
            ledger.extend(SparkEngine(spark), second.endpoint, uri, to_seq)
        result = DeltaTable(uri).to_pyarrow_table().to_pylist()
        (row,) = ledger.scheduled_rows(spark, second.endpoint).where("lateness_ms > 0").collect()
        assert audit.run(spark, second.endpoint).ok
    assert [event["rows"] for event in result if event["event"] == "started"] == [0]
    assert row.seq == late.seq and row.cause == "outage"
    assert row.late_outage_ms + row.late_broker_ms == row.lateness_ms
