"""Limits that all clients share: for bytes, for calls or connections of an edge, and for descriptors of the process.

Bytes, calls and connections have a fair share per address.

MemoryQuota limits the bytes of requests or answers that an edge holds:

    one address alone     half of the limit           one share is always left for the next address, so that no
    n addresses           an (n + 1)th of it each     address can keep the others out by being first

A share is never less than one item of the largest size, so that each address makes progress. With `reserve` and `room`,
a request that does not fit waits: requests of one address are granted in their order, those of several addresses in
turn. `check` and `held` refuse a request that does not fit.

SharedLimit limits the number of calls, streams or connections:

    up to half of the limit      every caller is admitted
    beyond                       an address or an account with n others has at most an (n + 2)th of the limit

So one address alone, or one account alone, gets at most half and cannot keep the others out. This limit never makes a
caller wait. It refuses at once, before a byte of the request is received.

IdleConnections closes idle connections of all edges when the process runs out of file descriptors.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from timeball.io.files import in_use
from timeball.model.errors import OverLimit

logger = logging.getLogger(__name__)

# ---- bytes ---------------------------------------------------------------------------------------------------

Granted = Callable[[], None]  # called when a request that had to wait fits, and its bytes are counted


class MemoryQuota:
    """Counts the bytes held for each address: received requests, or unread answers. Belongs to the event loop."""

    def __init__(self, bytes_max: int, item_bytes_max: int = 0) -> None:
        """`bytes_max`: for all addresses together.

        `item_bytes_max`: the largest item, the least share of an address.
        """
        self.bytes_max, self._item_bytes_max = bytes_max, item_bytes_max
        self.held_bytes = 0
        self._bytes_by_address: dict[str, int] = {}
        self._waiting: OrderedDict[str, deque[tuple[int, Granted]]] = OrderedDict()

    @property
    def waiting(self) -> int:
        """The number of requests that wait."""
        return sum(map(len, self._waiting.values()))

    def held_by(self, address: str) -> int:
        """Return the number of bytes that are counted for this address."""
        return self._bytes_by_address.get(address, 0)

    def fits(self, address: str, size_bytes: int) -> bool:
        """Check whether this address may hold this many more bytes. One item always fits an empty quota.

        An address that holds nothing may exceed its share, but not `bytes_max`.
        """
        own_bytes = self._bytes_by_address.get(address, 0)
        if self.held_bytes and self.held_bytes + size_bytes > self.bytes_max:
            return False
        share = max(self._item_bytes_max, self.bytes_max // (len(self._bytes_by_address) + 1))
        return not own_bytes or own_bytes + size_bytes <= share

    def add(self, address: str, size_bytes: int) -> None:
        """Count bytes that are in memory already, whether they fit or not."""
        if size_bytes:
            self.held_bytes += size_bytes
            self._bytes_by_address[address] = self._bytes_by_address.get(address, 0) + size_bytes

    def remove(self, address: str, size_bytes: int) -> None:
        """Stop counting bytes. Requests that wait may be granted."""
        remaining_bytes = self._bytes_by_address.get(address, 0) - size_bytes
        assert remaining_bytes >= 0, "more is given back than was held"
        self.held_bytes -= size_bytes
        if remaining_bytes:
            self._bytes_by_address[address] = remaining_bytes
        else:
            self._bytes_by_address.pop(address, None)
        if self._waiting:
            self._grant_waiting()

    def add_if_fits(self, address: str, size_bytes: int) -> bool:
        """Count these bytes if they fit and no request of this address waits. Returns whether they are counted."""
        if address in self._waiting or not self.fits(address, size_bytes):
            return False
        self.add(address, size_bytes)
        return True

    def reserve(self, address: str, size_bytes: int, granted: Granted) -> bool:
        """Count these bytes if they fit. Otherwise return False, and call `granted` later, when they are counted."""
        if self.add_if_fits(address, size_bytes):
            return True
        self._waiting.setdefault(address, deque()).append((size_bytes, granted))
        return False

    async def add_when_fits(self, address: str, size_bytes: int) -> None:
        """Wait until these bytes fit and are counted. If the caller is cancelled meanwhile, they are not counted."""
        if self.add_if_fits(address, size_bytes):
            return
        granted = asyncio.get_running_loop().create_future()

        def grant() -> None:
            # The future is done if the task was cancelled in this turn of the loop. The bytes are removed below then.
            if not granted.done():
                granted.set_result(None)

        self.reserve(address, size_bytes, grant)
        try:
            await granted
        except asyncio.CancelledError:
            if not self.withdraw(address, grant):
                self.remove(address, size_bytes)
            raise

    def check(self, address: str, size_bytes: int = 0) -> None:
        """Raise OverLimit if an answer of this size does not fit.

        Size 0: only if the address exceeds its share already.
        """
        if not self.fits(address, size_bytes):
            held_bytes = self.held_by(address)
            raise OverLimit(
                f"{held_bytes} bytes of answers to {address} are not read yet, {self.held_bytes} of all clients: "
                "read them before you ask again"
            )

    @contextmanager
    def held(self, address: str, size_bytes: int) -> Iterator[None]:
        """Count an answer while the `with` block sends it. Raises OverLimit if it does not fit."""
        self.check(address, size_bytes)
        self.add(address, size_bytes)
        try:
            yield
        finally:
            self.remove(address, size_bytes)

    def withdraw(self, address: str, granted: Granted) -> bool:
        """Remove the waiting request of this `granted` callback. Returns False if it was granted already."""
        requests = self._waiting.get(address, deque())
        for request in requests:
            if request[1] == granted:
                requests.remove(request)
                if not requests:
                    del self._waiting[address]
                self._grant_waiting()  # smaller requests behind it may fit
                return True
        return False

    def _grant_waiting(self) -> None:
        """Grant requests, one per address in turn, until no address has a first request that fits."""
        blocked: set[str] = set()
        while len(blocked) < len(self._waiting):
            address, requests = next(iter(self._waiting.items()))
            self._waiting.move_to_end(address)
            size_bytes, granted = requests[0]
            if address in blocked or not self.fits(address, size_bytes):
                blocked.add(address)
                continue
            requests.popleft()
            if not requests:
                del self._waiting[address]
            self.add(address, size_bytes)
            granted()


# ---- calls and connections -----------------------------------------------------------------------------------


class SharedLimit:
    """Counts open calls or connections per address and per account. Belongs to the event loop."""

    def __init__(self, noun: str, limit: int) -> None:
        """`noun`: the counted things in an error text, such as "connections"."""
        self._noun, self.limit = noun, limit
        # http2/exchange.py adds to these two fields itself for each call, because a function call would cost more than
        # the additions.
        self.taken = 0  # the sum of by_address
        # Has no zeros, so that its length is the number of addresses.
        self.by_address: defaultdict[str, int] = defaultdict(int)
        self._by_account: dict[str, int] = {}

    def take(self, address: str, account: str = "") -> None:
        """Count one more call, whether it fits or not. `account` is "" for a caller without an account."""
        self.taken += 1
        self.by_address[address] += 1
        self.count_account(account)

    def count_account(self, account: str) -> None:
        """Count a call for its account, too. Call it if the account was unknown at `take`. "" counts nothing."""
        if account:
            self._by_account[account] = self._by_account.get(account, 0) + 1

    def give_back(self, address: str, account: str = "") -> None:
        """Count one call of this address and account less."""
        self.taken -= 1
        _subtract(self.by_address, address)
        if account:
            _subtract(self._by_account, account)

    def excess(self, address: str, account: str = "") -> str | None:
        """Build an error text if the last counted call exceeds the limit or a share of it. None if it fits."""
        if self.taken > self.limit:
            return f"{self.limit} {self._noun} are open; close some, or try again later"
        if self.taken > self.limit // 2:
            for holder, counts in ((address, self.by_address), (account, self._by_account)):
                share = share_of(self.limit, len(counts))
                if counts.get(holder, 0) > share:
                    return (
                        f"{share} {self._noun} of {holder} are open, its share of {self.limit}; "
                        "close some, or try again later"
                    )
        return None

    def admit(self, address: str, account: str = "") -> None:
        """Count one more call until `give_back`. Raises OverLimit if it does not fit."""
        self.take(address, account)
        if error_text := self.excess(address, account):
            self.give_back(address, account)
            raise OverLimit(error_text)


def share_of(limit: int, holders: int) -> int:
    """Compute the share of each of `holders` addresses or accounts. One share is always left for the next one."""
    return max(1, limit // (holders + 1))


def exceeds_share(address: str, open_from: Iterable[str], limit: int) -> bool:
    """Check whether one more connection of this address exceeds its share.

    `open_from`: the address of each open connection. `limit`: of all connections.
    """
    counts = Counter(open_from)
    open_count = counts.total()
    if open_count < limit // 2:
        return False
    return open_count >= limit or counts[address] >= share_of(limit, len(counts.keys() | {address}))


def _subtract(counts: dict[str, int], holder: str) -> None:
    """Count one less for a holder, and remove a count of 0."""
    remaining = counts[holder] - 1
    if remaining:
        counts[holder] = remaining
    else:
        del counts[holder]


# ---- idle connections ----------------------------------------------------------------------------------------
# All edges share the table of descriptors of the process, and two edges accept connections in libraries without a
# limit. So `IdleConnections` reads the table once a second. For each connection to the broker's ports, it asks the
# kernel whether bytes have arrived, and how long ago. The descriptors that the broker needs for its own files are
# reserved separately (io/files.py).


CHECK_INTERVAL_S = 1.0
UNUSED_MS = 1_000  # age from which a connection without a byte is closed: a real client has sent one by then
FREE_MIN, FREE_MAX = 32, 1_024  # descriptors to keep free: an eighth of all, within these bounds
# Two fields of Linux's struct tcp_info: tcpi_last_data_recv in ms, and tcpi_bytes_received.
_TCP_INFO = struct.Struct("=52xI72xQ")


class Connection(NamedTuple):
    """An accepted connection. The order of the fields is the order of closing: the greatest tuple is closed first."""

    is_unused: bool  # no byte has ever arrived on it
    silent_ms: int  # since the last byte
    inode: int  # of the socket: it shows whether `fd` still belongs to this connection
    fd: int


class IdleConnections:
    """Closes idle connections to `ports`, on which the edges listen. `limit`: descriptors that the process may have.

    Connections on which no byte has ever arrived are closed first, then those that have been silent for the longest
    time. Live clients send heartbeats, polls or messages. The client of a closed connection sees an ordinary end of
    stream.
    """

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
        """Shut down the most idle connections if fewer than `free_target` descriptors are free.

        Returns their number.
        """
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
    """Whether a file descriptor with this number is open in this process."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def connections(ports: Collection[int], fds: Iterable[int]) -> Iterator[Connection]:
    """Yield the TCP connections among the descriptors `fds` whose local port is one of `ports`."""
    for fd in fds:
        try:
            file_status = os.fstat(fd)
            if not stat.S_ISSOCK(file_status.st_mode):
                continue
            with _borrowed_socket(fd) as connection:
                is_listening = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                is_inet = connection.family in (socket.AF_INET, socket.AF_INET6)
                if is_listening or not is_inet or connection.getsockname()[1] not in ports:
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            silent_ms, received_bytes = _TCP_INFO.unpack(info)
            yield Connection(received_bytes == 0, silent_ms, file_status.st_ino, fd)
        except OSError:
            continue  # not TCP, or closed meanwhile


def shut_down_all(ports: Collection[int]) -> int:
    """Shut down all TCP connections of the process whose local port is one of `ports`. Returns their number."""
    return sum(map(_shut_down, list(connections(ports, in_use()))))


@contextmanager
def _borrowed_socket(fd: int) -> Iterator[socket.socket]:
    """Wrap a descriptor that another object owns and closes.

    The descriptor is not duplicated, because no descriptor may be free for a duplicate.
    """
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
