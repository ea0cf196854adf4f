"""The way off the event loop: to the thread named, and back with whatever came of it."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from timeball.io.threads import in_thread
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
