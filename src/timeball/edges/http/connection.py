"""One HTTP connection: uvicorn's protocol, with limits for a request's head, and each answer in one write.

uvicorn limits neither the bytes of a head nor the time that a client may take for it. It also writes the head and the
body of an answer separately, which costs two system calls and two TCP segments.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from timeball.edges.shared.wrong_protocols import WRONG_PROTOCOLS, protocol_of

_BEGIN_BYTES = 64  # enough of a head to recognize another protocol
HEAD_BYTES_MAX = 32 * 1024
LAST_BYTES_S = 5.0  # for a client to read the remaining bytes when its connection is closed
HEAD_S = 20.0  # for a complete head, counted from the connection or from the first byte of the head


class JoinedWrites(asyncio.Transport):
    """A transport that joins the writes of one turn of the event loop into one write."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport, self._loop = transport, loop
        self._parts: list[bytes] = []  # if it is not empty, a flush is scheduled

    def write(self, data: Any) -> None:
        """Add `data` to the write at the end of this turn of the loop."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        """Write the remaining bytes, then close."""
        self._flush()
        self._transport.close()
        if self._transport.get_write_buffer_size():
            # The transport closes after the last byte is written. A client that does not read would keep it open for
            # ever.
            self._loop.call_later(LAST_BYTES_S, self._transport.abort)

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def is_closing(self) -> bool:
        """True while the transport closes, and when it is closed."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information about the socket, as asyncio's transports do."""
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Stop reading until `resume_reading`."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Deliver the bytes that are read to another protocol."""
        self._transport.set_protocol(protocol)


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's protocol for one connection, with limits for a request's head."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes = 0
        # the first bytes of a head, which identify the protocol of a client that uses another one
        self._begin = b""
        self._deadline: asyncio.TimerHandle | None = None  # of the head that is being received

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit for the first head."""
        super().connection_made(JoinedWrites(transport, self.loop))
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the time limit."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count the bytes of an incomplete head."""
        if self._deadline is not None:
            if not self._head_bytes:
                self._begin = data[:_BEGIN_BYTES]
            self._head_bytes += len(data)
        super().data_received(data)
        if (
            self._deadline is not None
            and self._head_bytes > HEAD_BYTES_MAX
            and not self.transport.is_closing()
        ):
            self.send_400_response(f"a head of more than {HEAD_BYTES_MAX} bytes")

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not HTTP/1. If it is of another protocol, log the name of that protocol."""
        if protocol_of(self._begin) != "HTTP/1":
            peer = self.client[0] if self.client else ""
            WRONG_PROTOCOLS.note("http", self._begin, peer, self.loop.time())
        super().send_400_response(msg)

    def on_message_begin(self) -> None:
        """Start the time limit for the rest of a head."""
        super().on_message_begin()
        if self._deadline is None:
            self._wait()

    def on_headers_complete(self) -> None:
        """Hand the request on. Its body has separate limits."""
        self._stop_waiting()
        super().on_headers_complete()

    def _wait(self) -> None:
        self._head_bytes = 0
        self._deadline = self.loop.call_later(HEAD_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
