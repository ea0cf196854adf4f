"""The lock between requests that move messages and a resume, which must run alone."""

from __future__ import annotations

import asyncio

from timeball.broker.accepting.waiters import Gate


def test_the_exclusive_holder_waits_for_sharers_and_new_sharers_wait_for_it() -> None:
    async def live() -> list[str]:
        gate, events, may_leave = Gate(), list[str](), asyncio.Event()

        async def share(name: str) -> None:
            async with gate.passing():
                events.append(f"{name} in")
                await may_leave.wait()
                events.append(f"{name} out")

        async def hold_alone() -> None:
            async with gate.alone():
                events.append("alone in")
                await asyncio.sleep(0)
                events.append("alone out")

        tasks = []
        for work in (share("a"), share("b"), hold_alone(), share("c")):
            tasks.append(asyncio.ensure_future(work))
            await asyncio.sleep(0)
        assert events == ["a in", "b in"]
        may_leave.set()
        await asyncio.gather(*tasks)
        return events

    assert asyncio.run(live()) == ["a in", "b in", "a out", "b out", "alone in", "alone out", "c in", "c out"]


def test_a_holder_that_raises_releases_the_gate() -> None:
    async def live() -> None:
        gate = Gate()
        for enter in (gate.passing, gate.alone, gate.passing):
            try:
                async with enter():
                    raise KeyError
            except KeyError:
                pass
        async with asyncio.timeout(5), gate.alone():
            pass

    asyncio.run(live())
