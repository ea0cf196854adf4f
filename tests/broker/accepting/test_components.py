"""The way off the event loop: to the thread named, and back with whatever came of it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from timeball.broker.accepting.components import Gate, in_thread, rollback_on_error
from timeball.model.errors import DiskFailed


def test_a_call_runs_in_the_thread_named_with_what_it_was_given() -> None:
    def where(one: int, *, two: int) -> tuple[str, int]:
        return threading.current_thread().name, one + two

    async def main() -> tuple[str, int]:
        with ThreadPoolExecutor(1, thread_name_prefix="reader") as thread:
            return await in_thread(thread, where, 40, two=2)

    name, total = asyncio.run(main())
    assert name.startswith("reader")
    assert total == 42


def test_what_it_raises_reaches_the_caller() -> None:
    def fail() -> None:
        raise DiskFailed("the disk is gone")

    async def main() -> None:
        with ThreadPoolExecutor(1) as thread:
            await in_thread(thread, fail)

    with pytest.raises(DiskFailed, match="gone"):
        asyncio.run(main())


def test_the_loop_goes_on_meanwhile() -> None:
    gate = threading.Event()

    async def main() -> bool:
        with ThreadPoolExecutor(1) as thread:
            waiting = asyncio.ensure_future(in_thread(thread, gate.wait, 60))
            await asyncio.sleep(0)
            assert not waiting.done()
            gate.set()  # only a loop that is not held up gets here
            return await waiting

    assert asyncio.run(main())


def test_what_failed_is_undone_and_still_fails() -> None:
    steps: list[int] = []
    with rollback_on_error(lambda: steps.append(1)):
        pass
    assert steps == []
    with pytest.raises(DiskFailed), rollback_on_error(lambda: steps.append(1), lambda: steps.append(2)):
        raise DiskFailed("gone")
    assert steps == [1, 2]


def test_one_alone_waits_for_those_inside_and_lets_none_in_meanwhile() -> None:
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


def test_one_that_fails_inside_has_left() -> None:
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
