"""Waiting: who is woken by what, for how long, and how many may wait."""

from __future__ import annotations

import asyncio

import pytest

from timeball.broker.accepting.waiters import Waiters, WaitQueue
from timeball.model import limits
from timeball.model.errors import OverLimit


async def _waits(waiters: Waiters, *places: tuple[str, int | None]) -> list[asyncio.Task[bool]]:
    tasks = [asyncio.ensure_future(waiters.wait(topic, 60, queue)) for topic, queue in places]
    await asyncio.sleep(0)
    return tasks


def test_a_queue_wakes_only_its_own_waiters() -> None:
    async def scene() -> None:
        waiters = Waiters()
        mine, another, any_queue, elsewhere = await _waits(waiters, ("a", 1), ("a", 2), ("a", None), ("b", 1))
        waiters.wake_queues([("a", 1), ("c", 1)])
        assert await mine and await any_queue
        await asyncio.sleep(0)
        assert not another.done() and not elsewhere.done()
        waiters.wake(["a"])
        assert await another
        waiters.wake_queues([("b", 1)])
        assert await elsewhere
        assert not waiters._by_topic and not waiters._count

    asyncio.run(scene())


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_a_waiter_is_woken_only_by_its_topic() -> None:
    async def main() -> None:
        waiters = Waiters()
        first, second, other = (asyncio.ensure_future(waiters.wait(name, 60)) for name in "aab")
        await turns()
        waiters.wake(["a", "c"])
        assert await first and await second
        await turns()
        assert not other.done()
        waiters.wake(["b"])
        assert await other

    asyncio.run(main())


def test_a_waiter_for_two_topics_is_woken_once_and_removed_from_both() -> None:
    async def main() -> None:
        waiters = Waiters()
        either = asyncio.ensure_future(waiters.wait_any(["a", "b"], 60))
        await turns()
        waiters.wake(["b"])
        assert await either
        assert not waiters._by_topic and not waiters._count

    asyncio.run(main())


def test_a_timed_out_or_cancelled_waiter_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PULLS_WAITING_MAX", 2)

    async def main() -> None:
        waiters = Waiters()
        assert await waiters.wait("a", 0) is False
        for _ in range(3):  # or the third would find no room
            gone = asyncio.ensure_future(waiters.wait("a", 60))
            await turns()
            gone.cancel()
            with pytest.raises(asyncio.CancelledError):
                await gone
        staying = [asyncio.ensure_future(waiters.wait("a", 60)) for _ in range(2)]
        await turns()
        with pytest.raises(OverLimit, match="2 consumers wait already"):
            await waiters.wait("b", 60)
        waiters.wake("a")
        assert await asyncio.gather(*staying) == [True, True]

    asyncio.run(main())


def soon(seconds: float = 60) -> float:
    return asyncio.get_running_loop().time() + seconds


async def hold(lines: WaitQueue, key: str, until: asyncio.Event, order: list[str], name: str) -> bool:
    async with lines.turn(key, soon()) as has_turn:
        order.append(name)
        await until.wait()
        return has_turn


def test_turns_are_in_order_and_independent_by_key() -> None:
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


def test_a_timeout_yields_false_and_the_queue_continues() -> None:
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


def test_too_many_waiters_raise_over_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PULLS_WAITING_MAX", 1)

    async def main() -> None:
        lines = WaitQueue()
        async with lines.turn("a", soon()):
            with pytest.raises(OverLimit, match="1 consumers wait"):
                async with lines.turn("b", soon()):
                    pass

    asyncio.run(main())
