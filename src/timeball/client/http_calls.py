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
    LeaseRequest,
    Operation,
    Page,
    Received,
    decode_answer,
    decode_lines,
    decode_received,
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
KEPT_MAX = 64  # idle connections to each node
STREAM_TYPES = ("application/x-ndjson", "text/event-stream")
STREAM_SILENCE_S = 60.0  # the broker writes an empty line every 15 s
LAST_BYTES_S = 1.0  # longest wait for the last messages of a stream that the client ends
# The first and the longest pause before a stream is opened again, after one without messages.
REOPEN_PAUSES_S = (0.1, 1.0)
# If this many bytes followed the first messages of a read, the broker probably has more to send. The read then waits
# BACKLOG_WAIT_S for them.
BACKLOG_BYTES = 16_384
BACKLOG_WAIT_S = 0.02

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
        self._nodes = {endpoint: node_of(endpoint) for endpoint in self._endpoints}
        self._tls = _tls_context(self._who) if endpoint.startswith("https") else None
        authorization = self._who.authorization
        self._headers = (("authorization", authorization),) if authorization else ()
        self._kept: dict[str, deque[Connection]] = {
            endpoint: deque(maxlen=KEPT_MAX) for endpoint in self._endpoints
        }
        self._all: weakref.WeakSet[Connection] = weakref.WeakSet()

    def close(self) -> None:
        """Close the connections. Calls that wait for their next attempt end with Unavailable."""
        self._closed.set()
        for idle_connections in self._kept.values():
            while idle_connections:
                idle_connections.pop().close()

    def after_fork(self) -> None:
        """See Attempts."""
        super().after_fork()
        inherited, self._all = list(self._all), weakref.WeakSet()
        self._kept = {endpoint: deque(maxlen=KEPT_MAX) for endpoint in self._endpoints}
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
        """Read all pages of a list, and return their rows.

        `page_after` builds the operation that reads the page after a `next_page`, or for None the first page.
        """
        rows, next_page = await self.run_async(page_after(None))
        while next_page is not None:
            page, next_page = await self.run_async(page_after(next_page))
            rows += page
        return rows

    async def receive(self, request: LeaseRequest, open_read: OpenRead | None = None) -> list[Received]:
        """Lease messages to a group. Waits up to `request.wait_ms` for the first one. Empty if none came.

        Raises RequestError if `open_read` is cancelled.
        """

        def build(limit_s: float) -> Request:
            wait_ms = wait_within(limit_s, self.timeout_ms, request.wait_ms)
            return Request("POST", receive_target(request._replace(wait_ms=wait_ms)))

        return await self._ask(
            build, decode_received, is_repeatable=True, wait_ms=request.wait_ms, open_read=open_read
        )

    def open_stream(self, request: LeaseRequest, credit: int, open_read: OpenRead | None) -> MessageStream:
        """Prepare a stream of messages, which opens when it is first read."""
        return MessageStream(self, request, credit, open_read)

    async def ask_async(
        self,
        request: Request,
        decode: Callable[[bytes], T],
        *,
        is_repeatable: bool,
    ) -> T:
        """Make a request, perhaps in several attempts, and decode the body of its answer.

        `is_repeatable`: the broker may receive the request twice. Raises the broker's error, or Unavailable.
        """
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
        """Make a request as `ask_async` does.

        `build` builds the request of an attempt from its time limit in seconds. `wait_ms`: how long the broker may wait
        before it answers. `open_read`: the request is a long poll, which can be cancelled and needs no slot.
        """
        self.check()

        async def attempt(limit_s: float) -> T:
            """Make the request once at the current node, within `limit_s` seconds, and decode its answer."""
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
            return decode_answer(decode, reply.body, endpoint, is_read=request.method == "GET")

        is_repeatable |= self._patience_s is not None
        async with self.network.slot() if open_read is None else nullcontext():
            return await self.with_retries(
                attempt, self.timeout_ms, is_repeatable=is_repeatable, wait_ms=wait_ms
            )

    def ask_json(
        self, request: Request, answer_type: type[A], convert: Callable[[A], T], *, is_repeatable: bool = True
    ) -> T:
        """Make a request, decode its answer from JSON as `answer_type`, and return the result of `convert` for it."""

        def decode(data: bytes) -> T:
            return convert(msgspec.json.decode(data, type=answer_type))

        return self.ask(request, decode, is_repeatable=is_repeatable)

    # ---- connections ------------------------------------------------------------------------------------

    async def _connect(self, endpoint: str, remaining_s: float) -> Connection:
        """Take a kept connection to a node, or open one within a part of `remaining_s` (`connect_limit_s`).

        Raises NotSent if the node does not answer.
        """
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
        """Make a request whose answer has no end. Returns the connection, from which the caller reads the answer.

        `open_read`: can end the connection from another thread, also after this call. Raises as `ask_async`.
        """
        sent = request._replace(headers=(*request.headers, *self._headers))

        async def attempt(limit_s: float) -> Connection:
            """Open the stream once at the current node. Returns its connection, or raises the error of the answer."""
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
        """Compute the time limit for a socket until `end_ns`, which is never 0: that would mean not to block."""
        return max(0.001, (end_ns - self._clock.monotonic_ns()) / 1e9)

    def _keep(self, endpoint: str, connection: Connection) -> None:
        """Keep a connection for the next call, or close it if that is not possible."""
        idle_connections = self._kept[endpoint]
        if connection.is_reusable and not self._closed.is_set() and len(idle_connections) < KEPT_MAX:
            idle_connections.append(connection)
        else:
            connection.close()


async def _read(
    connection: Connection, request: Request, timeout_s: float, open_read: OpenRead | None
) -> Reply:
    """Make a request. Raises RequestError if `open_read` is cancelled meanwhile."""
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
    """Build the TLS settings of a client: the certificates that it trusts, by default the system's.

    Raises RequestError if `tls_roots` are no certificates.
    """
    import ssl  # takes a third of the client's time to import, and few clients use it

    try:
        cadata = None if who.tls_roots is None else who.tls_roots.decode("ascii")
        return ssl.create_default_context(cadata=cadata)
    except (ssl.SSLError, ValueError) as error:
        raise RequestError(f"tls_roots: no PEM certificates ({error})") from error


class MessageStream:
    """A stream of messages. Opens when it is first read, and again after it has ended.

    The broker leases messages to the stream while fewer than `credit` of them have no answer. If the stream opens again
    before the messages of the previous one have answers, the reader may hold more than `credit` for a while. A stream
    belongs to one thread.
    """

    def __init__(
        self, calls: HttpCalls, request: LeaseRequest, credit: int, open_read: OpenRead | None
    ) -> None:
        self._calls, self._open_read, self._credit = calls, open_read, credit
        self.network = calls.network
        self._request = Request("POST", receive_target(request, credit))
        self._connection: Connection | None = None
        self._clock = calls._clock
        self._partial_line = b""  # the bytes after the last complete line
        self._received_ns = 0  # when the last bytes came
        self._reopen_ns = 0  # the stream is not opened again before this time
        self._reopen_pause_s = 0.0  # after the end of this stream; grows while streams bring no messages

    @property
    def descriptor(self) -> int | None:
        """The file descriptor of the socket, for a poll. None while no stream is open."""
        return None if self._connection is None else self._connection.descriptor

    async def read_async(self, wait_ms: int) -> list[Received]:
        """Wait up to `wait_ms` for messages, and return all that have come. Opens the stream when needed.

        Reads until the socket is empty, because the leases of all messages in it run already. Call this regularly, even
        with `wait_ms=0`: the broker ends a stream that is not read. Raises the broker's error, Unavailable if no stream
        can be opened, and RequestError after a cancel.
        """
        end_ns = self._clock.monotonic_ns() + wait_ms * 1_000_000
        messages, backlog_bytes = list[Received](), 0
        while len(messages) < self._credit:
            if self._connection is None:
                if messages or not await self._wait_to_open(end_ns):
                    break
                await self._open()
            if messages:
                wait_s = BACKLOG_WAIT_S if backlog_bytes >= BACKLOG_BYTES else 0
            else:
                wait_s = max(0.0, (end_ns - self._clock.monotonic_ns()) / 1e9)
            data = await self._read_bytes(wait_s, may_raise=not messages)
            if data is None:
                self._drop()
                self._reopen_ns = self._clock.monotonic_ns() + int(self._reopen_pause_s * 1e9)
            elif data:
                self._received_ns = self._clock.monotonic_ns()
                backlog_bytes += len(data) if messages else 0
                messages += self._take_lines(data)
                if messages:
                    self._reopen_pause_s = 0.0
            elif messages:
                break
            elif self._clock.monotonic_ns() - self._received_ns > STREAM_SILENCE_S * 1e9:
                self._leave_silent_node()
            # If bytes came without a whole message, read again even after `wait_ms`: the rest may be in h11's buffer,
            # where a poll of the socket does not see it.
            if not (data or messages) and self._clock.monotonic_ns() >= end_ns:
                break
        return messages

    read = driven(read_async)

    async def close_async(self) -> list[Received]:
        """End the stream. Returns the messages that came after the last read."""
        if self._connection is None:
            return []
        messages = self._take_lines(await self._connection.finish(LAST_BYTES_S))
        self._drop()
        return messages

    close = driven(close_async)

    async def _read_bytes(self, wait_s: float, *, may_raise: bool) -> bytes | None:
        """Read bytes of the open stream: b"" if none come within `wait_s`, None if the stream has ended.

        The broker ends it when it stops, or the connection breaks. Any other error, and a cancel, are raised only with
        `may_raise`. Without it the stream counts as ended: the caller returns its messages, and the next read opens it
        again.
        """
        assert self._connection is not None
        try:
            data = await self._connection.read_async(wait_s)
        except TimeballError as error:
            if may_raise:
                self._check_cancelled()
                if not isinstance(error, Lost):
                    raise
            return None
        if data is None and may_raise:
            self._check_cancelled()
        return data

    def _leave_silent_node(self) -> None:
        """Open the next stream at the next node: a node writes at least an empty line every 15 s."""
        assert self._connection is not None
        self._calls.leave(self._connection.endpoint)
        self._drop()

    async def _wait_to_open(self, end_ns: int) -> bool:
        """Wait until a stream may be opened again. Returns False if it may not be before `end_ns`."""
        wait_ns = min(self._reopen_ns, end_ns) - self._clock.monotonic_ns()
        if wait_ns > 0:
            await self._calls.pause(wait_ns / 1e9)
            self._check_cancelled()
        return self._reopen_ns <= max(end_ns, self._clock.monotonic_ns())

    async def _open(self) -> None:
        """Open the stream. Raises the broker's error or Unavailable, and RequestError after a cancel."""
        try:
            self._connection = await self._calls.open_async(self._request, self._open_read)
        except TimeballError:
            self._check_cancelled()
            raise
        self._partial_line, self._received_ns = b"", self._clock.monotonic_ns()
        self._reopen_pause_s = min(max(2 * self._reopen_pause_s, REOPEN_PAUSES_S[0]), REOPEN_PAUSES_S[1])

    def _take_lines(self, data: bytes) -> list[Received]:
        """Decode the complete lines of `data` and of the bytes before it. Keeps the rest for the next bytes."""
        lines, _, self._partial_line = (self._partial_line + data).rpartition(b"\n")
        return decode_answer(decode_lines, lines, self._calls.endpoint, is_read=True)

    def _drop(self) -> None:
        """Close the connection of the stream."""
        if self._connection is not None:
            if self._open_read is not None:
                self._open_read.end()
            self._connection.close()
            self._connection = None

    def _check_cancelled(self) -> None:
        """Raise RequestError if the read was cancelled, and close the stream."""
        if self._open_read is not None and self._open_read.is_cancelled:
            self._drop()
            raise RequestError("this read was cancelled")
