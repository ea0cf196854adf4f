"""The whole edge: it listens, stops, and ends the sessions of silent clients."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from tests.broker.on_node import batch
from tests.edges.grpc.wire import Wire, consumer_settings, definition, service
from tests.node_fixture import eventually, running_node

from timeball.edges.grpc import edge
from timeball.edges.grpc.dispatch import METHODS
from timeball.io.clock import ManualClock

NOT_IMPLEMENTED = {"SyncLiteSubscription"}


def test_with_a_negative_port_the_edge_does_not_listen(tmp_path: Path) -> None:
    with running_node(tmp_path / "data", grpc_port=-1) as node:
        assert node.node.grpc_port == -1


@pytest.mark.parametrize("name", sorted(NOT_IMPLEMENTED))
def test_an_unsupported_call_is_answered_with_not_implemented(wire: Wire, name: str) -> None:
    assert wire.ask(name, METHODS[name].request()).status.code == definition.Code.NOT_IMPLEMENTED


def test_a_stop_ends_open_telemetry_streams(tmp_path: Path) -> None:
    with running_node(tmp_path / "data") as node:
        wire = Wire.to(node)
        stream = wire.telemetry(consumer_settings("g"))
    with pytest.raises((StopIteration, grpc.RpcError)):
        next(stream)
    wire.close()


def test_after_a_restart_a_client_must_send_its_settings_again(tmp_path: Path) -> None:
    for _ in range(2):
        with running_node(tmp_path / "data") as node, Wire.to(node) as wire:
            beat = service.HeartbeatRequest(group=definition.Resource(name="g"))
            assert wire.ask("Heartbeat", beat).status.code == definition.Code.UNRECOGNIZED_CLIENT_TYPE
            wire.telemetry(consumer_settings("g"))
            wire.ask_ok("Heartbeat", beat)


def test_the_messages_of_a_killed_consumer_are_delivered_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "EXPIRY_CHECK_S", 0.02)
    clock = ManualClock()
    with running_node(tmp_path / "data", clock) as node, Wire.to(node, "living") as living:
        assert node.node.edges is not None
        clients = node.node.edges.grpc.context.sessions
        node.run(node.broker.send(batch(1, unique_key=["id-1"])))
        killed = Wire.to(node, "killed")
        killed.telemetry(consumer_settings("g", definition.ClientType.PUSH_CONSUMER))
        (message,) = killed.receive("g", "orders", auto_renew=True, invisible_ms=None)
        living.telemetry(consumer_settings("g"))
        killed.close()  # without NotifyClientTermination

        def with_heartbeats(condition: Callable[[], object]) -> Callable[[], object]:
            """Before each check of the condition, let 5 s pass, and send a heartbeat of the living client."""

            def check() -> object:
                clock.advance(5_000)
                living.ask_ok("Heartbeat", service.HeartbeatRequest(group=definition.Resource(name="g")))
                node.loop.call_soon_threadsafe(node.broker.ticker.wake)
                return condition()

            return check

        eventually(with_heartbeats(lambda: clients.get("killed") is None), "its session has ended")
        assert clients.get("living") is not None
        redelivered: list[definition.Message] = []
        eventually(
            with_heartbeats(
                lambda: redelivered.extend(living.receive("g", "orders", wait_ms=0)) or redelivered
            ),
            "the message is delivered again",
        )
        assert redelivered[0].system_properties.message_id == message.system_properties.message_id
        assert redelivered[0].system_properties.delivery_attempt == 2
