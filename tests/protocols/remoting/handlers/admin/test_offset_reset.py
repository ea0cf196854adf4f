"""Resetting offsets: what is stored, what the members are told, and who is not there to be told."""

from __future__ import annotations

import msgspec
import pyarrow as pa
import pytest
from tests.broker.on_node import batch, on_node
from tests.crash.world import World
from tests.protocols.remoting.pairs import Pair, site_of

from timeball.protocols.remoting.clients import Consuming
from timeball.protocols.remoting.codec.codes import Language, RequestCode, ResponseCode
from timeball.protocols.remoting.codec.frame import Command
from timeball.protocols.remoting.handlers.admin.offset_reset import Resets

RESET, TOLD = RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, RequestCode.RESET_CONSUMER_CLIENT_OFFSET


class Rig:
    """A topic with ten messages in queue 0, one a second; a group that has read five; a member of it."""

    def __init__(self, world: World, pair: Pair) -> None:
        self.world, self.pair = world, pair
        self.site = site_of(world.broker)
        self.handlers = Resets(self.site).handlers()

    @classmethod
    async def made(cls, world: World, *, language: int = Language.JAVA, members: bool = True) -> Rig:
        rig = cls(world, await Pair.made())
        rig.began_ms = world.clock.wall
        for _ in range(10):
            await world.broker.send(batch(1, queue_id=pa.array([0], pa.int32())))
            world.clock.advance(1_000)
        await world.broker.commit_offsets("g", "orders", {0: 5})
        if members:
            rig.site.clients.beat(
                rig.pair.connection, "c", produces=(), consumes=[Consuming("g")], now_ms=0, language=language
            )
        return rig

    async def reset(self, **fields: object) -> Command:
        return await self.pair.ask(self.handlers, RESET, **{"topic": "orders", "group": "g", **fields})

    @property
    def offsets(self) -> dict[int, int]:
        return dict(self.world.broker.offsets("g", "orders"))


@pytest.mark.parametrize(
    ("second", "force", "offset"), [(2, False, 2), (8, False, 5), (8, True, 8), (99, True, 10), (-9, True, 0)]
)
@on_node()
async def test_a_group_goes_to_an_instant_and_only_back_unless_forced(
    world: World, second: int, force: bool, offset: int
) -> None:
    rig = await Rig.made(world)
    answer = await rig.reset(timestamp=rig.began_ms + second * 1_000, isForce=str(force).lower())
    assert answer.code == 0
    assert b'{"brokerName":"timeball","queueId":0,"topic":"orders"}:%d' % offset in answer.body
    assert rig.offsets == {0: offset, 1: 0}
    told = await rig.pair.read()
    assert (told.code, told.is_one_way, told.body) == (TOLD, True, answer.body)
    assert (told.ext["topic"], told.ext["group"], told.ext["isForce"]) == ("orders", "g", str(force).lower())
    rig.pair.close()


@on_node()
async def test_minus_one_is_the_end(world: World) -> None:
    rig = await Rig.made(world)
    assert (await rig.reset(timestamp=-1, isForce="true")).code == 0
    assert rig.offsets == {0: 10, 1: 0}
    rig.pair.close()


@on_node()
async def test_the_cpp_client_is_told_in_json(world: World) -> None:
    rig = await Rig.made(world, language=Language.CPP)
    await rig.reset(timestamp=rig.began_ms, isForce="true")
    assert msgspec.json.decode((await rig.pair.read()).body)["offsetTable"] == [
        {"brokerName": "timeball", "queueId": queue, "topic": "orders", "offset": 0} for queue in (0, 1)
    ]
    rig.pair.close()


@on_node()
async def test_nobody_to_tell_and_nothing_to_reset(world: World) -> None:
    rig = await Rig.made(world, members=False)
    answer = await rig.reset(timestamp=0, isForce="true")
    assert answer.code == ResponseCode.CONSUMER_NOT_ONLINE
    assert str(answer.remark).startswith("Consumer not online, so can not reset offset, Group: g")
    assert (await rig.reset(topic="x", timestamp=0)).code == ResponseCode.SYSTEM_ERROR
    assert rig.offsets == {0: 5}
    rig.pair.close()
