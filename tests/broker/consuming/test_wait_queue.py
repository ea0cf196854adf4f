"""WaitQueue: one has the turn, the next one gets it, nobody waits too long, and nobody leaves a trace."""

from __future__ import annotations

import asyncio

import pytest

from timeball import limits
from timeball.broker.consuming.wait_queue import WaitQueue
from timeball.errors import OverLimit


def soon(seconds: float = 60) -> float:
    return asyncio.get_running_loop().time() + seconds


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def hold(lines: WaitQueue, key: str, until: asyncio.Event, order: list[str], name: str) -> bool:
    async with lines.turn(key, soon()) as has_turn:
        order.append(name)
        await until.wait()
        return has_turn


def test_turns_come_one_by_one_in_order_and_lines_are_apart() -> None:
    async def main() -> None:
        lines, order, gates = WaitQueue(), list[str](), [asyncio.Event() for _ in range(4)]
        tasks = [
            asyncio.create_task(hold(lines, key, gate, order, name))
            for key, gate, name in zip("aaab", gates, ["a1", "a2", "a3", "b1"], strict=True)
        ]
        await turns()
        assert order == ["a1", "b1"] and lines.length == 4
        tasks[1].cancel()  # whoever goes away is passed over
        gates[0].set()
        await turns()
        assert order == ["a1", "b1", "a3"]
        for gate in gates:
            gate.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [results[0], *results[2:]] == [True, True, True]
        assert isinstance(results[1], asyncio.CancelledError)
        assert lines.length == 0 and not lines._lines

    asyncio.run(main())


def test_whoever_waits_too_long_is_told_so_and_the_line_goes_on() -> None:
    async def main() -> None:
        lines, gate, order = WaitQueue(), asyncio.Event(), list[str]()
        first = asyncio.create_task(hold(lines, "a", gate, order, "first"))
        await turns()
        async with lines.turn("a", soon(0)) as has_turn:
            assert not has_turn
        gate.set()
        assert await first
        async with lines.turn("a", soon()) as has_turn:
            assert has_turn
        assert lines.length == 0 and not lines._lines

    asyncio.run(main())


def test_no_more_wait_than_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PULLS_WAITING_MAX", 1)

    async def main() -> None:
        lines = WaitQueue()
        async with lines.turn("a", soon()):
            with pytest.raises(OverLimit, match="1 consumers wait"):
                async with lines.turn("b", soon()):
                    pass

    asyncio.run(main())
