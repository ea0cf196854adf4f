"""Calls over the HTTP API: connections that are kept for further calls, retries, and streams of messages.

A connection serves one call at a time, and is kept for the next one. Connections are never shared between processes: a
child process after a fork closes its copies, and opens its own.

An error in a problem document has the code of the broker's error, so it becomes the error of the same class.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

import msgspec

from timeball.client.attempts import Attempts, Lost, OpenRead, split_endpoints, wait_within
from timeball.client.credentials import Credentials, credentials
from timeball.client.http_codec import (
    Operation,
    Page,
    Received,
    Receiving,
    decode_lines,
    decode_received,
    decoded,
    error_of,
    receive_target,
)
from timeball.client.http_connection import Connection, Reply, Request, node_of
from timeball.client.network import BLOCKING, Network, driven
from timeball.io.clock import Clock
from timeball.model.errors import RequestError, TimeballError

if TYPE_CHECKING:
    import ssl

SCHEMES = ("http", "https")
IDLE_S = 60.0  # a connection is used again within this time; the broker closes it after 75 s
KEPT_MAX = 64  # idle connections to a node
STREAM_TYPES = ("application/x-ndjson", "text/event-stream")
STREAM_SILENCE_S = 60.0  # the broker writes an empty line every 15 s
LAST_BYTES_S = 1.0  # for the last messages of a stream that the client ends
REOPEN_PAUSES_S = (0.1, 1.0)  # the first and the longest pause after streams that brought nothing
BACKLOG_BYTES = 16_384  # behind the first messages of a read: the broker has probably more to send
BACKLOG_WAIT_S = 0.02  # for the next messages of a backlog

A = TypeVar("A")
T = TypeVar("T")


class HttpCalls(Attempts):
    """The calls to one broker or cluster over HTTP. Thread safe."""

    def __init__(
        self,
        endpoint: str,
        timeout_ms: int,
        who: Credentials | None = None,
        *,
        patience_s: float | None = None,
        clock: Clock | None = None,
        network: Network = BLOCKING,
    ) -> None:
        """Prepare calls to http://host:port, or http://host:port,host:port for the nodes of a cluster.

        `who`: the credentials, by default from the environment. `patience_s`: retry each call for this many seconds
        (see attempts.py). Raises RequestError for a malformed endpoint, or certificates that cannot be read.
        """
        super().__init__(
            split_endpoints(endpoint, SCHEMES, "http://host:port"),
            timeout_ms,
            patience_s=patience_s,
            clock=clock,
            network=network,
        )
        self._who = credentials() if who is None else who
        self._nodes = {each: node_of(each) for each in self._endpoints}
        self._tls = _tls_context(self._who) if endpoint.startswith("https") else None
        authorization = self._who.authorization
        self._headers = (("authorization", authorization),) if authorization else ()
        self._kept: dict[str, deque[Connection]] = {each: deque(maxlen=KEPT_MAX) for each in self._endpoints}
        self._all: weakref.WeakSet[Connection] = weakref.WeakSet()

    def close(self) -> None:
        """Close the connections. Calls that wait for their next attempt end with Unavailable."""
        self._closed.set()
        for kept in self._kept.values():
            while kept:
                kept.pop().close()

    def after_fork(self) -> None:
        """See Attempts."""
        super().after_fork()
        inherited, self._all = list(self._all), weakref.WeakSet()
        self._kept = {each: deque(maxlen=KEPT_MAX) for each in self._endpoints}
        for connection in inherited:
            connection.forget()

    # ---- calls ------------------------------------------------------------------------------------------

    async def run_async(self, operation: Operation[T]) -> T:
        """Make the call of one operation."""
        return await self.ask_async(
            operation.request, operation.decode, is_repeatable=operation.is_repeatable
        )

    run = driven(run_async)

    async def read_pages(self, page_after: Callable[[str | None], Operation[Page[T]]]) -> list[T]:
        """Read all pages of a list. `page_after`: the operation that reads the page behind a name."""
        rows, next_page = await self.run_async(page_after(None))
        while next_page is not None:
            page, next_page = await self.run_async(page_after(next_page))
            rows += page
        return rows

    async def receive(self, request: Receiving, open_read: OpenRead | None = None) -> list[Received]:
        """Lease messages to a group. Waits for the first one."""

        def build(limit_s: float) -> Request:
            wait_ms = wait_within(limit_s, self.timeout_ms, request.wait_ms)
            return Request("POST", receive_target(request._replace(wait_ms=wait_ms)))

        return await self._ask(
            build, decode_received, is_repeatable=True, wait_ms=request.wait_ms, open_read=open_read
        )

    def open_stream(self, request: Receiving, credit: int, open_read: OpenRead | None) -> MessageStream:
        """Prepare a stream of messages."""
        return MessageStream(self, request, credit, open_read)

    async def ask_async(
        self,
        request: Request,
        decode: Callable[[bytes], T],
        *,
        is_repeatable: bool,
    ) -> T:
        """Make a request, perhaps in several attempts, and decode its answer."""
        return await self._ask(lambda limit_s: request, decode, is_repeatable=is_repeatable)

    ask = driven(ask_async)

    async def _ask(
        self,
        build: Callable[[float], Request],
        decode: Callable[[bytes], T],
        *,
        is_repeatable: bool,
        wait_ms: int = 0,
        open_read: OpenRead | None = None,
    ) -> T:
        """See `ask_async`. `build`: the request of an attempt, from its time limit in seconds.

        `open_read`: the request is a long poll, which others may cancel and which needs no slot of the network.
        """
        self.check()

        async def attempt(limit_s: float) -> T:
            endpoint, end_ns = self.endpoint, self._clock.monotonic_ns() + int(limit_s * 1e9)
            request = build(limit_s)
            sent = request._replace(headers=(*request.headers, *self._headers))
            connection = await self._connect(endpoint, limit_s)
            try:
                reply = await _read(connection, sent, self._seconds_until(end_ns), open_read)
            except BaseException:  # of any kind: an answer under way makes the connection useless
                connection.close()
                raise
            self._keep(endpoint, connection)
            if reply.status >= 400:
                raise error_of(reply, endpoint)
            return decoded(decode, reply.body, endpoint, is_read=request.method == "GET")

        is_repeatable |= self._patience_s is not None
        async with self.network.slot() if open_read is None else nullcontext():
            return await self.with_retries(
                attempt, self.timeout_ms, is_repeatable=is_repeatable, wait_ms=wait_ms
            )

    def ask_json(
        self, request: Request, kind: type[A], result: Callable[[A], T], *, is_repeatable: bool = True
    ) -> T:
        """Make a request. `result`: the result, from the answer of this kind."""

        def decode(data: bytes) -> T:
            return result(msgspec.json.decode(data, type=kind))

        return self.ask(request, decode, is_repeatable=is_repeatable)

    # ---- connections ------------------------------------------------------------------------------------

    async def _connect(self, endpoint: str, remaining_s: float) -> Connection:
        """Take a kept connection to a node, or connect. Leaves time for the other nodes. Raises NotSent."""
        kept, oldest_ns = self._kept[endpoint], self._clock.monotonic_ns() - int(IDLE_S * 1e9)
        while kept:
            try:
                connection = kept.pop()
            except IndexError:  # another thread took it
                break
            if connection.used_ns >= oldest_ns and not connection.is_stale:
                return connection
            connection.close()
        connection = await Connection.connect(
            self._nodes[endpoint],
            self.network,
            self._tls,
            self._who.tls_name,
            self.connect_limit_s(remaining_s),
            self._clock,
        )
        self._all.add(connection)
        return connection

    async def open_async(self, request: Request, open_read: OpenRead | None) -> Connection:
        """Make a request whose answer has no end. Returns its connection, from which the answer is read."""
        sent = request._replace(headers=(*request.headers, *self._headers))

        async def attempt(limit_s: float) -> Connection:
            endpoint, end_ns = self.endpoint, self._clock.monotonic_ns() + int(limit_s * 1e9)
            connection = await self._connect(endpoint, limit_s)
            try:
                if open_read is not None:
                    open_read.begin(connection.interrupt)
                reply = await connection.open(sent, self._seconds_until(end_ns))
                if reply.status < 400:
                    if not reply.content_type.startswith(STREAM_TYPES):
                        raise TimeballError(
                            f"{endpoint} answered with {reply.content_type!r}, not as a broker would"
                        )
                    return connection
                data = b""
                while chunk := await connection.read_async(self._seconds_until(end_ns)):
                    data += chunk
                raise error_of(reply._replace(body=data), endpoint)
            except BaseException:  # of any kind: an answer under way makes the connection useless
                connection.close()
                raise

        return await self.with_retries(attempt, self.timeout_ms)

    def open(self, request: Request, open_read: OpenRead | None) -> Connection:
        """See `open_async`."""
        return self.network.drive(self.open_async(request, open_read))

    def _seconds_until(self, end_ns: int) -> float:
        return max(0.001, (end_ns - self._clock.monotonic_ns()) / 1e9)

    def _keep(self, endpoint: str, connection: Connection) -> None:
        kept = self._kept[endpoint]
        if connection.is_reusable and not self._closed.is_set() and len(kept) < KEPT_MAX:
            kept.append(connection)
        else:
            connection.close()


async def _read(
    connection: Connection, request: Request, timeout_s: float, open_read: OpenRead | None
) -> Reply:
    """Make a request that another thread may cancel."""
    if open_read is None:
        return await connection.ask(request, timeout_s)
    open_read.begin(connection.interrupt)
    try:
        return await connection.ask(request, timeout_s)
    except TimeballError:
        if open_read.is_cancelled:
            raise RequestError("this read was cancelled") from None
        raise
    finally:
        open_read.end()


def _tls_context(who: Credentials) -> ssl.SSLContext:
    """Build the TLS settings of a client: the certificates that it trusts, by default the system's."""
    import ssl  # takes a third of the client's time to import, and few clients use it

    try:
        cadata = None if who.tls_roots is None else who.tls_roots.decode("ascii")
        return ssl.create_default_context(cadata=cadata)
    except (ssl.SSLError, ValueError) as error:
        raise RequestError(f"tls_roots: no PEM certificates ({error})") from error


class MessageStream:
    """A stream of messages with credit. Opens when it is first read, and again after it has ended.

    Belongs to one thread. The reader must have acknowledged or given back the messages of a stream that has ended, or
    it may hold more messages than its credit for a while.
    """

    def __init__(self, calls: HttpCalls, request: Receiving, credit: int, open_read: OpenRead | None) -> None:
        self._calls, self._open_read, self._credit = calls, open_read, credit
        self.network = calls.network
        self._request = Request("POST", receive_target(request, credit))
        self._connection: Connection | None = None
        self._clock = calls._clock
        self._partial_line = b""  # the bytes after the last complete line
        self._received_ns = 0  # when the last bytes had come
        self._reopen_ns, self._reopen_pause_s = 0, 0.0  # not before this time, and the next pause

    @property
    def descriptor(self) -> int | None:
        """The file descriptor of the socket, for a poll. None while no stream is open."""
        return None if self._connection is None else self._connection.descriptor

    async def read_async(self, wait_ms: int) -> list[Received]:
        """Wait up to `wait_ms` for messages, and return all that have come. Opens the stream when needed.

        Their leases run already, so no message is left in the socket. The broker ends a stream that is not read.
        """
        end_ns = self._clock.monotonic_ns() + wait_ms * 1_000_000
        messages, drained_bytes = list[Received](), 0
        while len(messages) < self._credit:
            if self._connection is None:
                if messages or not await self._wait_to_open(end_ns):
                    break
                await self._open()
            assert self._connection is not None
            if messages:
                wait_s = BACKLOG_WAIT_S if drained_bytes >= BACKLOG_BYTES else 0
            else:
                wait_s = max(0.0, (end_ns - self._clock.monotonic_ns()) / 1e9)
            try:
                data = await self._connection.read_async(wait_s)
            except TimeballError as error:
                if not messages:
                    self._check_cancelled()
                    if not isinstance(error, Lost):
                        raise
                data = None
            if data is None:  # the broker stops, or the connection broke
                if not messages:
                    self._check_cancelled()
                self._drop()
                self._reopen_ns = self._clock.monotonic_ns() + int(self._reopen_pause_s * 1e9)
            elif data:
                self._received_ns = self._clock.monotonic_ns()
                drained_bytes += len(data) if messages else 0
                messages += self._take_lines(data)
                if messages:
                    self._reopen_pause_s = 0.0
            elif messages:
                break
            elif self._clock.monotonic_ns() - self._received_ns > STREAM_SILENCE_S * 1e9:
                self._calls.leave(self._connection.endpoint)
                self._drop()
            # Not after bytes without a message: those of a message may be in memory, where no poll sees them.
            if not (data or messages) and self._clock.monotonic_ns() >= end_ns:
                break
        return messages

    read = driven(read_async)

    async def close_async(self) -> list[Received]:
        """End the stream, and return the messages that had come."""
        if self._connection is None:
            return []
        messages = self._take_lines(await self._connection.finish(LAST_BYTES_S))
        self._drop()
        return messages

    close = driven(close_async)

    async def _wait_to_open(self, end_ns: int) -> bool:
        """Wait until a stream may be opened. False if it may not be before `end_ns`."""
        wait_ns = min(self._reopen_ns, end_ns) - self._clock.monotonic_ns()
        if wait_ns > 0:
            await self._calls.pause(wait_ns / 1e9)
            self._check_cancelled()
        return self._reopen_ns <= max(end_ns, self._clock.monotonic_ns())

    async def _open(self) -> None:
        try:
            self._connection = await self._calls.open_async(self._request, self._open_read)
        except TimeballError:
            self._check_cancelled()
            raise
        self._partial_line, self._received_ns = b"", self._clock.monotonic_ns()
        self._reopen_pause_s = min(max(2 * self._reopen_pause_s, REOPEN_PAUSES_S[0]), REOPEN_PAUSES_S[1])

    def _take_lines(self, data: bytes) -> list[Received]:
        """Decode the lines that are complete."""
        lines, _, self._partial_line = (self._partial_line + data).rpartition(b"\n")
        return decoded(decode_lines, lines, self._calls.endpoint, is_read=True)

    def _drop(self) -> None:
        if self._connection is not None:
            if self._open_read is not None:
                self._open_read.end()
            self._connection.close()
            self._connection = None

    def _check_cancelled(self) -> None:
        if self._open_read is not None and self._open_read.is_cancelled:
            self._drop()
            raise RequestError("this read was cancelled")
