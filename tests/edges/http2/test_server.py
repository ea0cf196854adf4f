"""The HTTP/2 server with edges made for the test: its calls to the edge, and the calls that it refuses itself."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from tests.bounds import BOUND_S
from tests.edges.http2.raw_client import fields, message
from tests.edges.http2.test_streams import Wire

from timeball.edges.http2 import frames
from timeball.edges.http2.connection import Connection
from timeball.edges.http2.exchange import Call, CallLimits, Exchange, Method
from timeball.edges.http2.frames import Fault, frame
from timeball.edges.http2.server import REFUSAL_S, Server, parse_timeout
from timeball.edges.http2.streams import Streams
from timeball.edges.shared.shared_limits import MemoryQuota, SharedLimit
from timeball.model.errors import SetupError


class Echo:
    """An edge with one method, whose response is its request."""

    call = Call

    def __init__(self) -> None:
        self.call_limits = CallLimits(MemoryQuota(1_000_000), 10_000, SharedLimit("calls", 10))
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
        return Exchange(streams, number, is_half_closed, call, self.call_limits, self.serve, now_s)

    async def serve(self, exchange: Exchange, request: Any) -> None:
        exchange.respond(request)
        exchange.finish()


def run(check: Coroutine[Any, Any, None]) -> None:
    """Run a check in a new loop, at most for BOUND_S."""
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
        edge.call_limits.calls.limit = 0
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


class EchoOfEach(Echo):
    """An edge whose method answers each request of a stream."""

    def __init__(self) -> None:
        super().__init__()
        self.methods = {"/echo": Method("echo", True, True, bytes, bytes)}

    async def serve(self, exchange: Exchange, request: Any) -> None:
        async for each in request:
            exchange.respond(each)
        exchange.finish()


def test_a_stream_ends_its_task_when_a_later_message_is_no_request() -> None:
    async def check() -> None:
        edge = EchoOfEach()
        connection = Connection(Server(edge)._begin, set(), asyncio.get_running_loop())
        connection.connection_made(Wire(connection))
        block = b"".join(frames.literal(name, text) for name, text in fields("/echo"))
        connection.data_received(
            frames.PREFACE + frames.settings({}) + frame(frames.HEADERS, frames.END_HEADERS, 1, block)
        )
        [stream] = connection.streams.open.values()
        # The task reads both messages: the second is compressed, and no encoding was named.
        messages = message(b"one") + message(b"two", is_packed=True)
        connection.data_received(frame(frames.DATA, 0, 1, messages))
        assert stream.task is not None
        await asyncio.wait([stream.task])
        assert not connection.streams.open and edge.call_limits.calls.taken == 0

    run(check())


# ---- requests that are no gRPC calls ----------------------------------------------------------------------------

GET = b"".join(frames.literal(*each) for each in ((":method", "GET"), (":scheme", "http"), (":path", "/")))
REFUSED, TEXT = frames.literal(":status", "415"), b"only gRPC calls\n"


class RefusedClient:
    """A connection to an edge, whose client makes requests that are no gRPC calls."""

    def __init__(self, window: int = 65_535) -> None:
        self.connection = Connection(Server(Echo())._begin, set(), asyncio.get_running_loop())
        self.wire = Wire(self.connection)
        self.connection.connection_made(self.wire)
        self.connection.data_received(frames.PREFACE + frames.settings({frames.INITIAL_WINDOW: window}))

    async def answer(self, *sent: bytes) -> bytes:
        """Send these frames, and return all frames of the answers."""
        await asyncio.sleep(0)
        self.wire.written.clear()
        self.connection.data_received(b"".join(sent))
        await asyncio.sleep(0)
        return bytes(self.wire.written)


def headers_frame(flags: int = 0, block: bytes = GET, number: int = 1) -> bytes:
    """Return the HEADERS frame that opens a request."""
    return frame(frames.HEADERS, frames.END_HEADERS | flags, number, block)


def test_a_request_that_is_no_call_is_answered_with_a_text_when_it_is_complete() -> None:
    async def check() -> None:
        client = RefusedClient()
        answer = await client.answer(headers_frame(frames.END_STREAM))
        assert REFUSED in answer and frame(frames.DATA, 0, 1, TEXT) in answer
        assert await client.answer(headers_frame(number=3), frame(frames.DATA, 0, 3, b"x")) == b""
        assert len(client.connection.streams.open) == 1
        answer = await client.answer(frame(frames.DATA, frames.END_STREAM, 3, b"x"))
        assert REFUSED in answer and frame(frames.DATA, 0, 3, TEXT) in answer
        assert not client.connection.streams.open

    run(check())


def test_the_answer_to_a_request_that_is_no_call_keeps_to_the_window() -> None:
    async def check() -> None:
        client = RefusedClient(window=1)
        answer = await client.answer(headers_frame(frames.END_STREAM))
        assert answer.endswith(frame(frames.DATA, 0, 1, TEXT[:1]))
        assert frame(frames.DATA, 0, 1, TEXT[1:]) in await client.answer(frames.window_update(1, 1_000))
        assert not client.connection.streams.open

    run(check())


@pytest.mark.parametrize(
    ("length", "parts"), [("1", []), ("1", [b"four"]), ("1", [b"", b"ab"]), ("9", [b"ab"]), ("2", [b"ab"])]
)
def test_a_request_of_another_length_than_stated_is_reset(length: str, parts: list[bytes]) -> None:
    async def check() -> None:
        block = GET + frames.literal("content-length", length)
        sent = [headers_frame(0 if parts else frames.END_STREAM, block)]
        sent += [frame(frames.DATA, at == len(parts), 1, part) for at, part in enumerate(parts, start=1)]
        answer = await RefusedClient().answer(*sent)
        is_right = length == "2"
        assert (REFUSED in answer) == is_right
        assert (frames.rst_stream(1, Fault.PROTOCOL_ERROR) in answer) == (not is_right)

    run(check())


def test_a_long_or_slow_request_that_is_no_call_is_answered_before_its_end() -> None:
    async def check() -> None:
        client = RefusedClient()
        answer = await client.answer(headers_frame(), frame(frames.DATA, 0, 1, bytes(9_000)))
        assert REFUSED in answer and frames.rst_stream(1, Fault.NO_ERROR) in answer
        assert await client.answer(headers_frame(number=3)) == b""
        client.connection.check(asyncio.get_running_loop().time() + 2 * REFUSAL_S)
        await asyncio.sleep(0)
        assert REFUSED in client.wire.written
        stuck = RefusedClient(window=0)
        await stuck.answer(headers_frame(frames.END_STREAM))
        stuck.connection.check(asyncio.get_running_loop().time() + 2 * REFUSAL_S)
        await asyncio.sleep(0)
        assert frames.rst_stream(1, Fault.NO_ERROR) in stuck.wire.written
        assert not stuck.connection.streams.open

    run(check())


def test_many_requests_that_are_no_calls_end_the_connection() -> None:
    async def check() -> None:
        client = RefusedClient()
        numbers = range(1, 2 * 400, 2)  # 400 requests
        answer = await client.answer(*(headers_frame(frames.END_STREAM, number=number) for number in numbers))
        assert answer.count(REFUSED) < 200 and client.wire.is_closed

    run(check())


class LateEcho(Echo):
    """An edge that answers later, without a task."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[tuple[Exchange, bytes]] = []

    def serve(self, exchange: Exchange, request: Any) -> None:  # type: ignore[override]
        self.begun.append((exchange, request))

    def answer_all(self) -> None:
        """Answer each call with its request."""
        for exchange, request in self.begun:
            exchange.answer(request)
            exchange.answer(b"once more")  # has no effect: the call has its status


def test_a_stop_waits_for_the_answer_of_a_call_without_a_task() -> None:
    async def check() -> None:
        edge = LateEcho()
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
        edge = LateEcho()
        server = Server(edge)
        port = await server.start("127.0.0.1", 0, None, "--port")
        client = asyncio.create_task(ask(port, "/echo", message(b"hello")))
        while not edge.begun:
            await asyncio.sleep(0)
        assert edge.call_limits.calls.taken == 1 and edge.call_limits.received.held_bytes
        client.cancel()
        await asyncio.wait([client])
        for stream in server.open_streams():
            stream.streams.end_all()
        assert (edge.call_limits.calls.taken, edge.call_limits.received.held_bytes) == (0, 0)
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
def test_grpc_timeouts_are_parsed_and_other_texts_give_none(timeout: str, seconds: float | None) -> None:
    assert parse_timeout(timeout) == (None if seconds is None else pytest.approx(seconds))
