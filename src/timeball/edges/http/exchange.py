"""One HTTP request and its answer: uvicorn's state of a request, without the parts that only ASGI needs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple, cast

from starlette.datastructures import QueryParams
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from timeball.edges.http.codec import Answer, encode

if TYPE_CHECKING:
    from uvicorn._types import HTTPScope

logger = logging.getLogger(__name__)


class Target(NamedTuple):
    """The target of a request: the path without escapes, the query, and the parameters in the path."""

    path: str
    query: QueryParams
    params: dict[str, str]


class Exchange(RequestResponseCycle):
    """The state of one request. `body` has the bytes that were received and not read yet.

    Handlers that wait for the body or for a disconnect use `receive`, and streams use `send`: these are uvicorn's.
    """

    logger, access_log = logging.getLogger("uvicorn.error"), False
    default_headers: list[tuple[bytes, bytes]] = []
    # the state at the beginning
    disconnected = response_started = response_complete = False
    more_body = is_body_read = False
    chunked_encoding = None
    expected_content_length = 0
    on_disconnect: Callable[[], None] | None = None  # called when the client disconnects

    def __init__(
        self,
        method: str,
        target: Target,
        headers: dict[str, str],
        *,
        peer: str,
        transport: asyncio.Transport,
        flow: FlowControl,
        keep_alive: bool,
        expects_continue: bool,
    ) -> None:
        """Build the state of a request whose head is complete. uvicorn's constructor is not called."""
        self.method, self.target, self.headers, self.peer = method, target, headers, peer
        self.transport, self.flow, self.keep_alive = transport, flow, keep_alive
        self.waiting_for_100_continue = expects_continue
        self.body: bytes | bytearray = b""  # type: ignore[assignment]
        self.more_body = True

    @cached_property
    def scope(self) -> HTTPScope:  # type: ignore[override]
        """The part of an ASGI scope that uvicorn's `send` reads."""
        return cast("HTTPScope", {"method": self.method})

    @cached_property
    def message_event(self) -> asyncio.Event:  # type: ignore[override]
        """Set when `receive` has news: bytes of the body, or a disconnect. Most requests need no event."""
        event = asyncio.Event()
        if not self.is_body_read:
            event.set()
        return event

    def add_body(self, data: bytes) -> None:
        """Add received bytes of the body."""
        if not self.body:  # usually the only bytes: not copied
            self.body = data
        elif isinstance(self.body, bytearray):
            self.body += data
        else:
            self.body = bytearray(self.body + data)
        self.notify()

    def notify(self) -> None:
        """Wake a waiting `receive`."""
        if "message_event" in self.__dict__:
            self.message_event.set()

    def take_body(self) -> bytes:
        """Take the whole body, which must have been received. The next event of `receive` is the disconnect."""
        # A large body has paused the reading.
        self.flow.resume_reading()
        data, self.body, self.is_body_read = bytes(self.body), b"", True
        if "message_event" in self.__dict__:
            self.message_event.clear()
        return data

    async def drain(self, wait_s: float) -> bool:
        """Wait until the client has read earlier answers. Aborts its connection, and returns False, if it does not."""
        try:
            async with asyncio.timeout(wait_s):
                await self.flow.drain()
        except TimeoutError:
            logger.info("answer not taken peer=%s", self.peer)
            self.transport.abort()
            return False
        return True

    def write(self, answer: Answer) -> int:
        """Write an answer at once, head and body together. `flow.write_paused` must be false.

        Returns the number of bytes of the body that was written, 0 if the client has disconnected. uvicorn's `send`
        does the same in two events, and checks headers that do not come from Timeball.
        """
        if self.disconnected:
            return 0
        data = answer.value if isinstance(answer.value, bytes) else encode(answer.value)
        head = _first_lines(answer.status, answer.media_type)
        if answer.headers:
            head += b"".join(b"%b: %b\r\n" % header for header in answer.headers)
        if not self.keep_alive:
            head += b"connection: close\r\n"
        body = b"" if self.method == "HEAD" else data
        self.response_started, self.waiting_for_100_continue = True, False
        self.transport.writelines((head, b"content-length: %d\r\n\r\n" % len(data), body))
        self.response_complete = True
        self.notify()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()
        return len(body)


@lru_cache(64)
def _first_lines(status: int, media_type: str) -> bytes:
    """Build the status line and the headers that are equal in all answers with this status and media type."""
    return STATUS_LINE[status] + (
        f"content-type: {media_type}\r\ncache-control: no-store\r\nx-content-type-options: nosniff\r\n".encode()
    )
