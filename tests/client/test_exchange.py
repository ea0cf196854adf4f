"""A send stream: answers in order, refusals that leave it open, and the effect of its end on waiting callers."""

from __future__ import annotations

import gc
import itertools
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from tests.client import broken_streams
from tests.client.cutting_proxy import cutting_proxy
from tests.client.hanging import Unanswering, stopped_node, unanswering_node
from tests.node_fixture import BOUND_S, RunningNode, eventually, running_node

from timeball import Timeball
from timeball.client.attempts import Lost, NotNow, NotSent
from timeball.client.calls import Calls
from timeball.client.exchange import Answer, SendExchange, Source
from timeball.model import wire
from timeball.model.errors import (
    Conflict,
    InvalidMessage,
    RequestError,
    TimeballError,
    Unauthorized,
    Unavailable,
    from_code,
)

SCHEMA = pa.schema([("topic", pa.string()), ("body", pa.binary())])


def batch(topic: str = "exchange", rows: int = 1) -> pa.RecordBatch:
    """A batch of this many equal messages."""
    return pa.RecordBatch.from_arrays([pa.array([topic] * rows), pa.array([b"x"] * rows)], schema=SCHEMA)


def open_exchange(node: RunningNode, schema: pa.Schema = SCHEMA) -> SendExchange:
    """A send stream at this node, over a connection of its own."""
    return exchange_of(flight.FlightClient(node.endpoint), node.endpoint, schema)


def exchange_of(client: object, endpoint: str, schema: pa.Schema = SCHEMA) -> SendExchange:
    """A send stream by this client, which is Flight's or stands for it."""
    return SendExchange(client, schema, endpoint, open_s=BOUND_S, limit_s=BOUND_S)


def test_each_batch_gets_its_own_answer_in_order(node: RunningNode) -> None:
    exchange = open_exchange(node)
    futures = [exchange.submit(batch(rows=rows)) for rows in range(1, 200)]
    acks = [future.result(BOUND_S) for future in futures]
    assert [ack.rows for ack in acks] == list(range(1, 200))
    for ack, next_ack in itertools.pairwise(acks):
        assert next_ack.first_seq >= ack.first_seq + ack.rows
    exchange.close()


def test_a_refused_batch_does_not_end_the_stream(node: RunningNode) -> None:
    exchange = open_exchange(node)
    before, refused, after = (
        exchange.submit(batch()),
        exchange.submit(batch("no/such/name")),
        exchange.submit(batch()),
    )
    assert before.result(BOUND_S).rows == after.result(BOUND_S).rows == 1
    with pytest.raises(InvalidMessage, match="topic"):
        refused.result(BOUND_S)
    assert exchange.alive
    exchange.close()
    assert not exchange.alive


def test_a_refused_schema_ends_the_stream_and_is_the_error_of_all_batches(node: RunningNode) -> None:
    schema = pa.schema([*SCHEMA, pa.field("delay", pa.int64())])
    exchange = open_exchange(node, schema)
    with pytest.raises(InvalidMessage, match="unknown column 'delay'"):
        exchange.submit(pa.RecordBatch.from_pylist([{"topic": "t", "body": b""}], schema)).result(BOUND_S)
    eventually(lambda: not exchange.alive, "the stream ends")
    with pytest.raises(InvalidMessage, match="unknown column 'delay'"):
        exchange.submit(pa.RecordBatch.from_pylist([{"topic": "t", "body": b""}], schema))
    exchange.close()


def test_without_a_broker_a_stream_raises_notsent() -> None:
    with pytest.raises(NotSent):
        exchange = exchange_of(flight.FlightClient("grpc://127.0.0.1:1"), "grpc://127.0.0.1:1")
        exchange.submit(batch())


def test_a_closed_stream_has_its_last_answer_and_refuses_further_batches(node: RunningNode) -> None:
    exchange = open_exchange(node)
    last = exchange.submit(batch())
    exchange.close()
    assert last.result(0).rows == 1  # close waits for answers under way
    with pytest.raises(NotSent):
        exchange.submit(batch())


def test_a_stopping_broker_answers_or_refuses_each_batch_and_loses_none(data: Path) -> None:
    with running_node(data) as node:
        exchange = open_exchange(node)
        futures = [exchange.submit(batch()) for _ in range(100)]
        futures[0].result(BOUND_S)
        node.stop()
        outcomes = [future.exception(BOUND_S) for future in futures]
        eventually(lambda: not exchange.alive, "the stream ends")
        node.start()
        next_seq = node.broker.status()["log"]["next_seq"]  # type: ignore[index]
    accepted = [future.result().first_seq for future, error in zip(futures, outcomes) if error is None]
    assert accepted and all(seq < next_seq for seq in accepted)
    assert all(error is None or isinstance(error, NotNow) for error in outcomes)  # no batch is Lost
    with pytest.raises(NotSent):
        exchange.submit(batch())
    exchange.close()


def test_the_writer_of_a_stream_that_the_broker_ended_is_closed_without_output(
    data: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Arrow prints the error of a writer that is freed and not closed."""
    with running_node(data) as node:

        def end_stream() -> None:
            """Let the broker end a stream. At the return no name refers to it, so Python frees its writer."""
            exchange = open_exchange(node)
            exchange.submit(batch()).result(BOUND_S)
            node.stop()
            exchange._thread.join(BOUND_S)
            assert not exchange.alive

        end_stream()
        gc.collect()
        node.start()
    assert "Close() failed" not in capfd.readouterr().err


def test_the_codes_of_the_clients_errors_differ_from_those_of_the_broker() -> None:
    assert type(from_code("unavailable", "x")) is Unavailable
    assert {NotSent.code, Lost.code, Unavailable.code, TimeballError.code} == {
        "not_sent", "answer_lost", "unavailable", "error",
    }  # fmt: skip


class Refusing:
    """In the place of Flight's client: opening a stream raises this error."""

    def __init__(self, error: flight.FlightError) -> None:
        self.error = error

    def do_exchange(self, _: flight.FlightDescriptor) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (flight.FlightServerError("who are you?. Detail: Failed", b"unauthorized"), Unauthorized),
        (flight.FlightUnavailableError("connection refused"), NotSent),
    ],
)
def test_an_error_before_the_stream_opens_is_raised_as_a_refusal_or_notsent(
    error: flight.FlightError, raised: type[TimeballError]
) -> None:
    with pytest.raises(raised) as caught:
        exchange_of(Refusing(error), "grpc://here")
    assert type(caught.value) is raised


class Broken:
    """In the place of Flight's client, writer and reader: the stream fails with this text once a batch is written."""

    def __init__(self, text: str) -> None:
        self.text, self.has_written = text, threading.Event()

    def do_exchange(self, _: flight.FlightDescriptor) -> tuple[Broken, Broken]:
        return self, self

    def begin(self, _: pa.Schema) -> None:
        pass

    def write_batch(self, _: pa.RecordBatch) -> None:
        self.has_written.set()

    def close(self) -> None:
        pass

    def read_chunk(self) -> None:
        assert self.has_written.wait(BOUND_S)
        raise flight.FlightUnavailableError(f"Flight returned unavailable error, with message: {self.text}")


@pytest.mark.parametrize(
    ("text", "error_class"),
    [("Socket closed", Lost), ("failed to connect to all addresses; last error: Socket closed", NotSent)],
)
def test_a_batch_is_notsent_and_not_lost_if_no_connection_carried_it(
    text: str, error_class: type[TimeballError]
) -> None:
    """After a GOAWAY, gRPC opens a stream that was not processed on another connection: no broker has its batches."""
    exchange = exchange_of(Broken(text), "grpc://here")
    assert type(exchange.submit(batch()).exception(BOUND_S)) is error_class


class Disconnected(Broken):
    """In the place of Flight's client: this method of the writer raises OSError, as after a broken connection."""

    def __init__(self, method: str) -> None:
        super().__init__("Socket closed")
        self.method = method

    def begin(self, _: pa.Schema) -> None:
        self._break("begin")

    def write_batch(self, _: pa.RecordBatch) -> None:
        self.has_written.set()
        self._break("write_batch")

    def _break(self, method: str) -> None:
        if method == self.method:
            raise OSError("Could not write record batch to stream (server disconnect?)")


def test_a_stream_that_breaks_while_it_opens_raises_notsent() -> None:
    with pytest.raises(NotSent, match="server disconnect"):
        exchange_of(Disconnected("begin"), "grpc://here")


def test_a_batch_whose_write_fails_is_notsent() -> None:
    exchange = exchange_of(Disconnected("write_batch"), "grpc://here")
    assert type(exchange.submit(batch()).exception(BOUND_S)) is NotSent


# ---- a broker that hangs -----------------------------------------------------------------------------------


def unanswered_exchange(node: Unanswering, limit_s: float) -> SendExchange:
    """A send stream at a node that answers no batch, with this time limit for an answer."""
    client = flight.FlightClient(f"grpc://127.0.0.1:{node.port}")
    return SendExchange(client, SCHEMA, "grpc://here", open_s=BOUND_S, limit_s=limit_s)


def test_batches_without_an_answer_are_lost_after_the_time_limit_of_the_oldest() -> None:
    with unanswering_node() as node:
        exchange = unanswered_exchange(node, 0.1)
        answers = [exchange.submit(batch()) for _ in range(3)]
        for answer in answers:
            with pytest.raises(Lost, match=r"within 0\.1 s; the message may or may not have been accepted"):
                answer.result(BOUND_S)
        assert answers[0].waited_ns >= 0.1 * 1e9 and [answer.waited_ns for answer in answers[1:]] == [0, 0]
        eventually(lambda: not exchange.alive, "the stream ends")
        with pytest.raises(NotSent):
            exchange.submit(batch())
        exchange.close()


def test_a_blocked_write_ends_with_the_time_limit_of_the_oldest_batch() -> None:
    large = pa.RecordBatch.from_arrays([pa.array(["t"] * 4), pa.array([b"x" * 1_000_000] * 4)], schema=SCHEMA)
    with unanswering_node() as node:
        exchange, answers = unanswered_exchange(node, 0.3), list[Answer]()
        with pytest.raises(NotSent):  # raised by the first `submit` after the end of the stream
            while True:
                answers.append(exchange.submit(large))
        assert all(type(answer.exception(BOUND_S)) is Lost for answer in answers)
        exchange.close()


def test_an_idle_stream_has_no_time_limit(node: RunningNode) -> None:
    client = flight.FlightClient(node.endpoint)
    exchange = SendExchange(client, SCHEMA, node.endpoint, open_s=BOUND_S, limit_s=BOUND_S)
    exchange.submit(batch()).result(BOUND_S)
    exchange.limit_s = 0.01
    time.sleep(0.1)
    assert exchange.alive
    exchange.limit_s = BOUND_S
    assert exchange.submit(batch()).result(BOUND_S).rows == 1
    exchange.close()


def test_a_stream_that_does_not_open_in_time_raises_notsent() -> None:
    with stopped_node() as address, pytest.raises(NotSent, match=r"opened no stream within 0\.05 s"):
        client = flight.FlightClient(f"grpc://{address}")
        SendExchange(client, SCHEMA, f"grpc://{address}", open_s=0.05, limit_s=BOUND_S)


def end_streams_that_break(*words: str) -> subprocess.CompletedProcess[str]:
    """Run broken_streams.py with these arguments."""
    return subprocess.run(
        [sys.executable, broken_streams.__file__, *words],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False,
    )  # fmt: skip


def test_a_process_survives_the_end_of_streams_that_break_at_that_moment() -> None:
    process = end_streams_that_break()
    assert (process.returncode, process.stdout) == (0, "done\n")


def test_a_client_that_ends_streams_by_grpcs_own_means_is_noticed() -> None:
    assert end_streams_that_break("half-close").returncode == -signal.SIGABRT


# ---- records of a source -----------------------------------------------------------------------------------


def records(topic: str, *bodies: bytes) -> pa.RecordBatch:
    """A batch with a message for each body."""
    return pa.record_batch([pa.array([topic] * len(bodies)), pa.array(bodies, pa.binary())], SCHEMA)


def stored_bodies(columns: Timeball, topic: str) -> list[bytes]:
    """The bodies of all visible messages of a topic, sorted."""
    tables = [columns.read_queue(topic, queue, 0, 100).read_all() for queue in columns.queues(topic)]
    return sorted(body for table in tables for body in table.column("body").to_pylist())


@pytest.fixture
def calls(node: RunningNode) -> Iterator[Calls]:
    """A connection to the node over Flight."""
    connection = Calls(node.endpoint, 30_000)
    yield connection
    connection.close()


def test_a_source_continues_from_the_positions_at_the_broker(calls: Calls, columns: Timeball) -> None:
    source = Source(calls, "goes.on")
    assert source.positions() == {}
    source.send(records("goes-on", b"a", b"b"), {0: 7, 1: 0}, {0: 8, 1: 1})
    source.send(records("goes-on"), {0: 8}, {0: 20})  # records of which none became a message
    source.close()
    later = Source(calls, "goes.on")
    assert later.positions() == {0: 20, 1: 1}
    with pytest.raises(Conflict, match="stands at 20 in partition 0"):
        later.send(records("goes-on", b"b", b"c"), {0: 8}, {0: 9})
    later.send(records("goes-on", b"c"), {0: 20}, {0: 21})
    later.close()
    assert stored_bodies(columns, "goes-on") == [b"a", b"b", b"c"]


def test_a_refused_batch_does_not_move_the_positions_of_its_source(calls: Calls) -> None:
    source = Source(calls, "refused")
    with pytest.raises(InvalidMessage, match="topic"):
        source.send(records("no topic!", b"a"), {0: 0}, {0: 1})
    source.send(records("refused", b"a"), {0: 0}, {0: 1})
    source.close()
    assert source.positions() == {0: 1}


@pytest.mark.parametrize(
    ("begin", "end", "error_text"),
    [
        ({0: 1}, {0: 0}, "an end behind it"),
        ({0: 1}, {1: 1}, "each partition has a begin"),
        ({-1: 1}, {-1: 2}, "metadata of a batch"),
    ],
)
def test_malformed_positions_of_a_batch_are_refused(
    calls: Calls, begin: dict[int, int], end: dict[int, int], error_text: str
) -> None:
    source = Source(calls, "steps")
    with pytest.raises(RequestError, match=error_text):
        source.send(records("steps", b"a"), begin, end)
    source.close()


def test_a_batch_of_a_source_without_positions_is_refused(calls: Calls) -> None:
    exchange = SendExchange(
        calls.flight, SCHEMA, calls.endpoint, wire.SOURCE_PATH, open_s=BOUND_S, limit_s=BOUND_S
    )
    with pytest.raises(RequestError, match="metadata of a batch"):
        exchange.submit(records("steps", b"a")).result(BOUND_S)
    exchange.close()


def test_a_source_repeats_a_batch_whose_answer_was_lost_and_it_is_stored_once(data: Path) -> None:
    with running_node(data) as node, cutting_proxy(node.endpoint) as proxy:
        calls = Calls(proxy.endpoint, 30_000)
        source = Source(calls, "lost")
        source.send(records("lost", b"a"), {0: 0}, {0: 1})
        proxy.hold()
        sending = threading.Thread(target=source.send, args=(records("lost", b"b"), {0: 1}, {0: 2}))
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
            assert stored_bodies(columns, "lost") == [b"a", b"b"]
