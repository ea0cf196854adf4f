"""Send streams of pyarrow's client: the order of answers, atomic refusals, broken clients, and a stop of the broker."""

import contextlib
import itertools
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from tests.edges.arrow_types import ROWS, TYPES, column
from tests.node_fixture import BOUND_S, RunningNode, eventually, running_node

from timeball.edges.flight import exchange
from timeball.edges.flight.exchange import BATCHES_MAX
from timeball.model.wire import END_OF_STREAM

SCHEMA = pa.schema([("topic", pa.string()), ("body", pa.binary())])
EXCHANGE = flight.FlightDescriptor.for_path(b"send")


def batch(body: bytes = b"x", rows: int = 1, topic: str = "exchange") -> pa.RecordBatch:
    """Return a batch with `rows` equal messages."""
    return pa.RecordBatch.from_arrays([pa.array([topic] * rows), pa.array([body] * rows)], schema=SCHEMA)


def open_stream(wire: flight.FlightClient, schema: pa.Schema = SCHEMA) -> tuple[Any, Any]:
    """Open a send stream, and send its schema."""
    writer, reader = wire.do_exchange(EXCHANGE, flight.FlightCallOptions(timeout=BOUND_S))
    writer.begin(schema)
    return writer, reader


def answers(reader: Any) -> Iterator[dict[str, Any]]:
    """Yield the answers of a send stream."""
    for chunk in reader:
        yield json.loads(chunk.app_metadata.to_pybytes())


@pytest.mark.parametrize("messages_per_turn", [1, 3, exchange.MESSAGES_PER_TURN])
@pytest.mark.parametrize(
    "inline_bytes", [0, exchange.INLINE_DECODE_BYTES_MAX], ids=["by a thread", "by the loop"]
)
def test_each_batch_has_one_answer_in_order(
    wire: flight.FlightClient, monkeypatch: pytest.MonkeyPatch, messages_per_turn: int, inline_bytes: int
) -> None:
    monkeypatch.setattr(exchange, "MESSAGES_PER_TURN", messages_per_turn)
    monkeypatch.setattr(exchange, "INLINE_DECODE_BYTES_MAX", inline_bytes)
    writer, reader = open_stream(wire)
    sizes = [1, 5, 2, 1, 100]
    for rows in sizes:
        writer.write_batch(batch(rows=rows))
    writer.done_writing()
    received = list(answers(reader))
    assert [answer["rows"] for answer in received] == sizes
    assert all(answer.keys() == {"first_seq", "rows", "store_ms"} for answer in received)
    for before, after in itertools.pairwise(received):
        assert after["first_seq"] >= before["first_seq"] + before["rows"]


def test_a_batch_with_an_invalid_row_is_refused_whole_and_the_stream_continues(
    node: RunningNode, wire: flight.FlightClient
) -> None:
    writer, reader = open_stream(wire)
    half_bad = pa.RecordBatch.from_arrays(
        [pa.array(["exchange", "a/b"]), pa.array([b"never", b"x"])], schema=SCHEMA
    )
    for sent in (batch(b"before"), half_bad, batch(b"").slice(1), batch(b"after")):
        writer.write_batch(sent)
    writer.done_writing()
    before, refused, empty, after = answers(reader)
    assert (refused["error"], empty["error"]) == ("invalid_name", "invalid_message")
    assert "a/b" in refused["text"] or "topic" in refused["text"]
    rows = [
        row
        for part in node.broker.read_log(before["first_seq"], after["first_seq"] + 1)
        for row in part.to_pylist()
    ]
    bodies = [row["body"] for row in rows]
    assert b"before" in bodies and b"after" in bodies and b"never" not in bodies


def test_an_acknowledged_batch_is_durable(node: RunningNode, wire: flight.FlightClient) -> None:
    writer, reader = open_stream(wire)
    writer.write_batch(batch(rows=3))
    ack = json.loads(reader.read_chunk().app_metadata.to_pybytes())
    assert node.broker.status()["log"]["durable_seq"] >= ack["first_seq"] + 3  # type: ignore[index]
    writer.done_writing()
    assert list(answers(reader)) == []


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        (pa.schema([*SCHEMA, pa.field("delay", pa.int64())]), "unknown column 'delay'"),
        (pa.schema([SCHEMA.field("body")]), "'topic' is missing"),
        (pa.schema([("topic", pa.int8()), ("body", pa.binary())]), "column 'topic' is int8"),
    ],
)
def test_a_wrong_schema_is_refused_by_column(wire: flight.FlightClient, schema: pa.Schema, text: str) -> None:
    _, reader = open_stream(wire, schema)
    with pytest.raises(flight.FlightServerError, match=text) as caught:
        reader.read_chunk()
    assert caught.value.extra_info == b"invalid_message"


@pytest.mark.parametrize("path", ["send", "source", "release"])
@pytest.mark.parametrize("name", ["string_view", "binary_view", "list_view<item: string>"])
def test_view_columns_are_refused_by_their_schema(wire: flight.FlightClient, path: str, name: str) -> None:
    rows = pa.RecordBatch.from_arrays(
        [pa.array(["t"] * ROWS), pa.array([b"x"] * ROWS), column(TYPES[name])], names=["topic", "body", "tag"]
    )
    options = flight.FlightCallOptions(timeout=BOUND_S)
    writer, reader = wire.do_exchange(flight.FlightDescriptor.for_path(path.encode()), options)
    writer.begin(rows.schema)
    with contextlib.suppress(pa.ArrowException):
        writer.write_batch(rows)  # fails if the broker has ended the stream already
    with pytest.raises(flight.FlightServerError, match=r"column 'tag' is .*_view; cast it to") as caught:
        reader.read_chunk()
    assert caught.value.extra_info == b"invalid_message"


def test_another_path_is_not_found(wire: flight.FlightClient) -> None:
    for descriptor in (
        flight.FlightDescriptor.for_path(b"take"),
        flight.FlightDescriptor.for_command(b"send"),
    ):
        writer, reader = wire.do_exchange(descriptor)
        with pytest.raises(flight.FlightServerError, match="no such exchange"):
            reader.read_chunk()
        with pytest.raises(flight.FlightServerError):
            writer.close()


def test_more_batches_than_the_window_holds_are_all_answered(wire: flight.FlightClient) -> None:
    count = BATCHES_MAX + 500
    writer, reader = open_stream(wire)

    def write() -> None:
        for _ in range(count):
            writer.write_batch(batch())
        writer.done_writing()

    writing = threading.Thread(target=write)
    writing.start()
    assert sum(answer["rows"] for answer in answers(reader)) == count
    writing.join(BOUND_S)


def test_disconnected_clients_occupy_no_slots_and_no_bytes(node: RunningNode) -> None:
    edge = node.node.edges.flight
    assert edge is not None
    idle = edge._send_streams.taken
    for number in range(20):
        with flight.FlightClient(node.endpoint) as client:
            writer, reader = open_stream(client)
            for _ in range(50):
                writer.write_batch(batch(b"left"))
            if number % 2:
                reader.cancel()
            else:
                reader.read_chunk()
    eventually(lambda: edge._send_streams.taken == idle, "all slots are free again")
    eventually(lambda: not edge._uploads, "all streams are removed")
    eventually(lambda: edge._budget.held_bytes == 0, "all their batches are answered")
    with flight.FlightClient(node.endpoint) as client:  # other clients can send
        writer, reader = open_stream(client)
        writer.write_batch(batch())
        assert "first_seq" in json.loads(reader.read_chunk().app_metadata.to_pybytes())
        reader.cancel()


def test_bytes_that_are_not_grpc_do_not_disturb_other_clients(
    node: RunningNode, wire: flight.FlightClient
) -> None:
    for junk in (
        b"\x00" * 1_000,
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 500,
    ):
        with socket.create_connection(("127.0.0.1", node.settings.port), timeout=BOUND_S) as stranger:
            stranger.sendall(junk)
    writer, reader = open_stream(wire)
    writer.write_batch(batch())
    assert "first_seq" in json.loads(reader.read_chunk().app_metadata.to_pybytes())
    writer.done_writing()
    assert list(answers(reader)) == []


def test_a_stop_ends_open_streams_with_its_reason_after_their_answers(tmp_path: Path) -> None:
    with running_node(tmp_path / "data") as node, flight.FlightClient(node.endpoint) as client:
        writer, reader = open_stream(client)
        writer.write_batch(batch())
        acked = json.loads(reader.read_chunk().app_metadata.to_pybytes())
        ending = threading.Thread(target=node.stop)
        ending.start()  # the client keeps its stream open
        with pytest.raises(flight.FlightServerError, match="the broker is stopping") as refused:
            reader.read_chunk()
        assert refused.value.extra_info == b"unavailable"
        ending.join(BOUND_S)
        assert not ending.is_alive()
        node.start()
        (stored,) = node.broker.read_log(acked["first_seq"], acked["first_seq"] + 1)
        assert stored.num_rows == 1


def test_the_end_of_stream_message_ends_a_stream_after_its_answers(wire: flight.FlightClient) -> None:
    """The client's side of the stream stays open. The batches are answered, then the stream ends without an error."""
    writer, reader = open_stream(wire)
    for rows in (1, 2):
        writer.write_batch(batch(rows=rows))
    writer.write_metadata(END_OF_STREAM)
    assert [answer["rows"] for answer in answers(reader)] == [1, 2]
    writer.close()


def test_a_batch_after_the_end_of_its_stream_is_not_accepted(wire: flight.FlightClient) -> None:
    writer, reader = open_stream(wire)
    writer.write_batch(batch(topic="ended"))
    writer.write_metadata(END_OF_STREAM)
    with contextlib.suppress(pa.ArrowException, flight.FlightError):
        writer.write_batch(batch(rows=5, topic="ended"))
    rows = []
    with contextlib.suppress(pa.ArrowException, flight.FlightError):
        rows += [answer["rows"] for answer in answers(reader)]
    assert rows == [1]
