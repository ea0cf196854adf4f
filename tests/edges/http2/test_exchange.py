"""Single calls that gRPC's own library does not make: in pieces, compressed, invalid, too slow."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import AsyncIterator, Callable
from typing import Any
from urllib.parse import unquote

import pytest
from tests.edges.grpc.wire import consumer_settings, definition, service
from tests.edges.http2.raw_client import RawClient, fields, message
from tests.node_fixture import RunningNode, eventually

from timeball.edges.grpc.dispatch import SERVICE_NAME
from timeball.edges.grpc.edge import REQUEST_BYTES_MAX
from timeball.edges.http2 import frames
from timeball.edges.http2.exchange import Call, DecompressionError, Exchange, decompress
from timeball.edges.http2.frames import Fault, GrpcStatus, frame
from timeball.model.access import ANONYMOUS

BEAT = service.HeartbeatRequest(group=definition.Resource(name="g")).SerializeToString()
SETTINGS = service.TelemetryCommand(settings=consumer_settings("g")).SerializeToString()
TELEMETRY = f"/{SERVICE_NAME}/Telemetry"


def ask(node: RunningNode, data: bytes, **headers: str) -> tuple[int, str]:
    """Make a Heartbeat call with these bytes as its DATA, and return its status and message."""
    with RawClient(node) as client:
        number = client.headers(headers=fields(x_mq_client_id="raw", **headers))
        client.data(number, data)
        return client.status(number)


def response(client: RawClient, number: int) -> service.HeartbeatResponse:
    """Read the response of a Heartbeat call."""
    for kind, _, stream, payload in client.frames():
        if kind == frames.DATA and stream == number:
            return service.HeartbeatResponse.FromString(payload[5:])
    raise AssertionError("the connection has ended")


@pytest.mark.parametrize(
    ("encoding", "compress"),
    [("gzip", gzip.compress), ("deflate", zlib.compress), ("identity", lambda data: data)],
)
def test_a_request_in_each_supported_encoding_is_read(
    node: RunningNode, encoding: str, compress: Any
) -> None:
    with RawClient(node) as client:
        number = client.headers(headers=fields(x_mq_client_id="raw", grpc_encoding=encoding))
        client.data(number, message(compress(BEAT), is_packed=encoding != "identity"))
        assert response(client, number).status.code == definition.Code.UNRECOGNIZED_CLIENT_TYPE


@pytest.mark.parametrize(
    ("data", "headers", "status"),
    [
        (b"", {}, GrpcStatus.INVALID_ARGUMENT),
        (b"\x00\x00", {}, GrpcStatus.INVALID_ARGUMENT),
        (message(BEAT)[:-1], {}, GrpcStatus.INTERNAL),
        (message(b"\xff" * 20), {}, GrpcStatus.INTERNAL),
        (message(bytes(REQUEST_BYTES_MAX + 1))[:5], {}, GrpcStatus.RESOURCE_EXHAUSTED),
        (message(BEAT, is_packed=True), {}, GrpcStatus.UNIMPLEMENTED),
        (message(BEAT, is_packed=True), {"grpc_encoding": "snappy"}, GrpcStatus.UNIMPLEMENTED),
        (message(BEAT, is_packed=True), {"grpc_encoding": "gzip"}, GrpcStatus.INTERNAL),
        (
            message(gzip.compress(BEAT, mtime=0)[:-9], is_packed=True),
            {"grpc_encoding": "gzip"},
            GrpcStatus.INTERNAL,
        ),
        (
            message(gzip.compress(bytes(REQUEST_BYTES_MAX + 1), mtime=0), is_packed=True),
            {"grpc_encoding": "gzip"},
            GrpcStatus.RESOURCE_EXHAUSTED,
        ),
        (message(BEAT), {"grpc_timeout": "soon"}, GrpcStatus.INTERNAL),
        (message(BEAT), {"grpc_timeout": "123456789S"}, GrpcStatus.INTERNAL),
    ],
)
def test_bytes_that_are_no_request_end_the_call_with_a_status(
    node: RunningNode, data: bytes, headers: dict[str, str], status: GrpcStatus
) -> None:
    assert ask(node, data, **headers)[0] == status
    assert ask(node, message(BEAT)) == (0, "")


def test_a_request_in_pieces_is_one_request(node: RunningNode) -> None:
    whole = message(BEAT)
    with RawClient(node) as client:
        number = client.headers(headers=fields(x_mq_client_id="raw"))
        for at in range(len(whole)):
            client.data(number, whole[at : at + 1], ends=False)
        client.data(number, b"")
        assert response(client, number).status.code == definition.Code.UNRECOGNIZED_CLIENT_TYPE
        assert client.status(number) == (0, "")


def test_a_request_in_tiny_pieces_takes_little_more_than_its_bytes(node: RunningNode) -> None:
    request = frames.PREFIX.pack(0, 8_000) + bytes(8_000)
    with RawClient(node) as client:
        number = client.headers()
        pieces = [request[at : at + 2] for at in range(0, 7_000, 2)]
        client.send(b"".join(frame(frames.DATA, 0, number, piece) for piece in pieces))
        client.send(frame(frames.PING, 0, 0, b"the last"))
        next(None for kind, *_ in client.frames() if kind == frames.PING)
        (stream,) = node.node.edges.grpc._server.open_streams()  # type: ignore[union-attr]
        assert stream._held_bytes == 7_000 and len(stream._parts) < 10  # type: ignore[attr-defined]
        client.data(number, request[7_000:])
        assert client.status(number)[0] == GrpcStatus.INTERNAL, (
            "the whole request has come, and is no request"
        )


def test_a_client_that_continues_to_send_after_the_answer_is_reset(node: RunningNode) -> None:
    with RawClient(node) as client:
        number = client.headers(headers=fields(x_mq_client_id="raw"))
        client.data(number, message(BEAT), ends=False)
        assert client.status(number) == (0, "")
        reset = next(each for each in client.frames() if each.kind == frames.RST_STREAM)
        assert (reset.stream, int.from_bytes(reset.payload, "big")) == (number, Fault.NO_ERROR)
        client.data(number, bytes(100), ends=False)  # as if it had been on its way: no error
        second = client.headers(headers=fields(x_mq_client_id="raw"))
        client.data(second, message(BEAT))
        assert client.status(second) == (0, "")


def test_trailers_of_the_client_end_its_side(node: RunningNode) -> None:
    with RawClient(node) as client:
        number = client.headers(headers=fields(TELEMETRY, x_mq_client_id="raw"))
        client.data(number, message(SETTINGS), ends=False)
        block = client.block([("x-last", "1")])
        client.send(frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, number, block))
        assert client.status(number) == (0, "")


def test_an_unknown_method_and_a_request_without_grpc_get_an_answer(node: RunningNode) -> None:
    with RawClient(node) as client:
        assert (
            client.status(client.headers(ends=True, headers=fields("/no/such")))[0]
            == GrpcStatus.UNIMPLEMENTED
        )
        plain = [(name, "text/html" if name == "content-type" else text) for name, text in fields()]
        number = client.headers(ends=True, headers=plain)
        answer = [next(client.frames()) for _ in range(3)]
        kinds = [(kind, flags & frames.END_STREAM, stream) for kind, flags, stream, _ in answer]
        assert kinds == [
            (frames.HEADERS, 0, number), (frames.DATA, 0, number), (frames.HEADERS, frames.END_STREAM, number),
        ]  # fmt: skip
        assert answer[1].payload == b"only gRPC calls\n"
        assert client.status(client.headers(ends=True))[0] == GrpcStatus.INVALID_ARGUMENT


def test_all_requests_of_a_stream_larger_than_its_window_are_answered(node: RunningNode) -> None:
    """The requests together are larger than the stream's window, and one frame has 100 of them."""
    with RawClient(node) as client:
        number = client.headers(headers=fields(TELEMETRY, x_mq_client_id="raw"))
        answered = 0
        for _ in range(40):
            client.data(number, 100 * message(SETTINGS), ends=False)
            expected = answered + 100
            for kind, _, stream, _ in client.frames():
                answered += kind == frames.DATA and stream == number
                if answered == expected:
                    break
        client.data(number, b"")
        assert client.status(number) == (0, "")


def test_a_deadline_that_passes_ends_the_call_at_the_broker(node: RunningNode) -> None:
    assert node.node.edges is not None
    call_limits = node.node.edges.grpc.service.call_limits
    with RawClient(node) as client:
        number = client.headers(headers=fields(TELEMETRY, x_mq_client_id="raw", grpc_timeout="50m"))
        eventually(lambda: call_limits.calls.taken == 1, "the call has begun")
        assert client.status(number)[0] == GrpcStatus.DEADLINE_EXCEEDED
        eventually(lambda: not call_limits.calls.taken, "the call has ended")


def test_responses_that_the_client_does_not_read_end_the_call(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Exchange, "TAKEN_S", 0.3)
    with RawClient(node, greets=False) as client:
        client.send(frames.PREFACE + frames.settings({frames.INITIAL_WINDOW: 0}))
        stream = client.headers(headers=fields(TELEMETRY, x_mq_client_id="raw"))
        client.data(stream, message(SETTINGS), ends=False)
        assert client.status(stream)[0] == GrpcStatus.DEADLINE_EXCEEDED
        unary = client.headers(headers=fields(x_mq_client_id="raw"))
        client.data(unary, message(BEAT))
        reset = next(
            each for each in client.frames() if (each.kind, each.stream) == (frames.RST_STREAM, unary)
        )
        assert int.from_bytes(reset.payload, "big") == Fault.NO_ERROR


def test_a_grpc_message_with_special_characters_arrives(node: RunningNode) -> None:
    text = ask(node, message(BEAT), grpc_timeout="50% \u00e9")[1]
    assert unquote(text) == "grpc-timeout '50% \u00e9': digits and one of HMSmun"


def test_a_failure_outside_the_handlers_ends_the_call_and_is_logged(
    node: RunningNode, caplog: pytest.LogCaptureFixture
) -> None:
    assert node.node.edges is not None
    dispatch = node.node.edges.grpc.dispatch

    async def answer_text(name: str, call: Any, request: Any) -> Any:
        return "no message"

    async def yield_text(name: str, call: Any, request: Any) -> AsyncIterator[Any]:
        yield "no message"

    dispatch.unary, dispatch.stream = answer_text, yield_text  # type: ignore[method-assign]
    with RawClient(node) as client:
        unary = client.headers(headers=fields(x_mq_client_id="raw"))
        client.data(unary, message(BEAT))
        assert client.status(unary)[0] == GrpcStatus.INTERNAL
        telemetry = client.headers(headers=fields(TELEMETRY, x_mq_client_id="raw"))
        assert client.status(telemetry)[0] == GrpcStatus.INTERNAL
    assert "call not answered" in caplog.text


def test_a_stop_sends_goaway_twice_and_ends_open_calls(node: RunningNode) -> None:
    with RawClient(node) as client:
        number = client.headers(headers=fields(TELEMETRY, x_mq_client_id="raw"))
        client.data(number, message(SETTINGS), ends=False)
        next(each for each in client.frames() if each.kind == frames.DATA)
        assert node.node.edges is not None
        node.run(node.node.edges.grpc.close())
        last_streams = [
            int.from_bytes(payload[:4], "big")
            for kind, _, _, payload in client.frames()
            if kind == frames.GOAWAY
        ]
        assert last_streams == [frames.LAST_STREAM, number]


# ---- parts that need no connection ------------------------------------------------------------------------------

BYTES_MAX = 1_000  # of a decompressed message


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
@pytest.mark.parametrize("size_bytes", [0, 1, BYTES_MAX])
def test_a_message_up_to_the_maximum_is_decompressed(
    encoding: str, compress: Callable[[bytes], bytes], size_bytes: int
) -> None:
    data = b"x" * size_bytes
    assert decompress(compress(data), encoding, BYTES_MAX) == data


@pytest.mark.parametrize(
    ("data", "encoding", "status"),
    [
        (b"", "identity", GrpcStatus.UNIMPLEMENTED),
        (b"", "snappy", GrpcStatus.UNIMPLEMENTED),
        (b"no gzip", "gzip", GrpcStatus.INTERNAL),
        # These bytes are part of the name of the test.
        (gzip.compress(b"abc", mtime=0)[:-1], "gzip", GrpcStatus.INTERNAL),
        (zlib.compress(bytes(BYTES_MAX + 1)), "deflate", GrpcStatus.RESOURCE_EXHAUSTED),
    ],
)
def test_an_invalid_or_too_large_message_is_refused_with_a_status(
    data: bytes, encoding: str, status: GrpcStatus
) -> None:
    with pytest.raises(DecompressionError) as refused:
        decompress(data, encoding, BYTES_MAX)
    assert refused.value.status == status
    assert refused.value.text == str(refused.value)


def test_a_call_with_headers_only_has_no_deadline_and_an_anonymous_caller() -> None:
    call = Call({"te": "trailers"})
    assert (call.remaining_s, call.caller, call.peer) == (None, ANONYMOUS, "")
