"""A client that dials a wrong port is named in the broker's log once a minute, and told the port in its error."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import pytest
from tests.node_fixture import BOUND_S, RunningNode, running_node

from timeball import Timeball
from timeball.errors import Unavailable
from timeball.protocols import wrong_protocols
from timeball.protocols.wrong_protocols import PAUSE_S, WrongProtocols, protocol_of

REMOTING = b'{"code":105,"extFields":{"topic":"orders"},"flag":0,"language":"JAVA","opaque":1,"version":399}'
BEGINNINGS = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "HTTP/1": b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "RESP": b"*1\r\n$4\r\nPING\r\n",
    "remoting": (len(REMOTING) + 4).to_bytes(4, "big") + len(REMOTING).to_bytes(4, "big") + REMOTING,
    "Kafka": b"\x00\x00\x00\x1f\x00\x12\x00\x03\x00\x00\x00\x01\x00\x07rdkafka" + bytes(16),
}
# The protocols that have an edge of their own are no strangers there; Kafka's frames end within remoting's bounds.
EDGES = {
    "grpc": set(BEGINNINGS) - {"HTTP/2"},
    "flight": set(BEGINNINGS) - {"HTTP/2"},
    "http": {"TLS", "HTTP/2", "RESP", "remoting", "Kafka"},
    "remoting": {"TLS", "HTTP/2", "HTTP/1", "RESP"},
}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningNode]:
    with running_node(tmp_path_factory.mktemp("wrong") / "data", http_port=0) as running:
        yield running


@pytest.mark.parametrize("name", BEGINNINGS)
def test_a_protocol_is_known_by_its_first_bytes(name: str) -> None:
    assert protocol_of(BEGINNINGS[name]) == name


@pytest.mark.parametrize("begin", [b"", b"\x00", b"nonsense", b"\xff" * 16, bytes(3)])
def test_other_bytes_are_no_protocol(begin: bytes) -> None:
    assert protocol_of(begin) == ""


def test_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    noted = WrongProtocols()
    with caplog.at_level(logging.WARNING):
        for now_s in (100.0, 101.0, 102.0, 100.0 + PAUSE_S):
            assert noted.note("grpc", BEGINNINGS["TLS"], "a", now_s)
        assert not noted.note("grpc", b"nonsense", "a", 0.0)
    assert [record.getMessage() for record in caplog.records] == [
        "client of another protocol edge=grpc speaks=TLS peer=a not_logged=0",
        "client of another protocol edge=grpc speaks=TLS peer=a not_logged=2",
    ]


@pytest.mark.parametrize("edge", EDGES)
def test_a_wrong_client_is_named_once(
    node: RunningNode, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, edge: str
) -> None:
    # Another test of this process may have been named within this minute.
    monkeypatch.setattr(wrong_protocols.WRONG_PROTOCOLS, "_logged", {})
    port = node.node.edges.ports[edge]  # type: ignore[union-attr]
    with caplog.at_level(logging.WARNING):
        for name in EDGES[edge]:
            for _ in range(2):
                with socket.create_connection(("127.0.0.1", port), timeout=BOUND_S) as client:
                    client.sendall(BEGINNINGS[name])
                    try:
                        while client.recv(4_096):
                            pass  # until the broker closes
                    except ConnectionError:
                        pass
    lines = [record.getMessage() for record in caplog.records if f"edge={edge} " in record.getMessage()]
    assert sorted(line.partition("speaks=")[2].partition(" ")[0] for line in lines) == sorted(EDGES[edge])
    assert not [record for record in caplog.records if record.name != wrong_protocols.__name__]


def test_a_client_of_timeball_at_the_port_for_rocketmq_s_is_told_so(node: RunningNode) -> None:
    with (
        Timeball(f"grpc://127.0.0.1:{node.node.grpc_port}") as ball,
        pytest.raises(Unavailable, match="7400"),
    ):
        ball.status()
