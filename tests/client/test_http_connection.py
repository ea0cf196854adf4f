"""One HTTP connection: addresses, answers in pieces, and when it may be used again."""

from __future__ import annotations

import inspect
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.bounds import BOUND_S
from tests.client.awaited import awaited

from timeball import RequestError
from timeball.client.attempts import Lost
from timeball.client.http_connection import Connection, Node, Request, node_of
from timeball.client.loop_network import LoopNetwork
from timeball.client.network import BLOCKING, run
from timeball.io.clock import SystemClock

ASK = Request("GET", "/v1/topics")


class Driven:
    """A connection whose coroutines `drive` runs to their result: in this thread, or in an event loop."""

    def __init__(self, drive: Callable[[Coroutine[Any, Any, Any]], Any], connection: Connection) -> None:
        self._drive, self.connection = drive, connection

    def __getattr__(self, name: str) -> Any:
        async def get() -> Any:
            return getattr(self.connection, name)

        async def call(*args: Any) -> Any:
            result = attribute(*args)
            return await result if inspect.isawaitable(result) else result

        attribute = self._drive(get())
        return (lambda *args: self._drive(call(*args))) if callable(attribute) else attribute


@pytest.fixture(params=["blocking", "asyncio"])
def connected(request: pytest.FixtureRequest) -> Callable[[], tuple[Driven, socket.socket]]:
    """A function that makes a connection, blocking or of an event loop, and returns it and the peer's socket."""
    is_blocking = request.param == "blocking"
    drive, network = (run, BLOCKING) if is_blocking else (awaited, LoopNetwork(1))

    def connect() -> tuple[Driven, socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            node = Node("http://there", "127.0.0.1", listening.getsockname()[1])
            connection = drive(Connection.connect(node, network, None, "", BOUND_S, SystemClock()))
            peer, _ = listening.accept()
        peer.settimeout(BOUND_S)
        return Driven(drive, connection), peer

    return connect


Connected = Callable[[], tuple[Driven, socket.socket]]


@pytest.mark.parametrize(
    ("endpoint", "host", "port"),
    [
        ("http://broker:7480", "broker", 7480),
        ("http://broker", "broker", 7480),
        ("https://[::1]:81/", "::1", 81),
        ("https://[::1]", "::1", 7480),
    ],
)
def test_an_endpoint_is_split_into_host_and_port(endpoint: str, host: str, port: int) -> None:
    assert node_of(endpoint) == Node(endpoint, host, port)


@pytest.mark.parametrize(
    "endpoint", ["http://", "http://a:b", "http://a:0", "http://a:70000", "http://a/b:1"]
)
def test_a_malformed_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(RequestError, match="http://host:port"):
        node_of(endpoint)


def test_an_answer_in_pieces_is_read_whole_and_its_connection_is_reusable(connected: Connected) -> None:
    connection, peer = connected()

    def answer_in_pieces() -> None:
        assert peer.recv(65_536).startswith(b"GET /v1/topics HTTP/1.1\r\nhost: 127.0.0.1:")
        for piece in (b"HTTP/1.1 200 OK\r\ncontent-", b"length: 5\r\ncontent-type: a/b\r\n\r\nhe", b"llo"):
            peer.sendall(piece)

    thread = threading.Thread(target=answer_in_pieces)
    thread.start()
    reply = connection.ask(ASK, BOUND_S)
    thread.join(BOUND_S)
    assert (reply.status, reply.content_type, reply.body) == (200, "a/b", b"hello")
    assert connection.is_reusable and not connection.is_stale
    peer.close()
    assert connection.is_stale
    connection.close()


def test_the_host_header_has_an_ipv6_address_in_brackets(connected: Connected) -> None:
    connection, peer = connected()
    connection.connection._node = node_of("http://[2001:db8::1]:81")
    peer.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    connection.ask(ASK, BOUND_S)
    assert b"\r\nhost: [2001:db8::1]:81\r\n" in peer.recv(65_536)
    connection.close()
    peer.close()


def test_a_connection_that_breaks_within_an_answer_raises_lost(connected: Connected) -> None:
    for answer_part in (b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhe"):
        connection, peer = connected()
        peer.sendall(answer_part)
        peer.shutdown(socket.SHUT_WR)
        with pytest.raises(Lost, match="http://there did not answer"):
            connection.ask(ASK, BOUND_S)
        assert not connection.is_reusable
        connection.close()
        peer.close()


def test_a_connection_is_not_reusable_after_an_answer_that_closes_it(connected: Connected) -> None:
    connection, peer = connected()
    peer.sendall(b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\ncontent-length: 1\r\n\r\nx")
    assert connection.ask(ASK, BOUND_S).status == 503
    assert not connection.is_reusable
    connection.close()
    peer.close()


def test_an_endless_answer_is_read_as_it_arrives_and_raises_lost_after_an_interruption(
    connected: Connected,
) -> None:
    connection, peer = connected()
    peer.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\na\nb\r\n")
    assert connection.open(ASK, BOUND_S).status == 200
    assert connection.read(BOUND_S) == b"a\nb"
    assert connection.read(0) == b"", "no bytes have arrived"
    peer.sendall(b"1\r\n\n\r\n")
    assert connection.read(BOUND_S) == b"\n"
    connection.interrupt()
    with pytest.raises(Lost):
        connection.read(BOUND_S)
    connection.close()
    peer.close()


def test_finish_returns_the_last_bytes_of_an_endless_answer(connected: Connected) -> None:
    connection, peer = connected()
    peer.sendall(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    connection.open(ASK, BOUND_S)

    def end_answer() -> None:
        """Send the rest of the answer when the client has ended its direction."""
        while peer.recv(65_536):
            pass  # the client ends its direction
        peer.sendall(b"2\r\nab\r\n")
        peer.close()

    thread = threading.Thread(target=end_answer)
    thread.start()
    assert connection.finish(BOUND_S) == b"ab"
    thread.join(BOUND_S)
    connection.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_process_that_forgets_a_connection_does_not_end_the_parents(connected: Connected) -> None:
    connection, peer = connected()
    if not (child := os.fork()):
        connection.connection.forget()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    peer.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    assert connection.ask(ASK, BOUND_S).status == 200
    connection.close()
    peer.close()
