"""A client that breaks a rule of HTTP/2 or a bound of Timeball loses its connection. Other clients are not affected."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest
from tests.edges.grpc.wire import Wire, consumer_settings, definition, service
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
    STRAIN_PER_REFUSED_CALL,
)
from timeball.edges.http2.frames import Fault, GrpcStatus, frame
from timeball.edges.http2.streams import WINDOW_BYTES, WRITE_BUFFER_BYTES_MAX

HEARTBEAT = service.HeartbeatRequest(group=definition.Resource(name="g"))
BEAT = message(HEARTBEAT.SerializeToString())


def check_node_answers(node: RunningNode) -> None:
    """Check that another client of the node gets its answers."""
    with Wire.to(node, "another") as wire:
        wire.telemetry(consumer_settings("g"))
        wire.ask_ok("Heartbeat", HEARTBEAT)


def check_connection_answers(client: RawClient) -> None:
    """Check that a further call on this connection gets its answer."""
    number = client.headers(headers=fields(x_mq_client_id="raw"))
    client.data(number, BEAT)
    assert client.status(number) == (0, "")


# name -> (the error code that ends the connection, the function that breaks the rule)
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
def test_a_broken_rule_ends_the_connection_with_its_error_code(node: RunningNode, breach: str) -> None:
    fault, break_rule = BREACHES[breach]
    with RawClient(node) as client:
        check_connection_answers(client) if breach == "a window without end" else None
        break_rule(client)
        assert client.end()[0] == fault
    check_node_answers(node)


def reset_of(client: RawClient, number: int) -> int:
    """Wait until the stream is reset, and return the error code."""
    for kind, _, stream, payload in client.frames():
        assert kind != frames.GOAWAY, payload
        if kind == frames.RST_STREAM and stream == number:
            return int.from_bytes(payload, "big")
    raise AssertionError("the connection has ended")


STREAM_BREACHES: dict[str, tuple[Fault, Callable[[RawClient, int], None]]] = {
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


@pytest.mark.parametrize("name", STREAM_BREACHES)
def test_a_rule_broken_on_one_stream_resets_only_that_stream(node: RunningNode, name: str) -> None:
    fault, break_rule = STREAM_BREACHES[name]
    with RawClient(node) as client:
        number = client.headers()
        break_rule(client, number)
        assert reset_of(client, number) == fault
        client.data(number, b"on its way")
        check_connection_answers(client)


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
def test_headers_that_are_no_request_reset_the_stream(
    node: RunningNode, headers: list[tuple[str, str]]
) -> None:
    with RawClient(node) as client:
        number = client.headers(headers=headers)
        client.data(number, BEAT)
        assert reset_of(client, number) == Fault.PROTOCOL_ERROR
        check_connection_answers(client)


def test_data_after_the_end_resets_the_stream_unless_the_server_ended_it_first(node: RunningNode) -> None:
    with RawClient(node) as client:
        ended = client.headers(ends=True)
        client.data(ended, b"after the end")
        assert reset_of(client, ended) == Fault.STREAM_CLOSED
        # Refused because of its headers, before its request has arrived.
        refused_call = client.headers(headers=fields("/nothing"))
        assert client.status(refused_call)[0] == GrpcStatus.UNIMPLEMENTED
        client.data(refused_call, b"on its way", ends=False)
        trailers = client.block([("x-late", "1")])
        client.send(frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, refused_call, trailers))
        check_connection_answers(client)
        client.data(refused_call, b"after the end")
        assert reset_of(client, refused_call) == Fault.STREAM_CLOSED
        check_connection_answers(client)


def test_headers_after_the_end_of_a_stream_end_the_connection(node: RunningNode) -> None:
    with RawClient(node) as client:
        check_connection_answers(client)
        block = client.block([("x-late", "1")])
        client.send(frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, 1, block))
        assert client.end()[0] == Fault.STREAM_CLOSED
    check_node_answers(node)


def test_more_data_than_a_streams_window_ends_the_connection(node: RunningNode) -> None:
    with RawClient(node) as client:
        number = client.headers()
        # In one write: between two writes the call might read the first frame and raise its window again.
        one = frame(frames.DATA, 0, number, bytes(frames.FRAME_BYTES_MAX))
        client.send(one * (WINDOW_BYTES // frames.FRAME_BYTES_MAX + 1))
        assert client.end()[0] == Fault.FLOW_CONTROL_ERROR
    check_node_answers(node)


def test_data_of_ended_streams_is_given_back_to_the_connection_s_window(node: RunningNode) -> None:
    """More DATA than the connection's window, for a refused call: the window grows again as it is read."""
    with RawClient(node) as client:
        sent_bytes, given_back_bytes = 0, 0
        number = client.headers(headers=fields("/nothing"))
        while sent_bytes <= 2 * CONNECTION_WINDOW_BYTES:
            client.data(number, bytes(frames.FRAME_BYTES_MAX), ends=False)
            sent_bytes += frames.FRAME_BYTES_MAX
        client.send(frame(frames.PING, 0, 0, b"the last"))
        for kind, _, stream, payload in client.frames():
            given_back_bytes += (
                int.from_bytes(payload, "big") if kind == frames.WINDOW_UPDATE and not stream else 0
            )
            if kind == frames.PING:
                break
        assert (
            sent_bytes - CONNECTION_WINDOW_BYTES // 2
            <= given_back_bytes - CONNECTION_WINDOW_BYTES + frames.WINDOW_BYTES_DEFAULT
        )
        check_connection_answers(client)


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
    """Reserve the number of the next stream."""
    client._next += 2
    return _last(client)


def _last(client: RawClient) -> int:
    """Return the number of the newest stream."""
    return client._next - 2


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_of_frames_without_progress_ends_the_connection(node: RunningNode, flood: str) -> None:
    with RawClient(node) as client:
        if flood == "empty DATA":
            client.headers(headers=fields(f"/{module.__name__}"))
        for _ in range(STRAIN_MAX // 64 + 8):
            client.send(b"".join(FLOODS[flood](client) for _ in range(64)))
        assert client.end()[0] == Fault.ENHANCE_YOUR_CALM
    check_node_answers(node)


def calls_without_request(client: RawClient, block: bytes, count: int) -> bytes:
    """Encode `count` calls, each of which ends with its headers and so has no request."""
    flags = frames.END_HEADERS | frames.END_STREAM
    return b"".join(frame(frames.HEADERS, flags, _next(client), block) for _ in range(count))


@pytest.mark.parametrize("path", ["/nothing", dict(fields())[":path"]], ids=["unknown", "without a request"])
def test_calls_that_are_refused_by_their_headers_end_the_connection(node: RunningNode, path: str) -> None:
    """A refused call costs as much as a served one, so many of them would delay other clients."""
    calls_max = STRAIN_MAX // STRAIN_PER_REFUSED_CALL
    with RawClient(node) as client:
        client.send(calls_without_request(client, client.block(fields(path)), calls_max // 2))
        check_connection_answers(client)
    with RawClient(node) as client:
        client.send(calls_without_request(client, client.block(fields(path)), calls_max + 100))
        assert client.end()[0] == Fault.ENHANCE_YOUR_CALM
    check_node_answers(node)


def test_resets_of_all_calls_at_once_are_no_flood(node: RunningNode) -> None:
    with RawClient(node) as client:
        for _ in range(2):
            opened = [client.headers() for _ in range(CALLS_PER_CONNECTION_MAX)]
            for number in opened:
                client.send(frames.rst_stream(number, Fault.NO_ERROR))
        check_connection_answers(client)


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
    """Clients ping like this to measure the bandwidth of a connection."""
    with RawClient(node) as client:
        for _ in range(10):
            client.send(frame(frames.PING, 0, 0, bytes(8)))
            check_connection_answers(client)


def test_an_endless_header_block_ends_the_connection(node: RunningNode) -> None:
    with RawClient(node) as client:
        client.send(frame(frames.HEADERS, 0, 1, client.block(fields())))
        for _ in range(BLOCK_BYTES_MAX // frames.FRAME_BYTES_MAX + 1):
            client.send(frame(frames.CONTINUATION, 0, 1, bytes(frames.FRAME_BYTES_MAX)))
        assert client.end()[0] == Fault.ENHANCE_YOUR_CALM
    with RawClient(node) as client:
        client.send(frame(frames.HEADERS, 0, 1, client.block(fields())))
        client.send((STRAIN_MAX + 1) * frame(frames.CONTINUATION, 0, 1))
        assert client.end()[0] == Fault.ENHANCE_YOUR_CALM


def test_headers_in_several_frames_begin_a_call(node: RunningNode) -> None:
    with RawClient(node) as client:
        block = client.block(fields(x_mq_client_id="raw"))
        client.send(frame(frames.HEADERS, 0, 1, block[:5]))
        client.send(frame(frames.CONTINUATION, 0, 1, block[5:9]))
        client.send(frame(frames.CONTINUATION, frames.END_HEADERS, 1, block[9:]))
        client.data(1, BEAT)
        assert client.status(1)[0] == 0


def test_a_call_with_padding_and_priority_is_answered(node: RunningNode) -> None:
    with RawClient(node) as client:
        block = b"\x03" + bytes(5) + client.block(fields(x_mq_client_id="raw")) + bytes(3)
        flags = frames.END_HEADERS | frames.PADDED | frames.PRIORITISED
        client.send(frame(frames.HEADERS, flags, 1, block))
        client.send(frame(frames.DATA, frames.END_STREAM | frames.PADDED, 1, b"\x04" + BEAT + bytes(4)))
        assert client.status(1)[0] == 0


def test_headers_that_decode_to_too_much_end_the_connection(node: RunningNode) -> None:
    with RawClient(node) as client:
        large = ("x-large", "x" * 3_000)
        client.headers(headers=[*fields(), large])
        client.headers(headers=[*fields(), *100 * [large]])
        assert client.end()[0] == Fault.ENHANCE_YOUR_CALM
    check_node_answers(node)


def test_headers_of_too_many_bytes_end_only_the_call(node: RunningNode) -> None:
    with RawClient(node) as client:
        client.headers(headers=[*fields(), ("x-large", "x" * 3_000)])
        number = client.headers(
            headers=[*fields(), *(HEADERS_BYTES_MAX // 3_000 + 1) * [("x-large", "x" * 3_000)]]
        )
        assert client.status(number)[0] == GrpcStatus.RESOURCE_EXHAUSTED
        check_connection_answers(client)


@pytest.mark.parametrize("size_bytes", [17_000, 60_000, 200_000])
def test_too_many_headers_in_one_large_frame_end_only_the_call(node: RunningNode, size_bytes: int) -> None:
    """Flight's setting allows large frames for DATA, and clients use such frames for headers, too."""
    with RawClient(node, port=node.node.port) as client:
        open_before = client.headers(headers=fields("/before"))
        block = client.block(
            [*fields("/one"), ("x-kept", "for later"), ("x-large", "x" * size_bytes)], is_large=True
        )
        number, client._next = client._next, client._next + 2
        client.send(frame(frames.HEADERS, frames.END_HEADERS, number, block))
        client.data(number, b"on its way")
        assert client.status(open_before)[0] == GrpcStatus.UNIMPLEMENTED
        code, text = client.status(number)
        assert (code, str(HEADERS_BYTES_MAX) in text) == (
            GrpcStatus.UNIMPLEMENTED if "no call" in text else GrpcStatus.RESOURCE_EXHAUSTED,
            "no call" not in text,
        )
        later = client.headers(headers=[*fields("/two"), ("x-kept", "for later")])
        assert "/two" in client.status(later)[1], (
            "the large block was decoded, because the later block refers to its field"
        )


def test_a_block_beyond_its_bound_ends_the_connection(node: RunningNode) -> None:
    with RawClient(node, port=node.node.port) as client:
        block = client.block([*fields(), ("x-large", "x" * BLOCK_BYTES_MAX)], is_large=True)
        assert len(block) > BLOCK_BYTES_MAX
        client.send(frame(frames.HEADERS, frames.END_HEADERS, 1, block))
        assert client.end()[0] == Fault.ENHANCE_YOUR_CALM
    check_node_answers(node)


@pytest.mark.slow
def test_nothing_is_read_from_a_client_that_leaves_its_answers_unread(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused calls are answered at once. So the server must stop reading if the client does not read the answers."""
    # Otherwise the strain would end the connection first.
    monkeypatch.setattr(module, "STRAIN_PER_REFUSED_CALL", 0)
    with RawClient(node) as client:
        client.headers(headers=fields("/nothing", x_kept="1"))
        # These calls refer to the headers of the first one. So they have a few bytes each, and their answers many.
        block = client.block(fields("/nothing", x_kept="1"))
        client.socket.settimeout(2.0)
        sent = 0
        with pytest.raises(TimeoutError):
            for _ in range(1_000):
                client.socket.sendall(calls_without_request(client, block, 1_000))
                sent += 1
        (connection,) = (
            each
            for each in node.node.edges.grpc._server._connections
            if each.streams.peer  # type: ignore[union-attr]
        )
        assert connection._transport is not None
        assert connection._transport.get_write_buffer_size() < 8 * WRITE_BUFFER_BYTES_MAX
        check_node_answers(node)
        client.socket.settimeout(BOUND_S)
        answers_read = 0
        for kind, _, _, _ in client.frames():  # the server reads again once the client reads
            answers_read += kind == frames.HEADERS
            if answers_read == 30_000:
                break
        assert answers_read == 30_000 < 1_000 * sent


def test_a_client_that_never_reads_is_disconnected(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PING_S", 0.2)
    monkeypatch.setattr(module, "PING_TIMEOUT_S", 0.2)
    monkeypatch.setattr(module, "STRAIN_PER_REFUSED_CALL", 0)
    with RawClient(node) as client:
        block = client.block(fields("/nothing"))
        client.socket.settimeout(1.0)
        with pytest.raises(OSError):
            for _ in range(1_000):
                client.socket.sendall(calls_without_request(client, block, 1_000))
        eventually(lambda: not node.node.edges.grpc._server.connections, "the client is disconnected")  # type: ignore[union-attr]


def test_a_call_above_the_limit_of_a_connection_is_refused(node: RunningNode) -> None:
    with RawClient(node) as client:
        opened = [client.headers() for _ in range(CALLS_PER_CONNECTION_MAX + 1)]
        for kind, _, number, payload in client.frames():
            if kind == frames.RST_STREAM:
                assert (number, int.from_bytes(payload, "big")) == (opened[-1], Fault.REFUSED_STREAM)
                break
        client.send(frames.rst_stream(opened[0], Fault.NO_ERROR))
        check_connection_answers(client)


@pytest.mark.parametrize("ends", [True, False])
def test_goaway_arrives_although_the_client_sends_more(node: RunningNode, ends: bool) -> None:
    """Otherwise the close of a socket with unread bytes would reset the connection, and the reason would be lost."""
    more = frame(frames.PING, 0, 0, bytes(8)) * 200_000
    with RawClient(node) as client:
        client.socket.sendall(frames.window_update(0, 0) + more)
        if ends:
            client.socket.shutdown(socket.SHUT_WR)
        assert client.end()[0] == Fault.PROTOCOL_ERROR
        assert not client.was_reset
    eventually(lambda: not node.node.edges.grpc._server.connections, "the connection is closed")  # type: ignore[union-attr]


def test_a_client_without_a_preface_is_disconnected(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PREFACE_S", 0.1)
    with RawClient(node, greets=False) as client:
        assert client.end() == (Fault.NO_ERROR, "no preface of HTTP/2")


def test_a_client_that_answers_no_ping_is_disconnected(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PING_S", 0.1)
    monkeypatch.setattr(module, "PING_TIMEOUT_S", 0.1)
    with RawClient(node) as client:
        kinds = [kind for kind, *_ in client.frames()]
        assert kinds.count(frames.PING) == 1
    check_node_answers(node)


def test_an_idle_connection_gets_goaway_and_is_closed(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_S", 0.1)
    monkeypatch.setattr(module, "LEAVE_S", 0.1)
    with RawClient(node) as client:
        goaways = [payload for kind, _, _, payload in client.frames() if kind == frames.GOAWAY]
        assert [int.from_bytes(each[:4], "big") for each in goaways] == [frames.LAST_STREAM, 0]


def test_a_disconnected_client_leaves_no_call_and_no_connection(node: RunningNode) -> None:
    assert node.node.edges is not None
    server, call_limits = node.node.edges.grpc._server, node.node.edges.grpc.service.call_limits
    with RawClient(node) as client:
        client.headers(headers=fields(x_mq_client_id="raw"))
        eventually(lambda: call_limits.calls.taken == 1, "a call has begun")
    eventually(
        lambda: not call_limits.calls.taken and not server._connections, "call and connection are forgotten"
    )
