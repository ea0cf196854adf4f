"""Tests of events of log rows, also of rows that concern many messages or none: bulk attaches and starts."""

from __future__ import annotations

import pyarrow as pa
import pytest
from tests.node_fixture import RunningNode
from tests.spark.traffic import log_rows, send

from timeball.model.message import NO_DUE_TIME_MS, Kind, encode_properties
from timeball.spark.endpoint import Endpoint
from timeball.spark.log_events import EVENT_SCHEMA, attach_events, derive_events, read_events, read_spans
from timeball.table.attachment import Attachment, Reservation, encode


def test_a_bulk_attach_is_an_event_a_range_and_other_attaches_are_none() -> None:
    bulk = Attachment(job="bulk", job_id="j", epoch=0, ranges=[(10, 5), (20, 1)])
    moved = Attachment(job="compact", job_id="c", epoch=1, from_seq=1, to_seq=9)
    body = pa.array([encode(bulk), encode(moved), encode(Reservation(5))], pa.binary())
    result = pa.Table.from_pylist(
        list(attach_events(log_rows(Kind.TABLE, 3, store_ms=7, body=body))), EVENT_SCHEMA
    )
    assert [(row["first_seq"], row["rows"], row["at_ms"]) for row in result.to_pylist()] == [
        (10, 5, 7),
        (20, 1, 7),
    ]


def test_each_start_of_the_broker_is_an_event(node: RunningNode, broker: Endpoint) -> None:
    send(node.endpoint, 5)
    node.run(node.broker.compact())  # an attach, but not a bulk write
    repeated = broker.status().log.next_seq
    node.stop()
    node.start()
    with node.client() as ball:
        ball.send("orders", b"the first row of another life")
    end = broker.status().log.durable_seq
    result = read_spans(broker, 1, end).to_pylist()
    assert [(row["event"], row["first_seq"], row["rows"]) for row in result] == [("started", repeated, 0)]
    assert result[0]["lateness_ms"] >= 0
    assert read_spans(broker, repeated + 1, end).num_rows == read_spans(broker, end, end).num_rows == 0


def events(rows: pa.RecordBatch) -> list[dict[str, object]]:
    result = derive_events(rows)
    assert result.schema == EVENT_SCHEMA
    reported: list[dict[str, object]] = result.to_pylist()
    return reported


def test_release_event_has_position_and_lateness() -> None:
    rows = log_rows(
        Kind.RELEASE, 1, topic="t", due_ms=1_000, store_ms=1_007, source_seq=5, queue_id=2, queue_offset=9,
        reconsume_times=1,
    )  # fmt: skip
    assert events(rows) == [
        {
            "event": "released", "first_seq": 5, "rows": 1, "topic": "t", "unique_key": None, "due_ms": 1_000,
            "at_ms": 1_007, "lateness_ms": 7, "queue_id": 2, "queue_offset": 9, "attempt": 2, "event_seq": 1,
            "from_due_ms": None, "reason": None,
        }
    ]  # fmt: skip


def test_shifted_release_event_has_the_original_due_time() -> None:
    rows = log_rows(Kind.RELEASE, 1, topic="t", due_ms=1_000, store_ms=1_007, source_seq=5, from_due_ms=9_000)
    assert [(event["due_ms"], event["from_due_ms"]) for event in events(rows)] == [(1_000, 9_000)]
    # A move has the due time before it, and a half message that is accepted has none.
    for from_due_ms, former_ms in ((9_000, 9_000), (NO_DUE_TIME_MS, None)):
        rows = log_rows(Kind.MOVED, 1, topic="t", due_ms=1_000, store_ms=7, from_due_ms=from_due_ms)
        assert [(event["due_ms"], event["from_due_ms"]) for event in events(rows)] == [(1_000, former_ms)]


@pytest.mark.parametrize(
    ("accepted_ms", "late_ms"), [(None, 7), (900, 7), (1_005, 2), (1_007, 0), (1_100, 0)]
)
def test_lateness_of_overdue_message_counts_from_acceptance(accepted_ms: int | None, late_ms: int) -> None:
    rows = log_rows(
        Kind.RELEASE, 1, topic="t", due_ms=1_000, store_ms=1_007, source_seq=5, accepted_ms=accepted_ms
    )
    assert [event["lateness_ms"] for event in events(rows)] == [late_ms]


def test_a_half_message_and_its_end_are_no_events() -> None:
    for kind in (Kind.SCHEDULED, Kind.RELEASE, Kind.CANCEL):
        assert events(log_rows(kind, 1, topic="t", store_ms=1_007, source_seq=5)) == []


def test_a_half_message_is_accepted_by_its_first_move_and_moved_by_others() -> None:
    for from_due_ms, event in ((NO_DUE_TIME_MS, "accepted"), (900, "moved")):
        row = log_rows(Kind.MOVED, 1, due_ms=1_000, store_ms=500, source_seq=8, from_due_ms=from_due_ms)
        (result,) = events(row)
        assert (result["event"], result["first_seq"], result["event_seq"]) == (event, 8, 1)
    assert events(log_rows(Kind.MOVED, 1, due_ms=1_000, store_ms=500, source_seq=8)) == []


def test_accepted_and_cancelled_events_have_no_lateness_and_position() -> None:
    for kind, event, number in ((Kind.SCHEDULED, "accepted", 1), (Kind.CANCEL, "cancelled", 8)):
        rows = log_rows(kind, 1, due_ms=1_000, store_ms=2_000, source_seq=8, queue_id=-1)
        (result,) = events(rows)
        assert (result["event"], result["first_seq"], result["at_ms"]) == (event, number, 2_000)
        assert result["lateness_ms"] is result["queue_id"] is result["queue_offset"] is None


def test_a_cancel_has_its_reason() -> None:
    properties = [
        {"REASON": "expired", "BY": "anna"},
        {"BY": "b", "REASON": "selection s1"},
        {"XREASON": "x"},
        {},
    ]
    texts = [encode_properties(each) for each in properties]
    rows = log_rows(Kind.CANCEL, 5, due_ms=1_000, store_ms=7, properties=pa.array([*texts, None]))
    assert [event["reason"] for event in events(rows)] == ["expired", "selection s1", None, None, None]
    # The properties of other messages are their own.
    rows = log_rows(Kind.RELEASE, 2, due_ms=1_000, store_ms=7, topic="t", properties=pa.array(texts[:2]))
    assert [event["reason"] for event in events(rows)] == [None, None]


def test_a_release_into_the_topic_of_expired_messages_and_an_occurrence_are_marked() -> None:
    topics = pa.array(["%EXPIRED%t", "t", "t%EXPIRED%"])
    rows = log_rows(Kind.RELEASE, 3, due_ms=1_000, store_ms=7, topic=topics)
    assert [event["reason"] for event in events(rows)] == ["expired", None, None]
    keys = pa.array(["daily.1000", "daily.1001", "1000", "a.b.1000", ".1000", None, "daily.", "daily.1000x"])
    for kind, marked in ((Kind.SCHEDULED, ["occurrence"]), (Kind.RELEASE, [None])):
        rows = log_rows(kind, 8, due_ms=1_000, store_ms=7, topic="t", unique_key=keys)
        found = [event["reason"] for event in events(rows)]
        assert found == [*marked, None, None, None, *marked, None, None, None]


def test_read_events_yields_all_events_of_a_range(node: RunningNode, broker: Endpoint) -> None:
    send(node.endpoint, 5)
    end = broker.status().log.durable_seq
    result = [event for batch in read_events(broker, 1, end) for event in batch.to_pylist()]
    assert [(each["event"], each["first_seq"], each["rows"]) for each in result] == [
        ("accepted", seq, 1) for seq in range(2, 7)
    ]
    assert list(read_events(broker, end, end)) == []
