"""A client at a wrong port is logged once a minute, and Timeball's own client gets an error with the endpoint."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator

import pytest
from tests.bounds import BOUND_S
from tests.certificates import certificate
from tests.cli.in_process import run_here
from tests.node_fixture import RunningNode, running_node

from timeball import Timeball
from timeball.cli.output import ExitCode
from timeball.edges.http import connection as http
from timeball.edges.http2 import connection as http2
from timeball.edges.remoting import connection as remoting
from timeball.edges.shared import first_byte
from timeball.edges.shared.first_byte import PAUSE_S, WrongProtocols, protocol_of
from timeball.model.errors import Unavailable

REMOTING = b'{"code":105,"extFields":{"topic":"orders"},"flag":0,"language":"JAVA","opaque":1,"version":399}'
BEGINNINGS = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(32),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9),
    "HTTP/1": b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "RESP": b"*1\r\n$4\r\nPING\r\n",
    "remoting": (len(REMOTING) + 4).to_bytes(4, "big") + len(REMOTING).to_bytes(4, "big") + REMOTING,
    "Kafka": b"\x00\x00\x00\x1f\x00\x12\x00\x03\x00\x00\x00\x01\x00\x07rdkafka" + bytes(16),
}
# The protocols that each edge refuses and logs. Frames of Kafka look valid to remoting.
EDGES = {
    "grpc": set(BEGINNINGS) - {"HTTP/2"},
    "flight": set(BEGINNINGS) - {"HTTP/2"},
    "http": {"TLS", "HTTP/2", "RESP", "remoting", "Kafka"},
    "remoting": {"TLS", "HTTP/2", "HTTP/1", "RESP"},
    "name_server": {"TLS", "HTTP/2", "HTTP/1", "RESP"},
}
# With a certificate each port accepts only TLS, but gRPC's also accepts HTTP/2 from this machine.
EDGES_WITH_TLS = {
    edge: set(BEGINNINGS) - ({"TLS", "HTTP/2"} if edge == "grpc" else {"TLS"}) for edge in EDGES
}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningNode, RunningNode]]:
    """Run two nodes, without and with TLS."""
    folder = tmp_path_factory.mktemp("wrong")
    tls = certificate(folder / "tls").settings
    with (
        running_node(folder / "plain", http_port=0, name_server_port=0) as plain,
        running_node(folder / "data", http_port=0, name_server_port=0, **tls) as secured,
    ):
        yield plain, secured


@pytest.mark.parametrize("name", BEGINNINGS)
def test_a_protocol_is_recognised_by_its_first_bytes(name: str) -> None:
    assert protocol_of(BEGINNINGS[name]) == name


@pytest.mark.parametrize("begin", [b"", b"\x00", b"nonsense", b"\xff" * 16, bytes(3)])
def test_unknown_bytes_are_not_recognised(begin: bytes) -> None:
    assert protocol_of(begin) == ""


def test_a_protocol_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    noted = WrongProtocols()
    noted.listens({"http": 7480, "flight": 7400, "grpc": -1, "name_server": 9876}, has_tls=False)
    with caplog.at_level(logging.WARNING):
        for now_s in (100.0, 101.0, 102.0, 100.0 + PAUSE_S):
            noted.note("grpc", BEGINNINGS["HTTP/1"], "a", now_s)
            noted.note("remoting", b"nonsense", "b", now_s, "a frame of 3 bytes")
        noted.note("remoting", BEGINNINGS["HTTP/2"], "c", 0.0)
        noted.note("remoting", BEGINNINGS["TLS"], "c", 0.0)
        noted.note("grpc", BEGINNINGS["remoting"], "d", 0.0)
        noted.note("http", b"nonsense", "a", 0.0)
    began = "client of another protocol edge="
    assert [record.getMessage() for record in caplog.records] == [
        f"{began}grpc tls=off speaks=HTTP/1 peer=a not_logged=0 right_port=http_port:7480",
        "connection closed edge=remoting peer=b reason=a frame of 3 bytes not_logged=0",
        f"{began}grpc tls=off speaks=HTTP/1 peer=a not_logged=2 right_port=http_port:7480",
        "connection closed edge=remoting peer=b reason=a frame of 3 bytes not_logged=2",
        f"{began}remoting tls=off speaks=HTTP/2 peer=c not_logged=0 right_port=port:7400",
        f"{began}remoting tls=off speaks=TLS peer=c not_logged=0 right_port=none",
        f"{began}grpc tls=off speaks=remoting peer=d not_logged=0 right_port=name_server_port:9876",
    ]


def _dial(port: int, begin: bytes) -> None:
    """Send bytes, and wait until the broker closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=BOUND_S) as client:
        client.sendall(begin)
        try:
            while client.recv(4_096):
                pass
        except ConnectionError:
            pass


def _lines_of(edge: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the log lines that name an edge."""
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if f"edge={edge} " in line]


@pytest.mark.parametrize("has_tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("edge", EDGES)
def test_a_client_of_another_protocol_is_logged_once(
    nodes: tuple[RunningNode, RunningNode],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    edge: str,
    has_tls: bool,
) -> None:
    node, expected = nodes[has_tls], (EDGES_WITH_TLS if has_tls else EDGES)[edge]
    ports = node.node.edges.ports  # type: ignore[union-attr]
    # A new object, because another test may have logged the same protocol within this minute.
    noted = WrongProtocols()
    noted.listens(ports, has_tls=has_tls)
    for module in (remoting, http2, http, first_byte):
        monkeypatch.setattr(module, "WRONG_PROTOCOLS", noted)
    with caplog.at_level(logging.WARNING):
        for name in expected:
            for _ in range(2):
                _dial(ports[edge], BEGINNINGS[name])
    lines = _lines_of(edge, caplog)
    assert sorted(line.partition("speaks=")[2].partition(" ")[0] for line in lines) == sorted(expected)
    assert all(f" tls={'on' if has_tls else 'off'} " in line for line in lines)
    assert all(f"right_port=http_port:{ports['http']}" in line for line in lines if "speaks=HTTP/1" in line)
    assert not [record for record in caplog.records if record.name != first_byte.__name__]


@pytest.mark.parametrize("edge", ["remoting", "name_server"])
def test_broken_frames_are_logged_once(
    nodes: tuple[RunningNode, RunningNode],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    edge: str,
) -> None:
    monkeypatch.setattr(remoting, "WRONG_PROTOCOLS", WrongProtocols())
    port = nodes[False].node.edges.ports[edge]  # type: ignore[union-attr]
    with caplog.at_level(logging.WARNING):
        for begin in (b"\xff" * 16, b"\xfe" * 16, bytes(8)):
            _dial(port, begin)
    (line,) = _lines_of(edge, caplog)
    assert line.startswith(f"connection closed edge={edge} peer=") and line.endswith(" not_logged=0")


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(
    ("has_tls", "scheme"),
    [
        pytest.param(False, "grpc", id="plain"),
        pytest.param(False, "grpc+tls", id="tls-to-plain"),
        pytest.param(True, "grpc", id="plain-to-tls"),
        pytest.param(True, "grpc+tls", id="tls"),
    ],
)
@pytest.mark.parametrize("edge", ["flight", "grpc", "http", "remoting", "name_server"])
def test_a_timeball_client_at_a_wrong_port_gets_an_error_with_the_endpoint(
    nodes: tuple[RunningNode, RunningNode], edge: str, has_tls: bool, scheme: str
) -> None:
    endpoint = f"{scheme}://127.0.0.1:{nodes[has_tls].node.edges.ports[edge]}"  # type: ignore[union-attr]
    ended = run_here("campaign", "list", "--endpoint", endpoint)
    if edge == "flight" and has_tls == (scheme == "grpc+tls"):
        # This is the right port. With TLS, its certificate is not trusted here.
        assert ended.returncode == (ExitCode.UNREACHABLE if has_tls else ExitCode.OK)
        return
    assert (ended.returncode, ended.stdout) == (ExitCode.UNREACHABLE, "")
    assert endpoint in " ".join(ended.stderr.split()) and "Traceback" not in ended.stderr


@pytest.mark.usefixtures("no_pauses")
def test_a_timeball_client_at_the_grpc_port_gets_an_error_with_the_right_port(
    nodes: tuple[RunningNode, RunningNode],
) -> None:
    with (
        Timeball(f"grpc://127.0.0.1:{nodes[False].node.grpc_port}") as ball,
        pytest.raises(Unavailable, match="7400"),
    ):
        ball.reserve(1)
