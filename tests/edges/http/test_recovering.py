"""Answers to probes while the broker reads its log. Afterwards the HTTP edge serves the same port."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.bounds import BOUND_S
from tests.certificates import certificate
from tests.node_fixture import RunningNode
from tests.ports import free_ports

from timeball.broker.recovery import apply_log
from timeball.edges.http import recovering
from timeball.model.errors import SetupError
from timeball.node import node as node_module


def ask(port: int, path: str, method: str = "GET") -> tuple[int, dict[str, Any]]:
    """Make a request, and return the status and the JSON answer, {} for an empty one."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=BOUND_S)
    connection.request(method, path)
    answer = connection.getresponse()
    data = answer.read()
    connection.close()
    return answer.status, json.loads(data) if data else {}


class RecoveringNode:
    """A node whose recovery lasts until `end`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, data: Path, **settings: Any) -> None:
        self.may_recover, self.begun, self.port = threading.Event(), threading.Event(), free_ports(1)[0]

        def wait_and_apply(*args: Any, **options: Any) -> Any:
            self.begun.set()
            assert self.may_recover.wait(BOUND_S)
            return apply_log(*args, **options)

        monkeypatch.setattr(node_module, "apply_log", wait_and_apply)
        self.node = RunningNode(data, http_port=self.port, **settings)
        self.starting = threading.Thread(target=self.node.start)
        self.starting.start()
        assert self.begun.wait(BOUND_S)

    def end(self) -> None:
        """Let the recovery end, and wait until the node has started."""
        self.may_recover.set()
        self.starting.join(BOUND_S)


def test_a_recovering_broker_answers_503_and_serves_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = RecoveringNode(monkeypatch, tmp_path / "data")
    try:
        assert ask(broker.port, "/health/live") == (200, {"status": "live"})
        for path, method in (
            ("/health/ready", "GET"),
            ("/v1/topics?x=1", "GET"),
            ("/v1/topics/a/messages", "POST"),
        ):
            status, reported = ask(broker.port, path, method)
            assert (status, reported["code"]) == (503, "unavailable")
            assert "recovers" in reported["detail"]
        assert ask(broker.port, "/health/ready", "HEAD") == (503, {})
        with socket.create_connection(("127.0.0.1", broker.port), timeout=BOUND_S) as stranger:
            stranger.sendall(b"x" * (recovering.HEAD_BYTES_MAX + 1))
            stranger.shutdown(socket.SHUT_WR)
            assert stranger.recv(1) == b""
    finally:
        broker.end()
    try:
        assert ask(broker.port, "/health/ready") == (200, {"status": "ready"})
        assert broker.node.node.http_port == broker.port
    finally:
        broker.node.stop()
    with socket.create_server(("127.0.0.1", broker.port)):
        pass  # the copy of the descriptor is closed, too


def test_a_recovering_broker_with_a_certificate_only_accepts_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    created = certificate(tmp_path)
    broker = RecoveringNode(monkeypatch, tmp_path / "data", **created.settings)
    try:
        trusting = ssl.create_default_context(cafile=created.roots)
        connection = http.client.HTTPSConnection("localhost", broker.port, timeout=BOUND_S, context=trusting)
        connection.request("GET", "/health/ready")
        assert connection.getresponse().status == 503
        connection.close()
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(broker.port, "/health/live")
    finally:
        broker.end()
        broker.node.stop()


def test_a_recovery_that_fails_frees_the_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise SetupError("on purpose")

    monkeypatch.setattr(node_module, "apply_log", fail)
    node = RunningNode(tmp_path / "data", http_port=free_ports(1)[0])
    with pytest.raises(SetupError, match="on purpose"):
        node.start()
    with socket.create_server(("127.0.0.1", node.settings.http_port)):
        pass


def test_a_silent_client_is_disconnected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovering, "REQUEST_S", 0.05)
    broker = RecoveringNode(monkeypatch, tmp_path / "data")
    try:
        with socket.create_connection(("127.0.0.1", broker.port), timeout=BOUND_S) as silent:
            assert silent.recv(1) == b""
    finally:
        broker.end()
        broker.node.stop()


def test_connections_beyond_the_limit_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovering, "CONNECTIONS_MAX", 0)
    broker = RecoveringNode(monkeypatch, tmp_path / "data")
    try:
        with pytest.raises((OSError, http.client.HTTPException)):
            ask(broker.port, "/health/live")
    finally:
        broker.end()
        broker.node.stop()
