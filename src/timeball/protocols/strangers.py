"""Keeps descriptors free: when connections leave too few, strangers are closed, the most silent ones first.

Every edge accepts by itself, two of them inside libraries that have no bound, and a process has one table of
descriptors. So this looks at the table, once a second: which of its sockets are connections to our ports, whether
anything has ever come by them and how long ago, as the kernel knows it. Clients that are there beat, poll or send; one
that has only connected is the first to go. Who is closed sees an ordinary end of the connection.

What the broker needs for its own files is held back besides (descriptors.py).
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

from timeball.descriptors import in_use

logger = logging.getLogger(__name__)

LOOK_S = 1.0
LOOK_AGAIN_S = 0.1  # after some were closed: more of them may stand in line
STRANGER_MS = 1_000  # a client that means something has said something by then
FREE_MIN, FREE_MAX = 32, 1_024  # descriptors that are kept free: an eighth of all, within these
# Linux's struct tcp_info: tcpi_last_data_recv, in milliseconds, and tcpi_bytes_received.
_TCP_INFO = struct.Struct("=52xI72xQ")


class Connection(NamedTuple):
    """An accepted connection, in the order in which they are closed: the last first."""

    is_stranger: bool  # nothing has ever come by it
    silent_ms: int
    inode: int
    fd: int


class Strangers:
    """`limit`: descriptors that the process may have. `ports`: what the edges listen on."""

    def __init__(self, limit: int, ports: Collection[int]) -> None:
        self._limit, self._ports = limit, ports
        self.free_wanted = min(max(limit // 8, FREE_MIN), FREE_MAX)

    async def run(self) -> None:
        """Look once a second, without end."""
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
        """Close the most silent connections if too few descriptors are free; returns how many."""
        used = [fd for fd in in_use() if _is_open(fd)]
        wanted = self.free_wanted - (self._limit - len(used))
        if wanted <= 0:
            return 0
        found = sorted(connections(self._ports, used), reverse=True)
        # More may stand in line behind the strangers that are in, and an honest client among them.
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
    """Of the descriptors in use, TCP connections that were accepted on one of `ports`."""
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
    """The socket of a descriptor that is another's. No duplicate: there may be no descriptor left for one."""
    held = socket.socket(fileno=fd)
    try:
        yield held
    finally:
        held.detach()


def _shut_down(connection: Connection) -> bool:
    try:
        with _held(connection.fd) as held:
            if os.fstat(held.fileno()).st_ino != connection.inode:
                return False  # another one by now
            held.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True
