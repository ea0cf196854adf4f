"""The ports of a node that does not lead: forwards connections to the leader, and answers some HTTP requests itself.

So every node accepts connections on every port, and a client's address stays valid when the leader changes. A
connection that arrives while no node leads waits up to WAIT_S for a leader. The forwarded bytes are not interpreted:
the leader handles TLS and accounts.

The first HTTP request of a connection is an exception, because a load balancer asks each node about itself. Either it
is answered here and the connection is closed, or the whole connection is forwarded. These requests are answered here:

    GET /leader/<group>    503, with the leader's name, so that a load balancer sends no clients to this node
    GET /health/live       200
    GET /health/ready      200 while there is a leader, to which this port forwards
    GET /metrics           this replica's figures

With TLS, reading this request needs this node's certificate and a way to check the leader's certificate. Without the
latter, HTTP is also forwarded unread.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import unquote

import msgspec
from prometheus_client import ProcessCollector

from timeball.cluster.transport.connections import Address
from timeball.model.errors import Forbidden, SetupError, Unauthorized
from timeball.monitoring.figures import ReplicaFigures
from timeball.monitoring.metrics import CONTENT_TYPE, as_text, replica_metrics

logger = logging.getLogger(__name__)

# ---- HTTP requests that a follower answers itself ------------------------------------------------------------

HEAD_S = 30.0  # time limit for the head of a request, after which the connection is closed
END_OF_HEAD = b"\r\n\r\n"
JSON = "application/json"


class Request(NamedTuple):
    """The head of a request."""

    method: str
    path: str
    headers: dict[str, str]  # names in lower case


class LocalAnswers:
    """The answers of one node. Belongs to the event loop.

    `authenticate` receives the headers and raises Unauthorized unless their account may read the metrics. `check`
    receives method, path and headers, and raises Forbidden for requests that a browser sends on behalf of another
    site's page.
    """

    def __init__(
        self,
        figures: Callable[[], ReplicaFigures],
        authenticate: Callable[[Mapping[str, str]], object],
        check: Callable[[str, str, Mapping[str, str]], object],
    ) -> None:
        self._figures, self._authenticate, self._check = figures, authenticate, check
        self._process = ProcessCollector(registry=None)

    def answer(self, head: bytes) -> bytes | None:
        """Build the answer to a request with this head. None when the leader must answer it."""
        request = _parse(head)
        if request is None or request.method not in ("GET", "HEAD"):
            return None
        response = self._answer(request)
        if response is None:
            return None
        try:
            self._check(request.method, request.path, request.headers)
        except Forbidden as error:
            response = 403, _problem(403, error.code, str(error)), JSON
        return _encode(*response, is_head=request.method == "HEAD")

    def _answer(self, request: Request) -> tuple[int, bytes, str] | None:
        """Choose the answer by the path: status, body and media type. None when the leader must answer."""
        figures = self._figures()
        match request.path.strip("/").split("/"):
            case ["leader", group] if unquote(group) == figures.group:
                document = {"group": figures.group, "leader": figures.leader, "role": figures.role}
                return 503, msgspec.json.encode(document), JSON
            case ["leader", _]:
                return 404, _problem(404, "not_found", f"this node keeps group {figures.group}"), JSON
            case ["health", "live"]:
                return 200, b'{"status":"live"}', JSON
            case ["health", "ready"] if figures.leader:
                return 200, b'{"status":"ready"}', JSON
            case ["health", "ready"]:
                return 503, _problem(503, "unavailable", f"group {figures.group} has no leader"), JSON
            case ["metrics"]:
                return self._answer_metrics(request, figures)
        return None

    def _answer_metrics(self, request: Request, figures: ReplicaFigures) -> tuple[int, bytes, str]:
        """Answer with this replica's metrics, or with 401."""
        try:
            self._authenticate(request.headers)
        except Unauthorized as error:
            return 401, _problem(401, error.code, str(error)), JSON
        return 200, as_text([*replica_metrics(figures), *self._process.collect()]), CONTENT_TYPE


async def read_head(reader: asyncio.StreamReader) -> bytes | None:
    """Read the head of the first request.

    If the connection ends first, returns the bytes before the end. Returns b"" if the head is longer than the limit of
    the reader, which keeps the bytes, and None after HEAD_S.
    """
    with suppress(asyncio.LimitOverrunError):  # the head is too long
        try:
            async with asyncio.timeout(HEAD_S):
                return await reader.readuntil(END_OF_HEAD)
        except asyncio.IncompleteReadError as error:
            return error.partial
        except TimeoutError:
            return None
    return b""


def _parse(head: bytes) -> Request | None:
    """Parse the head of a request. None if it is not the whole head of an HTTP/1 request."""
    if not head.endswith(END_OF_HEAD):
        return None
    request_line, *lines = head.decode("latin-1").split("\r\n")
    fields = request_line.split(" ")
    if len(fields) != 3:
        return None
    headers = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return Request(fields[0], fields[1].partition("?")[0], headers)


def _problem(status: int, code: str, detail: str) -> bytes:
    return msgspec.json.encode(
        {"title": HTTPStatus(status).phrase, "status": status, "code": code, "detail": detail}
    )


def _encode(status: int, body: bytes, media_type: str, *, is_head: bool) -> bytes:
    """Encode a response that closes the connection. With `is_head`, without the body."""
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: {media_type}\r\n"
        f"content-length: {len(body)}\r\ncache-control: no-store\r\nconnection: close\r\n\r\n"
    )
    return head.encode("latin-1") + (b"" if is_head else body)


# ---- forwarding to the leader --------------------------------------------------------------------------------


WAIT_S = 5.0  # how long a client's connection waits for a leader
RETRY_S = 0.02  # between two attempts to reach a leader
DIAL_S = 1.0  # time limit for a connection to the leader
LAST_ANSWERS_S = 1.0  # time for the last answers of a leader after another node has become the leader
CHUNK_BYTES = 256 * 1024
HTTP = "http"  # name of the edge for HTTP


class Http(NamedTuple):
    """The handling of HTTP: the local answers, and TLS with clients and with the leader (both contexts or none)."""

    answers: LocalAnswers
    tls: ssl.SSLContext | None = None
    tls_to_leader: ssl.SSLContext | None = None


class Gateway:
    """Listens on this node's ports until it leads. Belongs to the event loop."""

    def __init__(
        self,
        host: str,
        ports: dict[str, int],
        address: Callable[[str], Address | None],
        http: Http | None = None,
    ) -> None:
        """Forward connections on `ports` (edge -> port) to `address(edge)`, which is None while no other node leads."""
        self._host, self._ports, self._address, self._http = host, ports, address, http
        self._servers: list[asyncio.Server] = []
        self._forwardings: set[asyncio.Task[None]] = set()
        self._leaders: dict[asyncio.Task[None], tuple[str, Address]] = {}  # edge and leader of a forwarding
        # The forwardings that have no connection to a leader yet.
        self._awaiting_leader: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Raises SetupError."""
        for edge, port in self._ports.items():
            # `edge` is a default value, because the name in the loop changes before the function is called.
            async def forward(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, edge: str = edge
            ) -> None:
                await self._forward(edge, reader, writer)

            try:
                tls = self._http.tls if self._http is not None and edge == HTTP else None
                server = await asyncio.start_server(forward, self._host, port, limit=CHUNK_BYTES, ssl=tls)
                self._servers.append(server)
            except OSError as error:
                await self.close()
                raise SetupError(
                    f"cannot listen on {self._host}:{port} ({edge}): {error.strerror}"
                ) from error

    @property
    def is_listening(self) -> bool:
        """Whether this node's ports are forwarded."""
        return bool(self._servers)

    def stop_listening(self) -> None:
        """Free the ports for this node's own servers, and close the connections that wait for a leader.

        Their clients connect again, and reach this node's own servers.
        """
        for server in self._servers:
            server.close()
        self._servers.clear()
        for task in self._awaiting_leader:
            task.cancel()

    def leader_changed(self) -> None:
        """Close the connections to earlier leaders, LAST_ANSWERS_S after another node has become the leader.

        An earlier leader that ends closes them itself. One that is cut off, or that hangs, never does.
        """
        loop = asyncio.get_running_loop()
        for task, (edge, leader) in self._leaders.items():
            if self._address(edge) not in (None, leader):
                loop.call_later(LAST_ANSWERS_S, task.cancel)

    async def drain(self) -> None:
        """Wait until the old leader has ended the forwarded connections, and close the others after LAST_ANSWERS_S.

        The leader's last answers and refusals are still on their way. A client whose connection is closed too early
        does not know which of its messages were accepted.
        """
        self.stop_listening()
        if self._forwardings:
            await asyncio.wait(set(self._forwardings), timeout=LAST_ANSWERS_S)
        await self.close()

    async def close(self) -> None:
        """Stop listening, and close the connections."""
        self.stop_listening()
        for task in self._forwardings:
            task.cancel()
        await asyncio.gather(*self._forwardings, return_exceptions=True)

    async def _forward(self, edge: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection: answer its first HTTP request here, or forward all bytes to the leader."""
        task = asyncio.current_task()
        assert task is not None
        self._forwardings.add(task)
        task.add_done_callback(self._forwardings.discard)
        task.add_done_callback(self._awaiting_leader.discard)
        task.add_done_callback(lambda task: self._leaders.pop(task, None))
        try:
            head = b""
            if self._http is not None and edge == HTTP:
                request_head = await read_head(reader)
                answer = self._http.answers.answer(request_head or b"")
                if answer is not None:
                    writer.write(answer)
                if answer is not None or request_head is None:
                    return
                head = request_head
            self._awaiting_leader.add(task)
            leader_streams = await self._connect(edge, task)
            self._awaiting_leader.discard(task)
            if leader_streams is not None:
                leader_streams[1].write(head)
                await _copy_both_ways(reader, writer, *leader_streams)
        except OSError:
            return  # the client is gone
        except asyncio.CancelledError:
            return  # cancelled by `close`; asyncio would log a cancelled server callback as an error
        finally:
            writer.close()

    async def _connect(
        self, edge: str, task: asyncio.Task[None]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """Connect to the leader, and record it as the leader of the forwarding `task`.

        Returns None when there was none for WAIT_S.
        """
        tls = self._http.tls_to_leader if self._http is not None and edge == HTTP else None
        loop = asyncio.get_running_loop()
        until_s = loop.time() + WAIT_S
        while loop.time() < until_s:
            address = self._address(edge)
            if address is not None:
                with suppress(OSError, TimeoutError):
                    async with asyncio.timeout(DIAL_S):
                        streams = await asyncio.open_connection(*address, limit=CHUNK_BYTES, ssl=tls)
                    if self._address(edge) in (None, address):
                        self._leaders[task] = edge, address
                        return streams
                    streams[1].close()  # another node leads by now, and `leader_changed` was called already
            await asyncio.sleep(RETRY_S)
        return None


async def _copy_both_ways(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    leader_reader: asyncio.StreamReader,
    leader_writer: asyncio.StreamWriter,
) -> None:
    """Copy bytes both ways until both directions have ended, or one connection breaks."""
    try:
        async with asyncio.TaskGroup() as directions:
            directions.create_task(_copy(reader, leader_writer))
            directions.create_task(_copy(leader_reader, writer))
    except* OSError:
        pass  # one connection broke; the other one is closed as well, so that its peer notices
    finally:
        leader_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until the end of `reader`, then end this direction of the other connection."""
    while data := await reader.read(CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
    else:
        writer.close()  # TLS cannot close one direction only: end the connection
