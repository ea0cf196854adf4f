"""The edge as a whole: it listens, it ends, and it forgets who is silent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import grpc
import pytest
from tests.broker.on_node import batch
from tests.edges.grpc.wire import Wire, consumer_settings, d, s
from tests.node_fixture import eventually, running_node

from timeball.edges.grpc import edge
from timeball.edges.grpc.dispatch import METHODS
from timeball.io.clock import ManualClock

NOT_THERE = {"SyncLiteSubscription"}


def test_without_a_port_nobody_listens(tmp_path: Path) -> None:
    with running_node(tmp_path / "data", grpc_port=-1) as node:
        assert node.node.grpc_port == -1


@pytest.mark.parametrize("name", sorted(NOT_THERE))
def test_what_is_not_there_says_so(wire: Wire, name: str) -> None:
    assert wire.ask(name, METHODS[name].request()).status.code == d.Code.NOT_IMPLEMENTED


def test_a_stop_does_not_wait_for_streams(tmp_path: Path) -> None:
    with running_node(tmp_path / "data") as node:
        wire = Wire.to(node)
        stream = wire.telemetry(consumer_settings("g"))
    with pytest.raises((StopIteration, grpc.RpcError)):
        next(stream)
    wire.close()


def test_a_restart_knows_nobody_and_is_told_again(tmp_path: Path) -> None:
    for _ in range(2):
        with running_node(tmp_path / "data") as node, Wire.to(node) as wire:
            beat = s.HeartbeatRequest(group=d.Resource(name="g"))
            assert wire.ask("Heartbeat", beat).status.code == d.Code.UNRECOGNIZED_CLIENT_TYPE
            wire.telemetry(consumer_settings("g"))
            wire.ask_ok("Heartbeat", beat)


def test_a_consumer_that_is_killed_is_missed_and_what_it_had_comes_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "EXPIRE_LOOK_S", 0.02)
    clock = ManualClock()
    with running_node(tmp_path / "data", clock) as node, Wire.to(node, "living") as living:
        assert node.node.edges is not None
        clients = node.node.edges.grpc.context.sessions
        node.run(node.broker.send(batch(1, unique_key=["id-1"])))
        killed = Wire.to(node, "killed")
        killed.telemetry(consumer_settings("g", d.ClientType.PUSH_CONSUMER))
        (message,) = killed.receive("g", "orders", auto_renew=True, invisible_ms=None)
        living.telemetry(consumer_settings("g"))
        killed.close()  # no good-bye

        def beat_until(true: Callable[[], object]) -> Callable[[], object]:
            """Time passes, and those who live beat."""

            def look() -> object:
                clock.advance(5_000)
                living.ask_ok("Heartbeat", s.HeartbeatRequest(group=d.Resource(name="g")))
                node.loop.call_soon_threadsafe(node.broker.ticker.wake)
                return true()

            return look

        eventually(beat_until(lambda: clients.get("killed") is None), "it is missed")
        assert clients.get("living") is not None
        back: list[d.Message] = []
        eventually(
            beat_until(lambda: back.extend(living.receive("g", "orders", wait_ms=0)) or back), "it is back"
        )
        assert back[0].system_properties.message_id == message.system_properties.message_id
        assert back[0].system_properties.delivery_attempt == 2
