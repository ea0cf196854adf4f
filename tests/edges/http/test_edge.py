"""The HTTP port: reused connections, TLS, a stop that ends long polls, and a port in use."""

from __future__ import annotations

import socket
import ssl
import threading
from pathlib import Path

import pytest
from tests.bounds import BOUND_S
from tests.certificates import certificate
from tests.edges.http.client import Client, client_of
from tests.node_fixture import RunningNode, eventually, running_node

from timeball.model.errors import SetupError


def connect(node: RunningNode) -> socket.socket:
    return socket.create_connection(("127.0.0.1", node.node.http_port), timeout=BOUND_S)


def test_a_connection_is_reused_after_each_kind_of_answer(client: Client) -> None:
    for path, status in (("/health/live", 200), ("/none", 404), ("/v1/topics", 200)) * 3:
        assert client.ask("GET", path).status == status


def test_pipelined_requests_are_answered_in_order(node: RunningNode) -> None:
    ask = b"GET %b HTTP/1.1\r\nHost: localhost\r\n%b\r\n"
    with connect(node) as connection:
        connection.sendall(ask % (b"/health/live", b"") + ask % (b"/none", b"Connection: close\r\n"))
        result = b""
        while part := connection.recv(65_536):
            result += part
    assert result.index(b"200 OK") < result.index(b"404 Not Found")


def test_a_stop_ends_long_polls(tmp_path: Path) -> None:
    with running_node(tmp_path / "data", http_port=0) as node:
        node.run(node.broker.create_topic("quiet"))
        waiting = connect(node)
        waiting.sendall(b"POST /v1/topics/quiet/receive?group=g&wait=60s HTTP/1.1\r\nHost: localhost\r\n\r\n")
        eventually(
            lambda: node.node.edges is not None and node.node.edges.http.limits.calls.taken,
            "the poll is there",
        )
        ended: list[bytes] = []
        watch = threading.Thread(target=lambda: ended.append(waiting.recv(65_536)))
        watch.start()
    watch.join(BOUND_S)
    waiting.close()
    assert ended == [b""], "a lost answer: clients repeat such a receive"


def test_a_port_in_use_is_a_setup_error_with_its_number(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(SetupError, match="--http-port"):
            with running_node(tmp_path / "data", http_port=taken.getsockname()[1]):
                pass


def test_with_a_certificate_only_tls_is_accepted(tmp_path: Path) -> None:
    created = certificate(tmp_path, "localhost")
    with running_node(tmp_path / "data", http_port=0, **created.settings) as node:
        trusting = ssl.create_default_context(cafile=created.roots)
        trusting.set_alpn_protocols(["h2", "http/1.1"])
        with trusting.wrap_socket(connect(node), server_hostname="localhost") as secure:
            assert secure.selected_alpn_protocol() == "http/1.1"
            secure.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert secure.recv(65_536).startswith(b"HTTP/1.1 200 ")
        with pytest.raises((ConnectionError, OSError, ValueError)), client_of(node) as plain:
            plain.ask("GET", "/health/live")


def test_a_client_that_leaves_a_connection_with_tls_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    created = certificate(tmp_path, "localhost")
    trusting = ssl.create_default_context(cafile=created.roots)
    with running_node(tmp_path / "data", http_port=0, **created.settings) as node:
        for leave in (lambda connection: connection.unwrap(), lambda _: None):
            with trusting.wrap_socket(connect(node), server_hostname="localhost") as secure:
                secure.sendall(b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert secure.recv(65_536).startswith(b"HTTP/1.1 200 ")
                leave(secure)
    assert not [record.getMessage() for record in caplog.records if record.name == "asyncio"]
