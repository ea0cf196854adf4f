"""A long list in shares: all of it, in order, and the loop's turn in between."""

from __future__ import annotations

import pytest
from tests.crash.lives import run
from tests.loop_turns import LoopTurns

from timeball.broker.registry.rates import shares


@pytest.mark.parametrize("count", [0, 1, 64, 65, 1_000])
def test_all_come_in_order_and_no_turn_has_more_than_a_share(count: int) -> None:
    turns = LoopTurns()

    async def walk() -> list[int]:
        found = []
        async for some in shares(range(count), 64):
            for each in some:
                turns.count()
                found.append(each)
        return found

    assert run(turns.most(walk())) == (list(range(count)), min(count, 64))


def test_what_comes_meanwhile_is_left_out() -> None:
    table = dict.fromkeys(range(5))

    async def walk() -> list[int]:
        found = []
        async for some in shares(table, 2):
            table[max(table) + 1] = None
            found += some
        return found

    assert run(walk()) == [0, 1, 2, 3, 4]
