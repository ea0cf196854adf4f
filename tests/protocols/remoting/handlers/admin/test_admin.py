"""The rooms of administration together: each answers for itself, and none in another's place."""

from __future__ import annotations

from tests.broker.on_node import on_node
from tests.crash.world import World
from tests.protocols.remoting.pairs import site_of

from timeball.protocols.remoting.codec.codes import RequestCode
from timeball.protocols.remoting.handlers.admin.admin import Admin


@on_node()
async def test_no_code_is_offered_twice(world: World) -> None:
    admin = Admin(site_of(world.broker))
    assert len(admin.handlers()) == sum(len(room) for room in admin._rooms)
    assert admin.handlers().keys() <= set(RequestCode)


@on_node()
async def test_samples_reach_the_figures(world: World) -> None:
    admin = Admin(site_of(world.broker))
    before = len(admin._runtime._samples)
    admin.sample()
    assert len(admin._runtime._samples) == before + 1
