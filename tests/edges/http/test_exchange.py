"""The state of one request: its body in any pieces, its disconnect, and its answer in one write."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from starlette.datastructures import QueryParams
from tests.edges.http.test_connection import RecordingTransport
from uvicorn.protocols.http.flow_control import FlowControl

from timeball.edges.http.codec import Answer
from timeball.edges.http.exchange import Exchange, Target


class Flow:
    """A flow that counts the times that reading is resumed."""

    resumed = 0

    def resume_reading(self) -> None:
        self.resumed += 1


def build_exchange(method: str = "POST", *, keep_alive: bool = True) -> tuple[Exchange, RecordingTransport]:
    """Return an exchange with an empty request, and its transport."""
    transport = RecordingTransport()
    exchange = Exchange(
        method, Target("/", QueryParams(""), {}), {}, peer="", transport=transport,
        flow=cast(FlowControl, Flow()), keep_alive=keep_alive, expects_continue=False,
    )  # fmt: skip
    exchange.on_response = lambda: None
    return exchange, transport


@pytest.mark.parametrize("pieces", [[], [b"a"], [b"a", b"bc"], [b"a", b"bc", b"d"]])
def test_a_whole_body_is_taken_and_the_next_event_is_the_disconnect(pieces: list[bytes]) -> None:
    async def take() -> tuple[bytes, bool, Any]:
        exchange, _ = build_exchange()
        for piece in pieces:
            exchange.add_body(piece)
        exchange.more_body = False
        data = exchange.take_body()
        event = asyncio.ensure_future(exchange.receive())
        await asyncio.sleep(0)
        waits = not event.done()
        exchange.disconnected = True
        exchange.notify()
        return data, waits, await event

    assert asyncio.run(take()) == (b"".join(pieces), True, {"type": "http.disconnect"})


def test_pieces_that_come_while_a_handler_waits_are_received() -> None:
    async def receive() -> list[Any]:
        exchange, _ = build_exchange()
        exchange.add_body(b"a")
        events = [await exchange.receive()]
        event = asyncio.ensure_future(exchange.receive())
        await asyncio.sleep(0)
        exchange.add_body(b"b")
        exchange.more_body = False
        exchange.notify()
        return [*events, await event]

    first, last = asyncio.run(receive())
    assert (first["body"], first["more_body"], last["body"], last["more_body"]) == (b"a", True, b"b", False)


@pytest.mark.parametrize(
    ("method", "keep_alive", "lines", "body"),
    [("POST", True, b"", b"{}"), ("HEAD", True, b"", b""), ("POST", False, b"connection: close\r\n", b"{}")],
)
def test_an_answer_is_one_write(method: str, keep_alive: bool, lines: bytes, body: bytes) -> None:
    exchange, transport = build_exchange(method, keep_alive=keep_alive)
    exchange.write(Answer(201, {}, ((b"a", b"b"),)))
    assert transport.writes == [
        b"HTTP/1.1 201 Created\r\ncontent-type: application/json\r\ncache-control: no-store\r\n"
        b"x-content-type-options: nosniff\r\na: b\r\n" + lines + b"content-length: 2\r\n\r\n" + body
    ]
    assert transport.is_closed is not keep_alive and exchange.response_complete


def test_a_client_that_has_disconnected_gets_no_answer() -> None:
    exchange, transport = build_exchange()
    exchange.disconnected = True
    exchange.write(Answer(200, {}))
    assert not transport.writes and not exchange.response_complete
