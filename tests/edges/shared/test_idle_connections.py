"""If descriptors run short, the most idle connections to the broker's ports are closed, and no more than needed."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.bounds import BOUND_S

from timeball.edges.shared import shared_limits
from timeball.edges.shared.shared_limits import IdleConnections, connections
from timeball.io.files import in_use


class Listener:
    """A listening socket, its accepted connections, and their clients."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._server = stack.enter_context(socket.socket())
        self._server.bind(("127.0.0.1", 0))
        self._server.listen(64)
        self.port: int = self._server.getsockname()[1]
        self.clients: list[socket.socket] = []
        self.accepted: list[socket.socket] = []

    def dial(self, count: int) -> None:
        for _ in range(count):
            client = socket.create_connection(self._server.getsockname(), timeout=BOUND_S)
            self.clients.append(self._stack.enter_context(client))
            self.accepted.append(self._stack.enter_context(self._server.accept()[0]))


@contextmanager
def listener() -> Iterator[Listener]:
    with ExitStack() as stack:
        yield Listener(stack)


def is_closed(client: socket.socket) -> bool:
    client.settimeout(0.2)
    try:
        return client.recv(1) == b""
    except TimeoutError:
        return False


def limit_with(free: int) -> int:
    """Return a limit with so many free descriptors, plus the one that listing the descriptors needs."""
    return len(os.listdir("/proc/self/fd")) + free


def test_the_most_idle_connections_are_closed_and_no_more_than_needed() -> None:
    with listener() as ours, listener() as others:
        ours.dial(3)
        others.dial(2)
        for number in (1, 0, 2):
            ours.clients[number].sendall(b"x")
            ours.accepted[number].recv(1)
            time.sleep(0.02)  # the kernel measures silence in milliseconds
        ours.dial(3)  # these send nothing
        watch = IdleConnections(limit_with(shared_limits.FREE_MIN - 5), [ours.port])
        assert watch.free_target == shared_limits.FREE_MIN
        assert watch.close_idle() == 4
        assert [is_closed(client) for client in ours.clients] == [False, True, False, True, True, True]
        assert not any(map(is_closed, others.clients))


def test_nothing_is_closed_while_enough_descriptors_are_free() -> None:
    with listener() as ours:
        ours.dial(3)
        assert IdleConnections(limit_with(shared_limits.FREE_MIN), [ours.port]).close_idle() == 0
        assert not any(map(is_closed, ours.clients))


def test_all_unused_connections_are_closed_if_descriptors_are_short() -> None:
    """More connections may wait in the backlog. A connection that has sent a byte stays open."""
    with listener() as ours:
        ours.dial(5)
        ours.clients[0].sendall(b"x")
        ours.accepted[0].recv(1)
        time.sleep(shared_limits.UNUSED_MS / 1000 + 0.02)
        assert IdleConnections(limit_with(shared_limits.FREE_MIN - 2), [ours.port]).close_idle() == 4
        assert [is_closed(client) for client in ours.clients] == [False, True, True, True, True]


def test_listening_sockets_and_other_descriptors_are_not_connections() -> None:
    with listener() as ours:
        ours.dial(2)
        before = len(os.listdir("/proc/self/fd"))
        result = list(connections([ours.port], in_use()))
        assert {each.fd for each in result} == {each.fileno() for each in ours.accepted}
        assert len(os.listdir("/proc/self/fd")) == before, "the search leaves no descriptor open"


def test_a_reused_descriptor_is_not_closed() -> None:
    with listener() as ours:
        ours.dial(1)
        [result] = connections([ours.port], in_use())
        assert not shared_limits._shut_down(result._replace(inode=result.inode + 1))
        assert not is_closed(ours.clients[0])
        assert shared_limits._shut_down(result)
        assert is_closed(ours.clients[0])
        assert not shared_limits._shut_down(result._replace(fd=1 << 20))
