"""Slots for send streams: which streams get a slot, and which lose it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pyarrow as pa
import pyarrow.flight as flight
import pytest
from tests.accounts import access_file
from tests.bounds import BOUND_S
from tests.edges.http2.raw_client import RawClient, fields, message
from tests.node_fixture import RunningNode, eventually, running_node

from timeball.edges.flight import exchange
from timeball.edges.flight.exchange import Upload
from timeball.edges.flight.server import SERVICE, FlightEdge

ACCOUNTS = """
[[accounts]]
access_key = "shop"
secret_key = "shop secret 1"
topics = { "orders" = "PUB" }

[[accounts]]
access_key = "worker"
secret_key = "worker secret 2"
groups = { "workers" = "SUB" }

[[accounts]]
access_key = "reader"
secret_key = "reader secret 3"
topics = { "orders" = "SUB" }

[[accounts]]
access_key = "nothing"
secret_key = "nothing secret 4"
"""
SECRETS = {"shop": 1, "worker": 2, "reader": 3, "nothing": 4}
ROWS = pa.record_batch({"topic": ["orders"], "body": [b"x"]})


@pytest.fixture
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    folder = tmp_path_factory.mktemp("guarded")
    path = access_file(folder, ACCOUNTS)
    with running_node(folder / "data", access_file=str(path), auto_create_topics=True) as running:
        yield running


def edge_of(node: RunningNode) -> FlightEdge:
    """Return the node's Flight edge."""
    assert node.node.edges is not None
    return node.node.edges.flight


def bearer(account: str) -> str:
    """Return the header `authorization` of an account."""
    return f"Bearer {account}:{account} secret {SECRETS[account]}"


def open_stream(wire: flight.FlightClient, account: str) -> tuple[Any, Any]:
    """Open a send stream of an account, and send its schema."""
    options = flight.FlightCallOptions(
        timeout=BOUND_S, headers=[(b"authorization", bearer(account).encode())]
    )
    writer, reader = wire.do_exchange(flight.FlightDescriptor.for_path(b"send"), options)
    writer.begin(ROWS.schema)
    return writer, reader


def send_batch(writer: Any, reader: Any) -> dict[str, Any]:
    """Send a batch, and return its answer."""
    writer.write_batch(ROWS)
    answer: dict[str, Any] = json.loads(reader.read_chunk().app_metadata.to_pybytes())
    return answer


@pytest.mark.parametrize("account", ["reader", "nothing"])
def test_an_account_without_send_permission_gets_no_slot(node: RunningNode, account: str) -> None:
    with RawClient(node, port=node.node.port) as client:
        number = client.headers(headers=fields(f"{SERVICE}DoExchange", authorization=bearer(account)))
        assert "may not send to any topic" in client.status(number)[1], "refused before it sends a message"
    assert not edge_of(node)._send_streams.taken


def test_an_account_with_some_send_permission_is_checked_for_each_topic(node: RunningNode) -> None:
    with flight.FlightClient(node.endpoint) as wire:
        assert send_batch(*open_stream(wire, "shop"))["rows"] == 1
        # A consumer may send to the retry topics of its groups, so it gets a slot.
        assert send_batch(*open_stream(wire, "worker"))["error"] == "forbidden"


def test_one_account_gets_at_most_half_of_the_slots(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge_of(node)._send_streams, "limit", 6)
    with ExitStack() as clients:
        wires = [clients.enter_context(flight.FlightClient(node.endpoint)) for _ in range(4)]
        streams = [open_stream(wire, "shop") for wire in wires[:3]]
        for stream in streams:
            assert send_batch(*stream)["rows"] == 1
        # The refusal may reach the client before or after it has sent its schema.
        with pytest.raises(flight.FlightServerError, match="its share of 6") as caught:
            open_stream(wires[3], "shop")[1].read_chunk()
        assert caught.value.extra_info == b"over_limit"
        assert send_batch(*streams[0])["rows"] == 1, "open streams go on"


def test_an_idle_stream_is_ended_when_another_stream_needs_its_slot(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge_of(node)._send_streams, "limit", 2)
    monkeypatch.setattr(exchange, "IDLE_S", 0.0)
    with ExitStack() as clients:
        wires = [clients.enter_context(flight.FlightClient(node.endpoint)) for _ in range(2)]
        streams = [open_stream(wires[0], "shop")]
        assert send_batch(*streams[0])["rows"] == 1
        for at in range(1, 6):  # each new stream ends the one before it
            streams.append(open_stream(wires[at % 2], "shop"))
            assert send_batch(*streams[-1])["rows"] == 1
            with pytest.raises(flight.FlightServerError) as caught:
                streams[-2][1].read_chunk()
            assert caught.value.extra_info == b"unavailable"
        streams[-1][0].close()  # otherwise the call would last until its timeout
    eventually(lambda: not edge_of(node)._send_streams.taken, "all slots are free")


def test_a_stream_without_a_message_loses_its_slot(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Upload, "READ_S", 0.3)
    with RawClient(node, port=node.node.port) as client:
        number = client.headers(headers=fields(f"{SERVICE}DoExchange", authorization=bearer("shop")))
        assert "has not come whole within" in client.status(number)[1]
    eventually(lambda: not edge_of(node)._send_streams.taken, "the slot is free")


@pytest.mark.parametrize("begun_bytes", [1, 1_000])
def test_a_message_that_is_not_complete_in_time_ends_its_stream(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch, begun_bytes: int
) -> None:
    edge = edge_of(node)
    with RawClient(node, port=node.node.port) as client:
        number = client.headers(headers=fields(f"{SERVICE}DoExchange", authorization=bearer("shop")))
        client.data(number, message(bytes(100_000))[:begun_bytes], ends=False)
        if begun_bytes > 5:
            eventually(lambda: edge.call_limits.received.held_bytes == 100_000, "the memory is reserved")
        monkeypatch.setattr(Upload, "READ_S", 0.3)
        assert "has not come whole within" in client.status(number)[1]
    eventually(
        lambda: not (edge._send_streams.taken or edge.call_limits.received.held_bytes),
        "slot and memory are free",
    )
