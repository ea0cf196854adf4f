"""The name server of a process, over the groups of its cluster."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.cluster.worlds import led, world_of
from tests.edges.remoting.wire import Wire

from timeball.cluster.coordination.coordinator import Node
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import Command
from timeball.model.config import Settings
from timeball.node.name_service import NameService

PLAIN = {"cluster": "c", "node": "a", "etcd": "http://127.0.0.1:2379"}


def settings(**more: object) -> Settings:
    """Build the settings of a node of a cluster with a name server."""
    return Settings(**(PLAIN | {"name_server_port": 9_876} | more))  # type: ignore[arg-type]


def test_a_route_request_is_forwarded_to_the_leader_of_the_coordinator(tmp_path: Path) -> None:
    async def run() -> None:
        async with world_of(None) as world:
            coordinator = world.coordinator("a")
            await coordinator.register(
                Node("a", {"remoting": "127.0.0.1:1"}), await coordinator.grant(60_000)
            )
            await led(coordinator, "a")
            service = NameService(settings(cluster="", name_server_port=0), world.coordinator("n"))
            port = await service.start()
            try:
                answer = await asyncio.to_thread(ask_route, port)
                assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE, (
                    "nothing listens where the leader was"
                )
            finally:
                await service.close()

    asyncio.run(run())


def test_the_status_lists_the_flight_addresses_of_each_group_once_it_is_read() -> None:
    async def run() -> None:
        async with world_of(None) as world:
            coordinator = world.coordinator("a")
            addresses = {"flight": "127.0.0.1:7400"}
            await coordinator.register(Node("a", addresses), await coordinator.grant(60_000))
            await led(coordinator, "a")
            service = NameService(settings(cluster="", name_server_port=-1), world.coordinator("n"))
            assert service.status() == {"group": "g1", "groups": None}, "not read yet"
            await service.start()
            try:
                async with asyncio.timeout(30):
                    while service.status()["groups"] is None:
                        await asyncio.sleep(0.01)
                assert service.status()["groups"] == [{"group": "g1", "addresses": ["127.0.0.1:7400"]}]
            finally:
                await service.close()

    asyncio.run(run())


def ask_route(port: int) -> Command:
    """Ask the name server for the route of a topic."""
    with Wire(port) as wire:
        return wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="orders")
