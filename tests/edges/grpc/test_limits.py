"""Clients that use too much, or do not read their responses: each meets a bound, and others are not affected."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from tests.certificates import certificate
from tests.edges.grpc.wire import Wire, consumer_settings, definition, producer_settings, service
from tests.node_fixture import BOUND_S, RunningNode, eventually, running_node

from timeball.edges.grpc.calls import STREAMS_PER_CLIENT_MAX
from timeball.edges.grpc.edge import REQUEST_BYTES_MAX
from timeball.edges.grpc.handlers.telemetry import SETTINGS_BYTES_MAX
from timeball.edges.http2 import connection as module
from timeball.edges.http2.connection import CALLS_PER_CONNECTION_MAX

LARGE = definition.Message(topic=definition.Resource(name="orders"), body=bytes(16 * REQUEST_BYTES_MAX))
HEARTBEAT = service.HeartbeatRequest(group=definition.Resource(name="g"))


def status_of_refusal(wire: Wire, request: object, **options: object) -> grpc.StatusCode:
    """Make a SendMessage call that must end with a gRPC error, and return its code."""
    call = wire._call("unary_unary", "SendMessage")
    with pytest.raises(grpc.RpcError) as error:
        call(request, timeout=BOUND_S, metadata=wire._metadata, **options)
    code: grpc.StatusCode = error.value.code()
    return code


def test_a_compressed_request_is_bounded_by_its_decompressed_size(node: RunningNode, wire: Wire) -> None:
    """64 MiB of zeros are compressed to 64 KiB."""
    bomb = service.SendMessageRequest(messages=[LARGE])
    assert (
        status_of_refusal(wire, bomb, compression=grpc.Compression.Gzip) == grpc.StatusCode.RESOURCE_EXHAUSTED
    )
    wire.ask_ok("QueryRoute", service.QueryRouteRequest(topic=definition.Resource(name="orders")))


def test_telemetry_streams_of_a_client_are_limited(wire: Wire) -> None:
    opened = [wire.telemetry(consumer_settings("g")) for _ in range(STREAMS_PER_CLIENT_MAX)]
    extra = wire.telemetry()
    extra.send(service.TelemetryCommand(settings=consumer_settings("g")))
    assert next(extra).status.code == definition.Code.TOO_MANY_REQUESTS
    opened[0].end()
    eventually(lambda: not list(opened[0]), "the stream ends with the client's side of it")
    wire.telemetry(consumer_settings("g"))  # the limit allows another one again


def test_too_large_settings_are_refused(wire: Wire) -> None:
    stream = wire.telemetry()
    settings = producer_settings(*(f"topic-{n}" for n in range(30_000)))
    assert settings.ByteSize() > SETTINGS_BYTES_MAX
    stream.send(service.TelemetryCommand(settings=settings))
    assert next(stream).status.code == definition.Code.PAYLOAD_TOO_LARGE
    # The settings were not stored, so the client is unknown.
    assert wire.ask("Heartbeat", HEARTBEAT).status.code == definition.Code.UNRECOGNIZED_CLIENT_TYPE


def test_calls_above_the_limit_of_a_connection_wait_in_the_client(node: RunningNode) -> None:
    """Silent Telemetry streams use up all calls of one connection. Another connection is not affected."""
    with Wire.to(node, "greedy") as greedy, Wire.to(node, "modest") as modest:
        held = [greedy.telemetry() for _ in range(CALLS_PER_CONNECTION_MAX)]
        waits = greedy.later("Heartbeat", HEARTBEAT)
        modest.telemetry(consumer_settings("g"))
        for _ in range(10):
            modest.ask_ok("Heartbeat", HEARTBEAT)
        assert not waits.done()
        held[0].cut()
        assert waits.result(BOUND_S).status.code == definition.Code.UNRECOGNIZED_CLIENT_TYPE


def test_a_client_that_reads_nothing_does_not_delay_others(node: RunningNode) -> None:
    """A client sends settings and never reads the answers. Only its own stream is blocked."""
    with Wire.to(node, "not-reading") as not_reading, Wire.to(node, "other") as other:
        large_settings = definition.Settings(
            client_type=definition.ClientType.PRODUCER,
            publishing=definition.Publishing(
                topics=[definition.Resource(name=f"topic-{n}") for n in range(2_000)]
            ),
        )
        stream = not_reading.telemetry()
        for _ in range(400):
            stream.send(service.TelemetryCommand(settings=large_settings))
        other.telemetry(producer_settings("orders"))
        for _ in range(20):
            other.ask_ok("Heartbeat", service.HeartbeatRequest())
        stream.cut()


def test_an_old_connection_is_closed_and_calls_go_on_over_another(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a maximum age of 300 ms, its stream ends, and the next call uses another connection."""
    monkeypatch.setattr(module, "AGE_S", 0.3)
    monkeypatch.setattr(module, "AGE_GRACE_S", 0.1)
    with Wire.to(node, "old") as wire:
        stream = wire.telemetry(consumer_settings("g"))
        with pytest.raises(grpc.RpcError) as error:
            next(stream)
        assert error.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        monkeypatch.undo()
        wire.ask_ok("Heartbeat", HEARTBEAT)


def test_with_a_certificate_tls_and_local_plain_text_are_served(tmp_path: Path) -> None:
    issued = certificate(tmp_path / "tls")
    with running_node(tmp_path / "data", **issued.settings) as node:
        address = f"localhost:{node.node.grpc_port}"
        credentials = grpc.ssl_channel_credentials(Path(issued.roots).read_bytes())
        stub = "/apache.rocketmq.v2.MessagingService/QueryRoute"
        request = service.QueryRouteRequest(topic=definition.Resource(name="orders")).SerializeToString()
        with grpc.secure_channel(address, credentials) as channel:
            answer = service.QueryRouteResponse.FromString(
                channel.unary_unary(stub)(request, timeout=BOUND_S)
            )
            assert answer.status.code == definition.Code.OK
        # From another machine: tests/edges/shared/test_first_byte.py.
        with grpc.insecure_channel(address) as channel:
            answer = service.QueryRouteResponse.FromString(
                channel.unary_unary(stub)(request, timeout=BOUND_S)
            )
            assert answer.status.code == definition.Code.OK
        other_certificate = certificate(tmp_path / "other")
        credentials = grpc.ssl_channel_credentials(Path(other_certificate.roots).read_bytes())
        with grpc.secure_channel(address, credentials) as channel, pytest.raises(grpc.RpcError) as error:
            channel.unary_unary(stub)(request, timeout=BOUND_S)
        assert error.value.code() == grpc.StatusCode.UNAVAILABLE
