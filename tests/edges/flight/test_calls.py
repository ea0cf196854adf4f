"""One call of Flight: the caller, then a slot, then the message, and a single status at the end."""

from __future__ import annotations

from base64 import b64decode

from tests.edges.http2.raw_client import RawClient, fields, message
from tests.node_fixture import RunningNode, eventually

from timeball.edges.flight.exchange import framed, framed_in_two
from timeball.edges.flight.server import SERVICE, FlightEdge
from timeball.edges.http2 import frames
from timeball.edges.http2.frames import GrpcStatus


def edge_of(node: RunningNode) -> FlightEdge:
    """Return the node's Flight edge."""
    assert node.node.edges is not None
    return node.node.edges.flight


def trailers_of(client: RawClient, number: int) -> dict[str, str]:
    """Return the trailers with which a call ends."""
    for kind, flags, stream, payload in client.frames():
        if kind == frames.HEADERS:
            result = dict(client._decoder.decode(payload))
            if stream == number and flags & frames.END_STREAM:
                return result
    raise AssertionError("the connection has ended")


def test_a_call_holds_its_slot_from_its_headers_to_its_end(node: RunningNode) -> None:
    edge = edge_of(node)
    with RawClient(node, port=node.node.port) as client:
        number = client.headers(headers=fields(f"{SERVICE}DoAction"))
        eventually(lambda: edge._calls.taken == 1, "the headers have taken a slot")
        client.data(number, message(b"\x0a\x06status"))
        assert trailers_of(client, number)["grpc-status"] == "0"
        eventually(lambda: not edge._calls.taken, "the answered call has freed its slot")
        reset = client.headers(headers=fields(f"{SERVICE}DoAction"))
        eventually(lambda: edge._calls.taken == 1, "the second call has taken a slot")
        client.send(frames.rst_stream(reset, frames.Fault.NO_ERROR))
        eventually(lambda: not edge._calls.taken, "the reset has freed it")


def test_a_refusal_has_status_unknown_and_timeballs_code_and_text(node: RunningNode) -> None:
    with RawClient(node, port=node.node.port) as client:
        number = client.headers(headers=fields(f"{SERVICE}DoAction"))
        client.data(number, message(b"\x0a\x04nope"))
        result = trailers_of(client, number)
    assert result["grpc-status"] == str(int(GrpcStatus.UNKNOWN))
    assert b64decode(result["grpc-status-details-bin"]) == b"not_found"
    assert "no action 'nope'" in result["grpc-message"]


def test_a_full_limit_refuses_before_a_message_is_received(node: RunningNode) -> None:
    calls = edge_of(node)._calls
    limit, calls.limit = calls.limit, 0
    try:
        with RawClient(node, port=node.node.port) as client:
            result = trailers_of(client, client.headers(headers=fields(f"{SERVICE}DoGet")))
        assert b64decode(result["grpc-status-details-bin"]) == b"over_limit"
    finally:
        calls.limit = limit


def test_framed_in_two_has_the_bytes_of_framed() -> None:
    parts = b"a", memoryview(b"bc"), b"", b"large"
    before, last = framed_in_two(*parts)
    assert before + last == framed(*parts) == message(b"abclarge")
