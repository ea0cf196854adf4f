"""Clients of HTTP/2 that gRPC's library is none of: one that keeps the rules, by h2, and one that need not keep any."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from hpack import Decoder, Encoder
from tests.node_fixture import BOUND_S, RunningNode

from timeball.edges.grpc.dispatch import SERVICE_NAME
from timeball.edges.http2 import frames

HEARTBEAT = f"/{SERVICE_NAME}/Heartbeat"


def fields(path: str = HEARTBEAT, **more: str) -> list[tuple[str, str]]:
    """The headers of a call."""
    return [
        (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost"), ("te", "trailers"),
        ("content-type", "application/grpc"), *((name.replace("_", "-"), text) for name, text in more.items()),
    ]  # fmt: skip


def message(data: bytes, *, is_packed: bool = False) -> bytes:
    """A message with gRPC's five bytes before it."""
    return bytes([is_packed]) + len(data).to_bytes(4, "big") + data


class RawClient:
    """A connection on which any bytes are sent, and frames are read."""

    def __init__(
        self, node: RunningNode | None, *, greets: bool = True, port: int | None = None, source: str = ""
    ) -> None:
        """`port`: where it is not that of RocketMQ's clients. `source`: the address that it comes from."""
        assert port or node
        address = ("127.0.0.1", port or (node.node.grpc_port if node else 0))
        self.socket = socket.create_connection(address, timeout=BOUND_S, source_address=(source, 0))
        self._encoder, self._decoder, self._held = Encoder(), Decoder(), b""
        self._next = 1
        if greets:
            wide = frames.settings({frames.INITIAL_WINDOW: frames.WINDOW_BYTES_MAX})
            self.send(frames.PREFACE + wide + frames.window_update(0, 2**30))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send bytes; a connection that the broker has closed meanwhile is what a test looks at next."""
        try:
            self.socket.sendall(data)
        except OSError:
            pass

    def headers(self, *, ends: bool = False, headers: list[tuple[str, str]] | None = None) -> int:
        """Open a stream; its number."""
        number, self._next = self._next, self._next + 2
        flags = frames.END_HEADERS | (frames.END_STREAM if ends else 0)
        self.send(frames.frame(frames.HEADERS, flags, number, self.block(headers or fields())))
        return number

    def block(self, headers: list[tuple[str, str]], *, is_large: bool = False) -> bytes:
        """A header block, as an ordinary client writes it; a large one without Huffman's code, which takes minutes."""
        block: bytes = self._encoder.encode(headers, huffman=not is_large)
        return block

    def data(self, number: int, payload: bytes, *, ends: bool = True) -> None:
        """Send DATA."""
        self.send(frames.frame(frames.DATA, frames.END_STREAM if ends else 0, number, payload))

    def frames(self) -> Iterator[tuple[int, int, int, bytes]]:
        """Kind, flags, stream and payload of what comes, until the connection ends."""
        while True:
            while len(self._held) >= frames.HEAD.size:
                high, low, kind, flags, number = frames.HEAD.unpack_from(self._held)
                end = frames.HEAD.size + (high << 8 | low)
                if len(self._held) < end:
                    break
                payload, self._held = self._held[frames.HEAD.size : end], self._held[end:]
                yield kind, flags, number, payload
            try:
                more = self.socket.recv(65_536)
            except ConnectionError:
                return
            if not more:
                return
            self._held += more

    def status(self, number: int) -> tuple[int, str]:
        """The status of gRPC that a call has ended with, and its sentence."""
        for kind, flags, stream, payload in self.frames():
            if kind == frames.HEADERS:
                found = dict(self._decoder.decode(payload))
                if stream == number and flags & frames.END_STREAM:
                    return int(found["grpc-status"]), found.get("grpc-message", "")
        raise AssertionError("the connection has ended")

    def end(self) -> tuple[int, str]:
        """The code and the reason of the GOAWAY that ends the connection, which it then does."""
        found = (-1, "")
        for kind, _, _, payload in self.frames():
            if kind == frames.GOAWAY:
                found = int.from_bytes(payload[4:8], "big"), payload[8:].decode()
        return found
