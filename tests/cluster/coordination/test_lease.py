"""A held lease: renewed in time, ended by the local clock, and replaced when it is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest
from tests.cluster.memory_store import Memory, MemoryStore
from tests.cluster.worlds import World, led, wait_until, world_of

from timeball.cluster.coordination.coordinator import LEASE_MARGIN_MS, Coordinator, HeldLease, Node
from timeball.io.clock import ManualClock, SystemClock
from timeball.model.errors import SetupError

TTL_MS = 1_000


def held_in(world: World, node: str = "a") -> HeldLease:
    """Return a held lease of a node, without a lease yet."""
    return HeldLease(world.coordinator(node), world.clock, Node(node), TTL_MS)


def in_memory(scenario: Callable[[World, ManualClock], Awaitable[None]]) -> None:
    """Run a scenario with a new cluster in memory, and its clock."""

    async def within() -> None:
        async with world_of(None) as world:
            assert isinstance(world.clock, ManualClock)
            await scenario(world, world.clock)

    asyncio.run(within())


def test_a_lease_is_renewed_four_times_per_ttl() -> None:
    async def scenario(world: World, clock: ManualClock) -> None:
        held = held_in(world)
        assert held.lease is None
        for _ in range(20):
            assert await held.renew_or_grant() == TTL_MS / 4 / 1_000
            assert held.lease is not None and held.lease.ends_ms == clock.boot_ms() + TTL_MS - LEASE_MARGIN_MS
            clock.advance(TTL_MS // 4)
        assert list(await world.coordinator("b").nodes()) == ["a"]

    in_memory(scenario)


def test_the_lease_ends_by_its_granted_ttl() -> None:
    async def scenario(world: World, clock: ManualClock) -> None:
        world.memory.ttl_s_min = 2  # as etcd with its default timings
        held = held_in(world)
        assert await held.renew_or_grant() == 0.5
        clock.advance(1_799)
        assert held.lease is not None
        clock.advance(1)
        assert held.lease is None

    in_memory(scenario)


def test_the_wall_clock_does_not_change_the_lease() -> None:
    async def scenario(world: World, clock: ManualClock) -> None:
        held = held_in(world)
        await held.renew_or_grant()
        for step_ms in (10**9, -2 * 10**9):
            clock.step_wall(step_ms)
            assert held.lease is not None
        clock.suspend(TTL_MS)  # a suspended machine wakes without a lease
        assert held.lease is None

    in_memory(scenario)


def test_a_lease_ends_without_answers_and_is_valid_again_after_a_renewal(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def scenario(world: World, clock: ManualClock) -> None:
        held = held_in(world)
        await held.renew_or_grant()
        lease = held.lease
        assert lease is not None
        world.memory.is_down = True
        for _ in range(3):
            assert await held.renew_or_grant() < TTL_MS / 4 / 1_000
            clock.advance(200)
        assert held.lease == lease
        clock.advance(200)
        assert held.lease is None
        world.memory.is_down = False  # before the lease has ended in etcd
        await held.renew_or_grant()
        assert held.lease is not None and held.lease.id == lease.id

    in_memory(scenario)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"], (
        "once each, not at every renewal"
    )


def test_a_lost_lease_is_replaced_and_the_node_registered_with_the_new_one() -> None:
    async def scenario(world: World, clock: ManualClock) -> None:
        held = held_in(world)
        await held.renew_or_grant()
        first = held.lease
        clock.advance(TTL_MS)
        await held.renew_or_grant()
        assert first is not None and held.lease is not None and held.lease.id != first.id
        assert list(await world.coordinator("b").nodes()) == ["a"]
        assert list(world.memory.leases) == [held.lease.id]

    in_memory(scenario)


def test_a_registration_is_repeated_after_a_lost_answer() -> None:
    async def scenario(world: World, clock: ManualClock) -> None:
        held, other = held_in(world), world.coordinator("b")
        world.memory.loses_answers = True
        await held.renew_or_grant()  # granted, but not known: that lease ends by itself
        assert held.lease is None and len(world.memory.leases) == 1
        world.memory.loses_answers = False
        await held.renew_or_grant()
        assert held.lease is not None and list(await other.nodes()) == ["a"]

    in_memory(scenario)


def test_errors_for_an_operator_are_retried_once_a_second() -> None:
    async def scenario(world: World, clock: ManualClock) -> None:
        class Refusing(MemoryStore):
            async def grant(self, ttl_s: int) -> tuple[int, int]:
                raise SetupError("permission denied")

        refused = Coordinator(Refusing(Memory(clock)), clock, cluster="c", node="a")
        assert await HeldLease(refused, clock, Node("a"), TTL_MS).renew_or_grant() == 1.0

    in_memory(scenario)


def test_a_released_lease_deletes_only_its_own_keys() -> None:
    async def scenario(world: World, clock: ManualClock) -> None:
        coordinator = world.coordinator("a")
        view, _ = await led(coordinator, "a")
        held = held_in(world)
        await held.release()  # nothing is held yet
        await held.renew_or_grant()
        await held.release()
        assert held.lease is None and not await coordinator.nodes()
        assert (await coordinator.read("g1")).holder == view.holder, "the holder's key has another lease"

    in_memory(scenario)


@pytest.mark.xdist_group("etcd")
def test_a_lease_is_held_on_etcd(etcd: object) -> None:
    async def scenario() -> None:
        async with world_of(etcd.endpoints) as world:  # type: ignore[attr-defined]
            assert isinstance(world.clock, SystemClock)
            held, other = held_in(world), world.coordinator("b")
            running = asyncio.create_task(held.run())
            await wait_until(other.nodes)
            lease = held.lease
            assert lease is not None
            # The lease is held past its first end. If this machine was too slow, the node has another lease.
            await wait_until(lambda: has_passed(world, lease.sent_ms + lease.ttl_ms))
            await wait_until(other.nodes)
            running.cancel()
            await held.release()
            assert not await other.nodes()

    asyncio.run(scenario())


async def has_passed(world: World, boot_ms: int) -> bool:
    """Check whether this time has passed."""
    return world.clock.boot_ms() > boot_ms
