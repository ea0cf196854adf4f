"""Tests of timeball.spark.endpoint, against a real broker."""

from __future__ import annotations

import socket

import pytest
from tests.node_fixture import RunningNode
from tests.spark.traffic import send, send_due_now
from tests.table.small_table import table_rows

from timeball.model.answers import RangesCancelled
from timeball.model.errors import NotFound, OutOfRange, Unavailable
from timeball.model.message import READ_SCHEMA, Kind
from timeball.spark.endpoint import Endpoint
from timeball.spark.table_store import Store
from timeball.table.attachment import Attachment


def test_the_log_is_read_with_the_kinds_asked_for(node: RunningNode, broker: Endpoint) -> None:
    first = broker.status().log.durable_seq
    send(node.endpoint, 10)
    status = broker.status()
    end = status.log.durable_seq
    assert end >= first + 10  # and what the broker notes of the topic
    batches = list(broker.read_log(first, end, [Kind.SCHEDULED]))
    assert sum(batch.num_rows for batch in batches) == 10
    assert batches[0].schema == READ_SCHEMA
    assert list(broker.read_log(first, end, [Kind.CANCEL])) == []


def test_queues_are_read_up_to_their_end_and_not_beyond(node: RunningNode, broker: Endpoint) -> None:
    send_due_now(node.endpoint, 20)
    queues = broker.queues("orders")
    assert sum(end - first for first, end in queues.values()) == 20
    for queue, (first, end) in queues.items():
        batches = list(broker.read_queue("orders", queue, first, end))
        assert sum(batch.num_rows for batch in batches) == end - first
    with pytest.raises(OutOfRange, match="queue 0 of 'orders' ends at"):
        list(broker.read_queue("orders", 0, 0, 1_000))
    with pytest.raises(NotFound):
        broker.queues("no.such")


def test_reserved_numbers_do_not_overlap(broker: Endpoint) -> None:
    first, second = broker.reserve(100), broker.reserve(1)
    assert second >= first + 100


def test_ranges_of_a_bulk_job_are_cancelled_together(broker: Endpoint) -> None:
    first_seq, now_ms = broker.reserve(100), broker.status().now_ms
    rows = table_rows([now_ms + 3_600_000] * 100, first_seq=first_seq)
    files = list(Store(broker.status().table.uri).put_rows(rows, now_ms))
    with pytest.raises(NotFound, match="set aside"):
        broker.cancel_ranges([(first_seq, 100)])
    broker.attach(Attachment(job="bulk", job_id="j", epoch=1, files=files, ranges=[(first_seq, 100)]))
    assert broker.cancel_ranges([(first_seq, 100)], "why") == RangesCancelled(100, 100, 0, 0)
    assert broker.cancel_ranges([(first_seq, 100)]) == RangesCancelled(100, 0, 100, 100)


def test_errors_come_back_as_the_broker_raised_them(broker: Endpoint) -> None:
    wrong = Attachment(job="compact", job_id="j", epoch=1, from_seq=999, to_seq=1000)
    with pytest.raises(OutOfRange, match=r"999.*watermark") as caught:
        broker.attach(wrong)
    assert "Detail" not in str(caught.value)
    with pytest.raises(OutOfRange):
        list(broker.read_log(0, 10**9))


def test_nobody_there_is_unavailable() -> None:
    with socket.socket() as unanswered:
        unanswered.bind(("127.0.0.1", 0))  # bound and not listening: nobody else can take it, nobody answers
        uri = f"grpc://127.0.0.1:{unanswered.getsockname()[1]}"
        with Endpoint(uri, patience_s=0) as endpoint:
            with pytest.raises(Unavailable, match="no broker answers at"):
                endpoint.status()
            with pytest.raises(Unavailable):
                list(endpoint.read_log(0, 1))


def test_a_broker_that_comes_back_is_waited_for(node: RunningNode) -> None:
    with Endpoint(node.endpoint, patience_s=30) as endpoint:
        endpoint.status()
        node.stop()
        with Endpoint(node.endpoint, patience_s=0) as hasty, pytest.raises(Unavailable):
            hasty.status()
        node.start()
        assert endpoint.status().watermark == 1
