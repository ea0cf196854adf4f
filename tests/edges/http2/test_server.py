"""The server apart from any edge: what it asks of one, and what it answers by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from tests.bounds import BOUND_S
from tests.edges.http2.raw_client import fields, message

from timeball.edges.http2 import frames
from timeball.edges.http2.calls import Call, Method, Room
from timeball.edges.http2.exchange import Exchange
from timeball.edges.http2.server import Server, seconds_of
from timeball.edges.http2.streams import Streams
from timeball.edges.shared.shared_limits import MemoryQuota, SharedLimit
from timeball.model.errors import SetupError


class Echo:
    """An edge with one method, which answers with its request."""

    call = Call

    def __init__(self) -> None:
        self.room = Room(MemoryQuota(1_000_000), 10_000, SharedLimit("calls", 10))
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
    try:
        while b"grpc-status" not in found:
            found += await reader.read(65_536)
    finally:
        writer.close()
    return found


def test_a_call_is_the_edge_s_and_every_other_has_a_status() -> None:
    async def check() -> None:
        edge = Echo()
        server = Server(edge)
        port = await server.start("127.0.0.1", 0, None, "--port")
        assert message(b"hello") in await ask(port, "/echo", message(b"hello"))
        assert b"no call '/other'" in await ask(port, "/other", message(b"hello"))
        edge.room.calls.limit = 0
        assert b"0 calls are open" in await ask(port, "/echo", message(b"hello"))
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


class Later(Echo):
    """An edge that answers from elsewhere, without a task."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[tuple[Exchange, bytes]] = []

    def serve(self, exchange: Exchange, request: Any) -> None:  # type: ignore[override]
        self.begun.append((exchange, request))

    def answer_all(self) -> None:
        for exchange, request in self.begun:
            exchange.answer(request)
            exchange.answer(b"once more")  # it has its status: nothing leaves


def test_a_stop_waits_for_an_answer_that_has_no_task() -> None:
    async def check() -> None:
        edge = Later()
        server = Server(edge)
        port = await server.start("127.0.0.1", 0, None, "--port")
        asked = asyncio.create_task(ask(port, "/echo", message(b"hello")))
        while not edge.begun:
            await asyncio.sleep(0)
        stopped = asyncio.create_task(server.close())
        await asyncio.sleep(0)
        [stream] = server.open_streams()
        assert stream.task is None and stream.under_way() is not None
        edge.answer_all()
        found = await asked
        assert message(b"hello") in found and b"once more" not in found
        assert stream.under_way().done()  # type: ignore[union-attr]
        await stopped

    run(check())


def test_what_no_answer_waits_for_is_given_back() -> None:
    async def check() -> None:
        edge = Later()
        server = Server(edge)
        port = await server.start("127.0.0.1", 0, None, "--port")
        asked = asyncio.create_task(ask(port, "/echo", message(b"hello")))
        while not edge.begun:
            await asyncio.sleep(0)
        assert edge.room.calls.taken == 1 and edge.room.received.held_bytes
        asked.cancel()
        await asyncio.wait([asked])
        for stream in server.open_streams():
            stream.streams.end_all()
        assert (edge.room.calls.taken, edge.room.received.held_bytes) == (0, 0)
        edge.answer_all()  # to a client that has gone
        await server.close()

    run(check())


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [
        ("2H", 7_200.0), ("3M", 180.0), ("30S", 30.0), ("50m", 0.05), ("2999000u", 2.999), ("99999999n", 0.099_999_999),
        ("0S", 0.0), ("", None), ("S", None), ("3", None), ("3s", None), ("123456789S", None), ("-1S", None),
        ("1.5S", None), ("\u0663S", None), ("3S ", None),
    ],
)  # fmt: skip
def test_a_timeout_is_digits_and_a_unit(timeout: str, seconds: float | None) -> None:
    assert seconds_of(timeout) == (None if seconds is None else pytest.approx(seconds))
