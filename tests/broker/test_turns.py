"""Turns: shared by those who come meanwhile, in order, and each with an outcome of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.crash.lives import run

from timeball.broker.turns import Turns
from timeball.errors import NotFound, OverLimit, TimeballError


def in_turns(items_max: int = 100) -> Callable[[Callable[[Bakery], Coroutine[Any, Any, None]]], Any]:
    def decorate(test: Callable[[Bakery], Coroutine[Any, Any, None]]) -> Callable[[], None]:
        def live() -> None:
            async def main() -> None:
                unheard: list[dict[str, Any]] = []
                asyncio.get_running_loop().set_exception_handler(lambda _, context: unheard.append(context))
                await test(Bakery(items_max))
                assert unheard == []

            run(main())

        live.__name__ = test.__name__
        return live

    return decorate


class Bakery:
    """A handler that works when told; orders above 100 are unknown, and 13 spoils the whole turn."""

    def __init__(self, items_max: int) -> None:
        self.turns: Turns[int, str] = Turns(self._bake, items_max)
        self.done: list[list[int]] = []
        self.open = asyncio.Event()
        self.closed_for: Exception | None = None

    async def _bake(self, orders: list[int]) -> list[str | TimeballError]:
        self.done.append(orders)
        await self.open.wait()
        if self.closed_for is not None:
            raise self.closed_for
        if 13 in orders:
            raise NotFound(f"13 of {orders}")
        return [NotFound(str(order)) if order > 100 else f"cake {order}" for order in orders]


@in_turns()
async def test_who_comes_meanwhile_shares_the_next_turn(bakery: Bakery) -> None:
    first = bakery.turns.take(1)
    await asyncio.sleep(0)
    rest = [bakery.turns.take(n) for n in (2, 3, 4)]
    bakery.open.set()
    assert await asyncio.gather(first, *rest) == ["cake 1", "cake 2", "cake 3", "cake 4"]
    assert bakery.done == [[1], [2, 3, 4]]
    assert await bakery.turns.take(5) == "cake 5"


@in_turns(items_max=2)
async def test_a_turn_has_its_size(bakery: Bakery) -> None:
    bakery.open.set()
    await asyncio.gather(*[bakery.turns.take(n) for n in range(5)])
    assert bakery.done == [[0, 1], [2, 3], [4]]


@in_turns()
async def test_an_error_of_one_is_its_own(bakery: Bakery) -> None:
    bakery.open.set()
    good, bad = await asyncio.gather(*[bakery.turns.take(n) for n in (1, 101)], return_exceptions=True)
    assert good == "cake 1" and isinstance(bad, NotFound)
    assert bakery.done == [[1, 101]]


@in_turns()
async def test_a_turn_that_is_refused_is_taken_one_by_one(bakery: Bakery) -> None:
    bakery.open.set()
    outcomes = await asyncio.gather(*[bakery.turns.take(n) for n in (1, 13, 2)], return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["cake 1", "13 of [13]", "cake 2"]


@pytest.mark.parametrize("error", [OverLimit("disk full"), RuntimeError("a bug")], ids=type)
def test_what_is_nobodys_mistake_is_told_to_all(error: Exception) -> None:
    @in_turns()
    async def live(bakery: Bakery) -> None:
        bakery.open.set()
        bakery.closed_for = error
        outcomes = await asyncio.gather(*[bakery.turns.take(n) for n in (1, 2)], return_exceptions=True)
        assert outcomes == [error] * 2
        assert len(bakery.done) == 1
        bakery.closed_for = None
        assert await bakery.turns.take(3) == "cake 3"

    live()


@in_turns()
async def test_who_has_gone_away_holds_nobody_up(bakery: Bakery) -> None:
    gone, stays = bakery.turns.take(1), bakery.turns.take(2)
    await asyncio.sleep(0)
    gone.cancel()
    bakery.open.set()
    assert await stays == "cake 2"
