"""The sockets between replicas: real sockets polled in the test's own thread, and peers that break rules."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from tests.bounds import BOUND_S

from timeball.cluster.protocol.messages import Ack, Data, Hello, Message, Ping, Refuse, encode
from timeball.cluster.transport import connections as sockets
from timeball.cluster.transport.connections import UNIDENTIFIED_MAX, Connections, listen, parse_address
from timeball.io.clock import SystemClock
from timeball.model.errors import PeerError, SetupError

GROUP = "g1"
Calls = list[tuple[object, ...]]


class RecordingListener:
    """A Listener that records its calls."""

    def __init__(self) -> None:
        self.calls: Calls = []
        self.on_message: Callable[[str, Message], None] = lambda node, message: None

    def opened(self, node: str) -> None:
        self.calls.append(("opened", node))

    def received(self, node: str, message: Message) -> None:
        self.calls.append(("received", node, message))
        self.on_message(node, message)

    def closed(self, node: str, *, opened_here: bool) -> None:
        self.calls.append(("closed", node, opened_here))


class End:
    """Connections that listen on a free port, and the calls of their listener."""

    def __init__(self, group: str = GROUP) -> None:
        listening = listen("127.0.0.1", 0)
        self.address = ("127.0.0.1", int(listening.getsockname()[1]))
        self.listener = RecordingListener()
        self.connections = Connections(group, listening, SystemClock().boot_ms)
        self.connections.listener = self.listener

    def dial(self, other: End, node: str = "b") -> None:
        self.connections.addresses = {node: other.address}
        self.connections.is_dialing = True


@pytest.fixture
def ends() -> Iterator[list[End]]:
    """A list of ends. Those that a test adds are closed at its end."""
    ends: list[End] = []
    yield ends
    for end in ends:
        end.connections.close()


def poll_until(ends: list[End], condition: Callable[[], object]) -> None:
    """Poll all these ends until the condition is true."""
    deadline = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < deadline, [end.listener.calls for end in ends]
        for end in ends:
            end.connections.poll(2)


def hello(node: str = "a", group: str = GROUP, epoch: int = 1) -> Hello:
    return Hello(epoch, group, f"{node}/1")


def raw(message: Message) -> bytes:
    return b"".join(encode(message))


def connected(ends: list[End]) -> tuple[End, End]:
    """Make the ends a and b. a has dialed b and sent its HELLO."""
    ends += [End(), End()]
    one, other = ends
    one.dial(other)
    poll_until(ends, lambda: ("opened", "b") in one.listener.calls)
    one.connections.send("b", hello())
    poll_until(ends, lambda: ("received", "a", hello()) in other.listener.calls)
    return one, other


def is_ended(sock: socket.socket, ends: list[End]) -> bool:
    """Poll until the other side has closed this socket's connection."""
    sock.settimeout(0.001)
    is_closed = False

    def check() -> bool:
        nonlocal is_closed
        with suppress(TimeoutError):
            try:
                is_closed = is_closed or not sock.recv(1 << 16)
            except ConnectionError:
                is_closed = True
        return is_closed

    poll_until(ends, check)
    return is_closed


def test_messages_and_answers_arrive_in_order_on_a_dialed_connection(ends: list[End]) -> None:
    one, other = connected(ends)
    messages: list[Message] = [Ping(1, 2, 3, 4), Data(1, 1, 64, 2, 0, b"f" * 100_000), Ping(1, 5, 6, 7)]
    for message in messages:
        one.connections.send("b", message)
    answer = Ack(1, 1, 64, 2)
    other.connections.send("a", answer)
    poll_until(ends, lambda: len(other.listener.calls) == 4 and len(one.listener.calls) == 2)
    assert other.listener.calls[1:] == [("received", "a", message) for message in messages]
    assert one.listener.calls == [("opened", "b"), ("received", "b", answer)]


def test_messages_without_a_connection_are_dropped(ends: list[End]) -> None:
    one, other = connected(ends)
    one.connections.send("c", Ping(1, 2, 3, 4))
    one.connections.send("b", Refuse(9))  # an answer, but b has opened nothing
    one.connections.send("b", Ping(1, 2, 3, 5))
    poll_until(ends, lambda: len(other.listener.calls) > 1)
    assert other.listener.calls[1:] == [("received", "a", Ping(1, 2, 3, 5))]


def test_a_node_is_dialed_until_it_listens_and_failures_are_not_reported(ends: list[End]) -> None:
    late = listen("127.0.0.1", 0)
    address = ("127.0.0.1", int(late.getsockname()[1]))
    late.close()
    one = End()
    ends.append(one)
    one.connections.addresses, one.connections.is_dialing = {"b": address}, True
    poll_until(ends, lambda: one.connections._redial_at_ms.get("b"))  # it was refused once
    other = End()
    ends.append(other)
    one.connections.addresses = {"b": other.address}
    poll_until(ends, lambda: ("opened", "b") in one.listener.calls)
    assert one.listener.calls == [("opened", "b")], "a failed dial is not reported"


def test_an_ended_connection_is_reported_and_dialed_again(ends: list[End]) -> None:
    one, other = connected(ends)
    other.connections.close()
    ends.remove(other)
    poll_until(ends, lambda: ("closed", "b", True) in one.listener.calls)
    restarted = End()
    ends.append(restarted)
    one.connections.addresses = {"b": restarted.address}
    poll_until(ends, lambda: one.listener.calls.count(("opened", "b")) == 2)


def test_hanging_up_is_reported_only_at_the_other_end(ends: list[End]) -> None:
    one, other = connected(ends)
    one.connections.hang_up()
    poll_until(ends, lambda: ("closed", "a", False) in other.listener.calls)
    for _ in range(20):
        one.connections.poll(2)
    assert one.listener.calls == [("opened", "b")], "it dials no more"


@pytest.mark.parametrize(
    "first",
    [
        raw(Ping(1, 2, 3, 4)),
        raw(hello(group="g2")),
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n".ljust(64, b"."),
        raw(hello())[:5] + b"\xff" * 60,
    ],
    ids=["no HELLO", "another group", "another magic", "numbers out of range"],
)
def test_a_connection_without_a_valid_hello_is_closed(ends: list[End], first: bytes) -> None:
    one, other = connected(ends)
    with socket.create_connection(other.address) as stranger:
        stranger.sendall(first)
        assert is_ended(stranger, ends)
    one.connections.send("b", Ping(1, 2, 3, 4))
    poll_until(ends, lambda: ("received", "a", Ping(1, 2, 3, 4)) in other.listener.calls)
    assert not [call for call in other.listener.calls if call[0] == "closed"], (
        "it was never reported as opened"
    )


def test_connections_without_a_hello_are_limited(ends: list[End]) -> None:
    one, other = connected(ends)
    strangers = [socket.create_connection(other.address) for _ in range(UNIDENTIFIED_MAX + 1)]
    assert is_ended(strangers[0], ends)
    # The newest connections may still introduce themselves.
    strangers[-1].sendall(raw(hello("c")))
    poll_until(ends, lambda: ("received", "c", hello("c")) in other.listener.calls)
    for stranger in strangers:
        stranger.close()
    one.connections.send("b", Ping(1, 2, 3, 4))
    poll_until(ends, lambda: ("received", "a", Ping(1, 2, 3, 4)) in other.listener.calls)


def test_a_hello_that_arrives_byte_by_byte_is_received(ends: list[End]) -> None:
    end = End()
    ends.append(end)
    with socket.create_connection(end.address) as peer:
        for byte in raw(hello()):
            peer.sendall(bytes([byte]))
            end.connections.poll(0)
        poll_until(ends, lambda: end.listener.calls)
        assert end.listener.calls == [("received", "a", hello())]


def test_a_newer_connection_of_a_node_replaces_the_older(ends: list[End]) -> None:
    end = End()
    ends.append(end)
    with socket.create_connection(end.address) as older, socket.create_connection(end.address) as newer:
        older.sendall(raw(hello(epoch=1)))
        poll_until(ends, lambda: end.listener.calls)
        newer.sendall(raw(hello(epoch=2)))
        poll_until(ends, lambda: len(end.listener.calls) == 3)
        assert end.listener.calls[1:] == [("closed", "a", False), ("received", "a", hello(epoch=2))]
        assert is_ended(older, ends)
        end.connections.send("a", Refuse(7))
        end.connections.poll(0)
        newer.settimeout(BOUND_S)
        assert newer.recv(100) == raw(Refuse(7))


def test_messages_of_a_replaced_connection_are_dropped(ends: list[End]) -> None:
    end = End()
    ends.append(end)
    with socket.create_connection(end.address) as older, socket.create_connection(end.address) as newer:
        older.sendall(raw(hello()))
        poll_until(ends, lambda: end.listener.calls)
        newer.sendall(raw(hello(epoch=2)))
        poll_until(ends, lambda: len(end.listener.calls) == 3)
        with suppress(ConnectionError):
            older.sendall(raw(Ping(1, 2, 3, 4)))
        newer.sendall(raw(Ping(2, 2, 3, 4)))
        poll_until(ends, lambda: len(end.listener.calls) == 4)
        assert end.listener.calls[-1] == ("received", "a", Ping(2, 2, 3, 4))


def test_a_message_that_the_listener_refuses_ends_its_connection(ends: list[End]) -> None:
    one, other = connected(ends)

    def refuse(node: str, message: Message) -> None:
        raise PeerError("not now")

    other.listener.on_message = refuse
    one.connections.send("b", Ping(1, 2, 3, 4))
    one.connections.send("b", Ping(1, 2, 3, 5))
    poll_until(ends, lambda: ("closed", "b", True) in one.listener.calls)
    assert other.listener.calls[1:] == [("received", "a", Ping(1, 2, 3, 4)), ("closed", "a", False)]


# ---- one that takes no bytes ----------------------------------------------------------------------------------


def test_a_replica_that_takes_no_bytes_is_cut_off(ends: list[End], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "UNSENT_BYTES_MAX", 1 << 20)
    one, _ = connected(ends)
    frames = b"f" * (1 << 20)
    sent = 0
    while ("closed", "b", True) not in one.listener.calls:
        one.connections.send("b", Data(1, 1, 64, 2, 0, frames))
        sent += 1
        assert sent < 64, "the system's buffers take no more than some megabytes"
    one.connections.send("b", Ping(1, 2, 3, 4))
    assert one.listener.calls == [("opened", "b"), ("closed", "b", True)]


def test_a_single_message_may_be_longer_than_the_bound_of_unsent_bytes(
    ends: list[End], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "UNSENT_BYTES_MAX", 1 << 20)
    one, other = connected(ends)
    data = Data(1, 1, 64, 2, 0, bytes(32 << 20))
    one.connections.send("b", data)
    poll_until(ends, lambda: len(other.listener.calls) == 2)
    assert other.listener.calls[1] == ("received", "a", data)
    assert one.listener.calls == [("opened", "b")]


def test_a_connection_that_cannot_be_written_is_still_read(ends: list[End]) -> None:
    one, other = connected(ends)
    one.connections.send("b", Data(1, 1, 64, 2, 0, bytes(32 << 20)))  # b does not read
    other.connections.send("a", Ack(1, 1, 64, 2))
    poll_until([one], lambda: ("received", "b", Ack(1, 1, 64, 2)) in one.listener.calls)


def test_the_events_of_a_connection_that_ended_during_the_poll_are_ignored(ends: list[End]) -> None:
    """A message of one makes the listener hang up on another, whose own event waits in the same poll."""
    one, other = connected(ends)
    one.listener.on_message = lambda node, message: one.connections.hang_up()
    with socket.create_connection(one.address) as peer:
        peer.sendall(raw(hello("c")))
        other.connections.send("a", Ack(1, 1, 64, 2))
        poll_until(ends, lambda: ("closed", "a", False) in other.listener.calls)
    assert one.listener.calls[1][0] == "received"


# ---- other calls ----------------------------------------------------------------------------------------------


def test_a_node_refuses_connections_only_after_its_process_has_ended(ends: list[End]) -> None:
    one, other = connected(ends)
    assert not one.connections.refuses("b") and not one.connections.refuses("unknown")
    other.connections.close()
    ends.remove(other)
    assert one.connections.refuses("b")


def test_a_poll_is_woken_by_another_thread(ends: list[End]) -> None:
    end = End()
    ends.append(end)
    begin = time.monotonic()
    end.connections.wake()
    end.connections.poll(int(BOUND_S * 1_000))
    assert time.monotonic() - begin < BOUND_S


def test_a_wake_after_the_close_writes_to_no_other_file() -> None:
    end = End()
    end.connections.close()
    end.connections.close()
    before = os.eventfd(0, os.EFD_NONBLOCK)  # takes the number that is free now
    try:
        end.connections.wake()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(before)
    finally:
        os.close(before)


def test_a_node_without_an_address_that_can_be_resolved_is_tried_again(ends: list[End]) -> None:
    one, other = End(), End()
    ends += [one, other]
    one.connections.addresses, one.connections.is_dialing = {"b": ("name.invalid", 1)}, True
    one.connections.poll(0)
    one.connections.addresses = {"b": other.address}
    poll_until(ends, lambda: ("opened", "b") in one.listener.calls)


def test_a_port_in_use_raises_a_set_up_error_with_its_option() -> None:
    with listen("127.0.0.1", 0) as listening, pytest.raises(SetupError, match="--replication-port"):
        listen("127.0.0.1", listening.getsockname()[1])


@pytest.mark.parametrize(
    ("text", "address"),
    [("10.0.0.1:7410", ("10.0.0.1", 7410)), ("[::1]:7410", ("::1", 7410)), ("b.example:1", ("b.example", 1))],
)
def test_an_address_is_split_into_host_and_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


def test_a_slow_look_up_of_a_name_delays_neither_polls_nor_other_nodes(
    ends: list[End], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, getaddrinfo = threading.Event(), socket.getaddrinfo

    def slow(host: str, *args: Any, **options: Any) -> Any:
        if host == "slow.test" and not options.get("flags"):
            assert answers.wait(BOUND_S)
            host = "127.0.0.1"
        return getaddrinfo(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    ends += [End(), End(), End()]
    one, slowly, other = ends
    one.connections.addresses = {"b": ("slow.test", slowly.address[1]), "c": other.address}
    one.connections.is_dialing = True
    poll_until(ends, lambda: ("opened", "c") in one.listener.calls)
    assert not one.connections.refuses("b"), "the name is not resolved yet"
    assert ("opened", "b") not in one.listener.calls
    answers.set()
    poll_until(ends, lambda: ("opened", "b") in one.listener.calls)
