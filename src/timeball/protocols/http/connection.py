"""One connection: uvicorn's, with bounds of a request's head, and an answer in one write.

uvicorn bounds neither the bytes of a head nor the time that a client takes for it, and writes the head of an answer
apart from its body: two calls of the kernel, and two segments.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from timeball.protocols.wrong_protocols import WRONG_PROTOCOLS, protocol_of

_BEGIN_BYTES = 64
HEAD_BYTES_MAX = 32 * 1024
LAST_BYTES_S = 5.0  # for a client to take what is left when its connection is closed
HEAD_S = 20.0  # for a head, from the connection or its first byte on


class JoinedWrites(asyncio.Transport):
    """A transport that writes what one turn of the loop has for it in one go."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport, self._loop = transport, loop
        self._parts: list[bytes] = []  # not empty: a flush is scheduled

    def write(self, data: Any) -> None:
        """Write this at the end of the turn, behind what was written before it."""
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        """Write the rest, then close."""
        self._flush()
        self._transport.close()
        if self._transport.get_write_buffer_size():
            # Closed when it is written, and a client that does not read has it wait for ever.
            self._loop.call_later(LAST_BYTES_S, self._transport.abort)

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def is_closing(self) -> bool:
        """Return whether it closes or is closed."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return what the transport knows of its socket."""
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Read no more for now."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Hand what is read to another protocol."""
        self._transport.set_protocol(protocol)


class BoundedHttp(HttpToolsProtocol):
    """uvicorn's connection, with bounds of a request's head."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes = 0
        self._begin = b""  # of a head, to name the protocol of a client that speaks another
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(JoinedWrites(transport, self.loop))
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Count the bytes of a head that is not complete."""
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
        """Refuse what is no HTTP/1; name what it is in the broker's log."""
        if protocol_of(self._begin) != "HTTP/1":
            peer = self.client[0] if self.client else ""
            WRONG_PROTOCOLS.note("http", self._begin, peer, self.loop.time())
        super().send_400_response(msg)

    def on_message_begin(self) -> None:
        """Begin to wait for the rest of a head."""
        super().on_message_begin()
        if self._deadline is None:
            self._wait()

    def on_headers_complete(self) -> None:
        """Hand the request on: its body has bounds of its own."""
        self._stop_waiting()
        super().on_headers_complete()

    def _wait(self) -> None:
        self._head_bytes = 0
        self._deadline = self.loop.call_later(HEAD_S, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
