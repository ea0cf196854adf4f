"""One HTTP/1.1 connection to a node: requests and answers, in turn, or one request with an endless answer.

The bytes are those of h11, which does no I/O, so each read has the time limit of its call. A connection belongs to the
call that uses it. Only `interrupt` may be called from another thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import h11

from timeball.client.attempts import Lost, NotSent
from timeball.client.network import Network, Stream, driven
from timeball.io.clock import Clock
from timeball.model.errors import RequestError, TimeballError

if TYPE_CHECKING:
    import ssl

DEFAULT_PORT = 7480
BEGIN = b"HTTP/1."  # the first bytes of each answer
PORTS = "Timeball's HTTP API is on --http-port (7480 by default)"


class Node(NamedTuple):
    """A node of a broker or cluster. `endpoint` is its address in texts for users."""

    endpoint: str
    host: str
    port: int


class Request(NamedTuple):
    """A request. `target`: the path with the query. `headers`: without host, credentials and content length."""

    method: str
    target: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()


class Reply(NamedTuple):
    """The status, content type and body of an answer."""

    status: int
    content_type: str
    body: bytes


def node_of(endpoint: str) -> Node:
    """Split "http://host:port", with DEFAULT_PORT if there is no port. Raises RequestError for a malformed endpoint."""
    address = endpoint.partition("://")[2].removesuffix("/")
    host, separator, port = address.rpartition(":")
    if not separator or address.endswith("]"):  # an IPv6 address in brackets has colons
        host, port = address, str(DEFAULT_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or "/" in host or not (port.isascii() and port.isdecimal() and 0 < int(port) < 65_536):
        raise RequestError(f"endpoint {endpoint!r}: write it as http://host:port")
    return Node(endpoint, host, int(port))


class Connection:
    """One connection to a node."""

    def __init__(self, node: Node, network: Network, stream: Stream, clock: Clock) -> None:
        """Use `stream`, which is connected to `node`."""
        self._node, self.network, self._stream, self._clock = node, network, stream, clock
        self._http = h11.Connection(h11.CLIENT)
        self.used_ns = clock.monotonic_ns()  # when the last answer came, or the connection was made

    @classmethod
    async def connect(
        cls,
        node: Node,
        network: Network,
        tls: ssl.SSLContext | None,
        tls_name: str,
        timeout_s: float,
        clock: Clock,
    ) -> Connection:
        """Connect within `timeout_s`. With `tls`, the certificate must have `tls_name`, or the name of the host.

        Raises NotSent.
        """
        try:
            stream = await network.connect(node.host, node.port, tls, tls_name or node.host, timeout_s)
        except OSError as error:
            raise NotSent(
                f"no broker answers at {node.endpoint}; is `timeball serve` running there? ({error})"
            ) from error
        return cls(node, network, stream, clock)

    @property
    def endpoint(self) -> str:
        """The address of the node."""
        return self._node.endpoint

    # ---- one request and its answer ---------------------------------------------------------------------

    async def ask(self, request: Request, timeout_s: float) -> Reply:
        """Send a request and wait for its answer. Raises Lost, and TimeballError for another server than a broker."""
        end_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        reply = await self._send(request, timeout_s, end_ns)
        chunks = [reply.body]
        while isinstance(event := await self._next_event(end_ns), h11.Data):
            chunks.append(bytes(event.data))
        self.used_ns = self._clock.monotonic_ns()
        return reply._replace(body=b"".join(chunks))

    async def open(self, request: Request, timeout_s: float) -> Reply:
        """Send a request and wait for the head of its answer, whose body `read` returns. Raises as `ask`."""
        return await self._send(request, timeout_s, self._clock.monotonic_ns() + int(timeout_s * 1e9))

    async def _send(self, request: Request, timeout_s: float, end_ns: int) -> Reply:
        """Send a request within `timeout_s`, and read the head of its answer until `end_ns`. Raises as `ask`.

        The body of the result is empty.
        """
        host = f"[{self._node.host}]" if ":" in self._node.host else self._node.host
        head = h11.Request(
            method=request.method,
            target=request.target,
            headers=[
                ("host", f"{host}:{self._node.port}"),
                *request.headers,
                ("content-length", str(len(request.body))),
            ],
        )
        parts = (head, h11.Data(request.body), h11.EndOfMessage())
        data = b"".join(self._http.send(part) or b"" for part in parts)
        try:
            await self._stream.send(data, timeout_s)
        except OSError as error:
            raise self._lost(error) from error
        while True:
            event = await self._next_event(end_ns)
            if isinstance(event, h11.Response):  # and not a 1xx answer before it
                break
        content_type = dict(event.headers).get(b"content-type", b"").decode("latin-1")
        return Reply(event.status_code, content_type, b"")

    @property
    def is_reusable(self) -> bool:
        """True if the last answer is complete, and the connection can be used again. Prepares it for a request then."""
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        return self._http.our_state is h11.IDLE

    @property
    def is_stale(self) -> bool:
        """True for a kept connection that the node has closed: no answer is under way, so nothing else can come."""
        return self._stream.is_readable

    # ---- an endless answer ------------------------------------------------------------------------------

    @property
    def descriptor(self) -> int:
        """The file descriptor of the socket, for a poll. Read until b"" before the poll: h11 may have more bytes."""
        return self._stream.descriptor

    async def read_async(self, wait_s: float) -> bytes | None:
        """Read bytes of the body: b"" if none come within `wait_s`, None at the end of the body.

        Raises Lost if the connection breaks.
        """
        event = self._http.next_event()
        if event is h11.NEED_DATA:
            if not await self._stream.wait(wait_s):
                return b""
            event = await self._next_event(self._clock.monotonic_ns() + int((wait_s + 1) * 1e9))
        if isinstance(event, h11.Data):
            return bytes(event.data)
        return None

    read = driven(read_async)

    async def finish(self, wait_s: float) -> bytes:
        """Tell the node that no more bytes are wanted, and return the bytes that it has sent by then.

        Waits up to `wait_s` for each part of them.
        """
        chunks = []
        try:
            # The node then sends its last bytes and closes.
            last_s = wait_s if self._stream.end_sending() else 0
            while chunk := await self.read_async(last_s):
                chunks.append(chunk)
        except (OSError, TimeballError):
            pass  # leases that were under way end after their time
        return b"".join(chunks)

    # ---- the end ----------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Make the call that uses the connection end soon. May be called from another thread."""
        self._stream.interrupt()

    def close(self) -> None:
        """Close the connection."""
        self._stream.close()

    def forget(self) -> None:
        """Close this process's copy of a connection that the parent process still uses."""
        self._stream.forget()

    # ---- internals --------------------------------------------------------------------------------------

    async def _next_event(self, end_ns: int) -> h11.Event:
        """Wait until `end_ns` for the next event of h11. Raises Lost, and TimeballError for bytes that are no HTTP."""
        try:
            while (event := self._http.next_event()) is h11.NEED_DATA:
                data = await self._stream.receive(max(0.001, (end_ns - self._clock.monotonic_ns()) / 1e9))
                self._http.receive_data(data)
                if self._http.their_state is h11.SEND_RESPONSE:
                    self._check_beginning(is_over=not data)
        except OSError as error:
            raise self._lost(error) from error
        except h11.RemoteProtocolError as error:
            if self._http.trailing_data[1]:  # the connection has ended within an answer
                raise self._lost(error) from error
            raise TimeballError(
                f"{self._node.endpoint} answered with something else than a broker would: {error}. {PORTS}"
            ) from error
        assert not isinstance(event, type), event
        return event

    def _check_beginning(self, *, is_over: bool) -> None:
        """Check the first bytes of an answer, before h11 can read its head.

        Raises ConnectionResetError if the connection has ended, and TimeballError for another protocol.
        """
        begin = self._http.trailing_data[0][: len(BEGIN)]
        if begin != BEGIN[: len(begin)]:
            raise TimeballError(
                f"{self._node.endpoint} answered with something else than a broker would: it speaks no HTTP. {PORTS}"
            )
        if is_over:
            raise ConnectionResetError("the connection was closed before the answer")

    def _lost(self, error: Exception) -> Lost:
        """Build the error of a call whose answer did not come, because of `error`."""
        reason = (
            "no answer in time" if isinstance(error, TimeoutError) else str(error) or type(error).__name__
        )
        return Lost(
            f"{self._node.endpoint} did not answer: {reason}; the call may or may not have been carried out"
        )
