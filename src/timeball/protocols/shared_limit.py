"""A bound on how many of something may be open, and a share of it for each address and each account.

    up to half of the limit      each caller gets a place
    beyond                       an address or an account with n others has at most an (n + 2)th of the limit

So the first address cannot keep the others out: one address alone, or one account alone, has half. A limit never makes
a caller wait. It refuses at once, before a byte of a request is received.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from timeball.errors import OverLimit


class SharedLimit:
    """Counts what is open by who holds it. Belongs to the event loop."""

    def __init__(self, what: str, limit: int) -> None:
        self._what, self.limit = what, limit
        self.taken = 0
        self._by_address: dict[str, int] = {}
        self._by_account: dict[str, int] = {}

    def take(self, address: str, account: str = "") -> None:
        """Count one more, whether it fits or not. `account`: "" for a caller without one."""
        self.taken += 1
        self._by_address[address] = self._by_address.get(address, 0) + 1
        self.name(account)

    def name(self, account: str) -> None:
        """Count for this account what has been taken before the caller was known."""
        if account:
            self._by_account[account] = self._by_account.get(account, 0) + 1

    def give_back(self, address: str, account: str = "") -> None:
        """Count one less."""
        self.taken -= 1
        _subtract(self._by_address, address)
        if account:
            _subtract(self._by_account, account)

    def excess(self, address: str, account: str = "") -> str | None:
        """Return the error's text when there is one too many, which has been counted; None when all fit."""
        if self.taken > self.limit:
            return f"{self.limit} {self._what} are open; close some, or try again later"
        if self.taken > self.limit // 2:
            for holder, counts in ((address, self._by_address), (account, self._by_account)):
                share = share_of(self.limit, len(counts))
                if counts.get(holder, 0) > share:
                    return (
                        f"{share} {self._what} of {holder} are open, its share of {self.limit}; "
                        "close some, or try again later"
                    )
        return None

    def admit(self, address: str, account: str = "") -> None:
        """Take a place, until `give_back`; raise OverLimit when there is none."""
        self.take(address, account)
        if text := self.excess(address, account):
            self.give_back(address, account)
            raise OverLimit(text)


def share_of(limit: int, holders: int) -> int:
    """Return how many each of these holders may have of a limit: always one share is left for the next one."""
    return max(1, limit // (holders + 1))


def exceeds_share(address: str, open_from: Iterable[str], limit: int) -> bool:
    """Return whether this address may open no more beside those that are open from these addresses, one for each."""
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
