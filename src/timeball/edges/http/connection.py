"""One HTTP connection: uvicorn's parser and flow control, limits for heads, and the start of each request.

    JoinedWrites      a transport that joins the writes of one turn of the event loop
    RequestFlow       flow control that reads no more while requests wait
    HttpConnection    one connection

uvicorn would build an ASGI scope, several events and two timers for each request. Timeball's handlers need none of
them, so a connection starts them itself (docs/decisions/0099-http-without-asgi.md). A head is the request line with the
headers. uvicorn limits neither its size nor the time until it is complete. It also writes the head and the body of an
answer separately, which costs two system calls and two TCP segments.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Iterable
from functools import partial
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from timeball.edges.http.codec import problem
from timeball.edges.http.exchange import Exchange
from timeball.edges.http.requests import ANSWER_S, Endpoint, PathTable, no_path
from timeball.edges.shared.first_byte import WRONG_PROTOCOLS, protocol_of
from timeball.model.errors import Unavailable

STOPPING = problem(503, Unavailable.code, "the broker stops, and did nothing; send the request again")
_FIRST_BYTES_MAX = 64  # of a connection; enough to recognize another protocol
HEAD_BYTES_MAX = 32 * 1024  # also of trailers, or of the extension of a chunk, that come in several pieces
# An idle connection stays open for this long at a stop. A request that is on its way gets an answer, from which the
# client knows that it was not carried out. uvicorn waits for 0.1 s at a stop anyway.
LINGER_S = 0.08
LAST_BYTES_S = 5.0  # for a client to read the remaining bytes when the broker closes its connection
HEAD_S = 20.0  # for a complete head, counted from the connection or from the first byte of the head
_TOO_LARGE = f"a head or trailer of more than {HEAD_BYTES_MAX} bytes"


class _HeadTooLarge(Exception):
    """A head has more than HEAD_BYTES_MAX. The parser reports it as the context of its HttpParserError."""


class JoinedWrites(asyncio.Transport):
    """A transport that joins the writes of one turn of the event loop into one write."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport, self._loop = transport, loop
        self._chunks: list[bytes] = []  # written at the end of this turn; if not empty, a flush is scheduled

    def write(self, data: Any) -> None:
        """Add `data` to the write at the end of this turn of the loop."""
        if not self._chunks:
            self._loop.call_soon(self._flush)
        self._chunks.append(data)

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        """Write a whole answer at once, as no other bytes follow it in this turn."""
        if self._chunks:
            self.write(b"".join(list_of_data))
        elif not self._transport.is_closing():
            self._transport.write(b"".join(list_of_data))

    def close(self) -> None:
        """Write the remaining bytes, then close."""
        self._flush()
        if self._transport.is_closing():  # asyncio's transport with TLS cannot be asked after a second close
            return
        self._transport.close()
        if self._transport.get_write_buffer_size():
            # The transport closes after the last byte is written. A client that does not read would keep it open.
            self._loop.call_later(LAST_BYTES_S, self._abort_unread)

    def _abort_unread(self) -> None:
        """Close the transport if bytes are still unread. Otherwise it has closed itself, and `abort` would fail."""
        if self._transport.get_write_buffer_size():
            self._transport.abort()

    def _flush(self) -> None:
        """Write the collected chunks at once."""
        chunks, self._chunks = self._chunks, []
        if chunks and not self._transport.is_closing():
            self._transport.write(b"".join(chunks))

    def abort(self) -> None:
        """Close at once."""
        self._transport.abort()

    def is_closing(self) -> bool:
        """True while the transport closes, and when it is closed."""
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return information about the socket by its name in asyncio, or `default`."""
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        """Stop reading until `resume_reading`."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again."""
        self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Pass the received bytes to another protocol."""
        self._transport.set_protocol(protocol)


class RequestFlow(FlowControl):
    """Flow control that reads no more while requests of the connection wait for the answer to an earlier one."""

    def __init__(self, connection: HttpConnection) -> None:
        super().__init__(connection.transport)
        self._connection = connection

    def resume_reading(self) -> None:
        """Read again, unless requests wait: the client could add to them without a limit."""
        if self.read_paused and not self._connection.waiting:
            super().resume_reading()
            self._connection.after_resume()


class HttpConnection(HttpToolsProtocol):
    """One connection. It answers its requests one after the other, in their order."""

    cycle: Exchange  # the newest request

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._paths: PathTable = self.config.loaded_app
        # requests that are not started: they wait for their bodies, or for the answer to an earlier one
        self.waiting: deque[tuple[Exchange, Endpoint | None]] = deque()
        self._is_invalid = False  # the client has sent an invalid request; the bytes behind it are ignored
        self._serving: Exchange | None = None  # the request that is started and not answered
        self._unused_bytes = 0  # received since the last head or part of a body
        # the size of the pieces in which the newest head came: an upper limit of its size, as they may have other bytes
        self._head_pieces_bytes = 0
        # the first bytes of the connection, by which another protocol is recognized
        self._first_bytes = b""
        self._is_in_head = True  # a head is expected at once, or has begun
        # the time limit of a head that has not come in one piece. None: no such head is under way
        self._head_deadline: asyncio.TimerHandle | None = None
        self._idle_since_s: float | None = None  # None while a request is under way
        self._is_stopping = False  # the broker stops: requests that come are refused

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit for the head of the first request."""
        super().connection_made(JoinedWrites(transport, self.loop))
        self.flow = RequestFlow(self)
        self._start_head_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the time limits, and tell the started request that its client has disconnected."""
        self._cancel_head_deadline()
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
        # uvicorn marks only the newest request.
        if self._serving is not None:
            self._serving.disconnected = True
            self._serving.notify()
            if self._serving.on_disconnect is not None:
                self._serving.on_disconnect()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """Refuse further requests, and close the connection after the present one, or after LINGER_S."""
        self._is_stopping = True
        if self._serving is not None:
            self.cycle.keep_alive = self._serving.keep_alive = False
        elif not self.transport.is_closing():
            self.loop.call_later(LINGER_S, self.transport.close)

    def eof_received(self) -> None:
        """Close the connection within LAST_BYTES_S. asyncio would close it when the client has read all answers."""
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse received bytes, and start the first request that waits.

        Refuses invalid bytes, and heads and trailers that are too large.
        """
        if self._is_invalid:
            return
        if not self._first_bytes:
            self._first_bytes = data[:_FIRST_BYTES_MAX]
        self._unused_bytes += len(data)
        self._head_pieces_bytes = len(data) + (self._head_pieces_bytes if self._is_in_head else 0)
        try:
            self._parse(data)
        except HttpParserError as error:
            self.logger.warning("invalid HTTP request: %s", error)
            is_large = isinstance(error.__context__, _HeadTooLarge)
            self.send_400_response(_TOO_LARGE if is_large else "Invalid HTTP request received.")
            return
        # A request whose body has not come yet: its handler waits for it.
        self._start_next()
        if self.transport.is_closing():
            return
        if self._unused_bytes > HEAD_BYTES_MAX:
            self.send_400_response(_TOO_LARGE)
        # Usually a head comes at once, and needs no time limit.
        elif self._is_in_head and self._head_deadline is None and not self.flow.read_paused:
            self._start_head_deadline()

    def after_resume(self) -> None:
        """Start the time limit for a head that has begun. It does not run while the connection reads nothing."""
        if self._is_in_head and self._head_deadline is None and not self.transport.is_closing():
            self._start_head_deadline()

    def _parse(self, data: bytes | memoryview) -> None:
        """Pass received bytes to the parser. Raises HttpParserError.

        Requests with `Upgrade` are served as if they had no such header (RFC 9110, 7.8). The parser stops behind the
        head of such a request, so a new parser gets the head again without the header, and then the remaining bytes.
        """
        while data:
            try:
                self.parser.feed_data(data)
            except HttpParserUpgrade as upgrade:
                if self.parser.get_method() == b"CONNECT":  # has no body, but a tunnel
                    raise HttpParserError("CONNECT is not supported") from None
                head = self._head_without_upgrade()
                # The old parser parses nothing more if the head has `Connection: close`.
                self.parser = HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.parser.feed_data(head)
                data = memoryview(data)[upgrade.args[0] :]
            else:
                return

    def _head_without_upgrade(self) -> bytes:
        """Build the head of the newest request again, without the header Upgrade."""
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    def send_400_response(self, msg: str) -> None:
        """Refuse an invalid request with status 400 and the text `msg`, and close the connection.

        If earlier requests wait for their answers, the invalid one gets none: the connection closes after those
        answers. If the client speaks another protocol, log the name of that protocol.
        """
        if protocol_of(self._first_bytes) != "HTTP/1":
            peer = self.client[0] if self.client else ""
            WRONG_PROTOCOLS.note("http", self._first_bytes, peer, self.loop.time())
        if self.waiting and self.cycle.more_body:
            self.waiting.pop()  # the invalid request itself: a part of its body is invalid
        last_exchange = self.waiting[-1][0] if self.waiting else self._serving
        if last_exchange is None or (last_exchange.more_body and not last_exchange.response_started):
            super().send_400_response(msg)
        else:
            last_exchange.keep_alive, self._is_invalid, self._is_in_head = False, True, False
            self._cancel_head_deadline()

    # -- events of the parser ----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """Begin a head. Called for the first byte of a request."""
        self.url, self.headers, self.expect_100_continue = b"", [], False
        self._idle_since_s = None  # only here: empty lines between requests are no requests
        if not self._is_in_head:
            self._is_in_head, self._unused_bytes = True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Add a header. Trailers are ignored."""
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Build the state of a request, and add it to the requests that wait. Raises _HeadTooLarge."""
        if self.parser.should_upgrade():
            return  # the head comes again
        # The exact size costs a loop. Nearly every head comes in one small piece, and needs none.
        if self._head_pieces_bytes > HEAD_BYTES_MAX and self._head_bytes() > HEAD_BYTES_MAX:
            raise _HeadTooLarge
        self._is_in_head, self._unused_bytes = False, 0
        self._cancel_head_deadline()
        parser = self.parser
        target, endpoint = self._paths.find(self.url)
        earlier_exchange = self.cycle
        exchange = self.cycle = Exchange(
            parser.get_method().decode("ascii"),
            target,
            {name.decode("latin-1"): value.decode("latin-1") for name, value in self.headers},
            peer=self.client[0] if self.client else "",
            transport=self.transport,
            flow=self.flow,
            keep_alive=parser.get_http_version() != "1.0" and parser.should_keep_alive(),
            expects_continue=self.expect_100_continue,
        )
        exchange.on_response = self.on_response_complete
        self.waiting.append((exchange, endpoint))
        if earlier_exchange is not None and not earlier_exchange.response_complete:
            self.flow.pause_reading()

    def _head_bytes(self) -> int:
        """Compute the size of the complete head, without additional blanks in it."""
        request_line = len(self.parser.get_method()) + len(self.url) + len("  HTTP/1.1\r\n")
        return request_line + sum(len(name) + len(value) + 4 for name, value in self.headers) + len("\r\n")

    def on_body(self, body: bytes) -> None:
        """Add received bytes of a body to its request. Bytes that arrive after the answer are dropped.

        Pauses reading if the handler has not taken more than HIGH_WATER_LIMIT bytes.
        """
        self._unused_bytes = 0
        exchange = self.cycle
        if not exchange.response_complete:
            exchange.add_body(body)
            if len(exchange.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()

    def on_message_complete(self) -> None:
        """Note that the body of a request is complete, and start the request if no other one is served."""
        if self.parser.should_upgrade():
            return
        exchange = self.cycle
        if not exchange.response_complete:
            exchange.more_body = False
            exchange.notify()
        self._start_next()

    # -- requests ----------------------------------------------------------------------------------------------

    def _start_next(self) -> None:
        """Start the next request, unless another one is under way."""
        if self.waiting and self._serving is None and not self.transport.is_closing():
            if self._is_stopping and self.waiting[0][0].more_body:
                # A refusal now would close the connection with unread bytes. This resets it, and the client would lose
                # the answer.
                return
            exchange, endpoint = self.waiting.popleft()
            self._serving, self._idle_since_s = exchange, None
            if len(exchange.body) <= HIGH_WATER_LIMIT:  # for a larger body, its handler resumes reading
                self.flow.resume_reading()
            if self._is_stopping:
                exchange.keep_alive = False
                exchange.write(STOPPING)
            elif endpoint is not None:
                endpoint.start(exchange, partial(self._run, exchange))
            elif self.flow.write_paused:
                self._run(exchange, _refuse_later(exchange))
            else:
                exchange.write(no_path(exchange.target.path))

    def _run(self, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        """Start a task that serves a request."""
        task = self.loop.create_task(self._serve(exchange, work))
        self.tasks.add(task)  # uvicorn waits for these tasks at a stop
        task.add_done_callback(self.tasks.discard)  # also of a task that is cancelled before its first step

    async def _serve(self, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        """Run the handler of a request, and close the connection without an answer if it fails or is cancelled."""
        try:
            await work
        except BaseException:  # such as a cancel at a stop, or a client that does not read
            # No answer, and no 500: it is unknown whether the request was carried out, as after a crash. Clients know
            # from the closed connection which requests they may repeat.
            exchange.transport.close()

    def on_response_complete(self) -> None:
        """Start the next request that has come, or wait for the next request for a limited time."""
        self.server_state.total_requests += 1
        self._serving = None
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.waiting:
            # In a later turn, because each answer may start the next request: the stack would grow with their number.
            self.loop.call_soon(self._start_next)
            return
        self._idle_since_s = self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._wait_for_next_request(self.timeout_keep_alive)

    # -- time limits -------------------------------------------------------------------------------------------
    # A timer for each request would cost as much as its checks. So one timer runs while a connection is open, and looks
    # how long it has been idle.

    def _wait_for_next_request(self, wait_s: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(wait_s, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """Close the connection if it has been idle for `timeout_keep_alive` seconds."""
        self.timeout_keep_alive_task = None
        if self._idle_since_s is None:
            return  # the timer starts again after the answer
        remaining_s = self._idle_since_s + self.timeout_keep_alive - self.loop.time()
        if remaining_s > 0:
            self._wait_for_next_request(remaining_s)
        else:
            super().timeout_keep_alive_handler()

    def _start_head_deadline(self) -> None:
        """Start the time limit for a head."""
        self._head_deadline = self.loop.call_later(HEAD_S, self._refuse_slow_head)

    def _refuse_slow_head(self) -> None:
        """Refuse a head that is not complete in time. A client that has sent nothing gets no answer."""
        if self._first_bytes:
            self.send_400_response(f"the head was not complete within {HEAD_S:.0f} s")
        else:
            self.transport.abort()

    def _cancel_head_deadline(self) -> None:
        if self._head_deadline is not None:
            self._head_deadline.cancel()
            self._head_deadline = None


async def _refuse_later(exchange: Exchange) -> None:
    """Answer a request for an unknown path when the client has read earlier answers."""
    if await exchange.drain(ANSWER_S):
        exchange.write(no_path(exchange.target.path))
