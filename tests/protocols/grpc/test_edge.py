"""The edge as a whole: it listens, it ends, and it forgets who is silent."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest
from tests.node_fixture import running_node
from tests.protocols.grpc.wire import Wire, consumer_settings, d, s

from timeball.protocols.grpc.dispatch import METHODS

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
