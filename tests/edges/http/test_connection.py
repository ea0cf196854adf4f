"""A connection: limits for the size and time of a head, and each answer in one segment."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from tests.edges.http.client import Client
from tests.edges.http.test_edge import connect
from tests.node_fixture import RunningNode

from timeball.edges.http import edge as bounds


def test_a_too_large_head_is_refused(node: RunningNode) -> None:
    with connect(node) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        try:
            for _ in range(bounds.HEAD_BYTES_MAX // 1_000 + 2):
                connection.sendall(b"a: " + b"x" * 1_000 + b"\r\n")
            answer = connection.recv(4_096)
        except ConnectionError:
            answer = b"HTTP/1.1 400 "  # closed while this was sending
    assert answer.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("said", [b"", b"GET / HT"])
def test_a_client_with_an_incomplete_head_is_disconnected(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(bounds, "HEAD_S", 0.1)
    with connect(node) as connection:
        connection.sendall(said)
        try:
            assert connection.recv(1) == b""
        except ConnectionResetError:
            pass


class Kept(asyncio.Transport):
    """A transport that keeps each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0


def test_the_writes_of_one_turn_are_joined() -> None:
    stored = Kept()

    async def write() -> None:
        joined = bounds.JoinedWrites(stored, asyncio.get_running_loop())
        joined.write(b"head ")
        joined.write(b"body")
        assert stored.writes == []
        await asyncio.sleep(0)
        joined.write(b"next")
        joined.close()
        await asyncio.sleep(0)

    asyncio.run(write())
    assert stored.writes == [b"head body", b"next"]
    assert stored.is_closed


def test_connections_have_tcp_nodelay(node: RunningNode, client: Client) -> None:
    assert client.ask("GET", "/health/live").status == 200
    server = node.node.edges.http._server
    assert server is not None
    options = [
        connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        for connection in server.server_state.connections
    ]
    assert options and all(options)
