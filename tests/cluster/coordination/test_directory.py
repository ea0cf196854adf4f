"""The directory: the leader of each group, from the coordinator's records, holders and nodes."""

from __future__ import annotations

import asyncio

from tests.cluster.worlds import World, led, world_of

from timeball.cluster.coordination.coordinator import Directory, Node


async def register(world: World, node: str, port: int) -> None:
    coordinator = world.coordinator(node)
    await coordinator.register(Node(node, {"remoting": f"127.0.0.1:{port}"}), await coordinator.grant(60_000))


def test_the_leader_is_the_one_that_also_holds_the_group() -> None:
    async def run() -> None:
        async with world_of(None) as world:
            await register(world, "a", 10_911)
            directory = Directory(world.coordinator("c"))
            before = await directory.read()
            assert before == world.memory.revision and directory.leader("g1") is None
            coordinator = world.coordinator("a")
            _, lease = await led(coordinator, "a")
            assert await directory.read() > before
            leader = directory.leader("g1")
            assert leader is not None and leader.name == "a"
            assert directory.address("g1", "remoting") == ("127.0.0.1", 10_911)
            assert directory.address("g1", "flight") is None
            await register(world, "b", 10_912)
            await directory.read()
            assert directory.replicas("g1", "remoting")[0] == "127.0.0.1:10911"
            assert directory.replicas("g1", "flight") == directory.replicas("g9", "remoting") == []
            await coordinator.resign("g1", lease)
            await directory.read()
            assert directory.leader("g1") is None and "g1" in directory.views, "the group stays known"

    asyncio.run(run())


def test_a_running_directory_reads_changes_also_after_a_failed_read() -> None:
    async def run() -> None:
        async with world_of(None) as world:
            await register(world, "a", 10_911)
            directory = Directory(world.coordinator("c"))
            world.memory.is_down = True
            reading = asyncio.create_task(directory.run())
            await asyncio.sleep(0)
            world.memory.is_down = False
            await led(world.coordinator("a"), "a")
            async with asyncio.timeout(30):
                while directory.leader("g1") is None:
                    await asyncio.sleep(0.01)
            reading.cancel()

    asyncio.run(run())
