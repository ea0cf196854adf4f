"""Limits shared by all clients of an edge, with a share per address: for bytes, and for open calls or connections.

MemoryQuota limits the bytes that an edge holds in the broker:

    one address alone     half of the bound           one share is always left for the next address, so that no
    n addresses           an (n + 1)th of it each     address can keep the others out by being first

A share is never less than one item of the largest size, so that each address makes progress. A request that does not
fit waits, in order within an address and in turn between addresses. With `check` or `held` it is refused instead.

SharedLimit limits calls, streams or connections:

    up to half of the limit      each caller gets a place
    beyond                       an address or an account with n others has at most an (n + 2)th of the limit

So one address alone, or one account alone, gets at most half and cannot keep the others out. Such a limit never makes a
caller wait. It refuses at once, before a byte of a request is received.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from timeball.model.errors import OverLimit

Granted = Callable[[], None]


class MemoryQuota:
    """Counts the bytes held for each address: received requests, or unread answers. Belongs to the event loop."""

    def __init__(self, bytes_max: int, item_bytes_max: int = 0) -> None:
        self.bytes_max, self._item_bytes_max = bytes_max, item_bytes_max
        self.held_bytes = 0
        self._of: dict[str, int] = {}
        self._waiting: OrderedDict[str, deque[tuple[int, Granted]]] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait."""
        return sum(map(len, self._waiting.values()))

    def held_by(self, address: str) -> int:
        """Return the bytes that this address holds now."""
        return self._of.get(address, 0)

    def fits(self, address: str, size_bytes: int) -> bool:
        """Return whether this address may hold this many more bytes."""
        mine = self._of.get(address, 0)
        if self.held_bytes and self.held_bytes + size_bytes > self.bytes_max:
            return False
        share = max(self._item_bytes_max, self.bytes_max // (len(self._of) + 1))
        return not mine or mine + size_bytes <= share

    def add(self, address: str, size_bytes: int) -> None:
        """Count bytes that exist already, whether they fit or not."""
        if size_bytes:
            self.held_bytes += size_bytes
            self._of[address] = self._of.get(address, 0) + size_bytes

    def remove(self, address: str, size_bytes: int) -> None:
        """Give back bytes. Waiting requests may be granted."""
        left = self._of.get(address, 0) - size_bytes
        assert left >= 0, "more is given back than was held"
        self.held_bytes -= size_bytes
        if left:
            self._of[address] = left
        else:
            self._of.pop(address, None)
        if self._waiting:
            self._let_in()

    def add_if_room(self, address: str, size_bytes: int) -> bool:
        """Count these bytes if they fit and no request of this address waits, and return whether they are counted."""
        if address in self._waiting or not self.fits(address, size_bytes):
            return False
        self.add(address, size_bytes)
        return True

    def reserve(self, address: str, size_bytes: int, granted: Granted) -> bool:
        """Count these bytes if they fit. Otherwise return False and call `granted` once they are counted."""
        if self.add_if_room(address, size_bytes):
            return True
        self._waiting.setdefault(address, deque()).append((size_bytes, granted))
        return False

    async def room(self, address: str, size_bytes: int) -> None:
        """Wait until these bytes fit and are counted."""
        if self.add_if_room(address, size_bytes):
            return
        granted = asyncio.get_running_loop().create_future()

        def grant() -> None:
            # It is done if its task was cancelled in this turn of the loop. The task then gives back the granted bytes.
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
        """Raise OverLimit if an answer of this size exceeds the share of `address`. Size 0: if it does so already."""
        if not self.fits(address, size_bytes):
            mine = self.held_by(address)
            raise OverLimit(
                f"{mine} bytes of answers to {address} are not read yet, {self.held_bytes} of all clients; read "
                "yours, then ask on"
            )

    @contextmanager
    def held(self, address: str, size_bytes: int) -> Iterator[None]:
        """Count an answer while it is sent. Raises OverLimit if there is no room for it."""
        self.check(address, size_bytes)
        self.add(address, size_bytes)
        try:
            yield
        finally:
            self.remove(address, size_bytes)

    def withdraw(self, address: str, granted: Granted) -> bool:
        """Stop waiting, or return False if the request was granted already."""
        line = self._waiting.get(address, deque())
        for entry in line:
            if entry[1] == granted:
                line.remove(entry)
                if not line:
                    del self._waiting[address]
                self._let_in()  # requests behind it may fit
                return True
        return False

    def _let_in(self) -> None:
        """Grant requests that fit: one per address, in turn."""
        blocked: set[str] = set()
        while len(blocked) < len(self._waiting):
            address, line = next(iter(self._waiting.items()))
            self._waiting.move_to_end(address)
            size_bytes, granted = line[0]
            if address in blocked or not self.fits(address, size_bytes):
                blocked.add(address)
                continue
            line.popleft()
            if not line:
                del self._waiting[address]
            self.add(address, size_bytes)
            granted()


class SharedLimit:
    """Counts open calls or connections by their holder. Belongs to the event loop."""

    def __init__(self, what: str, limit: int) -> None:
        self._what, self.limit = what, limit
        # Each call over HTTP/2 adds to these two in place (http2/exchange.py), because a function call costs more than
        # the sums.
        self.taken = 0  # the sum of by_address
        self.by_address: defaultdict[str, int] = defaultdict(int)  # no zeros: its length counts holders
        self._by_account: dict[str, int] = {}

    def take(self, address: str, account: str = "") -> None:
        """Count one more, whether it fits or not. `account` is "" for a caller without one."""
        self.taken += 1
        self.by_address[address] += 1
        self.name(account)

    def name(self, account: str) -> None:
        """Count a place for this account that was taken before the caller was known."""
        if account:
            self._by_account[account] = self._by_account.get(account, 0) + 1

    def give_back(self, address: str, account: str = "") -> None:
        """Count one less."""
        self.taken -= 1
        _subtract(self.by_address, address)
        if account:
            _subtract(self._by_account, account)

    def excess(self, address: str, account: str = "") -> str | None:
        """Return the error's text if there is one place too many (the last one is counted already); None if all fit."""
        if self.taken > self.limit:
            return f"{self.limit} {self._what} are open; close some, or try again later"
        if self.taken > self.limit // 2:
            for holder, counts in ((address, self.by_address), (account, self._by_account)):
                share = share_of(self.limit, len(counts))
                if counts.get(holder, 0) > share:
                    return (
                        f"{share} {self._what} of {holder} are open, its share of {self.limit}; "
                        "close some, or try again later"
                    )
        return None

    def admit(self, address: str, account: str = "") -> None:
        """Take a place, until `give_back`. Raises OverLimit if there is none."""
        self.take(address, account)
        if text := self.excess(address, account):
            self.give_back(address, account)
            raise OverLimit(text)


def share_of(limit: int, holders: int) -> int:
    """Return the share of each of these holders in a limit: one share is always left for the next holder."""
    return max(1, limit // (holders + 1))


def exceeds_share(address: str, open_from: Iterable[str], limit: int) -> bool:
    """Return whether this address may open no more connections, given the address of each open one."""
    counts = Counter(open_from)
    taken = counts.total()
    if taken < limit // 2:
        return False
    return taken >= limit or counts[address] >= share_of(limit, len(counts.keys() | {address}))


def _subtract(counts: dict[str, int], holder: str) -> None:
    left = counts[holder] - 1
    if left:
        counts[holder] = left
    else:
        del counts[holder]
