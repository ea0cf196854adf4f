"""Tests of timeball.pipeline.views.log_events: the same events as the ledger job's, row by row."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from tests.node_fixture import RunningNode
from tests.pipeline.traffic import log_rows, send, send_due_now

from timeball import Timeball
from timeball.message import Kind
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.jobs import ledger
from timeball.pipeline.views.log_events import EVENT_SCHEMA, attach_events, events, read_events
from timeball.table.attachment import Attachment, Reservation, encode


def test_a_release_says_where_and_how_late() -> None:
    rows = log_rows(
        Kind.RELEASE, 1, topic="t", due_ms=1_000, store_ms=1_007, source_seq=5, queue_id=2, queue_offset=9,
        reconsume_times=1,
    )  # fmt: skip
    assert events(rows).to_pylist() == [
        {
            "event": "released", "first_seq": 5, "rows": 1, "topic": "t", "unique_key": None, "due_ms": 1_000,
            "at_ms": 1_007, "lateness_ms": 7, "queue_id": 2, "queue_offset": 9, "attempt": 2, "event_seq": 1,
        }
    ]  # fmt: skip


def test_what_is_accepted_or_cancelled_has_no_lateness_and_no_place() -> None:
    for kind, event, number in ((Kind.PROMISE, "accepted", 1), (Kind.CANCEL, "cancelled", 8)):
        rows = log_rows(kind, 1, due_ms=1_000, store_ms=2_000, source_seq=8, queue_id=-1)
        (found,) = events(rows).to_pylist()
        assert (found["event"], found["first_seq"], found["at_ms"]) == (event, number, 2_000)
        assert found["lateness_ms"] is found["queue_id"] is found["queue_offset"] is None


def test_a_bulk_attach_is_an_event_a_range_and_other_attaches_are_none() -> None:
    bulk = Attachment(job="bulk", job_id="j", epoch=0, ranges=[(10, 5), (20, 1)])
    moved = Attachment(job="compact", job_id="c", epoch=1, from_seq=1, to_seq=9)
    body = pa.array([encode(bulk), encode(moved), encode(Reservation(5))], pa.binary())
    found = attach_events(log_rows(Kind.TABLE, 3, store_ms=7, body=body))
    assert found.schema == EVENT_SCHEMA
    assert [(row["first_seq"], row["rows"], row["at_ms"]) for row in found.to_pylist()] == [
        (10, 5, 7),
        (20, 1, 7),
    ]


@pytest.mark.spark
@pytest.mark.timeout(600)
def test_the_ledger_job_says_the_same(spark: SparkSession, node: RunningNode, broker: Endpoint) -> None:
    send(node.endpoint, 5)
    send_due_now(node.endpoint, 3)
    with Timeball(node.endpoint) as ball:
        ball.cancel(ids=[ball.send("orders", b"x", after="1d").id])
    node.run(node.broker.compact())
    again = broker.status().log.next_seq
    node.stop()
    node.start()
    with Timeball(node.endpoint) as ball:
        ball.send("orders", b"the first row of another life")
    end = broker.status().log.durable_seq
    ours = pa.Table.from_batches(list(read_events(broker, 1, end)), EVENT_SCHEMA).sort_by("event_seq")
    job = ledger.read_events(spark, node.endpoint, 1, end).collect()
    started = ledger.read_starts(node.endpoint, 1, end).to_pylist()
    theirs = sorted([*(row.asDict() for row in job), *started], key=lambda row: row["event_seq"])
    assert ledger.LEDGER_SCHEMA == EVENT_SCHEMA
    assert theirs == ours.to_pylist()
    assert [row["first_seq"] for row in started] == [again]
    assert len(ours) == 5 + 3 + 3 + 2 + 1
