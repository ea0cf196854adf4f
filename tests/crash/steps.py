"""Steps that all scenarios use."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tests.crash.world import World

Step = Callable[[World], Awaitable[object]]


def cancel_some(*numbers: int) -> Step:
    """Cancel messages by the numbers of their keys, in the order in which the keys were made."""

    async def cancel(world: World) -> None:
        await world.cancel([f"k{number:05d}" for number in numbers])

    return cancel
