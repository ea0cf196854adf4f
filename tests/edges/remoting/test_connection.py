"""Connections: framing, deadlines, buffering of answers, and requests of the broker."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode, eventually

from timeball.edges.remoting import connection as module
from timeball.edges.remoting.codec.codes import CommandFlag, RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import BINARY, HEADER_BYTES_MAX, JSON, BadFrame, Command, encode
from timeball.edges.remoting.connection import Connection
from timeball.model.errors import Unavailable

OPAQUE = 7
ROUTE = Command(code=RequestCode.GET_ROUTEINFO_BY_TOPIC, opaque=OPAQUE, ext={"topic": "TBW102"})


def open_connections(node: RunningNode) -> set[Connection]:
    return node.node.edges.remoting._connections  # type: ignore[union-attr]


def only_connection(node: RunningNode) -> Connection:
    eventually(lambda: len(open_connections(node)) == 1, "connected")
    return next(iter(open_connections(node)))


def test_frames_in_pieces_and_several_at_once_are_answered(wire: Wire) -> None:
    data = encode(ROUTE)
    for at in range(len(data)):
        wire.send_bytes(data[at : at + 1])
    assert wire.answer_to(OPAQUE).code == 0
    wire.send_bytes(data * 3)
    assert wire.answer_to(OPAQUE).code == 0


class Recorder(asyncio.Transport):
    """A transport that records each write and never blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.closed
        self.writes.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0


def writes_of_one_read(answers: Callable[[Connection, Any], None], frames: int) -> list[bytes]:
    """Receive `frames` frames in one read, call `answers(connection, frame)` for each, and return the writes."""

    async def read() -> list[bytes]:
        def receive(connection: Connection, result: list[Any]) -> None:
            for frame in result:
                answers(connection, frame)

        connection = Connection(receive, set(), asyncio.get_running_loop())
        recorder = Recorder()
        connection.connection_made(recorder)
        connection.data_received(encode(ROUTE) * frames)
        return recorder.writes

    return asyncio.run(read())


def test_answers_to_the_requests_of_one_read_are_written_together() -> None:
    numbers = itertools.count()
    assert writes_of_one_read(lambda connection, _: connection.write(b"%d," % next(numbers)), 5) == [
        b"0,1,2,3,4,"
    ]
    assert writes_of_one_read(lambda connection, _: connection.write(b"alone"), 1) == [b"alone"]
    assert writes_of_one_read(lambda connection, _: None, 3) == []


def test_buffered_answers_have_a_maximum_size() -> None:
    part = bytes(module.BUFFERED_BYTES_MAX // 2)
    writes = writes_of_one_read(lambda connection, _: connection.write(part), 5)
    assert [len(data) for data in writes] == [2 * len(part), 2 * len(part), len(part)]


def test_answers_before_a_close_or_a_bad_frame_are_sent() -> None:
    def close(connection: Connection, _: object) -> None:
        connection.write(b"bye,")
        connection.close()

    def refuse(connection: Connection, _: object) -> None:
        connection.write(b"one,")
        raise BadFrame("the second frame is invalid")

    assert writes_of_one_read(close, 3) == [b"bye,"]
    assert writes_of_one_read(refuse, 3) == [b"one,"]


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff\xff" + b"x" * 100,
        b"\x7f\xff\xff\xff\x00\x00\x00\x04",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x00\x00\x00\x08\x00\x00\x00\x04nope",
    ],
)
def test_a_client_without_valid_frames_is_disconnected_and_others_are_not(
    node: RunningNode, wire: Wire, data: bytes
) -> None:
    with Wire.to(node) as bad:
        bad.send_bytes(data)
        assert bad.is_closed()
    wire.send_bytes(encode(ROUTE))
    assert wire.answer_to(OPAQUE).code == 0


@pytest.mark.parametrize("serialisation", [JSON, BINARY])
@pytest.mark.parametrize(
    ("code", "ext", "answer"),
    [
        (RequestCode.SEND_MESSAGE_V2, {"i": "x" * HEADER_BYTES_MAX}, ResponseCode.MESSAGE_ILLEGAL),
        (RequestCode.SEND_MESSAGE_V2, {"e": "three"}, ResponseCode.INVALID_PARAMETER),
        (RequestCode.SEND_MESSAGE, {"queueId": "three"}, ResponseCode.INVALID_PARAMETER),
        (RequestCode.HEART_BEAT, {"x": "x" * HEADER_BYTES_MAX}, ResponseCode.MESSAGE_ILLEGAL),
        (RequestCode.PULL_MESSAGE, {str(n): "" for n in range(300)}, ResponseCode.INVALID_PARAMETER),
    ],
)
def test_a_bad_header_is_answered_and_the_connection_stays_open(
    node: RunningNode, serialisation: int, code: int, ext: dict[str, str], answer: int
) -> None:
    route = msgspec.structs.replace(ROUTE, serialisation=serialisation)
    bad = Command(code, 5, ext={"b": "t", "topic": "t", **ext}, serialisation=serialisation)
    one_way = msgspec.structs.replace(bad, opaque=6, flag=CommandFlag.ONE_WAY)
    with Wire.to(node, serialisation) as wire:
        wire.send_bytes(encode(bad) + encode(one_way) + encode(route))
        assert (wire.answer_to(5).code, wire.answer_to(OPAQUE).code) == (answer, 0)
        assert not wire._answers, "one-way requests have no answer"


def test_half_a_frame_has_a_deadline(node: RunningNode, wire: Wire) -> None:
    wire.send_bytes(encode(ROUTE)[:-1])
    connection = only_connection(node)
    eventually(lambda: connection._frame_begun_s is not None, "the beginning of a frame is received")
    begun_s = connection._frame_begun_s
    assert begun_s is not None
    node.loop.call_soon_threadsafe(connection.check_deadlines, begun_s + module.HALF_FRAME_S)
    wire.send_bytes(encode(ROUTE)[-1:])
    assert wire.answer_to(OPAQUE).code == 0, "the connection is open until HALF_FRAME_S has passed"
    eventually(lambda: connection._frame_begun_s is None, "the frame is complete")
    wire.send_bytes(encode(ROUTE)[:-1])
    eventually(lambda: connection._frame_begun_s is not None, "the beginning of another frame is received")
    node.loop.call_soon_threadsafe(connection.check_deadlines, node.loop.time() + module.HALF_FRAME_S + 1)
    assert wire.is_closed()


def test_single_bytes_do_not_extend_the_deadline_of_a_frame(node: RunningNode, wire: Wire) -> None:
    data = encode(ROUTE)
    wire.send_bytes(data[:1])
    connection = only_connection(node)
    eventually(lambda: connection._frame_begun_s is not None, "the first byte is received")
    begun_s = connection._frame_begun_s
    wire.send_bytes(data[1:9])
    eventually(lambda: connection._splitter.held_bytes == 9, "nine bytes are received")
    assert connection._frame_begun_s == begun_s


def test_a_silent_connection_is_closed(node: RunningNode, wire: Wire) -> None:
    connection = only_connection(node)
    node.loop.call_soon_threadsafe(connection.check_deadlines, node.loop.time() + module.IDLE_S + 1)
    assert wire.is_closed()


def test_a_connection_with_a_pending_request_is_not_closed_as_silent(node: RunningNode, wire: Wire) -> None:
    connection = only_connection(node)
    connection.calls = 1
    node.loop.call_soon_threadsafe(connection.check_deadlines, node.loop.time() + module.IDLE_S + 1)
    wire.send_bytes(encode(ROUTE))
    assert wire.answer_to(OPAQUE).code == 0


def test_a_client_that_reads_no_answers_is_disconnected(node: RunningNode, wire: Wire) -> None:
    connection = only_connection(node)

    async def write_too_much() -> None:
        part = bytes(1024 * 1024)
        for _ in range(module.OUTBOUND_BYTES_MAX // len(part) * 2):
            connection.write(part)

    node.run(write_too_much())
    assert not connection.is_open


def test_a_closed_connection_whose_client_does_not_read_is_aborted(node: RunningNode, wire: Wire) -> None:
    connection = only_connection(node)

    async def write_and_close() -> None:
        connection.write(b"x" * module.OUTBOUND_BYTES_MAX)
        connection.close()
        connection.check_deadlines(node.loop.time() + module.GOODBYE_S - 1)

    node.run(write_and_close())
    assert open_connections(node) == {connection}, "the client may still read the answer"
    node.loop.call_soon_threadsafe(connection.check_deadlines, node.loop.time() + module.GOODBYE_S + 1)
    eventually(lambda: not open_connections(node), "the connection is aborted")


def test_a_request_of_the_broker_gets_its_answer(node: RunningNode, wire: Wire) -> None:
    asked = asyncio.run_coroutine_threadsafe(only_connection(node).request(Command(code=39), 30), node.loop)
    wire.reply(wire.next_pushed(), ext="yes")
    assert asked.result(60).ext == {"ext": "yes"}


def test_a_request_of_the_broker_without_an_answer_is_unavailable(node: RunningNode, wire: Wire) -> None:
    connection = only_connection(node)
    with pytest.raises(Unavailable, match="did not answer"):
        asyncio.run_coroutine_threadsafe(connection.request(Command(code=39), 0.001), node.loop).result(60)
    asked = asyncio.run_coroutine_threadsafe(connection.request(Command(code=39), 60), node.loop)
    wire.next_pushed()
    wire.close()
    with pytest.raises(Unavailable, match="disconnected"):
        asked.result(60)
    assert not connection._pending_requests
    eventually(lambda: not open_connections(node), "the node has noticed the end of the connection")
    with pytest.raises(Unavailable, match="disconnected"):
        asyncio.run_coroutine_threadsafe(connection.request(Command(code=39), 60), node.loop).result(60)


def test_a_connection_beyond_the_maximum_is_closed(
    node: RunningNode, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_connection(node)
    monkeypatch.setattr(module, "CONNECTIONS_MAX", 1)
    with Wire.to(node) as second:
        assert second.is_closed()
    wire.send_bytes(encode(ROUTE))
    assert wire.answer_to(OPAQUE).code == 0
