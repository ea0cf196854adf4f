"""The HTTP/2 server with edges made for the test: its calls to the edge, and the calls that it refuses itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from tests.bounds import BOUND_S
from tests.edges.http2.raw_client import fields, message

from timeball.edges.http2 import frames
from timeball.edges.http2.exchange import Call, Exchange, Method, Room
from timeball.edges.http2.server import Server, parse_timeout
from timeball.edges.http2.streams import Streams
from timeball.edges.shared.shared_limits import MemoryQuota, SharedLimit
from timeball.model.errors import SetupError


class Echo:
    """An edge with one method, whose response is its request."""

    call = Call

    def __init__(self) -> None:
        self.room = Room(MemoryQuota(1_000_000), 10_000, SharedLimit("calls", 10))
        self.methods = {"/echo": Method("echo", False, False, bytes, bytes)}

    def open(
        self,
        method: Method | None,
        streams: Streams,
        number: int,
        is_half_closed: bool,
        call: Call,
        now_s: float,
    ) -> Exchange:
        return Exchange(streams, number, is_half_closed, call, self.room, self.serve, now_s)

    async def serve(self, exchange: Exchange, request: Any) -> None:
        exchange.respond(request)
        exchange.finish()


def run(check: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(check, BOUND_S))


async def ask(port: int, path: str, data: bytes) -> bytes:
    """Make one call, and return all bytes of the answer. Its headers are literals, so they can be searched."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    block = b"".join(frames.literal(name, text) for name, text in fields(path))
    writer.write(
        frames.PREFACE + frames.settings({}) + frames.frame(frames.HEADERS, frames.END_HEADERS, 1, block)
        + frames.frame(frames.DATA, frames.END_STREAM, 1, data)
    )  # fmt: skip
    received = b""
    try:
        while b"grpc-status" not in received:
            received += await reader.read(65_536)
    finally:
        writer.close()
    return received


def test_a_known_method_is_served_and_others_fail_with_a_status() -> None:
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


def test_a_port_in_use_raises_an_error_that_names_its_option() -> None:
    async def check() -> None:
        first, second = Server(Echo()), Server(Echo())
        port = await first.start("127.0.0.1", 0, None, "--port")
        with pytest.raises(SetupError, match=f"--some-port {port}"):
            await second.start("127.0.0.1", port, None, "--some-port")
        await first.close()

    run(check())


class Later(Echo):
    """An edge that answers later, without a task."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[tuple[Exchange, bytes]] = []

    def serve(self, exchange: Exchange, request: Any) -> None:  # type: ignore[override]
        self.begun.append((exchange, request))

    def answer_all(self) -> None:
        for exchange, request in self.begun:
            exchange.answer(request)
            exchange.answer(b"once more")  # has no effect: the call has its status


def test_a_stop_waits_for_the_answer_of_a_call_without_a_task() -> None:
    async def check() -> None:
        edge = Later()
        server = Server(edge)
        port = await server.start("127.0.0.1", 0, None, "--port")
        client = asyncio.create_task(ask(port, "/echo", message(b"hello")))
        while not edge.begun:
            await asyncio.sleep(0)
        stopped = asyncio.create_task(server.close())
        await asyncio.sleep(0)
        [stream] = server.open_streams()
        assert stream.task is None and stream.completion() is not None
        edge.answer_all()
        received = await client
        assert message(b"hello") in received and b"once more" not in received
        assert stream.completion().done()  # type: ignore[union-attr]
        await stopped

    run(check())


def test_a_call_whose_client_has_gone_gives_back_slot_and_memory() -> None:
    async def check() -> None:
        edge = Later()
        server = Server(edge)
        port = await server.start("127.0.0.1", 0, None, "--port")
        client = asyncio.create_task(ask(port, "/echo", message(b"hello")))
        while not edge.begun:
            await asyncio.sleep(0)
        assert edge.room.calls.taken == 1 and edge.room.received.held_bytes
        client.cancel()
        await asyncio.wait([client])
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
def test_grpc_timeouts_are_parsed_and_other_texts_are_none(timeout: str, seconds: float | None) -> None:
    assert parse_timeout(timeout) == (None if seconds is None else pytest.approx(seconds))
