"""What carries the calls: its bounds, where a hostile client meets them first."""

from __future__ import annotations

import socket
from pathlib import Path

import grpc
import pytest
from tests.node_fixture import BOUND_S, RunningNode, running_node
from tests.protocols.grpc.wire import Wire, consumer_settings, d, s

from timeball.errors import SetupError
from timeball.protocols.grpc.server import REQUEST_BYTES_MAX
from timeball.protocols.http2.connection import HEADERS_BYTES_MAX


def failed(wire: Wire, request: object, name: str = "SendMessage") -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as error:
        wire.ask(name, request)
    code: grpc.StatusCode = error.value.code()
    return code


def still_answers(node: RunningNode) -> None:
    with Wire.to(node, "somebody-else") as wire:
        wire.telemetry(consumer_settings("g"))
        wire.ask_ok("Heartbeat", s.HeartbeatRequest(group=d.Resource(name="g")))


def test_a_request_has_a_bound(node: RunningNode, wire: Wire) -> None:
    large = s.SendMessageRequest(messages=[d.Message(body=bytes(REQUEST_BYTES_MAX + 1))])
    assert failed(wire, large) == grpc.StatusCode.RESOURCE_EXHAUSTED
    still_answers(node)


def test_headers_have_a_bound(node: RunningNode) -> None:
    with Wire.to(node, x_mq_more="x" * 2 * HEADERS_BYTES_MAX) as wire:
        assert failed(wire, s.HeartbeatRequest(), "Heartbeat") == grpc.StatusCode.RESOURCE_EXHAUSTED
    still_answers(node)


def test_what_is_no_request_harms_nobody(node: RunningNode) -> None:
    channel = grpc.insecure_channel(f"127.0.0.1:{node.node.grpc_port}")
    for path in (
        "/apache.rocketmq.v2.MessagingService/Heartbeat",
        "/apache.rocketmq.v2.MessagingService/Nothing",
    ):
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary(path)(b"\xff" * 64, timeout=BOUND_S)
        assert error.value.code() in (
            grpc.StatusCode.INTERNAL, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.UNKNOWN,
        )  # fmt: skip
    channel.close()
    still_answers(node)


def test_what_does_not_speak_http2_harms_nobody(node: RunningNode) -> None:
    with socket.create_connection(("127.0.0.1", node.node.grpc_port), timeout=BOUND_S) as far:
        far.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(1_000))
        while far.recv(4_096):
            pass
    still_answers(node)


def test_a_port_that_another_has_is_an_error(node: RunningNode, tmp_path: Path) -> None:
    with (
        pytest.raises(SetupError, match="--grpc-port"),
        running_node(tmp_path / "other", grpc_port=node.node.grpc_port),
    ):
        pass
