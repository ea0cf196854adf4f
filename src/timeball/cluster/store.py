"""A small store of keys with revisions, transactions and leases, as etcd has it: what `KeyCoordinator` is built on.

    revision    counts the transactions that wrote something; each key knows the one that wrote it last
    transaction all comparisons hold: the first list of operations is done, else the second, at one instant
    lease       a key that is put with a lease goes when that ends

Two stores implement it: `etcd.py`, and the model of the tests, which are compared with each other step by step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

VALUE_BYTES_MAX = 256 * 1024  # a node's addresses and a group's record have some hundreds


class KeyValue(NamedTuple):
    """A key as it was read."""

    key: str
    value: bytes
    revision: int
    lease_id: int  # 0: stays for ever


class RevisionIs(NamedTuple):
    """Holds if this revision wrote the key last; 0: if there is no such key."""

    key: str
    revision: int


class LeaseIs(NamedTuple):
    """Holds if the key is there by this lease."""

    key: str
    lease_id: int


class Put(NamedTuple):
    """Write a key."""

    key: str
    value: bytes
    lease_id: int = 0


class Delete(NamedTuple):
    """Delete a key, if it is there."""

    key: str


class Read(NamedTuple):
    """Read a key, or all that begin with it."""

    key: str
    is_prefix: bool = False


Comparison = RevisionIs | LeaseIs
Operation = Put | Delete | Read


class Outcome(NamedTuple):
    """The answer to a transaction; `reads` has what each `Read` of the list that was done has found, by key."""

    succeeded: bool
    revision: int  # of the store, after it
    reads: list[list[KeyValue]]


class Store(Protocol):
    """All but `close` raise Unavailable and SetupError, as a Coordinator does."""

    async def transact(
        self, when: Sequence[Comparison], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> Outcome:
        """Do one of two lists of operations; raise LeaseLost when a key is put with a lease that has ended."""

    async def grant(self, ttl_s: int) -> tuple[int, int]:
        """Return a new lease's id and the seconds that it was granted."""

    async def renew(self, lease_id: int) -> int:
        """Return the seconds that a lease was granted anew; raise LeaseLost."""

    async def revoke(self, lease_id: int) -> None:
        """End a lease, if it has not ended yet, and delete its keys."""

    async def time_to_live(self, lease_id: int) -> int | None:
        """Return the seconds that are left of a lease, None when it has ended."""

    async def wait(self, prefix: str, after: int, timeout_s: float) -> None:
        """Return when a key with this prefix may have changed after a revision, or after the timeout."""

    async def close(self) -> None:
        """End connections and watches."""
