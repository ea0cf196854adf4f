"""Keeps descriptors free: if connections leave too few, the most silent ones are closed, strangers first.

A stranger is a connection that has received no byte. Every edge accepts connections itself, two of them in libraries
without a bound, but a process has only one table of descriptors. So this module reads the table once a second. For each
connection to the broker's ports, the kernel states whether and how long ago bytes arrived. Live clients send
heartbeats, polls or messages, so a client that has only connected is closed first. Such a client sees an ordinary end
of the connection.

The descriptors that the broker needs for its own files are reserved separately (descriptors.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import struct
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from timeball.io.descriptors import in_use

logger = logging.getLogger(__name__)

LOOK_S = 1.0
LOOK_AGAIN_S = 0.1  # after some were closed: more strangers may wait in the backlog
STRANGER_MS = 1_000  # a real client has sent something by then
FREE_MIN, FREE_MAX = 32, 1_024  # descriptors that are kept free: an eighth of all, within these bounds
# Linux's struct tcp_info: tcpi_last_data_recv, in milliseconds, and tcpi_bytes_received.
_TCP_INFO = struct.Struct("=52xI72xQ")


class Connection(NamedTuple):
    """An accepted connection. Connections are sorted by these fields, and the greatest is closed first."""

    is_stranger: bool  # no byte has ever arrived on it
    silent_ms: int
    inode: int
    fd: int


class IdleConnections:
    """Closes idle connections to `ports`, on which the edges listen. `limit`: the process's maximum of descriptors."""

    def __init__(self, limit: int, ports: Collection[int]) -> None:
        self._limit, self._ports = limit, ports
        self.free_wanted = min(max(limit // 8, FREE_MIN), FREE_MAX)

    async def run(self) -> None:
        """Check the descriptors once a second, without end."""
        while True:
            await asyncio.sleep(LOOK_S)
            # In a thread: the table may have a hundred thousand entries.
            closed = await asyncio.to_thread(self.close_idle)
            if closed:
                logger.warning(
                    "too few descriptors are free, the most idle connections are closed descriptors=%d closed=%d",
                    self._limit, closed,
                )  # fmt: skip

    def close_idle(self) -> int:
        """Close the most silent connections if too few descriptors are free, and return how many were closed."""
        used = [fd for fd in in_use() if _is_open(fd)]
        wanted = self.free_wanted - (self._limit - len(used))
        if wanted <= 0:
            return 0
        found = sorted(connections(self._ports, used), reverse=True)
        # More connections may wait in the backlog behind the strangers, an honest client among them.
        strangers = sum(each.is_stranger and each.silent_ms >= STRANGER_MS for each in found)
        wanted = max(wanted, strangers)
        return sum(map(_shut_down, found[:wanted]))


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def connections(ports: Collection[int], used: Iterable[int]) -> Iterator[Connection]:
    """Yield the descriptors in use that are TCP connections accepted on one of `ports`."""
    for fd in used:
        try:
            found = os.fstat(fd)
            if not stat.S_ISSOCK(found.st_mode):
                continue
            with _held(fd) as held:
                listening = held.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                inet = held.family in (socket.AF_INET, socket.AF_INET6)
                if listening or not inet or held.getsockname()[1] not in ports:
                    continue
                info = held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            silent_ms, received_bytes = _TCP_INFO.unpack(info)
            yield Connection(received_bytes == 0, silent_ms, found.st_ino, fd)
        except OSError:
            continue  # no TCP, no connection any more, or gone meanwhile


@contextmanager
def _held(fd: int) -> Iterator[socket.socket]:
    """Yield a socket object for a descriptor of another owner, not a duplicate: no descriptor may be left for one."""
    held = socket.socket(fileno=fd)
    try:
        yield held
    finally:
        held.detach()


def _shut_down(connection: Connection) -> bool:
    try:
        with _held(connection.fd) as held:
            if os.fstat(held.fileno()).st_ino != connection.inode:
                return False  # the descriptor now belongs to another connection
            held.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True
