"""Readers of HTTP/2 and gRPC: header blocks, frames, whole connections, sends in protobuf."""

from __future__ import annotations

import asyncio
import gzip
import struct
from collections.abc import Mapping
from typing import Any

import pytest
from tests.edges.grpc.codec import test_send_requests as sends
from tests.edges.http2 import test_server
from tests.edges.http2.raw_client import message
from tests.edges.http2.test_hpack_decoder import interpreted
from tests.edges.http2.test_streams import Wire
from tests.fuzz.choices import Choices
from tests.fuzz.target import Target

from timeball.edges.grpc._generated import definition_pb2 as d
from timeball.edges.http2 import connection, frames
from timeball.edges.http2.connection import UNPACKED_BYTES_MAX, Bounds, Connection
from timeball.edges.http2.exchange import CallLimits, Exchange, Method
from timeball.edges.http2.frames import BrokenRule, FrameReader, Payload, frame, literal
from timeball.edges.http2.hpack_decoder import HpackDecoder
from timeball.edges.http2.server import Server
from timeball.edges.http2.streams import Flushes, Stream
from timeball.edges.shared.shared_limits import MemoryQuota, SharedLimit

# ---- header blocks: the compiled decoder gives what the interpreted one gives ---------------------------------------

INTERPRETED = interpreted()
BLOCKS_MAX, FIELD_BYTES = 8, 32


def decoded(decoder: Any, block: bytes) -> object:
    """Return the result of a decoder for a block, or its fault."""
    try:
        return *decoder.decode(block), decoder.is_malformed
    except BrokenRule as error:
        return error.fault


def check_header_blocks(data: bytes) -> None:
    """Read the blocks of a connection. Each begins with its length in two bytes."""
    choices = Choices(data)
    decoders = HpackDecoder(UNPACKED_BYTES_MAX), INTERPRETED(UNPACKED_BYTES_MAX)
    for _ in range(BLOCKS_MAX):
        if not choices.are_left:
            return
        block = choices.bytes_of(choices.byte() << 8 | choices.byte())
        result = decoded(decoders[0], block)
        assert result == decoded(decoders[1], block)
        if not isinstance(result, tuple):
            return  # the connection ends
        headers, size_bytes, _ = result
        size_bytes_min = sum(len((name + value).encode()) + FIELD_BYTES for name, value in headers.items())
        assert size_bytes_min <= size_bytes <= UNPACKED_BYTES_MAX


def sized(*blocks: bytes) -> bytes:
    """Join blocks, each after its length."""
    return b"".join(len(block).to_bytes(2, "big") + block for block in blocks)


def header_block_seeds() -> list[bytes]:
    # An index of the static table, a literal that is kept, the same by its index, a text in Huffman's code.
    kept = b"\x83\x40\x01x\x03abc"
    huffman = b"\x41\x8c\xf1\xe3\xc2\xe5\xf2\x3a\x6b\xa0\xab\x90\xf4\xff"
    return [
        sized(b"\x83" + literal("te", "trailers"), kept, b"\xbe"),
        sized(huffman, b"\x3f\xe1\x1f" + kept, b"\x20" + kept, b"\x10\x03abc\x00"),
    ]


def break_header_blocks(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreted decoder accept a table of any size."""

    def unchecked(self: Any, bytes_max: int) -> None:
        self._table_bytes_max = bytes_max
        self._evict()

    patch.setattr(INTERPRETED, "_resize", unchecked)


# ---- frames: in pieces of any size they are those of the whole, and their encoding is the input --------------------

SMALL_FRAME_BYTES, DATA_BYTES_MAX = 64, 1_000


def check_frames(data: bytes) -> None:
    choices = Choices(data)
    sizes, stream = Choices(choices.short_bytes()), choices.rest()
    with pytest.MonkeyPatch.context() as patch:
        # A small frame has up to 64 bytes here, so that few bytes make a large frame.
        patch.setattr(frames, "FRAME_BYTES_MAX", SMALL_FRAME_BYTES)
        whole, broken = read_frames([stream])
        parts, part_broken = read_frames(sizes.pieces(stream))
    assert b"".join(payload for *_, payload in whole) == b"".join(payload for *_, payload in parts)
    assert broken == part_broken
    if broken is None and stream.startswith(frames.PREFACE):
        written = b"".join(frame(*fields) for fields in whole)
        # The highest bit of a stream's number is not read.
        assert len(written) <= len(stream) - len(frames.PREFACE)
        assert all(len(payload) <= DATA_BYTES_MAX for *_, payload in whole)


def read_frames(pieces: list[bytes]) -> tuple[list[tuple[int, int, int, bytes]], object]:
    """Return the frames in these pieces, and the fault of the reader or None."""
    reader, result = FrameReader(DATA_BYTES_MAX), list[tuple[int, int, int, bytes]]()
    for piece in pieces:
        result += [(kind, flags, number, bytes(part)) for kind, flags, number, part in reader.read(piece)]
        if reader.broken is not None:
            return result, reader.broken.fault
    return result, None


def frame_seeds() -> list[bytes]:
    small = frames.settings({frames.MAX_FRAME: 20_000}) + frames.window_update(0, 9) + frame(0, 1, 1, b"abc")
    large = frame(0, 1, 1, bytes(range(200))) + frame(1, 4, 3, bytes(100)) + frame(6, 0, 0, bytes(8))
    return [bytes([4, 1, 8, 40, 3]) + frames.PREFACE + stream for stream in (small, large)]


def break_frames(patch: pytest.MonkeyPatch) -> None:
    """Lose the last byte of the rest of a large frame."""
    read_rest = FrameReader._read_rest

    def wrong(self: FrameReader, rest: Any, data: bytes, result: list[frames.Frame]) -> int:
        return read_rest(self, rest, data[:-1] if len(data) > 1 else data, result)

    patch.setattr(FrameReader, "_read_rest", wrong)


# ---- connections: no error leaves, memory is bounded and given back, and each closed stream is forgotten ------------

OUT_BYTES_MAX, REQUEST_BYTES_MAX = 2 << 20, 4_096


def decode_request(data: bytes) -> bytes:
    if data.startswith(b"\xff"):
        raise ValueError("no request")
    return data


class Echo(test_server.Echo):
    """A service of two calls: one answers its request, the other each request of a stream."""

    def __init__(self) -> None:
        self.call_limits = CallLimits(
            MemoryQuota(16_384, REQUEST_BYTES_MAX), REQUEST_BYTES_MAX, SharedLimit("calls", 64)
        )
        self.methods: Mapping[str, Method] = {
            "/e/one": Method("one", False, False, decode_request, bytes, (ValueError,)),
            "/e/all": Method("all", True, True, decode_request, bytes, (ValueError,)),
        }

    async def serve(self, exchange: Exchange, request: Any) -> None:
        if exchange.method.takes_stream:
            async for part in request:
                if not exchange.respond(part):
                    await exchange.sent()
            exchange.finish()
        else:
            exchange.answer(request)


class LoudFlushes(Flushes):
    """Flushes that do not catch errors."""

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        for streams in pending:
            streams.flush()


class OpenWire(Wire):
    """A transport whose client reads all at once."""

    written_bytes = 0

    def write(self, data: Payload) -> None:
        self.written_bytes += len(data)

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0


TURNS = 3


async def converse(pieces: list[bytes]) -> None:
    """Send these pieces over a connection, end it, and check the rules."""
    service, errors, loop = Echo(), list[object](), asyncio.get_running_loop()
    server = Server(service, Bounds())
    loop.set_exception_handler(lambda _, context: errors.append(context))
    link = Connection(server._begin, set(), loop, Bounds(), LoudFlushes(loop))
    wire = OpenWire(link)
    link.connection_made(wire)
    open_calls: list[Stream] = []
    for piece in pieces:
        link.data_received(piece)
        open_calls += link.streams.open.values()
        await asyncio.sleep(0)
    for _ in range(TURNS):
        await asyncio.sleep(0)
    assert service.call_limits.received.held_bytes <= 16_384
    assert wire.written_bytes <= OUT_BYTES_MAX
    tasks = [stream.task for stream in open_calls if stream.task is not None]
    link.connection_lost(None)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, Exception):
            raise result
    assert not errors, errors
    assert not link.streams.open
    assert (service.call_limits.received.held_bytes, service.call_limits.calls.taken) == (0, 0)


def check_connection(data: bytes) -> None:
    choices = Choices(data)
    sizes = Choices(choices.bytes_of(choices.byte() % 16))
    asyncio.run(converse(sizes.pieces(frames.PREFACE + choices.rest())))


def call(number: int, path: str, *parts: bytes, fields: bytes = b"") -> bytes:
    """Encode a call with further header fields, whose DATA comes in these parts."""
    block = b"\x83\x86" + literal(":path", path) + literal("content-type", "application/grpc") + fields
    opened = frame(frames.HEADERS, frames.END_HEADERS, number, block)
    data = [frame(frames.DATA, index == len(parts) - 1, number, part) for index, part in enumerate(parts)]
    return opened + b"".join(data)


def connection_seeds() -> list[bytes]:
    wide = frames.settings({frames.INITIAL_WINDOW: 2**31 - 1}) + frames.window_update(0, 2**30)
    one, packed = message(b"request"), message(gzip.compress(bytes(99), mtime=0), is_packed=True)
    encoding = literal("grpc-encoding", "gzip")
    cut = call(1, "/e/one", one)
    return [
        b"\0" + wide + call(1, "/e/one", one) + call(3, "/e/all", one[:3], one[3:] + one, b""),
        b"\2\7\7" + call(1, "/e/one", packed, fields=encoding) + frame(frames.PING, 0, 0, bytes(8)),
        b"\0" + cut[:3] + b"\1\0" + cut[5:] + frames.rst_stream(1, frames.Fault.NO_ERROR),
        b"\1\xff" + call(1, "/none", one) + frame(frames.PRIORITY, 0, 3, bytes(5)) + call(3, "/e/one", b""),
        b"\0"
        + frame(frames.HEADERS, 0, 1, b"\x83\x86")
        + frame(frames.CONTINUATION, 4, 1, literal("te", "x")),
    ]


def break_connection(patch: pytest.MonkeyPatch) -> None:
    """Read a short WINDOW_UPDATE or RST_STREAM without a check of its size."""

    def unchecked(payload: bytes) -> int:
        number: int = struct.unpack_from(">I", payload)[0]
        return number & 2**31 - 1

    patch.setattr(connection, "read_31_bits", unchecked)


# ---- sends in protobuf: a plain send gives the row of the reference --------------------------------------------------


def check_grpc_send(data: bytes) -> None:
    sends.check_plain(data)


def grpc_send_seeds() -> list[bytes]:
    keyed = sends.message(
        b"x", tag="t", keys=["k", "l"], message_id="1", properties={"a": "b"}, born_host="h"
    )
    delayed = sends.message(b"x", message_id="2", due_ms=sends.NOW_MS + 5_077)
    packed = sends.message(b"x", message_id="3", body_encoding=d.Encoding.GZIP)
    return [sends.send_request(sent).SerializeToString() for sent in (keyed, delayed, packed)]


def break_grpc_send(patch: pytest.MonkeyPatch) -> None:
    """Let the reference refuse a tag."""
    encode_row = sends.encode_row

    def wrong(message: d.Message, *others: Any) -> Any:
        if message.system_properties.tag:
            raise sends.Refused(0, "a tag")
        return encode_row(message, *others)

    patch.setattr(sends, "encode_row", wrong)


TARGETS = [
    Target("http2-header-blocks", "HPACK", check_header_blocks, header_block_seeds, break_header_blocks),
    Target("http2-frames", "frames in pieces", check_frames, frame_seeds, break_frames),
    Target("http2-connection", "whole connections, with calls", check_connection, connection_seeds, break_connection),
    Target("grpc-sends", "sends in protobuf", check_grpc_send, grpc_send_seeds, break_grpc_send),
]  # fmt: skip
