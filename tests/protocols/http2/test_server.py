"""The server apart from any edge: what it asks of one, and what it answers by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from tests.bounds import BOUND_S
from tests.protocols.http2.raw_client import fields, message

from timeball.errors import SetupError
from timeball.protocols.byte_shares import ByteShares
from timeball.protocols.http2 import frames
from timeball.protocols.http2.exchange import Call, Exchange, Method, Room
from timeball.protocols.http2.server import Server, headers_of
from timeball.protocols.http2.streams import Streams


class Echo:
    """An edge with one method, which answers with its request."""

    def __init__(self) -> None:
        self.room = Room(ByteShares(1_000_000), 10_000, 10)
        self.methods = {"/echo": Method("echo", False, False, bytes, bytes)}

    def open(
        self, method: Method | None, streams: Streams, number: int, is_heard: bool, call: Call, now_s: float
    ) -> Exchange:
        return Exchange(streams, number, is_heard, call, self.room, self.serve, now_s)

    async def serve(self, exchange: Exchange, request: Any) -> None:
        exchange.respond(request)
        exchange.finish()


def run(check: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(check, BOUND_S))


async def ask(port: int, path: str, data: bytes) -> bytes:
    """All that comes to a client that asks once and closes its side; literals, so it can be searched."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    block = b"".join(frames.literal(name, text) for name, text in fields(path))
    writer.write(
        frames.PREFACE + frames.settings({}) + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, block)
        + frames.frame(frames.DATA, frames.END_STREAM, 1, data)
    )  # fmt: skip
    found = b""
    while b"grpc-status" not in found:
        found += await reader.read(65_536)
    writer.close()
    return found


def test_a_call_is_the_edge_s_and_every_other_has_a_status() -> None:
    async def check() -> None:
        edge = Echo()
        server = Server(edge)
        port = await server.start("127.0.0.1", 0, None, "--port")
        assert message(b"hello") in await ask(port, "/echo", message(b"hello"))
        assert b"no call '/other'" in await ask(port, "/other", message(b"hello"))
        edge.room.calls = edge.room.calls_max + 1
        assert b"calls are under way" in await ask(port, "/echo", message(b"hello"))
        await server.close()
        assert server.connections == 0
        await server.close()  # a second time does nothing

    run(check())


def test_a_port_that_is_taken_is_named_with_its_option() -> None:
    async def check() -> None:
        first, second = Server(Echo()), Server(Echo())
        port = await first.start("127.0.0.1", 0, None, "--port")
        with pytest.raises(SetupError, match=f"--some-port {port}"):
            await second.start("127.0.0.1", port, None, "--some-port")
        await first.close()

    run(check())


def test_of_a_header_that_is_there_twice_the_first_counts() -> None:
    assert headers_of([("a", "1"), ("b", "2", "secret"), ("a", "3")]) == {"a": "1", "b": "2"}
