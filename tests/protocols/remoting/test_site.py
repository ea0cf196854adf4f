"""Which address clients are told."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.node_fixture import RunningNode, running_node
from tests.protocols.remoting.wire import Wire, json_body

from timeball.errors import SetupError
from timeball.protocols.remoting.codec.codes import RequestCode
from timeball.protocols.remoting.codec.records import Host


@pytest.mark.parametrize(
    ("advertise", "told"),
    [
        ("", "127.0.0.1:{port}"),
        ("10.1.2.3", "10.1.2.3:{port}"),
        ("10.1.2.3:999", "10.1.2.3:999"),
        ("[fe80::1]:999", "[fe80::1]:999"),
        ("fe80::1", "[fe80::1]:{port}"),
        ("localhost", "localhost:{port}"),
    ],
)
def test_what_is_advertised_is_told(tmp_path: Path, advertise: str, told: str) -> None:
    with running_node(tmp_path, advertise=advertise) as node, Wire.to(node) as wire:
        route = json_body(wire.ask_ok(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="TBW102"))
        assert route["brokerDatas"][0]["brokerAddrs"]["0"] == told.format(port=node.node.remoting_port)


@pytest.mark.parametrize(
    ("advertise", "address"),
    [
        ("10.1.2.3:999", bytes([10, 1, 2, 3])),
        ("[::1]:999", bytes(15) + b"\x01"),
        ("localhost:999", bytes([127, 0, 0, 1])),
    ],
)
def test_the_store_host_is_the_same_as_bytes(tmp_path: Path, advertise: str, address: bytes) -> None:
    with running_node(tmp_path, advertise=advertise) as node, Wire.to(node) as wire:
        wire.ask_ok(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="TBW102")
        remoting = node.node.remoting
        assert remoting is not None
        [connection] = remoting._connections
        assert remoting.site.store_host(connection) == Host(address, 999)


def test_a_name_that_is_none_is_refused_at_the_start(tmp_path: Path) -> None:
    running = RunningNode(tmp_path, advertise="no.such.host.invalid:1")
    with pytest.raises(SetupError, match=r"--advertise no\.such\.host\.invalid:1"):
        running.start()


def test_a_port_that_is_not_there_is_told_nobody(tmp_path: Path) -> None:
    with running_node(tmp_path, remoting_port=-1) as node:
        remoting = node.node.remoting
        assert remoting is not None and node.node.remoting_port == -1
        with Wire(node.node.name_server_port) as wire:
            route = json_body(wire.ask_ok(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="TBW102"))
            told = route["brokerDatas"][0]["brokerAddrs"]["0"]
            assert told == f"127.0.0.1:{node.node.name_server_port}"
