"""A connection: limits for the size and time of a head, each answer in one segment, and answers in their order."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

import pytest
import uvicorn
from tests.bounds import BOUND_S
from tests.edges.http.client import Client
from tests.edges.http.test_edge import connect
from tests.node_fixture import RunningNode, eventually
from uvicorn.server import ServerState

from timeball.edges.http import connection as bounds
from timeball.edges.http import requests, send_codec
from timeball.edges.http.codec import Answer
from timeball.edges.shared.shared_limits import SharedLimit
from timeball.io.security import OPEN
from timeball.model.config import Settings


def test_a_head_is_refused_when_it_becomes_too_large(node: RunningNode) -> None:
    with connect(node) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        try:
            for _ in range(bounds.HEAD_BYTES_MAX // 1_000 + 2):
                connection.sendall(b"a: " + b"x" * 1_000 + b"\r\n")
            answer = connection.recv(4_096)
        except ConnectionError:
            answer = b"HTTP/1.1 400 "  # closed while this was sending
    assert answer.startswith(b"HTTP/1.1 400 ")


def test_a_client_that_sends_nothing_is_disconnected(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "HEAD_S", 0.1)
    with connect(node) as connection:
        try:
            assert connection.recv(1) == b""
        except ConnectionResetError:
            pass


def test_a_head_that_is_not_complete_in_time_is_refused(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "HEAD_S", 0.1)
    with connect(node) as connection:
        connection.sendall(b"GET / HT")
        (refused,) = read_answers(connection)
    assert refused.startswith(b"400 ") and b"the head was not complete within" in refused


class RecordingTransport(asyncio.Transport):
    """A transport that records each write, and the calls that change its state."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[bytes] = []
        self.unread_bytes = 0
        self.is_closed = self.is_aborted = self.is_paused = False
        self.on_full: Callable[[], None] | None = (
            None  # called by a write that the system cannot take at once
        )

    def abort(self) -> None:
        self.is_closed = self.is_aborted = True

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def write(self, data: Any) -> None:
        self.writes.append(bytes(data))
        if self.on_full is not None:
            self.on_full()

    def close(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return self.unread_bytes


def test_the_writes_of_one_turn_are_joined() -> None:
    transport = RecordingTransport()

    async def write() -> None:
        joined = bounds.JoinedWrites(transport, asyncio.get_running_loop())
        joined.write(b"head ")
        joined.write(b"body")
        assert transport.writes == []
        await asyncio.sleep(0)
        joined.write(b"next")
        joined.close()
        await asyncio.sleep(0)

    asyncio.run(write())
    assert transport.writes == [b"head body", b"next"]
    assert transport.is_closed


def test_a_whole_answer_is_written_at_once_behind_the_writes_of_its_turn() -> None:
    transport = RecordingTransport()

    async def write() -> None:
        joined = bounds.JoinedWrites(transport, asyncio.get_running_loop())
        joined.writelines((b"whole ", b"answer"))
        assert transport.writes == [b"whole answer"]
        joined.write(b"head ")
        joined.writelines((b"next ", b"answer"))
        assert len(transport.writes) == 1
        await asyncio.sleep(0)
        joined.close()
        joined.writelines((b"late",))

    asyncio.run(write())
    assert transport.writes == [b"whole answer", b"head next answer"]


def test_a_transport_that_closed_itself_in_time_is_not_aborted_afterwards() -> None:
    timers: list[Callable[[], None]] = []

    class Closing(asyncio.Protocol):
        def __init__(self) -> None:
            self.lost = asyncio.Event()

        def connection_lost(self, exc: Exception | None) -> None:
            self.lost.set()

    async def close() -> None:
        loop = asyncio.get_running_loop()
        here, there = socket.socketpair()
        transport, protocol = await loop.connect_accepted_socket(Closing, here)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "call_later", lambda _, call: timers.append(call))
            joined = bounds.JoinedWrites(transport, loop)
            joined.write(bytes(8 * 1024 * 1024))
            joined.close()
        with there:
            read = await asyncio.to_thread(lambda: there.makefile("rb").read())
        assert len(read) == 8 * 1024 * 1024
        await protocol.lost.wait()
        await asyncio.sleep(0)  # the transport is gone

    asyncio.run(close())
    (time_is_over,) = timers
    time_is_over()


def test_connections_have_tcp_nodelay(node: RunningNode, client: Client) -> None:
    assert client.ask("GET", "/health/live").status == 200
    server = node.node.edges.http._server
    assert server is not None
    options = [
        connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        for connection in server.server_state.connections
    ]
    assert options and all(options)


# ---- the order of requests and answers --------------------------------------------------------------------------


def build_post(path: str, body: bytes = b"", headers: bytes = b"") -> bytes:
    """Return a POST request with a JSON body. `headers` are complete lines."""
    return (
        b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n%b\r\n%b"
        % (path.encode(), len(body), headers, body)
    )


def build_send(body: str, topic: str = "ordered") -> bytes:
    """Return a request that sends one message, which is due in an hour."""
    return build_post(f"/v1/topics/{topic}/messages", json.dumps({"body": body, "after": "1h"}).encode())


LAST_REQUEST = b"GET /health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


def read_answers(connection: socket.socket) -> list[bytes]:
    """Read the answers until the server closes."""
    data = b""
    while part := connection.recv(65_536):
        data += part
    return data.split(b"HTTP/1.1 ")[1:]


def test_later_requests_of_a_connection_are_answered_after_a_slow_one(
    node: RunningNode, client: Client
) -> None:
    poll = build_post("/v1/topics/slow/receive?group=g&wait=60s")
    with connect(node) as connection:
        connection.sendall(
            poll + build_send("a") + b"GET /none HTTP/1.1\r\nHost: localhost\r\n\r\n" + LAST_REQUEST
        )
        eventually(lambda: node.node.edges.http.limits.calls.taken, "the poll waits")  # type: ignore[union-attr]
        assert client.send("slow", {"body": "awaited"}).status == 201
        received = read_answers(connection)
    assert [part[:3] for part in received] == [b"200", b"201", b"404", b"200"]
    assert b"awaited" in received[0]


def test_a_body_in_many_pieces_is_accepted(node: RunningNode) -> None:
    with connect(node) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        whole = build_send("in pieces")
        for at in range(len(whole)):
            connection.sendall(whole[at : at + 1])
        connection.sendall(LAST_REQUEST)
        sent, _ = read_answers(connection)
    assert sent.startswith(b"201")


def test_many_refused_requests_behind_a_slow_one_are_all_answered(node: RunningNode) -> None:
    # Each refusal follows at once, within the end of the one before.
    refused = build_post("/v1/topics/ordered/messages", b"{")
    with connect(node) as connection:
        connection.sendall(build_send("first") + refused * 1_500 + LAST_REQUEST)
        received = read_answers(connection)
    assert [part[:3] for part in received] == [b"201"] + [b"400"] * 1_500 + [b"200"]


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"


@pytest.mark.parametrize("pieces", [1, 2, 1_000], ids=["at once", "head and body", "single bytes"])
@pytest.mark.parametrize("is_chunked", [False, True], ids=["length", "chunked"])
def test_a_request_to_upgrade_is_served_with_its_body(
    node: RunningNode, client: Client, pieces: int, *, is_chunked: bool
) -> None:
    topic = f"upgraded-{pieces}-{is_chunked}"
    whole = build_post(f"/v1/topics/{topic}/messages", b'{"body": "whole"}').replace(
        b"\r\n", b"\r\n" + UPGRADE, 1
    )
    head, _, body = whole.partition(b"\r\n\r\n")
    if is_chunked:
        head = head.replace(b"Content-Length: %d" % len(body), b"Transfer-Encoding: chunked")
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    head += b"\r\n\r\n"
    with connect(node) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if pieces == 1:
            connection.sendall(head + body + head + body)
        elif pieces == 2:
            for part in (head, body, head, body):
                connection.sendall(part)
                client.ask("GET", "/health/live")  # the part has come by then
        else:
            for at in range(len(head + body)):
                connection.sendall((head + body)[at : at + 1])
            connection.sendall(head + body)
        connection.sendall(
            b"GET /health/live HTTP/1.1\r\nHost: localhost\r\n" + UPGRADE + b"\r\n" + LAST_REQUEST
        )
        assert [part[:3] for part in read_answers(connection)] == [b"201", b"201", b"200", b"200"]
    received = client.receive(topic, max=3).value["messages"]
    assert [message["body"] for message in received] == ["whole", "whole"]


def test_a_request_to_upgrade_and_to_close_closes_the_connection(node: RunningNode) -> None:
    with connect(node) as connection:
        connection.sendall(
            LAST_REQUEST.replace(b"Connection: close", b"Connection: close, Upgrade\r\nUpgrade: h2c")
            + LAST_REQUEST
        )
        (only,) = read_answers(connection)
    assert only.startswith(b"200") and b"connection: close\r\n" in only


def test_a_tunnel_is_refused(node: RunningNode) -> None:
    with connect(node) as connection:
        connection.sendall(b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n" + LAST_REQUEST)
        (refused,) = read_answers(connection)
    assert refused.startswith(b"400")


@pytest.mark.parametrize("body", [b"{", b'{"body": "x", "after": "1h"}'], ids=["refused", "sent"])
def test_no_request_is_served_behind_one_that_closes_the_connection(
    node: RunningNode, client: Client, body: bytes
) -> None:
    last = build_post("/v1/topics/ordered/messages", body, b"Connection: close\r\n")
    with connect(node) as connection:
        connection.sendall(last + build_send("never", topic="behind"))
        assert len(read_answers(connection)) == 1
    assert client.ask("GET", "/v1/topics").value["topics"]
    assert "behind" not in [topic["topic"] for topic in client.ask("GET", "/v1/topics").value["topics"]]


def test_a_send_is_accepted_although_its_client_disconnects(node: RunningNode, client: Client) -> None:
    assert node.node.edges is not None
    limits = node.node.edges.http.limits
    body = json.dumps({"id": "left", "body": "x", "after": "1h"}).encode()
    with connect(node) as connection:
        connection.sendall(build_post("/v1/topics/ordered/messages", body))
    eventually(lambda: client.ask("GET", "/v1/messages/left").status == 200, "the message is accepted")
    eventually(lambda: not limits.received.held_bytes and not limits.calls.taken, "its limits are free again")


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "task"])
def test_an_answer_that_cannot_be_encoded_becomes_a_problem(
    node: RunningNode, client: Client, monkeypatch: pytest.MonkeyPatch, *, is_direct: bool
) -> None:
    monkeypatch.setattr(send_codec, "build_answer", lambda *_, **__: object())
    whole = build_send("unsaid")
    with connect(node) as connection:
        connection.sendall(whole if is_direct else whole[:-1])
        if not is_direct:
            eventually(lambda: node.node.edges.http.limits.calls.taken, "it waits for its body")  # type: ignore[union-attr]
            connection.sendall(whole[-1:])
        connection.sendall(LAST_REQUEST)
        refused, last = read_answers(connection)
    assert refused.startswith(b"500") and b'"code":"error"' in refused and last.startswith(b"200")
    assert not node.node.edges.http.limits.calls.taken  # type: ignore[union-attr]


def test_an_idle_connection_is_closed_but_not_during_a_poll(
    node: RunningNode, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = node.node.edges.http._server  # type: ignore[union-attr]
    assert server is not None
    monkeypatch.setattr(server.config, "timeout_keep_alive", 0.2)
    poll = build_post("/v1/topics/ordered/receive?group=idle&wait=1s")
    with connect(node) as connection:
        # The timer starts with the first answer, and ends during the poll.
        connection.sendall(LAST_REQUEST.replace(b"Connection: close\r\n", b"") + poll)
        received = read_answers(connection)
    assert [part[:3] for part in received] == [b"200", b"200"]


# ---- clients that do not read, by the events of a transport ------------------------------------------------------


class Served:
    """A connection in the running loop, with a recording transport. `handlers`: by the path without its slash."""

    def __init__(self, **handlers: requests.Handler | requests.DirectHandler) -> None:
        self.limits = requests.RequestLimits()
        pages = requests.ForeignPageCheck(Settings(), has_accounts=False)
        endpoints = {
            f"/{name}": requests.Endpoint(
                {"GET": handler, "POST": handler}, OPEN, pages, lambda: 0, self.limits,
                is_open=True, former_methods={}, parameters={},
            )
            for name, handler in handlers.items()
        }  # fmt: skip
        config = uvicorn.Config(
            cast(Any, None), http=bounds.HttpConnection, ws="none", lifespan="off", interface="asgi3",
            log_config=None, access_log=False,
        )  # fmt: skip
        config.load()
        config.loaded_app = cast(Any, requests.PathTable(endpoints))
        self.connection = bounds.HttpConnection(config, ServerState(), {})
        self.transport = RecordingTransport()
        self.connection.connection_made(self.transport)

    async def receive(self, data: bytes) -> None:
        """Pass bytes of the client to the connection, and let its tasks run."""
        self.connection.data_received(data)
        await self.settle()

    async def settle(self) -> None:
        """Let the tasks of the connection run until they wait."""
        for _ in range(20):
            await asyncio.sleep(0)

    @property
    def statuses(self) -> list[bytes]:
        """The statuses of all answers written so far."""
        return [part[:3] for part in b"".join(self.transport.writes).split(b"HTTP/1.1 ")[1:]]


def build_request(name: str, method: str = "GET", headers: str = "") -> bytes:
    """Build the head of a request for the path of a handler. `headers`: lines with their ends."""
    return f"{method} /{name} HTTP/1.1\r\n{headers}\r\n".encode()


async def short(_: requests.Call) -> Answer:
    """Answer with a short body."""
    return Answer(200, b"short")


async def stream(_: requests.Call) -> requests.Stream:
    """Answer with a stream of one chunk."""

    async def chunks() -> AsyncGenerator[bytes, None]:
        yield b"chunk"

    return requests.Stream(chunks(), "text/plain")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (build_request("none"), b"404"),
        (build_request("short"), b"200"),
        (build_request("stream"), b"200"),
        (build_request("stream", "HEAD"), b"200"),
    ],
    ids=["unknown path", "answer", "stream", "head of a stream"],
)
@pytest.mark.parametrize("reads", [True, False], ids=["in time", "never"])
def test_an_answer_waits_for_a_client_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch, request_bytes: bytes, status: bytes, *, reads: bool
) -> None:
    async def serve() -> None:
        served = Served(short=short, stream=stream)
        served.connection.pause_writing()
        await served.receive(request_bytes)
        assert not served.transport.writes
        if reads:
            served.connection.resume_writing()
            await served.settle()
        while served.connection.tasks:  # they end after ANSWER_S at the latest
            await asyncio.wait(served.connection.tasks)
        await served.settle()
        assert served.statuses == ([status] if reads else [])
        assert served.transport.is_aborted is not reads

    for module in (bounds, requests):
        monkeypatch.setattr(module, "ANSWER_S", BOUND_S if reads else 0.01)
    asyncio.run(serve())


@pytest.mark.parametrize("is_direct", [True, False], ids=["direct", "task"])
@pytest.mark.parametrize("reads", [True, False], ids=["in time", "never"])
def test_a_written_answer_is_counted_until_the_client_reads_it(
    monkeypatch: pytest.MonkeyPatch, *, is_direct: bool, reads: bool
) -> None:
    async def serve() -> None:
        served = Served(short=requests.DirectHandler(begin, short) if is_direct else short)
        served.transport.on_full = served.connection.pause_writing
        await served.receive(build_request("short"))
        assert served.statuses == [b"200"]
        assert served.limits.sent.held_bytes == len(b"short")
        if reads:
            served.connection.resume_writing()
            await served.settle()
        while served.connection.tasks:  # they end after ANSWER_S at the latest
            await asyncio.wait(served.connection.tasks)
        assert served.limits.sent.held_bytes == 0
        assert served.transport.is_aborted is not reads

    def begin(_: requests.Call, respond: requests.Respond) -> bool:
        respond(Answer(200, b"short"))
        return True

    monkeypatch.setattr(requests, "ANSWER_S", BOUND_S if reads else 0.01)
    asyncio.run(serve())


def test_a_large_answer_that_was_begun_before_the_limit_was_reached_is_refused() -> None:
    async def serve() -> None:
        served = Served(large=large)
        await served.receive(build_request("large"))
        served.limits.sent.add("", requests.SENT_BYTES_MAX)  # answers to other requests of this address
        is_built.set()
        await served.settle()
        assert served.statuses == [b"429"]

    async def large(_: requests.Call) -> Answer:
        await is_built.wait()
        return Answer(200, b"large", size_bytes=5)

    is_built = asyncio.Event()
    asyncio.run(serve())


def test_an_answer_that_the_system_takes_at_once_is_not_counted() -> None:
    async def serve() -> None:
        served = Served(short=short)
        await served.receive(build_request("short"))
        assert served.statuses == [b"200"]
        assert not served.connection.tasks and served.limits.sent.held_bytes == 0

    asyncio.run(serve())


def test_a_stream_over_its_limit_is_refused_when_the_client_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve() -> None:
        served = Served(stream=stream)
        served.limits.streams = SharedLimit("streams", 0)
        served.connection.pause_writing()
        await served.receive(build_request("stream"))
        assert not served.transport.writes
        served.connection.resume_writing()
        await served.settle()
        assert served.statuses == [b"429"]

    asyncio.run(serve())


def test_the_end_of_a_stream_waits_a_limited_time_for_a_client_that_does_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def serve() -> None:
        served = Served(stream=pausing)
        await served.receive(build_request("stream"))
        await asyncio.wait(served.connection.tasks)
        assert served.transport.is_closed and served.statuses == [b"200"]

    async def pausing(call: requests.Call) -> requests.Stream:
        async def chunks() -> AsyncGenerator[bytes, None]:
            yield b"chunk"
            call.exchange.flow.pause_writing()

        return requests.Stream(chunks(), "text/plain")

    monkeypatch.setattr(requests, "STREAM_READ_S", 0.01)
    asyncio.run(serve())


def test_a_client_that_ends_its_direction_and_does_not_read_is_disconnected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def serve() -> None:
        served = Served(short=short)
        served.connection.data_received(build_request("none"))
        served.transport.unread_bytes = 1
        served.connection.eof_received()
        assert served.statuses == [b"404"]
        while not served.transport.is_aborted:
            await asyncio.sleep(0.001)

    monkeypatch.setattr(bounds, "LAST_BYTES_S", 0.01)
    asyncio.run(serve())


@pytest.mark.parametrize(
    "pieces",
    [
        [build_request("none") + build_request("asked")],
        [build_request("none") + b"GET ", b"/asked HTTP/1.1\r\n\r\n"],
    ],
)
def test_a_connection_is_not_idle_while_a_request_is_served(pieces: list[bytes]) -> None:
    async def serve() -> None:
        asked = ManualHandler()
        served = Served(asked=asked.handler)
        served.connection.timeout_keep_alive = 0
        for piece in pieces:
            await served.receive(piece)
        assert not served.transport.is_closed
        asked.answer()
        await served.settle()
        assert served.transport.is_closed and served.statuses == [b"404", b"200"]

    asyncio.run(serve())


def test_empty_lines_keep_no_connection_open() -> None:
    async def serve() -> None:
        served = Served(short=short)
        await served.receive(build_request("none"))
        await served.receive(b"\r\n")
        served.connection.timeout_keep_alive = 0
        served.connection.timeout_keep_alive_handler()
        assert served.transport.is_closed

    asyncio.run(serve())


def test_at_a_stop_a_request_on_its_way_is_refused_and_a_running_one_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that sends on a connection that it believes idle knows that the broker did nothing."""

    async def serve() -> None:
        asked = ManualHandler()
        idle, running, silent = Served(short=short), Served(asked=asked.handler), Served()
        await idle.receive(build_request("none"))
        await running.receive(build_request("asked"))
        idle.connection.shutdown()
        running.connection.shutdown()
        assert not idle.transport.is_closed and not running.transport.is_closed
        await idle.receive(build_request("short"))
        asked.answer()
        await running.settle()
        assert (idle.statuses, running.statuses) == ([b"404", b"503"], [b"200"])
        assert idle.transport.is_closed and running.transport.is_closed
        monkeypatch.setattr(bounds, "LINGER_S", 0)
        silent.connection.shutdown()
        await silent.settle()
        assert silent.transport.is_closed and not silent.statuses

    asyncio.run(serve())


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_task_that_is_cancelled_before_its_first_step_is_forgotten() -> None:
    async def serve() -> None:
        served = Served(short=short)
        served.connection.data_received(build_request("short"))
        (task,) = served.connection.tasks
        task.cancel()
        await served.settle()
        assert not served.connection.tasks

    asyncio.run(serve())


# ---- the limits for what a client sends ahead -------------------------------------------------------------------


class ManualHandler:
    """A handler that answers only when the test calls `answer`: the oldest request first."""

    def __init__(self) -> None:
        self.calls: list[tuple[requests.Call, requests.Respond]] = []

    @property
    def handler(self) -> requests.DirectHandler:
        return requests.DirectHandler(self._begin, short)

    def _begin(self, call: requests.Call, respond: requests.Respond) -> bool:
        """Take a call whose body has arrived. Return False for the other calls."""
        if call.take_body() is None:
            return False
        self.calls.append((call, respond))
        return True

    def answer(self) -> None:
        """Answer the oldest call."""
        self.calls.pop(0)[1](Answer(200, b"asked"))


CHUNKED = build_request("asked", "POST", "transfer-encoding: chunked\r\n")


@pytest.mark.parametrize(
    ("begin", "more"),
    [(b"0\r\n", b"a: b\r\n"), (b"0\r\na: ", b"b"), (b"1;a=", b"b"), (b"", b"\r\n")],
    ids=["trailers", "one trailer", "extension", "empty lines"],
)
def test_trailers_extensions_and_empty_lines_in_pieces_are_limited(begin: bytes, more: bytes) -> None:
    async def serve() -> None:
        served = Served(asked=ManualHandler().handler)
        await served.receive(CHUNKED + begin if begin else build_request("none"))
        for _ in range(bounds.HEAD_BYTES_MAX // 1_024 + 1):
            assert not served.transport.is_closed
            await served.receive(more * (1_024 // len(more)))
        await served.receive(more * 1_024)
        assert served.transport.is_closed
        assert len(served.connection.headers) < 2

    asyncio.run(serve())


def test_trailers_are_no_headers() -> None:
    async def serve() -> None:
        asked = ManualHandler()
        served = Served(asked=asked.handler)
        await served.receive(CHUNKED + b"2\r\nab\r\n0\r\n" + b"a: b\r\n" * 10 + b"\r\n")
        ((call, _),) = asked.calls
        assert call.headers == {"transfer-encoding": "chunked"}
        assert [name for name, _ in served.connection.headers] == [b"transfer-encoding"]

    asyncio.run(serve())


def test_nothing_is_read_from_a_connection_while_requests_wait() -> None:
    async def serve() -> None:
        asked = ManualHandler()
        served = Served(asked=asked.handler)
        await served.receive(build_request("asked") * 4)
        for waiting in (3, 2, 1, 0):
            assert (len(asked.calls), len(served.connection.waiting)) == (1, waiting)
            assert served.transport.is_paused is (waiting > 0)
            asked.answer()
            await served.settle()
        assert served.statuses == [b"200"] * 4

    asyncio.run(serve())


def test_the_time_limit_of_a_head_does_not_run_while_nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def serve() -> None:
        asked = ManualHandler()
        served = Served(asked=asked.handler)
        await served.receive(build_request("asked") * 2 + b"GET /as")
        await asyncio.sleep(2 * bounds.HEAD_S)
        assert not served.transport.is_aborted
        asked.answer()
        await served.settle()
        assert not served.transport.is_paused and not served.transport.is_closed
        await asyncio.sleep(2 * bounds.HEAD_S)
        asked.answer()  # the request before the incomplete head gets its answer
        await served.settle()
        assert served.transport.is_closed and served.statuses == [b"200", b"200"]

    monkeypatch.setattr(bounds, "HEAD_S", 0.02)
    asyncio.run(serve())


def build_head(size_bytes: int) -> bytes:
    """Build the head of a GET with exactly this size."""
    begin, end = b"GET /short HTTP/1.1\r\na: ", b"\r\n\r\n"
    return begin + b"x" * (size_bytes - len(begin) - len(end)) + end


@pytest.mark.parametrize("is_divided", [False, True], ids=["one piece", "two pieces"])
@pytest.mark.parametrize(
    ("size_bytes", "is_accepted"),
    [(bounds.HEAD_BYTES_MAX, True), (bounds.HEAD_BYTES_MAX + 1, False), (8 * bounds.HEAD_BYTES_MAX, False)],
)
def test_a_head_of_more_than_the_limit_is_refused_however_it_arrives(
    size_bytes: int, *, is_divided: bool, is_accepted: bool
) -> None:
    async def serve() -> None:
        served = Served(short=short)
        head = build_head(size_bytes)
        if is_divided:
            await served.receive(head[: size_bytes // 2])
            await served.receive(head[size_bytes // 2 :])
        else:
            await served.receive(head)
        assert served.statuses == [b"200" if is_accepted else b"400"]
        assert served.transport.is_closed is not is_accepted

    asyncio.run(serve())


@pytest.mark.parametrize("is_divided", [False, True], ids=["one piece", "two pieces"])
def test_a_large_head_behind_a_request_with_a_body_is_refused(*, is_divided: bool) -> None:
    async def serve() -> None:
        asked = ManualHandler()
        served = Served(asked=asked.handler)
        earlier = build_request("asked", "POST", "content-length: 4\r\n") + b"body"
        head = build_head(bounds.HEAD_BYTES_MAX + 1)
        # The first piece contains the earlier request and, if there are two, half of the head.
        begin = head[: len(head) // 2] if is_divided else head
        await served.receive(earlier + begin)
        await served.receive(head[len(begin) :])
        asked.answer()
        await served.settle()
        assert served.statuses == [b"200"]  # a refusal behind another request has no answer
        assert served.transport.is_closed

    asyncio.run(serve())


@pytest.mark.parametrize(
    "invalid", [b"garbage\r\n\r\n", CHUNKED + b"none\r\n", b"GET /asked HTTP/1.1\r\na: " + b"x" * 33_000],
    ids=["head", "body", "long head"],
)  # fmt: skip
@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_an_invalid_request_closes_behind_the_answers_to_earlier_ones(invalid: bytes, ahead: int) -> None:
    async def serve() -> None:
        asked = ManualHandler()
        served = Served(asked=asked.handler)
        await served.receive(build_request("asked") * ahead)
        await served.receive(invalid[:1])
        await served.receive(invalid[1:])
        for _ in range(ahead):
            assert not served.transport.is_closed
            await served.receive(build_request("none"))
            asked.answer()
            await served.settle()
        assert served.transport.is_closed and served.statuses == [b"200"] * ahead
        assert b"".join(served.transport.writes).count(b"connection: close") == 1

    asyncio.run(serve())


def test_a_request_with_an_invalid_body_is_refused_at_once() -> None:
    async def serve() -> None:
        served = Served(reading=reading)
        await served.receive(build_request("reading", "POST", "transfer-encoding: chunked\r\n"))
        assert served.connection.tasks and not served.transport.is_closed
        await served.receive(b"none\r\n")
        assert served.transport.is_closed and served.statuses == [b"400"]
        served.connection.connection_lost(None)
        await asyncio.wait(served.connection.tasks)

    async def reading(call: requests.Call) -> Answer:
        return Answer(200, await call.read_body())

    asyncio.run(serve())
