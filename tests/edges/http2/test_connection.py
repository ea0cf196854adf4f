"""A client that breaks HTTP/2's rules, or bounds of ours, loses its connection; the others notice nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.edges.grpc.wire import Wire, consumer_settings, d, s
from tests.edges.http2.raw_client import RawClient, fields, message
from tests.node_fixture import BOUND_S, RunningNode, eventually

from timeball.edges.http2 import connection as module
from timeball.edges.http2 import frames
from timeball.edges.http2.connection import (
    BLOCK_BYTES_MAX,
    CALLS_PER_CONNECTION_MAX,
    CONNECTION_WINDOW_BYTES,
    HEADERS_BYTES_MAX,
    STRAIN_MAX,
    STRAIN_REFUSED,
)
from timeball.edges.http2.frames import Fault, frame
from timeball.edges.http2.streams import UNTAKEN_BYTES_MAX, WINDOW_BYTES

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
    "a window of a stream that never was": (
        Fault.PROTOCOL_ERROR,
        lambda client: client.send(frames.window_update(7, 1)),
    ),
    "a setting that is none": (
        Fault.PROTOCOL_ERROR,
        lambda client: client.send(frames.settings({frames.ENABLE_PUSH: 2})),
    ),
    "a GOAWAY of a stream": (
        Fault.PROTOCOL_ERROR,
        lambda client: client.send(frame(frames.GOAWAY, 0, 1, bytes(8))),
    ),
    "a priority of no stream": (
        Fault.PROTOCOL_ERROR,
        lambda client: client.send(frame(frames.PRIORITY, 0, 0, bytes(5))),
    ),
    "a stream below itself": (
        Fault.PROTOCOL_ERROR,
        lambda client: client.send(
            frame(frames.HEADERS, frames.END_HEADERS | frames.PRIORITISED, 1, b"\0\0\0\1\0" + client.block(fields()))
        ),
    ),
    "more padding than DATA": (
        Fault.PROTOCOL_ERROR,
        lambda client: client.send(frame(frames.DATA, frames.PADDED, client.headers(), b"\x09ab")),
    ),
    "a number below the last one": (
        Fault.STREAM_CLOSED,
        lambda client: client.send(
            frame(frames.HEADERS, frames.END_HEADERS, 5, client.block(fields()))
            + frame(frames.HEADERS, frames.END_HEADERS, 3, client.block(fields()))
        ),
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


def reset_of(client: RawClient, number: int) -> int:
    """The code by which a stream is reset."""
    for kind, _, stream, payload in client.frames():
        assert kind != frames.GOAWAY, payload
        if kind == frames.RST_STREAM and stream == number:
            return int.from_bytes(payload, "big")
    raise AssertionError("the connection has ended")


FAULTS_OF_A_STREAM: dict[str, tuple[Fault, Callable[[RawClient, int], None]]] = {
    "a priority below itself": (
        Fault.PROTOCOL_ERROR,
        lambda client, number: client.send(
            frame(frames.PRIORITY, 0, number, number.to_bytes(4, "big") + b"\0")
        ),
    ),
    "a priority that is none": (
        Fault.FRAME_SIZE_ERROR,
        lambda client, number: client.send(frame(frames.PRIORITY, 0, number, b"abc")),
    ),
    "a window without end": (
        Fault.FLOW_CONTROL_ERROR,
        lambda client, number: client.send(frames.window_update(number, frames.WINDOW_BYTES_MAX)),
    ),
}


@pytest.mark.parametrize("name", FAULTS_OF_A_STREAM)
def test_a_fault_of_a_stream_ends_that_stream_alone(node: RunningNode, name: str) -> None:
    fault, do = FAULTS_OF_A_STREAM[name]
    with RawClient(node) as client:
        number = client.headers()
        do(client, number)
        assert reset_of(client, number) == fault
        client.data(number, b"on its way")
        answers(client)


@pytest.mark.parametrize(
    "headers",
    [
        [each for each in fields() if each[0] != ":method"],
        [each for each in fields() if each[0] != ":scheme"],
        [each for each in fields() if each[0] != ":path"],
        fields(""),
        [*fields(), ("connection", "keep-alive")],
        [*fields(), ("transfer-encoding", "chunked")],
        [(":status", "200"), *fields()],
        [("te", "gzip") if each[0] == "te" else each for each in fields()],
    ],
    ids=["method", "scheme", "path", "empty path", "connection", "transfer-encoding", "status", "te"],
)
def test_what_is_no_request_is_reset(node: RunningNode, headers: list[tuple[str, str]]) -> None:
    with RawClient(node) as client:
        number = client.headers(headers=headers)
        client.data(number, BEAT)
        assert reset_of(client, number) == Fault.PROTOCOL_ERROR
        answers(client)


def test_data_behind_the_end_resets_the_stream_and_data_on_its_way_does_not(node: RunningNode) -> None:
    with RawClient(node) as client:
        ended = client.headers(ends=True)
        client.data(ended, b"behind the end")
        assert reset_of(client, ended) == Fault.STREAM_CLOSED
        cut = client.headers(headers=fields("/nothing"))  # refused before its request has come
        assert client.status(cut)[0] == 12
        client.data(cut, b"on its way", ends=False)
        trailers = client.block([("x-late", "1")])
        client.send(frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, cut, trailers))
        answers(client)
        client.data(cut, b"behind the end")
        assert reset_of(client, cut) == Fault.STREAM_CLOSED
        answers(client)


def test_headers_behind_the_end_end_the_connection(node: RunningNode) -> None:
    with RawClient(node) as client:
        answers(client)
        block = client.block([("x-late", "1")])
        client.send(frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, block))
        assert client.end()[0] == Fault.STREAM_CLOSED
    still_answers(node)


def test_more_data_than_a_streams_window_ends_the_connection(node: RunningNode) -> None:
    with RawClient(node) as client:
        number = client.headers()
        # In one write: between two of them the call may have read the first frame and given the window back.
        one = frame(frames.DATA, 0, number, bytes(frames.FRAME_BYTES_MAX))
        client.send(one * (WINDOW_BYTES // frames.FRAME_BYTES_MAX + 1))
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
    "many settings in a frame": lambda client: frame(
        frames.SETTINGS, 0, 0, 640 * frames.settings({frames.INITIAL_WINDOW: 1_000})[frames.HEAD.size :]
    ),
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


def refused(client: RawClient, block: bytes, count: int) -> bytes:
    """So many calls, each without a request."""
    flags = frames.END_HEADERS | frames.END_STREAM
    return b"".join(frame(frames.HEADERS, flags, _next(client), block) for _ in range(count))


@pytest.mark.parametrize("path", ["/nothing", dict(fields())[":path"]], ids=["unknown", "without a request"])
def test_calls_that_are_refused_by_their_headers_end_the_connection(node: RunningNode, path: str) -> None:
    """Each costs as much as one that does something: those of many connections would keep others waiting."""
    most = STRAIN_MAX // STRAIN_REFUSED
    with RawClient(node) as client:
        client.send(refused(client, client.block(fields(path)), most // 2))
        answers(client)
    with RawClient(node) as client:
        client.send(refused(client, client.block(fields(path)), most + 100))
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


@pytest.mark.parametrize("size_bytes", [17_000, 60_000, 200_000])
def test_headers_of_one_large_frame_end_the_call_alone(node: RunningNode, size_bytes: int) -> None:
    """Flight announces large frames for its DATA, and clients send their headers in such frames, too."""
    with RawClient(node, port=node.node.port) as client:
        open_before = client.headers(headers=fields("/before"))
        block = client.block(
            [*fields("/one"), ("x-kept", "for later"), ("x-large", "x" * size_bytes)], is_large=True
        )
        number, client._next = client._next, client._next + 2
        client.send(frame(frames.HEADERS, frames.END_HEADERS, number, block))
        client.data(number, b"on its way")
        assert client.status(open_before)[0] == 12
        code, text = client.status(number)
        assert (code, str(HEADERS_BYTES_MAX) in text) == (
            12 if "no call" in text else 8,
            "no call" not in text,
        )
        later = client.headers(headers=[*fields("/two"), ("x-kept", "for later")])
        assert "/two" in client.status(later)[1], "what the large block kept is known"


def test_a_block_beyond_its_bound_ends_the_connection(node: RunningNode) -> None:
    with RawClient(node, port=node.node.port) as client:
        block = client.block([*fields(), ("x-large", "x" * BLOCK_BYTES_MAX)], is_large=True)
        assert len(block) > BLOCK_BYTES_MAX
        client.send(frame(frames.HEADERS, frames.END_HEADERS, 1, block))
        assert client.end()[0] == Fault.ENHANCE_YOUR_CALM
    still_answers(node)


@pytest.mark.slow
def test_nothing_is_read_from_a_client_that_leaves_its_answers_unread(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused calls are answered at once, whatever the client has read: so they must not be read without an end."""
    monkeypatch.setattr(module, "STRAIN_REFUSED", 0)  # which ends the connection sooner
    with RawClient(node) as client:
        client.headers(headers=fields("/nothing", x_kept="1"))
        # Later calls are a few bytes each, and their answers many.
        one = client.block(fields("/nothing", x_kept="1"))
        client.socket.settimeout(2.0)
        sent = 0
        with pytest.raises(TimeoutError):
            for _ in range(1_000):
                client.socket.sendall(refused(client, one, 1_000))
                sent += 1
        (connection,) = (
            each
            for each in node.node.edges.grpc._server._connections
            if each.streams.peer  # type: ignore[union-attr]
        )
        assert connection._transport is not None
        assert connection._transport.get_write_buffer_size() < 8 * UNTAKEN_BYTES_MAX
        still_answers(node)
        client.socket.settimeout(BOUND_S)
        answers_read = 0
        for kind, _, _, _ in client.frames():  # it is read again once the client reads
            answers_read += kind == frames.HEADERS
            if answers_read == 30_000:
                break
        assert answers_read == 30_000 < 1_000 * sent


def test_a_client_that_never_reads_is_let_go(node: RunningNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PING_S", 0.2)
    monkeypatch.setattr(module, "PING_TIMEOUT_S", 0.2)
    monkeypatch.setattr(module, "STRAIN_REFUSED", 0)
    with RawClient(node) as client:
        one = client.block(fields("/nothing"))
        client.socket.settimeout(1.0)
        with pytest.raises(OSError):
            for _ in range(1_000):
                client.socket.sendall(refused(client, one, 1_000))
        eventually(lambda: not node.node.edges.grpc._server.connections, "it is let go")  # type: ignore[union-attr]


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
        eventually(lambda: room.calls.taken == 1, "a call has begun")
    eventually(lambda: not room.calls.taken and not server._connections, "it is forgotten")
