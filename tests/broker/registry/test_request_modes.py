"""Which groups pop: said once, known after a restart."""

from __future__ import annotations

import pytest
from tests.broker.on_node import on_node
from tests.crash.world import World

from timeball import limits
from timeball.broker.registry.request_modes import RequestMode, RequestModes
from timeball.errors import InvalidMessage, OverLimit

MODE = RequestMode("t", "g", "POP", 3)


@on_node()
async def test_what_was_said_is_kept_and_what_was_not_is_pull(world: World) -> None:
    modes = RequestModes(world.broker.parts)
    assert modes.get("t", "g") == RequestMode("t", "g", "PULL", 0)
    await modes.set(MODE)
    await world.restart()
    modes = RequestModes(world.broker.parts)
    assert modes.get("t", "g") == MODE
    assert modes.get("t", "h").mode == "PULL"


@on_node()
async def test_names_and_numbers_are_bounded(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    modes = RequestModes(world.broker.parts)
    for wrong in (RequestMode("", "g"), RequestMode("t", "../g")):
        with pytest.raises(InvalidMessage):
            await modes.set(wrong)
    monkeypatch.setattr(limits, "GROUPS_MAX", 1)
    await modes.set(MODE)
    await modes.set(RequestMode("t", "g", "PULL"))
    with pytest.raises(OverLimit):
        await modes.set(RequestMode("u", "g"))
