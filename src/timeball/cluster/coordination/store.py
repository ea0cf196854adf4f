"""A small key-value store with revisions, transactions and leases, modelled on etcd. `Coordinator` is built on it.

    revision    counts the transactions that wrote something; each key has the revision that wrote it last
    transaction if all comparisons hold, the first list of operations is carried out, else the second; atomic
    lease       a key that is put with a lease is deleted when the lease ends

There are two implementations: `etcd.py`, and the in-memory model of the tests. The tests compare the two step by
step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class KeyValue(NamedTuple):
    """A key as it was read."""

    key: str
    value: bytes
    revision: int
    lease_id: int  # 0: the key has no lease and stays


class RevisionIs(NamedTuple):
    """Holds if this revision wrote the key last. With revision 0: holds if the key does not exist."""

    key: str
    revision: int


class LeaseIs(NamedTuple):
    """Holds if the key exists and is bound to this lease."""

    key: str
    lease_id: int


class Put(NamedTuple):
    """Write a key."""

    key: str
    value: bytes
    lease_id: int = 0


class Delete(NamedTuple):
    """Delete a key if it exists."""

    key: str


class Read(NamedTuple):
    """Read a key, or all keys that begin with it."""

    key: str
    is_prefix: bool = False


Comparison = RevisionIs | LeaseIs
Operation = Put | Delete | Read


class Outcome(NamedTuple):
    """The result of a transaction. `reads` has the keys found by each `Read` of the list that was carried out."""

    succeeded: bool
    revision: int  # of the store, after the transaction
    reads: list[list[KeyValue]]


class Store(Protocol):
    """The operations of a store. All methods but `close` raise Unavailable and SetupError, as a Coordinator's do."""

    async def transact(
        self, when: Sequence[Comparison], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> Outcome:
        """Carry out `then` if all of `when` hold, else `otherwise`. Raises LeaseLost for a Put with an ended lease."""

    async def grant(self, ttl_s: int) -> tuple[int, int]:
        """Request a new lease. Returns its id and the granted TTL in seconds."""

    async def renew(self, lease_id: int) -> int:
        """Renew a lease. Returns the granted TTL in seconds. Raises LeaseLost."""

    async def revoke(self, lease_id: int) -> None:
        """End a lease, if it has not ended yet, and delete its keys."""

    async def time_to_live(self, lease_id: int) -> int | None:
        """Read how many seconds of a lease are left. None when it has ended."""

    async def wait(self, prefix: str, after: int, timeout_s: float) -> None:
        """Wait until a key with this prefix may have changed after a revision, or until the timeout."""

    async def close(self) -> None:
        """Close connections and watches."""
