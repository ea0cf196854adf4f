"""What carries the calls: its bounds, where a hostile client meets them first."""

from __future__ import annotations

import socket
from pathlib import Path

import grpc
import pytest
from tests.certificates import certificate
from tests.edges.grpc.wire import Wire, consumer_settings, d, s
from tests.node_fixture import BOUND_S, RunningNode, running_node

from timeball.edges.grpc.edge import REQUEST_BYTES_MAX
from timeball.edges.http2.connection import HEADERS_BYTES_MAX
from timeball.model.errors import SetupError


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


def heartbeat(channel: grpc.Channel) -> int:
    """The code of a call that needs no settings before it."""
    call = channel.unary_unary(
        "/apache.rocketmq.v2.MessagingService/Heartbeat",
        s.HeartbeatRequest.SerializeToString,
        s.HeartbeatResponse.FromString,
    )
    response = call(s.HeartbeatRequest(), timeout=BOUND_S, metadata=[("x-mq-client-id", "c")])
    return int(response.status.code)


def test_tls_and_plain_text_come_by_one_port(tmp_path: Path) -> None:
    """Java's and Go's clients dial TLS, Python's and Node's do not."""
    issued = certificate(tmp_path / "tls")
    roots = grpc.ssl_channel_credentials(Path(issued.roots).read_bytes())
    with running_node(tmp_path / "data", **issued.settings) as node:
        target = f"127.0.0.1:{node.node.grpc_port}"
        silent = socket.create_connection(("127.0.0.1", node.node.grpc_port), timeout=BOUND_S)
        for _ in range(2):
            with grpc.insecure_channel(target) as plain, grpc.secure_channel(target, roots) as secure:
                assert heartbeat(plain) == heartbeat(secure) == d.Code.UNRECOGNIZED_CLIENT_TYPE
        # Who says nothing holds nobody up, and a handshake that is none harms nobody.
        with socket.create_connection(("127.0.0.1", node.node.grpc_port), timeout=BOUND_S) as nonsense:
            nonsense.sendall(b"\x16\x03\x01\x00\x05hello")
            while nonsense.recv(1024):
                pass
        with grpc.secure_channel(target, roots) as secure:
            assert heartbeat(secure) == d.Code.UNRECOGNIZED_CLIENT_TYPE
    assert silent.recv(1) == b""
    silent.close()


def test_a_port_that_is_taken_is_told_with_a_certificate_too(tmp_path: Path) -> None:
    issued = certificate(tmp_path / "tls")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with (
            pytest.raises(SetupError, match="--grpc-port"),
            running_node(tmp_path / "data", grpc_port=taken.getsockname()[1], **issued.settings),
        ):
            pass
