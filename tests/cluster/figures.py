"""Measure the coordinator on three members of etcd on this machine: `python -m tests.cluster.figures [COUNT]`.

Measured: swaps, renewals and reads one after the other; the time from a holder's last renewal until another node has
won its group; the time without swaps when etcd's own leader is killed; the requests of an idle node. A holder dies by
no longer renewing, at a random moment of its interval, as after a kill.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
from tests.cluster.etcd_cluster import EtcdCluster
from tests.cluster.worlds import World, make_group, next_record, wait_until, world_of

from timeball.cluster.coordination.coordinator import Coordinator, Directory, GroupView, HeldLease, Node
from timeball.cluster.coordination.etcd import EtcdAccess, EtcdStore
from timeball.model.errors import Unavailable

POLL_S = 1.0  # the interval of a node's reads, independent of its watch


class Share(NamedTuple):
    """Percentiles of durations, in milliseconds."""

    p50: float
    p99: float
    highest: float

    @classmethod
    def of(cls, times_s: list[float]) -> Share:
        """Compute the percentiles of these durations in seconds."""
        times_ms = sorted(1_000 * time_s for time_s in times_s)
        return cls(times_ms[len(times_ms) // 2], times_ms[int(0.99 * len(times_ms))], times_ms[-1])

    def __str__(self) -> str:
        return f"p50 {self.p50:.2f}  p99 {self.p99:.2f}  max {self.highest:.2f} ms"


async def timed(call: Callable[[], Awaitable[object]], count: int) -> Share:
    """Measure `count` calls, one after the other."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        await call()
        times.append(time.perf_counter() - began)
    return Share.of(times)


async def verbs(endpoints: list[str], count: int) -> dict[str, Share]:
    """Measure single requests."""
    async with world_of(endpoints) as world:
        coordinator = world.coordinator("a")
        view, lease = await make_group(coordinator), await coordinator.grant(60_000)

        async def swap() -> None:
            """Change the number of the set."""
            nonlocal view
            assert view.record is not None
            changed = msgspec.structs.replace(view.record, generation=view.record.generation + 1)
            view = (await coordinator.change("g1", view.revision, changed)).view

        async def lead() -> None:
            """Lead the next epoch, and resign."""
            nonlocal view
            swap = await coordinator.lead("g1", view.revision, next_record(view, "a"), lease)
            assert swap.won
            view = swap.view
            await coordinator.resign("g1", lease)

        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "swap of a record": swap,
            "lead and resign": lead,
            "renewal of a lease": lambda: coordinator.renew(lease),
            "read of a group": lambda: coordinator.read("g1"),
        }
        return {name: await timed(call, count) for name, call in calls.items()}


def node_of(
    world: World, endpoints: list[str], name: str, ttl_ms: int
) -> tuple[EtcdStore, Coordinator, HeldLease]:
    """Make a node in a new store: the store, its coordinator, and its lease."""
    store = EtcdStore(EtcdAccess(endpoints), ttl_ms=ttl_ms)
    world.stores.append(store)
    coordinator = Coordinator(store, world.clock, cluster=world.cluster, node=name)
    return store, coordinator, HeldLease(coordinator, world.clock, Node(name), ttl_ms)


async def takeovers(endpoints: list[str], ttl_ms: int, count: int) -> Share:
    """Measure the time from the death of a holder until a waiting node has won."""
    times = []
    for _ in range(count):
        async with world_of(endpoints) as world:
            _, holder, holding = node_of(world, endpoints, "a", ttl_ms)
            _, waiter, waiting = node_of(world, endpoints, "b", ttl_ms)
            tasks = [asyncio.create_task(lease.run()) for lease in (holding, waiting)]
            await registered(waiter, 2)
            view = await make_group(holder)
            assert holding.lease is not None
            view = (await holder.lead("g1", view.revision, next_record(view, "a"), holding.lease)).view
            won = asyncio.create_task(stand(waiter, waiting, view))
            await asyncio.sleep(random.uniform(1, 2) * ttl_ms / 1_000)
            tasks[0].cancel()
            died = time.perf_counter()
            times.append(await won - died)
            tasks[1].cancel()
    return Share.of(times)


async def registered(coordinator: Coordinator, count: int) -> None:
    """Wait until `count` nodes have registered."""

    async def are_there() -> bool:
        return len(await coordinator.nodes()) >= count

    await wait_until(are_there)


async def stand(coordinator: Coordinator, held: HeldLease, view: GroupView) -> float:
    """Wait until the group is free, as a follower does, lead it, and return the time."""
    while True:
        await coordinator.wait_for_change(view.as_of, POLL_S)
        try:
            view = await coordinator.read("g1")
            if view.holder is None and held.lease is not None:
                swap = await coordinator.lead("g1", view.revision, next_record(view, "b"), held.lease)
                if swap.won:
                    return time.perf_counter()
        except Unavailable:
            pass  # on a busy machine etcd may elect another leader meanwhile


async def outage(etcd: EtcdCluster, ttl_ms: int) -> float:
    """Kill etcd's leader, and return the seconds until a swap is made."""
    leader = await asyncio.to_thread(etcd.leader)
    endpoints = [leader.client, *(endpoint for endpoint in etcd.endpoints if endpoint != leader.client)]
    async with world_of(endpoints) as world:
        _, coordinator, _ = node_of(world, endpoints, "a", ttl_ms)
        view = await make_group(coordinator)
        assert view.record is not None
        leader.kill()
        began = time.perf_counter()
        while True:
            try:
                changed = msgspec.structs.replace(view.record, generation=9)
                if (await coordinator.change("g1", view.revision, changed)).won:
                    break
            except Unavailable:
                pass
        duration_s = time.perf_counter() - began
    leader.start()
    await asyncio.to_thread(etcd.wait_ready)
    return duration_s


async def lapse(etcd: EtcdCluster, ttl_ms: int) -> float:
    """Kill etcd's leader, and return the seconds for which a node's lease was over by its own clock."""
    leader = await asyncio.to_thread(etcd.leader)
    async with world_of(etcd.endpoints) as world:
        _, coordinator, held = node_of(world, etcd.endpoints, "a", ttl_ms)
        running = asyncio.create_task(held.run())
        await registered(coordinator, 1)
        lapsed_s, since = 0.0, time.perf_counter()
        leader.kill()
        killed_ms = world.clock.boot_ms()
        while held.lease is None or held.lease.sent_ms < killed_ms:
            await asyncio.sleep(0.002)
            since, elapsed_s = time.perf_counter(), time.perf_counter() - since
            lapsed_s += elapsed_s if held.lease is None else 0
        running.cancel()
    leader.start()
    await asyncio.to_thread(etcd.wait_ready)
    return lapsed_s


async def idle(endpoints: list[str], ttl_ms: int, seconds: float, *, has_group: bool) -> float:
    """Return the requests a second of a node that holds a lease and keeps its directory.

    `has_group`: False before `timeball cluster init`.
    """
    async with world_of(endpoints) as world:
        store, coordinator, held = node_of(world, endpoints, "a", ttl_ms)
        directory = Directory(coordinator)
        running = [asyncio.create_task(part.run()) for part in (held, directory)]
        await registered(coordinator, 1)
        if has_group:
            await make_group(coordinator)

        async def is_read() -> bool:
            return bool(directory.nodes) and bool(directory.views) == has_group

        await wait_until(is_read)
        before, began = store.requests, time.perf_counter()
        await asyncio.sleep(seconds)
        for task in running:
            task.cancel()
        return (store.requests - before) / (time.perf_counter() - began)


def measure(count: int) -> list[str]:
    """Return the lines of the report."""
    lines = []
    with tempfile.TemporaryDirectory() as folder, EtcdCluster(Path(folder) / "etcd") as etcd:
        for name, share in asyncio.run(verbs(etcd.endpoints, 20 * count)).items():
            lines.append(f"{name}: {share}")
        for ttl_ms in (1_000, 2_000):
            share = asyncio.run(takeovers(etcd.endpoints, ttl_ms, count))
            lines.append(f"takeover, TTL {ttl_ms} ms: {share}")
            for name, has_group in (("idle", True), ("idle without a group", False)):
                rate = asyncio.run(idle(etcd.endpoints, ttl_ms, count, has_group=has_group))
                lines.append(f"{name}, TTL {ttl_ms} ms: {rate:.1f} requests/s")
        outages = [asyncio.run(outage(etcd, 1_000)) for _ in range(max(1, count // 4))]
        lines.append(f"etcd's leader killed, no swap for: {Share.of(outages)}")
        for ttl_ms in (1_000, 2_000):
            lapses = [asyncio.run(lapse(etcd, ttl_ms)) for _ in range(max(1, count // 4))]
            lapsed = sum(lapse_s > 0 for lapse_s in lapses)
            lines.append(
                f"etcd's leader killed, lease of {ttl_ms} ms lapsed: {lapsed} of {len(lapses)}, {Share.of(lapses)}"
            )
    return lines


if __name__ == "__main__":
    print("\n".join(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 20)))
