"""The memory limits of all connections together: never exceeded, shared among addresses, and always released."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode, eventually

from timeball.edges.remoting import connection as module
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import Command, encode
from timeball.edges.remoting.connection import Connection, MemoryLimits

MIB = 1024 * 1024
OTHER = "127.0.0.2"
BODY = bytes(MIB)
OPAQUE = 7


def limits_of(node: RunningNode) -> MemoryLimits:
    """Return the memory limits of the remoting edge."""
    assert node.node.edges is not None
    return node.node.edges.remoting._memory_limits


def connections(node: RunningNode) -> list[Connection]:
    """Return the open connections of the remoting edge."""
    assert node.node.edges is not None
    return list(node.node.edges.remoting._connections)


def send_frame(body: bytes = BODY) -> bytes:
    """Return the frame of a send."""
    fields = {"a": "p", "b": "t", "c": "TBW102", "d": "1", "e": "0", "f": "0", "h": "0", "i": "", "j": "0"}
    return encode(Command(code=RequestCode.SEND_MESSAGE_V2, opaque=OPAQUE, ext=fields, body=body))


@contextmanager
def wires(node: RunningNode, count: int, address: str = "127.0.0.1") -> Iterator[list[Wire]]:
    """Connect several clients from one address during a block."""
    with ExitStack() as stack:
        yield [stack.enter_context(Wire.to(node, source=address)) for _ in range(count)]


def set_limits(node: RunningNode, bytes_max: int) -> MemoryLimits:
    """Set the limits of received bytes and of unread answers, and return the limits of the node."""
    limits = limits_of(node)
    limits.received.bytes_max = limits.unread.bytes_max = bytes_max
    limits.received._item_bytes_max = 2 * MIB
    return limits


def test_incomplete_frames_of_all_connections_are_limited(node: RunningNode) -> None:
    """Twenty clients of one address begin a frame of 1 MiB. The address may use 5 of the 10 MiB."""
    limits, data = set_limits(node, 10 * MIB), send_frame()
    with wires(node, 20) as clients:
        for wire in clients:
            wire.send_bytes(data[: 300 * 1024])
        eventually(lambda: limits.received.waiting == 16, "sixteen clients wait")
        assert limits.received.held_bytes <= 5 * MIB
        with wires(node, 1, OTHER) as [other]:
            other.send_bytes(data)
            assert other.answer_to(OPAQUE).code == ResponseCode.SUCCESS, "another address has its own share"
        for wire in clients:  # each complete frame frees memory for a client that waits
            wire.send_bytes(data[300 * 1024 :])
        assert {wire.answer_to(OPAQUE).code for wire in clients} == {ResponseCode.SUCCESS}
    assert limits.received.held_bytes <= 5 * MIB
    eventually(lambda: not limits.received.held_bytes, "all bytes are released")


def test_a_disconnected_client_releases_its_bytes(node: RunningNode) -> None:
    limits, data = set_limits(node, 4 * MIB), send_frame()
    with wires(node, 6) as clients:
        for wire in clients:
            wire.send_bytes(data[: 300 * 1024])
        eventually(lambda: limits.received.waiting == 5, "five clients wait")
    eventually(
        lambda: not limits.received.held_bytes and not limits.received.waiting, "all bytes are released"
    )


def test_a_connection_that_waits_for_memory_is_not_closed_as_silent(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits, data = set_limits(node, 4 * MIB), send_frame()
    with wires(node, 2) as [first, second]:
        first.send_bytes(data[:-1])
        eventually(lambda: limits.received.held_bytes > MIB, "the first frame has its memory")
        second.send_bytes(data[: 300 * 1024])
        eventually(lambda: limits.received.waiting == 1, "the second client waits")
        waiting = next(connection for connection in connections(node) if connection.flow.is_waiting)
        node.loop.call_soon_threadsafe(waiting.check_deadlines, node.loop.time() + 1_000)
        first.send_bytes(data[-1:])
        assert first.answer_to(OPAQUE).code == ResponseCode.SUCCESS
        second.send_bytes(data[300 * 1024 :])
        assert second.answer_to(OPAQUE).code == ResponseCode.SUCCESS


def test_too_many_connections_that_wait_for_memory_are_closed(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAITING_MAX", 2)
    limits, data = set_limits(node, 4 * MIB), send_frame()
    with wires(node, 6) as clients:
        for wire in clients:
            wire.send_bytes(data[: 300 * 1024])
        # Three connections are also open for a moment while the six connect, so that the waiting ones are counted, too.
        eventually(lambda: limits.received.waiting == 2 and len(connections(node)) == 3, "three are closed")


def test_the_bytes_of_a_large_send_are_released_when_it_is_answered_or_refused(node: RunningNode) -> None:
    limits = limits_of(node)
    with wires(node, 1) as [wire]:
        for body in (BODY, bytes(3 * MIB), bytes(4 * MIB + 1)):
            wire.send_bytes(send_frame(body=body))
            answer = wire.answer_to(OPAQUE)
            assert (answer.code == ResponseCode.SUCCESS) == (len(body) <= 4 * MIB)
            eventually(lambda: not limits.received.held_bytes, "all bytes are released")


def test_unread_answers_of_all_connections_are_limited(node: RunningNode) -> None:
    """One connection alone could have 64 MiB of unread answers."""
    limits = set_limits(node, 8 * MIB)
    with wires(node, 10):
        eventually(lambda: len(connections(node)) == 10, "connected")

        async def answer_all() -> int:
            highest = 0
            for _ in range(3):
                for connection in connections(node):
                    connection.write(bytes(3 * MIB))
                    highest = max(highest, limits.unread.held_bytes)
            return highest

        assert node.run(answer_all()) <= 8 * MIB
        assert limits.unread.held_bytes <= 8 * MIB
    eventually(lambda: not limits.unread.held_bytes, "all bytes are released")


def test_an_address_with_too_many_unread_answers_is_refused_and_others_are_not(node: RunningNode) -> None:
    limits = set_limits(node, 8 * MIB)
    with wires(node, 1) as [slow], wires(node, 1, OTHER) as [other]:
        eventually(lambda: len(connections(node)) == 2, "connected")
        slow_connection = next(connection for connection in connections(node) if connection.peer[0] != OTHER)

        async def fill() -> None:
            limits.unread.add("127.0.0.1", 5 * MIB)  # as if other connections of this address did not read
            slow_connection.flow.unread_bytes = 1

        node.run(fill())
        assert slow.ask(RequestCode.GET_ALL_TOPIC_CONFIG).code == ResponseCode.SYSTEM_BUSY
        assert other.ask(RequestCode.GET_ALL_TOPIC_CONFIG).code == ResponseCode.SUCCESS


def test_the_broker_stops_reading_from_a_client_with_many_unread_answers(node: RunningNode) -> None:
    """A client that sends requests faster than it reads answers slows down only itself."""
    with wires(node, 1) as [wire]:
        eventually(lambda: len(connections(node)) == 1, "connected")
        [connection] = connections(node)

        async def write() -> bool:
            connection.write(bytes(module.UNREAD_HIGH_BYTES + 8 * MIB))
            return connection.flow._is_slow

        assert node.run(write())
        wire.send_bytes(
            encode(Command(code=RequestCode.GET_ROUTEINFO_BY_TOPIC, opaque=OPAQUE, ext={"topic": "TBW102"}))
        )
        remaining = module.UNREAD_HIGH_BYTES + 8 * MIB
        wire._socket.settimeout(30)
        while remaining > 0:
            remaining -= len(wire._socket.recv(min(remaining, MIB)))
        assert wire.answer_to(OPAQUE).code == ResponseCode.SUCCESS
        assert not connection.flow._is_slow


def test_the_second_loopback_address_of_these_tests_can_be_bound() -> None:
    with socket.socket() as probe:
        probe.bind((OTHER, 0))
