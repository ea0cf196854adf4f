"""What a process of a cluster is built with: the coordinator of its settings, and the name server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.cluster.worlds import led, world_of
from tests.protocols.remoting.wire import Wire

from timeball.cluster.coordinator import Node
from timeball.config import Settings
from timeball.errors import SetupError
from timeball.name_service import NameService, coordinator_of
from timeball.protocols.remoting.codec.codes import RequestCode, ResponseCode
from timeball.protocols.remoting.codec.frame import Command

PLAIN = {"cluster": "c", "node": "a", "etcd": "http://127.0.0.1:2379"}


def settings(**more: object) -> Settings:
    return Settings(**(PLAIN | {"name_server_port": 9_876} | more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"etcd": "127.0.0.1:2379"}, "etcd"),
        ({"etcd": "https://127.0.0.1:2379", "etcd_cert": "there.pem"}, "certificate"),
        ({"etcd_user": "timeball", "etcd_password_file": "nowhere"}, "--etcd-password-file"),
    ],
)
def test_a_coordinator_that_cannot_be_is_refused_by_its_option(more: dict[str, str], says: str) -> None:
    with pytest.raises(SetupError, match=says):
        coordinator_of(settings(**more))


def test_the_password_is_read_from_its_file(tmp_path: Path) -> None:
    async def run() -> None:
        secret = tmp_path / "password"
        secret.touch(0o600)
        secret.write_text("swordfish\n")
        await coordinator_of(settings(etcd_user="timeball", etcd_password_file=str(secret))).close()

    asyncio.run(run())


def test_it_answers_for_the_groups_of_the_coordinator(tmp_path: Path) -> None:
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


def ask_route(port: int) -> Command:
    with Wire(port) as wire:
        return wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="orders")
