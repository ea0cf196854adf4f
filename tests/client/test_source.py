"""Sends of a source's records: a lost answer causes neither a loss nor a duplicate."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from tests.client.cutting_proxy import cutting_proxy
from tests.node_fixture import BOUND_S, RunningNode, eventually, running_node

from timeball import Timeball
from timeball.client.calls import Calls
from timeball.client.source import Source
from timeball.model import wire
from timeball.model.errors import Conflict, InvalidMessage, RequestError

SCHEMA = pa.schema([("topic", pa.string()), ("body", pa.binary())])


def rows(topic: str, *bodies: bytes) -> pa.RecordBatch:
    return pa.record_batch([pa.array([topic] * len(bodies)), pa.array(bodies, pa.binary())], SCHEMA)


def kept(columns: Timeball, topic: str) -> list[bytes]:
    found = [columns.read_queue(topic, queue, 0, 100).read_all() for queue in columns.queues(topic)]
    return sorted(body for table in found for body in table.column("body").to_pylist())


@pytest.fixture
def calls(node: RunningNode) -> Iterator[Calls]:
    found = Calls(node.endpoint, 30_000)
    yield found
    found.close()


def test_a_source_goes_on_where_it_stands(calls: Calls, columns: Timeball) -> None:
    source = Source(calls, "goes.on")
    assert source.positions() == {}
    source.send(rows("goes-on", b"a", b"b"), {0: 7, 1: 0}, {0: 8, 1: 1})
    source.send(rows("goes-on"), {0: 8}, {0: 20})  # nothing became a message
    source.close()
    another = Source(calls, "goes.on")
    assert another.positions() == {0: 20, 1: 1}
    with pytest.raises(Conflict, match="stands at 20 in partition 0"):
        another.send(rows("goes-on", b"b", b"c"), {0: 8}, {0: 9})
    another.send(rows("goes-on", b"c"), {0: 20}, {0: 21})
    another.close()
    assert kept(columns, "goes-on") == [b"a", b"b", b"c"]


def test_after_a_refused_batch_the_source_continues(calls: Calls) -> None:
    source = Source(calls, "refused")
    with pytest.raises(InvalidMessage, match="topic"):
        source.send(rows("no topic!", b"a"), {0: 0}, {0: 1})
    source.send(rows("refused", b"a"), {0: 0}, {0: 1})
    source.close()
    assert source.positions() == {0: 1}


@pytest.mark.parametrize(
    ("begin", "end", "said"),
    [
        ({0: 1}, {0: 0}, "an end behind it"),
        ({0: 1}, {1: 1}, "each partition has a begin"),
        ({-1: 1}, {-1: 2}, "metadata of a batch"),
    ],
)
def test_a_step_that_is_none_is_refused(
    calls: Calls, begin: dict[int, int], end: dict[int, int], said: str
) -> None:
    source = Source(calls, "steps")
    with pytest.raises(RequestError, match=said):
        source.send(rows("steps", b"a"), begin, end)
    source.close()


def test_a_stream_of_a_source_without_steps_is_refused(calls: Calls) -> None:
    from timeball.client.exchange import SendExchange

    exchange = SendExchange(
        calls.flight, SCHEMA, calls.endpoint, wire.SOURCE_PATH, open_s=BOUND_S, limit_s=BOUND_S
    )
    with pytest.raises(RequestError, match="metadata of a batch"):
        exchange.submit(rows("steps", b"a")).result(BOUND_S)
    exchange.close()


def test_a_batch_whose_answer_was_lost_is_sent_again_and_is_there_once(data: Path) -> None:
    with running_node(data) as node, cutting_proxy(node.endpoint) as proxy:
        calls = Calls(proxy.endpoint, 30_000)
        source = Source(calls, "lost")
        source.send(rows("lost", b"a"), {0: 0}, {0: 1})
        proxy.hold()
        sending = threading.Thread(target=source.send, args=(rows("lost", b"b"), {0: 1}, {0: 2}))
        sending.start()
        positions = node.broker.tables.source_positions
        eventually(lambda: positions.of("", "lost") == {0: 2}, "the broker has the batch")
        proxy.cut()
        sending.join(BOUND_S)
        assert not sending.is_alive()
        assert source.positions() == {0: 2}
        source.close()
        calls.close()
        with node.client() as columns:
            assert kept(columns, "lost") == [b"a", b"b"]
