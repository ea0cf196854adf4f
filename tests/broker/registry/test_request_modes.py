"""Which groups pop: said once, known after a restart."""

from __future__ import annotations

import pytest
from tests.broker.on_node import on_node
from tests.broker.registry.state_rows import StateRows
from tests.crash.world import World

from timeball import limits
from timeball.broker.registry.request_modes import RequestMode, RequestModes
from timeball.errors import InvalidMessage, OverLimit

MODE = RequestMode("t", "g", "POP", 3)


@on_node()
async def test_what_was_said_is_kept_and_what_was_not_is_pull(world: World) -> None:
    modes = world.broker.parts.request_modes
    assert modes.get("t", "g") == RequestMode("t", "g", "PULL", 0)
    modes.set(MODE)
    await world.restart()
    modes = world.broker.parts.request_modes
    assert modes.get("t", "g") == MODE
    assert modes.get("t", "h").mode == "PULL"


def test_names_and_numbers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = StateRows().opened(RequestModes)
    for wrong in (RequestMode("", "g"), RequestMode("t", "../g")):
        with pytest.raises(InvalidMessage):
            modes.set(wrong)
    monkeypatch.setattr(limits, "GROUPS_MAX", 1)
    modes.set(MODE)
    modes.set(RequestMode("t", "g", "PULL"))
    with pytest.raises(OverLimit):
        modes.set(RequestMode("u", "g"))
