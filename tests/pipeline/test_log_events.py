"""Events that are no single promise's: bulk attaches and starts."""

from __future__ import annotations

import pyarrow as pa
from tests.node_fixture import RunningNode
from tests.pipeline.traffic import log_rows, send

from timeball import Timeball
from timeball.message import Kind
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.log_events import EVENT_SCHEMA, attach_events, read_spans
from timeball.table.attachment import Attachment, Reservation, encode


def test_a_bulk_attach_is_an_event_a_range_and_other_attaches_are_none() -> None:
    bulk = Attachment(job="bulk", job_id="j", epoch=0, ranges=[(10, 5), (20, 1)])
    moved = Attachment(job="compact", job_id="c", epoch=1, from_seq=1, to_seq=9)
    body = pa.array([encode(bulk), encode(moved), encode(Reservation(5))], pa.binary())
    found = pa.Table.from_pylist(
        list(attach_events(log_rows(Kind.TABLE, 3, store_ms=7, body=body))), EVENT_SCHEMA
    )
    assert [(row["first_seq"], row["rows"], row["at_ms"]) for row in found.to_pylist()] == [
        (10, 5, 7),
        (20, 1, 7),
    ]


def test_each_start_of_the_broker_is_an_event(node: RunningNode, broker: Endpoint) -> None:
    send(node.endpoint, 5)
    node.run(node.broker.compact())  # an attach, but not a bulk write
    again = broker.status().log.next_seq
    node.stop()
    node.start()
    with Timeball(node.endpoint) as ball:
        ball.send("orders", b"the first row of another life")
    end = broker.status().log.durable_seq
    found = read_spans(broker, 1, end).to_pylist()
    assert [(row["event"], row["first_seq"], row["rows"]) for row in found] == [("started", again, 0)]
    assert found[0]["lateness_ms"] >= 0
    assert read_spans(broker, again + 1, end).num_rows == read_spans(broker, end, end).num_rows == 0
