"""The environments for the contract of coordinators: in memory, and on three real members of etcd."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from tests.bounds import BOUND_S
from tests.cluster.memory_store import Memory, MemoryStore

from timeball.cluster.coordination.coordinator import Coordinator, GroupView, Lease
from timeball.cluster.coordination.etcd import EtcdAccess, EtcdStore
from timeball.cluster.coordination.store import Comparison, Operation, Outcome, Store
from timeball.cluster.protocol.replica import Record
from timeball.io.clock import Clock, ManualClock, SystemClock
from timeball.model.errors import Unavailable

T = TypeVar("T")

TTL_MS = 2_000  # of a lease that a test lets end
LONG_TTL_MS = 60_000  # of one that must not end in a test, however busy the machine is
RECORD = Record(3, "a/1", ("a/1", "b/1", "c/1"))

_names = itertools.count()


class Repeating:
    """A store that carries each transaction out twice, as after a lost answer. The caller gets the second answer."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def transact(
        self, when: Sequence[Comparison], then: Sequence[Operation], otherwise: Sequence[Operation] = ()
    ) -> Outcome:
        await self._store.transact(when, then, otherwise)
        return await self._store.transact(when, then, otherwise)

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


@dataclass
class World:
    """Coordinators of several nodes of one cluster, whose name no other test uses."""

    endpoints: list[str] | None  # None: in memory
    cluster: str = field(default_factory=lambda: f"{time.time_ns():x}-{next(_names)}")
    clock: Clock = field(default_factory=SystemClock)
    stores: list[Store] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.endpoints is None:
            self.clock = ManualClock()
            self.memory = Memory(self.clock)

    def store(self) -> Store:
        """Make a store of this cluster: a new one for each call."""
        if self.endpoints is None:
            return MemoryStore(self.memory)
        # Each store begins at another member.
        first = len(self.stores) % len(self.endpoints)
        endpoints = self.endpoints[first:] + self.endpoints[:first]
        self.stores.append(EtcdStore(EtcdAccess(endpoints), ttl_ms=20_000))
        return self.stores[-1]

    def coordinator(self, node: str, *, repeating: bool = False) -> Coordinator:
        """Make the coordinator of a node. With `repeating`, each transaction is carried out twice."""
        store = self.store()
        return Coordinator(
            Repeating(store) if repeating else store,  # type: ignore[arg-type]
            self.clock, cluster=self.cluster, node=node,
        )  # fmt: skip

    async def pass_time(self, ms: int, until: Callable[[], Awaitable[object]]) -> None:
        """Let `ms` pass, so that a lease ends: in memory at once, with etcd by waiting until `until` is true."""
        if isinstance(self.clock, ManualClock):
            self.clock.advance(ms)
        await wait_until(until)


@asynccontextmanager
async def world_of(endpoints: list[str] | None) -> AsyncIterator[World]:
    """Yield a new cluster in memory (None), or in the etcd with these endpoints."""
    world = World(endpoints)
    try:
        yield world
    finally:
        for store in world.stores:
            await store.close()


async def wait_until(condition: Callable[[], Awaitable[object]]) -> None:
    """Ask again and again until the condition is true, also while the coordinator is unavailable."""
    async with asyncio.timeout(BOUND_S):
        while True:
            try:
                if await condition():
                    return
            except Unavailable:
                pass
            await asyncio.sleep(0.01)


async def make_group(coordinator: Coordinator, group: str = "g1") -> GroupView:
    """Make a group's first record."""
    swap = await coordinator.change(group, 0, RECORD)
    assert swap.won
    return swap.view


def next_record(view: GroupView, node: str) -> Record:
    """Return the record by which this node leads the next epoch."""
    assert view.record is not None
    return msgspec.structs.replace(view.record, epoch=view.record.epoch + 1, leader=f"{node}/1")


async def led(coordinator: Coordinator, node: str, ttl_ms: int = LONG_TTL_MS) -> tuple[GroupView, Lease]:
    """Make the group g1 and lead it in the next epoch. Returns it, and the lease that holds it."""
    view, lease = await make_group(coordinator), await coordinator.grant(ttl_ms)
    swap = await coordinator.lead("g1", view.revision, next_record(view, node), lease)
    assert swap.won
    return swap.view, lease
