"""Tests of timeball.spark.jobs.audit_engines: both engines compute the same from the same log and tables."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from tests.broker.on_node import batch
from tests.node_fixture import RunningNode
from tests.spark.traffic import send, send_due_now

from timeball.model.errors import OverLimit
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs import audit_engines, ledger
from timeball.spark.jobs.audit_engines import AuditEngine, DuckDbEngine, Reads, SparkAuditEngine
from timeball.spark.jobs.marked import InProcessEngine
from timeball.spark.table_store import open_table, sibling
from timeball.spark.views.audit_sql import BULK_SCHEMA, ENDED_SCHEMA, AuditTexts


@pytest.mark.spark
@pytest.mark.timeout(600)
@pytest.mark.parametrize("driver_rows", [10**6, 0])
def test_both_engines_compute_the_same_sums(
    spark: SparkSession,
    node: RunningNode,
    broker: Endpoint,
    monkeypatch: pytest.MonkeyPatch,
    driver_rows: int,
) -> None:
    """Events are in the ledger and in the log, rows in the table, in the tail and in delay levels.

    Some messages were moved or cancelled. `driver_rows`: 0 makes the executors read the log, 10**6 the driver.
    """
    monkeypatch.setattr(audit_engines, "DRIVER_ROWS", driver_rows)
    send(node.endpoint, 200)
    node.run(node.broker.send(batch(2, delay_level=[18, 17])))
    node.run(node.broker.reschedule(seqs=[10, 11], delay_ms=10**9))
    node.run(node.broker.compact())
    send_due_now(node.endpoint, 5)
    status = broker.status()
    uri, middle = sibling(status.table.uri, "ledger"), status.log.durable_seq - 8
    ledger.extend(InProcessEngine(), node.endpoint, uri, middle)
    node.run(node.broker.cancel(seqs=[10, 60]))
    send(node.endpoint, 20)
    status = broker.status()
    end = status.log.durable_seq
    reads = Reads(
        endpoint=node.endpoint, table_uri=status.table.uri, table_version=status.table.version, ledger=open_table(uri),
        events=(1, middle), fresh_events=(middle, end), tail=(status.watermark, end), levels=(1, end), placed=(1, end),
    )  # fmt: skip
    duckdb, on_spark = (
        results(engine, reads, status.settled_before_ms)
        for engine in (DuckDbEngine(), SparkAuditEngine(spark, "test"))
    )
    assert duckdb == on_spark
    for rows, least in zip(duckdb, (5, 4, 2, 1), strict=True):
        assert len(rows) >= least, "a comparison of few rows says nothing"


def results(engine: AuditEngine, reads: Reads, settled_ms: int) -> list[list[tuple[object, ...]]]:
    """The sorted rows of each query: sums of events, sums of stored rows, ended messages, and queues."""
    texts = AuditTexts(engine.dialect, engine.relation, since=1, settled_ms=settled_ms, overdue_before_ms=0)
    with engine:
        engine.read(reads)
        engine.register("kept", ENDED_SCHEMA.empty_table())
        found = [engine.query(text) for text in (texts.events(), texts.rows(), texts.ended(), texts.queues())]
        return [sorted(tuple(row.values()) for row in table.to_pylist()) for table in found]


def test_an_audit_that_needs_more_memory_than_allowed_is_refused() -> None:
    with DuckDbEngine(memory_bytes=8 << 20) as engine:
        engine.register("numbers", pa.table({"n": range(10)}))
        assert engine.query("select count(*) as n from numbers").to_pylist() == [{"n": 10}]
        with pytest.raises(OverLimit, match="needs more than 8,388,608 bytes"):
            engine.query("select list(a.range) from range(10000000) as a")


@pytest.mark.spark
def test_rows_behind_an_empty_chunk_are_read(spark: SparkSession) -> None:
    """The numbers of bulk writes are gathered range by range, and a range may have none in the suspect groups."""
    some, none = pa.table({"seq": [1, 2, 3], "event_seq": [9, 9, 9]}, BULK_SCHEMA), BULK_SCHEMA.empty_table()
    for parts in ([none, some], [some, none, some]):
        rows = pa.concat_tables(parts)
        with SparkAuditEngine(spark, "test") as engine:
            engine.register("bulk", rows)
            [read] = engine.query(f"SELECT count(*) AS rows FROM {engine.relation('bulk')}").to_pylist()
            assert read == {"rows": rows.num_rows}
