"""Tests of timeball.pipeline.source.retrying_read: a broker that is started again in the middle of a read."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from tests.node_fixture import RunningNode
from tests.pipeline.traffic import send, send_due_now

from timeball import Timeball
from timeball.errors import OutOfRange, Unavailable
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.source.retrying_read import TRIES, behind_last_seq, behind_rows, retrying_read


def restart(node: RunningNode) -> None:
    node.stop()
    node.start()


def test_a_read_of_the_log_goes_on_where_it_broke_off(node: RunningNode, broker: Endpoint) -> None:
    with Timeball(node.endpoint) as ball:
        # More than the connection takes in ahead of the reader.
        ball.send_many([{"body": bytes(65_536), "after": 86_400}] * 400, topic="orders", batch_rows=20)
    end = broker.status().log.durable_seq
    begun: list[int] = []

    def read(begin: int) -> Iterator[pa.RecordBatch]:
        begun.append(begin)
        return broker.read_log(begin, end, coalesce_rows=20)

    rows = retrying_read(broker, read, 1, behind_last_seq)
    seqs = next(rows).column("seq").to_pylist()
    restart(node)
    seqs += [seq for batch in rows for seq in batch.column("seq").to_pylist()]
    assert seqs == list(range(1, end))
    assert len(begun) == 2 and begun[1] > 1  # it did break off, and did not begin again


def test_a_read_of_a_queue_goes_on_where_it_broke_off(node: RunningNode, broker: Endpoint) -> None:
    send_due_now(node.endpoint, 40)
    queue, (first, end) = next(iter(broker.queues("orders").items()))

    def read(begin: int) -> Iterator[pa.RecordBatch]:
        for offset in range(begin, end):
            yield from broker.read_queue("orders", queue, offset, offset + 1)

    rows = retrying_read(broker, read, first, behind_rows)
    offsets = next(rows).column("queue_offset").to_pylist()
    restart(node)
    offsets += [offset for batch in rows for offset in batch.column("queue_offset").to_pylist()]
    assert offsets == list(range(first, end))


def test_a_broker_that_is_there_but_breaks_off_for_ever_is_a_failure(broker: Endpoint) -> None:
    tries: list[int] = []

    def read(begin: int) -> Iterator[pa.RecordBatch]:
        tries.append(begin)
        raise Unavailable("broke off")
        yield

    with pytest.raises(Unavailable, match="broke off"):
        list(retrying_read(broker, read, 7, behind_rows))
    assert tries == [7] * (TRIES + 1)


def test_other_errors_are_not_tried_again(broker: Endpoint) -> None:
    with pytest.raises(OutOfRange):
        list(retrying_read(broker, lambda begin: broker.read_log(begin, 1), 0, behind_last_seq))


def test_a_broker_that_stays_away_is_unavailable(node: RunningNode) -> None:
    send(node.endpoint, 10)
    with Endpoint(node.endpoint, patience_s=0) as hasty:
        rows = retrying_read(hasty, lambda begin: hasty.read_log(begin, 11), 1, behind_last_seq)
        node.stop()
        with pytest.raises(Unavailable):
            list(rows)
    node.start()
