"""Close idle connections when the process runs out of file descriptors.

Connections on which no byte has ever arrived are closed first, then those that have been silent for the longest time.
Live clients send heartbeats, polls or messages. The client of a closed connection sees an ordinary end of stream.

All edges share one table of descriptors, and two of them accept connections in libraries without a limit. So this
module reads the table of the process once a second. For each connection to the broker's ports, it asks the kernel
whether bytes have arrived, and how long ago.

The descriptors that the broker needs for its own files are reserved separately (io/descriptors.py).
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

CHECK_INTERVAL_S = 1.0
CHECK_AGAIN_S = 0.1  # after some were closed: more unused connections may wait in the backlog
UNUSED_MS = 1_000  # a real client has sent its first byte by then
FREE_MIN, FREE_MAX = 32, 1_024  # descriptors to keep free: an eighth of all, within these bounds
# Two fields of Linux's struct tcp_info: tcpi_last_data_recv in ms, and tcpi_bytes_received.
_TCP_INFO = struct.Struct("=52xI72xQ")


class Connection(NamedTuple):
    """An accepted connection. The order of the fields is the order of closing: the greatest tuple is closed first."""

    is_unused: bool  # no byte has ever arrived on it
    silent_ms: int
    inode: int
    fd: int


class IdleConnections:
    """Closes idle connections to `ports`, on which the edges listen. `limit`: descriptors that the process may have."""

    def __init__(self, limit: int, ports: Collection[int]) -> None:
        self._limit, self._ports = limit, ports
        self.free_target = min(max(limit // 8, FREE_MIN), FREE_MAX)

    async def run(self) -> None:
        """Check the descriptors once a second, without end."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            # In a thread, because the table may have a hundred thousand entries.
            closed = await asyncio.to_thread(self.close_idle)
            if closed:
                logger.warning(
                    "too few descriptors are free, the most idle connections are closed descriptors=%d closed=%d",
                    self._limit, closed,
                )  # fmt: skip

    def close_idle(self) -> int:
        """Close the most idle connections if too few descriptors are free, and return how many were closed."""
        used_fds = [fd for fd in in_use() if _is_open(fd)]
        close_count = self.free_target - (self._limit - len(used_fds))
        if close_count <= 0:
            return 0
        candidates = sorted(connections(self._ports, used_fds), reverse=True)
        # Close all unused connections: behind them in the backlog, real clients may wait to be accepted.
        unused_count = sum(
            candidate.is_unused and candidate.silent_ms >= UNUSED_MS for candidate in candidates
        )
        close_count = max(close_count, unused_count)
        return sum(map(_shut_down, candidates[:close_count]))


def _is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def connections(ports: Collection[int], fds: Iterable[int]) -> Iterator[Connection]:
    """Yield the TCP connections among the descriptors that were accepted on one of `ports`."""
    for fd in fds:
        try:
            file_status = os.fstat(fd)
            if not stat.S_ISSOCK(file_status.st_mode):
                continue
            with _borrowed_socket(fd) as connection:
                listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                inet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if listening or not inet or connection.getsockname()[1] not in ports:
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            silent_ms, received_bytes = _TCP_INFO.unpack(info)
            yield Connection(received_bytes == 0, silent_ms, file_status.st_ino, fd)
        except OSError:
            continue  # not TCP, or closed meanwhile


@contextmanager
def _borrowed_socket(fd: int) -> Iterator[socket.socket]:
    """Wrap a descriptor that another object owns. It is not duplicated, since no descriptor may be left for that."""
    borrowed = socket.socket(fileno=fd)
    try:
        yield borrowed
    finally:
        borrowed.detach()


def _shut_down(connection: Connection) -> bool:
    """Shut a connection down. Returns False if its descriptor was closed or reused meanwhile."""
    try:
        with _borrowed_socket(connection.fd) as borrowed:
            if os.fstat(borrowed.fileno()).st_ino != connection.inode:
                return False  # the descriptor now belongs to another connection
            borrowed.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False
    return True
