"""The lock between requests that move messages and a resume, which must run alone."""

from __future__ import annotations

import asyncio

from timeball.broker.accepting.waiters import Gate


def test_the_exclusive_holder_waits_for_others_and_blocks_new_ones() -> None:
    async def live() -> list[str]:
        gate, told, go = Gate(), list[str](), asyncio.Event()

        async def pass_(name: str) -> None:
            async with gate.passing():
                told.append(f"{name} in")
                await go.wait()
                told.append(f"{name} out")

        async def alone() -> None:
            async with gate.alone():
                told.append("alone in")
                await asyncio.sleep(0)
                told.append("alone out")

        tasks = []
        for work in (pass_("a"), pass_("b"), alone(), pass_("c")):
            tasks.append(asyncio.ensure_future(work))
            await asyncio.sleep(0)
        assert told == ["a in", "b in"]
        go.set()
        await asyncio.gather(*tasks)
        return told

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
