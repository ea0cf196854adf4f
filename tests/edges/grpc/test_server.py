"""The edge's server: bounds of requests and headers, other protocols on its port, TLS."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import grpc
import pytest
from tests.certificates import certificate
from tests.edges.grpc.wire import Wire, consumer_settings, definition, receive_request, service
from tests.node_fixture import BOUND_S, RunningNode, running_node

from timeball.broker.consuming.requests import Received, ReceiveRequest
from timeball.edges.grpc.edge import REQUEST_BYTES_MAX
from timeball.edges.http2.connection import HEADERS_BYTES_MAX
from timeball.model.errors import SetupError


def grpc_error(wire: Wire, request: object, name: str = "SendMessage") -> grpc.StatusCode:
    """Make a call that must fail, and return the status code of gRPC."""
    with pytest.raises(grpc.RpcError) as error:
        wire.ask(name, request)
    code: grpc.StatusCode = error.value.code()
    return code


def check_node_answers(node: RunningNode) -> None:
    """Assert that another client gets its answers."""
    with Wire.to(node, "somebody-else") as wire:
        wire.telemetry(consumer_settings("g"))
        wire.ask_ok("Heartbeat", service.HeartbeatRequest(group=definition.Resource(name="g")))


def test_a_too_large_request_is_refused(node: RunningNode, wire: Wire) -> None:
    large = service.SendMessageRequest(messages=[definition.Message(body=bytes(REQUEST_BYTES_MAX + 1))])
    assert grpc_error(wire, large) == grpc.StatusCode.RESOURCE_EXHAUSTED
    check_node_answers(node)


def test_too_large_headers_are_refused(node: RunningNode) -> None:
    with Wire.to(node, x_mq_more="x" * 2 * HEADERS_BYTES_MAX) as wire:
        assert grpc_error(wire, service.HeartbeatRequest(), "Heartbeat") == grpc.StatusCode.RESOURCE_EXHAUSTED
    check_node_answers(node)


def test_invalid_requests_do_not_affect_other_clients(node: RunningNode) -> None:
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
    check_node_answers(node)


def test_a_client_of_another_protocol_is_disconnected(node: RunningNode) -> None:
    with socket.create_connection(("127.0.0.1", node.node.grpc_port), timeout=BOUND_S) as client_socket:
        client_socket.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(1_000))
        while client_socket.recv(4_096):
            pass
    check_node_answers(node)


def test_a_port_of_another_node_is_an_error_that_names_the_option(node: RunningNode, tmp_path: Path) -> None:
    with (
        pytest.raises(SetupError, match="--grpc-port"),
        running_node(tmp_path / "other", grpc_port=node.node.grpc_port),
    ):
        pass


def heartbeat(channel: grpc.Channel) -> int:
    """Make a call that needs no settings, and return its code."""
    call = channel.unary_unary(
        "/apache.rocketmq.v2.MessagingService/Heartbeat",
        service.HeartbeatRequest.SerializeToString,
        service.HeartbeatResponse.FromString,
    )
    response = call(service.HeartbeatRequest(), timeout=BOUND_S, metadata=[("x-mq-client-id", "c")])
    return int(response.status.code)


def test_tls_and_plain_text_are_served_on_one_port(tmp_path: Path) -> None:
    """RocketMQ's clients in Java and Go connect with TLS, those in Python and Node without."""
    issued = certificate(tmp_path / "tls")
    roots = grpc.ssl_channel_credentials(Path(issued.roots).read_bytes())
    with running_node(tmp_path / "data", **issued.settings) as node:
        target = f"127.0.0.1:{node.node.grpc_port}"
        silent = socket.create_connection(("127.0.0.1", node.node.grpc_port), timeout=BOUND_S)
        for _ in range(2):
            with grpc.insecure_channel(target) as plain, grpc.secure_channel(target, roots) as secure:
                assert heartbeat(plain) == heartbeat(secure) == definition.Code.UNRECOGNIZED_CLIENT_TYPE
        # A silent client and an invalid handshake do not affect other clients.
        with socket.create_connection(("127.0.0.1", node.node.grpc_port), timeout=BOUND_S) as nonsense:
            nonsense.sendall(b"\x16\x03\x01\x00\x05hello")
            while nonsense.recv(1024):
                pass
        with grpc.secure_channel(target, roots) as secure:
            assert heartbeat(secure) == definition.Code.UNRECOGNIZED_CLIENT_TYPE
    assert silent.recv(1) == b""
    silent.close()


def test_a_taken_port_is_an_error_with_a_certificate_too(tmp_path: Path) -> None:
    issued = certificate(tmp_path / "tls")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with (
            pytest.raises(SetupError, match="--grpc-port"),
            running_node(tmp_path / "data", grpc_port=taken.getsockname()[1], **issued.settings),
        ):
            pass


def test_a_client_that_ends_its_direction_at_any_moment_takes_no_message(node: RunningNode) -> None:
    """The direction ends a varying number of loop turns after the message: before, during and after the hand-out."""
    consuming, edge = node.broker.consuming, node.node.edges.grpc  # type: ignore[union-attr]
    request = ReceiveRequest("g", "t", invisible_ms=60_000)
    node.run(node.broker.create_topic("t", 1))

    async def return_and_end(held: Received, turns: int) -> None:
        """Give the message back, and end the direction of the waiting client after some turns of the loop."""
        while not consuming.waiting_receives:
            await asyncio.sleep(0)
        (connection,) = [each for each in edge._server._connections if each.streams.open]
        consuming.return_unseen(held.receipts)
        for _ in range(turns):
            await asyncio.sleep(0)
        connection.eof_received()
        connection._transport.close()  # as asyncio does after `eof_received`

    answered = 0
    for turns in range(12):
        with node.client() as ball:
            ball.send("t", "x")
        held = node.run(consuming.receive(request, 0))
        with Wire.to(node) as leaving:
            responses = leaving.stream("ReceiveMessage", receive_request("g", "t", wait_ms=20_000))
            node.run(return_and_end(held, turns))
            try:
                messages = [each.message for each in responses if each.HasField("message")]
            except grpc.RpcError:
                messages = []
        answered += bool(messages)
        with Wire.to(node) as other:
            (message,) = messages or other.receive("g", "t", wait_ms=1_000)
            assert message.system_properties.delivery_attempt == 1
            entry = service.AckMessageEntry(
                message_id=message.system_properties.message_id,
                receipt_handle=message.system_properties.receipt_handle,
            )
            other.ask_ok(
                "AckMessage",
                service.AckMessageRequest(
                    group=definition.Resource(name="g"), topic=definition.Resource(name="t"), entries=[entry]
                ),
            )
    assert 0 < answered < 12
