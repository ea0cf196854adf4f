"""DoGet over raw HTTP/2: the schema before a wait, and large answers in parts, as fast as the client reads."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from tests.edges.http2.raw_client import RawClient, fields, message
from tests.node_fixture import BOUND_S, RunningNode, eventually

from timeball.edges.flight import codec, server
from timeball.edges.flight.server import SERVICE
from timeball.edges.http2 import frames
from timeball.edges.shared import arrow_ipc as ipc


def ticket(**wanted: object) -> bytes:
    """Return the request of a DoGet call with these fields, as bytes."""
    return bytes(flight.Ticket(json.dumps(wanted).encode()).serialize())


def answers(client: RawClient, number: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the header and the body of each message of a call, until its end."""
    buffered = b""
    for kind, flags, stream, payload in client.frames():
        if kind == frames.HEADERS and stream == number and flags & frames.END_STREAM:
            return
        if kind == frames.DATA and stream == number:
            buffered += payload
            client.send(frames.window_update(0, len(payload)) + frames.window_update(number, len(payload)))
        while len(buffered) >= 5 and len(buffered) >= (end := 5 + int.from_bytes(buffered[1:5], "big")):
            message = codec.parse_data([buffered[5:end]])
            buffered = buffered[end:]
            yield bytes(message.header), b"".join(message.body)


@pytest.fixture
def large(node: RunningNode) -> tuple[int, int]:
    """Send rows with more bytes than one part of an answer.

    Return their first sequence number, and the one after them.
    """
    sent = pa.RecordBatch.from_pydict(
        {"topic": ["large"] * 30, "body": [bytes([at]) * 100_000 for at in range(30)]}
    )
    accepted = [node.run(node.broker.send(sent)) for _ in range(4)]
    return accepted[0].first_seq, accepted[-1].first_seq + 30


def test_the_schema_is_sent_before_the_rows_of_a_waiting_read(node: RunningNode) -> None:
    """A client of pyarrow can cancel a read only after it has the schema."""
    node.run(node.broker.create_topic("waited-for", 1))
    wanted = ticket(read="pull", topic="waited-for", offsets={"0": 0}, rows=1, wait_ms=60_000)
    with RawClient(node, port=node.node.port) as client:
        number = client.headers(headers=fields(f"{SERVICE}DoGet"))
        client.data(number, message(wanted))
        header, body = next(answers(client, number))
        assert ipc.read_schema(memoryview(header)).names[0] == "seq" and not body


def test_a_large_answer_is_sent_in_parts_and_in_order(node: RunningNode, large: tuple[int, int]) -> None:
    with flight.FlightClient(node.endpoint) as client:
        wanted = {"read": "log", "from_seq": large[0], "to_seq": large[1]}
        chunks = [chunk.data for chunk in client.do_get(flight.Ticket(json.dumps(wanted).encode()))]
    assert len(chunks) > 2 and all(chunk.nbytes <= 2 * server.ANSWER_PART_BYTES for chunk in chunks)
    rows = pa.Table.from_batches(chunks).filter(pa.compute.field("topic") == "large")
    assert rows.column("body").to_pylist() == 4 * [bytes([at]) * 100_000 for at in range(30)]


def test_bytes_that_a_client_has_not_read_are_counted_until_it_disconnects(
    node: RunningNode, large: tuple[int, int]
) -> None:
    edge = node.node.edges.flight
    assert edge is not None
    counted = edge._reads.answers
    with RawClient(node, greets=False, port=node.node.port) as client:
        client.send(frames.PREFACE + frames.settings({frames.INITIAL_WINDOW: 1_000}))
        number = client.headers(headers=fields(f"{SERVICE}DoGet"))
        client.data(number, message(ticket(read="log", from_seq=large[0], to_seq=large[1])))
        eventually(lambda: counted.held_bytes > 1_000_000, "the unread rows are counted")
    eventually(lambda: not counted.held_bytes, "the disconnect has freed them")


def test_a_paused_reader_occupies_no_thread_and_gets_all_rows(
    node: RunningNode, large: tuple[int, int]
) -> None:
    """While more readers than there are threads wait in the middle of the log, another one reads all rows."""
    wanted = flight.Ticket(
        json.dumps({"read": "log", "from_seq": large[0], "to_seq": large[1], "coalesce_rows": 1}).encode()
    )
    paused = []
    for _ in range(server.LOG_THREADS + 2):
        client = flight.FlightClient(node.endpoint)
        reader = client.do_get(wanted, flight.FlightCallOptions(timeout=BOUND_S))
        reader.read_chunk()
        paused.append((client, reader))
    rows: list[int] = []
    with flight.FlightClient(node.endpoint) as other:
        reading = threading.Thread(target=lambda: rows.append(other.do_get(wanted).read_all().num_rows))
        reading.start()
        reading.join(BOUND_S)
    assert rows == [large[1] - large[0]]
    for client, reader in paused:
        assert 1 + sum(chunk.data.num_rows > 0 for chunk in reader) >= 2
        client.close()
