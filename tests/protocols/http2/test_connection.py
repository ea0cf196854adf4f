"""A client that breaks HTTP/2's rules, or bounds of ours, loses its connection; the others notice nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.node_fixture import RunningNode, eventually
from tests.protocols.grpc.wire import Wire, consumer_settings, d, s
from tests.protocols.http2.raw_client import RawClient, fields, message

from timeball.protocols.http2 import connection as module
from timeball.protocols.http2 import frames
from timeball.protocols.http2.connection import (
    BLOCK_BYTES_MAX,
    CALLS_PER_CONNECTION_MAX,
    CONNECTION_WINDOW_BYTES,
    HEADERS_BYTES_MAX,
    STRAIN_MAX,
)
from timeball.protocols.http2.frames import Fault, frame
from timeball.protocols.http2.streams import WINDOW_BYTES

HEARTBEAT = s.HeartbeatRequest(group=d.Resource(name="g"))
BEAT = message(HEARTBEAT.SerializeToString())


def still_answers(node: RunningNode) -> None:
    with Wire.to(node, "another") as wire:
        wire.telemetry(consumer_settings("g"))
        wire.ask_ok("Heartbeat", HEARTBEAT)


def answers(client: RawClient) -> None:
    number = client.headers(headers=fields(x_mq_client_id="raw"))
    client.data(number, BEAT)
    assert client.status(number) == (0, "")


BREACHES: dict[str, tuple[Fault, Callable[[RawClient], None]]] = {
    "a frame that is too large": (
        Fault.FRAME_SIZE_ERROR,
        lambda client: client.send(frame(frames.DATA, 0, 1, bytes(frames.FRAME_BYTES_MAX + 1))),
    ),
    "DATA of a stream that is not open": (Fault.PROTOCOL_ERROR, lambda client: client.data(1, b"x")),
    "a stream with an even number": (
        Fault.PROTOCOL_ERROR,
        lambda client: client.send(frame(frames.HEADERS, frames.END_HEADERS, 2, client.block(fields()))),
    ),
    "another frame within headers": (
        Fault.PROTOCOL_ERROR,
        lambda client: client.send(
            frame(frames.HEADERS, 0, 1, client.block(fields())) + frame(frames.PING, 0, 0, bytes(8))
        ),
    ),
    "CONTINUATION of nothing": (
        Fault.PROTOCOL_ERROR,
        lambda client: client.send(frame(frames.CONTINUATION, frames.END_HEADERS, 1, b"")),
    ),
    "no header block": (
        Fault.COMPRESSION_ERROR,
        lambda client: client.send(frame(frames.HEADERS, frames.END_HEADERS, 1, b"\xff\xff\xff\xff\xff")),
    ),
    "more padding than payload": (
        Fault.PROTOCOL_ERROR,
        lambda client: client.send(frame(frames.HEADERS, frames.END_HEADERS | frames.PADDED, 1, b"\x09ab")),
    ),
    "a push": (Fault.PROTOCOL_ERROR, lambda client: client.send(frame(frames.PUSH_PROMISE, 0, 1, bytes(8)))),
    "half a setting": (Fault.FRAME_SIZE_ERROR, lambda client: client.send(frame(frames.SETTINGS, 0, 0, b"abc"))),
    "a short PING": (Fault.FRAME_SIZE_ERROR, lambda client: client.send(frame(frames.PING, 0, 0, b"abc"))),
    "a short RST_STREAM": (
        Fault.FRAME_SIZE_ERROR,
        lambda client: client.send(frame(frames.RST_STREAM, 0, 1, b"abc")),
    ),
    "a reset of a stream that never was": (
        Fault.PROTOCOL_ERROR,
        lambda client: client.send(frames.rst_stream(7, Fault.NO_ERROR)),
    ),
    "a window that grows by nothing": (
        Fault.PROTOCOL_ERROR,
        lambda client: client.send(frames.window_update(0, 0)),
    ),
    "a window without end": (
        Fault.FLOW_CONTROL_ERROR,
        lambda client: client.send(frames.window_update(0, frames.WINDOW_BYTES_MAX)),
    ),
    "a first window without end": (
        Fault.FLOW_CONTROL_ERROR,
        lambda client: client.send(frames.settings({frames.INITIAL_WINDOW: 2**31})),
    ),
}  # fmt: skip


@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_of_the_rules_ends_the_connection_with_its_code(node: RunningNode, breach: str) -> None:
    fault, do = BREACHES[breach]
    with RawClient(node) as client:
        answers(client) if breach == "a window without end" else None
        do(client)
        assert client.end()[0] == fault
    still_answers(node)


def test_more_data_than_a_streams_window_ends_the_connection(node: RunningNode) -> None:
    with RawClient(node) as client:
        number = client.headers()
        for _ in range(WINDOW_BYTES // frames.FRAME_BYTES_MAX + 1):
            client.data(number, bytes(frames.FRAME_BYTES_MAX), ends=False)
        assert client.end()[0] == Fault.FLOW_CONTROL_ERROR
    still_answers(node)


def test_data_that_is_late_is_counted_and_the_window_comes_back(node: RunningNode) -> None:
    """More than the connection's window, over streams that have ended: it is given back as it is read."""
    with RawClient(node) as client:
        sent_bytes, windows = 0, 0
        number = client.headers(headers=fields("/nothing"))
        while sent_bytes <= 2 * CONNECTION_WINDOW_BYTES:
            client.data(number, bytes(frames.FRAME_BYTES_MAX), ends=False)
            sent_bytes += frames.FRAME_BYTES_MAX
        client.send(frame(frames.PING, 0, 0, b"the last"))
        for kind, _, stream, payload in client.frames():
            windows += int.from_bytes(payload, "big") if kind == frames.WINDOW_UPDATE and not stream else 0
            if kind == frames.PING:
                break
        assert (
            sent_bytes - CONNECTION_WINDOW_BYTES // 2
            <= windows - CONNECTION_WINDOW_BYTES + frames.WINDOW_BYTES_DEFAULT
        )
        answers(client)


FLOODS: dict[str, Callable[[RawClient], bytes]] = {
    "settings": lambda client: frames.settings({}),
    "answers to settings": lambda client: frame(frames.SETTINGS, frames.ACK, 0),
    "answers to pings": lambda client: frame(frames.PING, frames.ACK, 0, bytes(8)),
    "priorities": lambda client: frame(frames.PRIORITY, 0, 1, bytes(5)),
    "windows": lambda client: frames.window_update(0, 1),
    "frames that nobody knows": lambda client: frame(99, 0, 0),
    "resets": lambda client: (
        frame(frames.HEADERS, frames.END_HEADERS, _next(client), client.block(fields()))
        + frames.rst_stream(_last(client), Fault.NO_ERROR)
    ),
    "empty DATA": lambda client: frame(frames.DATA, 0, 1),
}


def _next(client: RawClient) -> int:
    client._next += 2
    return _last(client)


def _last(client: RawClient) -> int:
    return client._next - 2


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_of_frames_that_are_no_calls_ends_the_connection(node: RunningNode, flood: str) -> None:
    with RawClient(node) as client:
        if flood == "empty DATA":
            client.headers(headers=fields(f"/{module.__name__}"))
        for _ in range(STRAIN_MAX // 64 + 8):
            client.send(b"".join(FLOODS[flood](client) for _ in range(64)))
        assert client.end()[0] == Fault.ENHANCE_YOUR_CALM
    still_answers(node)


def test_ends_of_all_calls_at_once_are_no_flood(node: RunningNode) -> None:
    with RawClient(node) as client:
        for _ in range(2):
            opened = [client.headers() for _ in range(CALLS_PER_CONNECTION_MAX)]
            for number in opened:
                client.send(frames.rst_stream(number, Fault.NO_ERROR))
        answers(client)


def test_pings_are_answered_and_too_many_end_the_connection(node: RunningNode) -> None:
    with RawClient(node) as client:
        client.send(frame(frames.PING, 0, 0, b"12345678"))
        assert any(
            (kind, flags, payload) == (frames.PING, frames.ACK, b"12345678")
            for kind, flags, _, payload in client.frames()
        )
        client.send(8 * frame(frames.PING, 0, 0, bytes(8)))
        assert client.end() == (Fault.ENHANCE_YOUR_CALM, "too_many_pings")


def test_pings_between_answers_are_no_flood(node: RunningNode) -> None:
    """As clients measure how much a connection carries."""
    with RawClient(node) as client:
        for _ in range(10):
            client.send(frame(frames.PING, 0, 0, bytes(8)))
            answers(client)


def test_headers_without_end_end_the_connection(node: RunningNode) -> None:
    with RawClient(node) as client:
        client.send(frame(frames.HEADERS, 0, 1, client.block(fields())))
        for _ in range(BLOCK_BYTES_MAX // frames.FRAME_BYTES_MAX + 1):
            client.send(frame(frames.CONTINUATION, 0, 1, bytes(frames.FRAME_BYTES_MAX)))
        assert client.end()[0] == Fault.ENHANCE_YOUR_CALM
    with RawClient(node) as client:
        client.send(frame(frames.HEADERS, 0, 1, client.block(fields())))
        client.send((STRAIN_MAX + 1) * frame(frames.CONTINUATION, 0, 1))
        assert client.end()[0] == Fault.ENHANCE_YOUR_CALM


def test_headers_in_parts_are_a_call(node: RunningNode) -> None:
    with RawClient(node) as client:
        block = client.block(fields(x_mq_client_id="raw"))
        client.send(frame(frames.HEADERS, 0, 1, block[:5]))
        client.send(frame(frames.CONTINUATION, 0, 1, block[5:9]))
        client.send(frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[9:]))
        client.data(1, BEAT)
        assert client.status(1)[0] == 0


def test_padding_and_priorities_are_left_out(node: RunningNode) -> None:
    with RawClient(node) as client:
        block = b"\x03" + bytes(5) + client.block(fields(x_mq_client_id="raw")) + bytes(3)
        flags = frames.END_HEADERS | frames.PADDED | frames.PRIORITISED
        client.send(frame(frames.HEADERS, flags, 1, block))
        client.send(frame(frames.DATA, frames.END_STREAM | frames.PADDED, 1, b"\x04" + BEAT + bytes(4)))
        assert client.status(1)[0] == 0


def test_headers_that_unpack_to_very_much_end_the_connection(node: RunningNode) -> None:
    with RawClient(node) as client:
        large = ("x-large", "x" * 3_000)
        client.headers(headers=[*fields(), large])
        client.headers(headers=[*fields(), *100 * [large]])
        assert client.end()[0] == Fault.ENHANCE_YOUR_CALM
    still_answers(node)


def test_headers_of_too_many_bytes_end_the_call_alone(node: RunningNode) -> None:
    with RawClient(node) as client:
        client.headers(headers=[*fields(), ("x-large", "x" * 3_000)])
        number = client.headers(
            headers=[*fields(), *(HEADERS_BYTES_MAX // 3_000 + 1) * [("x-large", "x" * 3_000)]]
        )
        assert client.status(number)[0] == 8
        answers(client)


def test_calls_beyond_those_of_a_connection_are_refused(node: RunningNode) -> None:
    with RawClient(node) as client:
        opened = [client.headers() for _ in range(CALLS_PER_CONNECTION_MAX + 1)]
        for kind, _, number, payload in client.frames():
            if kind == frames.RST_STREAM:
                assert (number, int.from_bytes(payload, "big")) == (opened[-1], Fault.REFUSED_STREAM)
                break
        client.send(frames.rst_stream(opened[0], Fault.NO_ERROR))
        answers(client)


def test_one_who_says_nothing_is_let_go(node: RunningNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PREFACE_S", 0.1)
    with RawClient(node, greets=False) as client:
        assert client.end() == (Fault.NO_ERROR, "no preface of HTTP/2")


def test_one_who_answers_no_ping_is_let_go(node: RunningNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PING_S", 0.1)
    monkeypatch.setattr(module, "PING_TIMEOUT_S", 0.1)
    with RawClient(node) as client:
        kinds = [kind for kind, *_ in client.frames()]
        assert kinds.count(frames.PING) == 1
    still_answers(node)


def test_an_idle_connection_is_asked_to_come_again(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.1)
    monkeypatch.setattr(module, "LEAVE_S", 0.1)
    with RawClient(node) as client:
        gone = [payload for kind, _, _, payload in client.frames() if kind == frames.GOAWAY]
        assert [int.from_bytes(each[:4], "big") for each in gone] == [frames.LAST_STREAM, 0]


def test_a_client_that_has_gone_leaves_nothing(node: RunningNode) -> None:
    assert node.node.edges is not None
    server, room = node.node.edges.grpc._server, node.node.edges.grpc.service.room
    with RawClient(node) as client:
        client.headers(headers=fields(x_mq_client_id="raw"))
        eventually(lambda: room.calls == 1, "a call has begun")
    eventually(lambda: not room.calls and not server._connections, "it is forgotten")
