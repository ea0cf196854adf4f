"""A Store in memory: the model that etcd is compared with, and the store of tests without etcd.

The stores of all nodes share one `Memory`. Tests switch faults on: with `is_down` nothing is done and no answer comes,
with `loses_answers` the request is carried out and no answer comes.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from timeball.cluster.coordination.store import (
    Comparison,
    Delete,
    KeyValue,
    Operation,
    Outcome,
    Put,
    Read,
    RevisionIs,
)
from timeball.io.clock import Clock
from timeball.model.errors import LeaseLost, Unavailable


@dataclass
class Granted:
    """A lease."""

    ttl_s: int
    ends_ms: int


@dataclass
class Memory:
    """Keys, revisions and leases."""

    clock: Clock
    revision: int = 1
    keys: dict[str, KeyValue] = field(default_factory=dict)
    leases: dict[int, Granted] = field(default_factory=dict)
    ids: itertools.count[int] = field(default_factory=lambda: itertools.count(7))
    ttl_s_min: int = 1
    is_down: bool = False
    loses_answers: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # set at the next write, then replaced
    written: dict[str, int] = field(default_factory=dict)  # key -> revision of its last write or deletion

    def newest(self, prefix: str) -> int:
        """Find the revision of the last change below a prefix."""
        return max((revision for key, revision in self.written.items() if key.startswith(prefix)), default=0)

    def expire(self) -> None:
        """End the leases whose time is over."""
        for lease_id, lease in list(self.leases.items()):
            if self.clock.boot_ms() >= lease.ends_ms:
                self.end(lease_id)

    def end(self, lease_id: int) -> None:
        """End a lease, and delete its keys."""
        self.leases.pop(lease_id, None)
        self.write({key: None for key, kv in self.keys.items() if kv.lease_id == lease_id})

    def write(self, changes: dict[str, KeyValue | None]) -> None:
        """Write these keys in one revision. None deletes a key."""
        if not changes:
            return
        self.revision += 1
        for key, kv in changes.items():
            self.keys.pop(key, None)
            self.written[key] = self.revision
            if kv is not None:
                self.keys[key] = kv._replace(revision=self.revision)
        self.changed.set()
        self.changed = asyncio.Event()


class MemoryStore:
    """A Store over a Memory. Its methods are those of Store (coordination/store.py)."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory

    async def transact(
        self, when: Sequence[Comparison], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> Outcome:
        memory = await self._up()
        succeeded = all(self._holds(comparison) for comparison in when)
        operations = then if succeeded else otherwise
        for operation in operations:
            if isinstance(operation, Put) and operation.lease_id and operation.lease_id not in memory.leases:
                raise LeaseLost("gone")
        changes: dict[str, KeyValue | None] = {}
        for operation in operations:
            if isinstance(operation, Put):
                changes[operation.key] = KeyValue(operation.key, operation.value, 0, operation.lease_id)
            elif isinstance(operation, Delete) and operation.key in memory.keys:
                changes[operation.key] = None
        memory.write(changes)
        reads = [self._read(operation) for operation in operations if isinstance(operation, Read)]
        self._answer()
        return Outcome(succeeded, memory.revision, reads)

    async def grant(self, ttl_s: int) -> tuple[int, int]:
        memory = await self._up()
        lease_id, granted_s = next(memory.ids), max(ttl_s, memory.ttl_s_min)
        memory.leases[lease_id] = Granted(granted_s, memory.clock.boot_ms() + granted_s * 1_000)
        self._answer()
        return lease_id, granted_s

    async def renew(self, lease_id: int) -> int:
        memory = await self._up()
        if lease_id not in memory.leases:
            raise LeaseLost("gone")
        lease = memory.leases[lease_id]
        lease.ends_ms = memory.clock.boot_ms() + lease.ttl_s * 1_000
        self._answer()
        return lease.ttl_s

    async def revoke(self, lease_id: int) -> None:
        (await self._up()).end(lease_id)
        self._answer()

    async def time_to_live(self, lease_id: int) -> int | None:
        memory = await self._up()
        lease = memory.leases.get(lease_id)
        return None if lease is None else (lease.ends_ms - memory.clock.boot_ms()) // 1_000

    async def wait(self, prefix: str, after: int, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                while self.memory.newest(prefix) <= after:
                    await self.memory.changed.wait()
        except TimeoutError:
            pass

    async def close(self) -> None:
        pass

    async def _up(self) -> Memory:
        """Return the memory, once other tasks have run. Raises Unavailable while it is down."""
        await asyncio.sleep(0)  # other tasks run between a request and its effect, as with a network
        if self.memory.is_down:
            raise Unavailable("down")
        self.memory.expire()
        return self.memory

    def _answer(self) -> None:
        """Raise Unavailable if answers are lost."""
        if self.memory.loses_answers:
            raise Unavailable("the answer is lost")

    def _holds(self, comparison: Comparison) -> bool:
        kv = self.memory.keys.get(comparison.key)
        if isinstance(comparison, RevisionIs):
            return (kv.revision if kv else 0) == comparison.revision
        return (kv.lease_id if kv else 0) == comparison.lease_id

    def _read(self, read: Read) -> list[KeyValue]:
        keys = [
            key
            for key in self.memory.keys
            if key == read.key or (read.is_prefix and key.startswith(read.key))
        ]
        return [self.memory.keys[key] for key in sorted(keys)]
