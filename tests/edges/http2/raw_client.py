"""An HTTP/2 client for tests that sends any bytes, also those that break the rules."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple, Self

from hpack import Decoder, Encoder
from tests.node_fixture import BOUND_S, RunningNode

from timeball.edges.grpc.dispatch import SERVICE_NAME
from timeball.edges.http2 import frames

HEARTBEAT = f"/{SERVICE_NAME}/Heartbeat"


def fields(path: str = HEARTBEAT, **more: str) -> list[tuple[str, str]]:
    """Return the headers of a call. `more`: further headers, with _ for -."""
    return [
        (":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost"), ("te", "trailers"),
        ("content-type", "application/grpc"), *((name.replace("_", "-"), text) for name, text in more.items()),
    ]  # fmt: skip


def message(data: bytes, *, is_packed: bool = False) -> bytes:
    """Put gRPC's prefix of five bytes in front of a message."""
    return bytes([is_packed]) + len(data).to_bytes(4, "big") + data


class ReceivedFrame(NamedTuple):
    """A frame. `stream` 0 is the connection."""

    kind: int
    flags: int
    stream: int
    payload: bytes


class RawClient:
    """A connection that sends any bytes and reads frames."""

    def __init__(
        self, node: RunningNode | None, *, greets: bool = True, port: int | None = None, source: str = ""
    ) -> None:
        """Connect to the node's gRPC port, or to `port`, from the local address `source`.

        `greets`: send the preface, and settings with windows that never block the server.
        """
        assert port or node
        address = ("127.0.0.1", port or (node.node.grpc_port if node else 0))
        self.socket = socket.create_connection(address, timeout=BOUND_S, source_address=(source, 0))
        self._encoder, self._decoder, self._unread = Encoder(), Decoder(), b""
        self._next = 1
        self.was_reset = False  # whether `frames` has ended with a reset, and not with an orderly close
        if greets:
            wide_windows = frames.settings({frames.INITIAL_WINDOW: frames.WINDOW_BYTES_MAX})
            self.send(frames.PREFACE + wide_windows + frames.window_update(0, 2**30))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        """Send bytes. That the broker has closed the connection is no error here, because tests check it by reading."""
        try:
            self.socket.sendall(data)
        except OSError:
            pass

    def headers(self, *, ends: bool = False, headers: list[tuple[str, str]] | None = None) -> int:
        """Open a stream, and return its number. `ends`: end the client's side, too."""
        number, self._next = self._next, self._next + 2
        flags = frames.END_HEADERS | (frames.END_STREAM if ends else 0)
        self.send(frames.frame(frames.HEADERS, flags, number, self.block(headers or fields())))
        return number

    def block(self, headers: list[tuple[str, str]], *, is_large: bool = False) -> bytes:
        """Encode a header block. A large block is not Huffman coded, because that would take minutes."""
        block: bytes = self._encoder.encode(headers, huffman=not is_large)
        return block

    def data(self, number: int, payload: bytes, *, ends: bool = True) -> None:
        """Send DATA. `ends`: end the client's side, too."""
        self.send(frames.frame(frames.DATA, frames.END_STREAM if ends else 0, number, payload))

    def frames(self) -> Iterator[ReceivedFrame]:
        """Yield each frame that arrives, until the connection ends."""
        while True:
            while len(self._unread) >= frames.HEAD.size:
                high, low, kind, flags, number = frames.HEAD.unpack_from(self._unread)
                end = frames.HEAD.size + (high << 8 | low)
                if len(self._unread) < end:
                    break
                payload, self._unread = self._unread[frames.HEAD.size : end], self._unread[end:]
                yield ReceivedFrame(kind, flags, number, payload)
            try:
                more = self.socket.recv(65_536)
            except ConnectionError:
                self.was_reset = True
                return
            if not more:
                return
            self._unread += more

    def status(self, number: int) -> tuple[int, str]:
        """Wait for the end of a call, and return its grpc-status and grpc-message."""
        for kind, flags, stream, payload in self.frames():
            if kind == frames.HEADERS:
                headers = dict(self._decoder.decode(payload))
                if stream == number and flags & frames.END_STREAM:
                    return int(headers["grpc-status"]), headers.get("grpc-message", "")
        raise AssertionError("the connection has ended")

    def end(self) -> tuple[int, str]:
        """Wait for the end of the connection, and return the code and the reason of the last GOAWAY (-1: none came)."""
        code_and_reason = (-1, "")
        for kind, _, _, payload in self.frames():
            if kind == frames.GOAWAY:
                code_and_reason = int.from_bytes(payload[4:8], "big"), payload[8:].decode()
        return code_and_reason
