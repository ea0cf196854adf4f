"""Tests as coroutines on a whole node in memory: `@on_node()` above `async def test_…(world: World, …)`.

The disk is a CrashFiles, the test moves the clock, and no port is open. A test fails on an exception that only
the event loop has seen, and on one that stopped the node, unless `failing` is set.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pyarrow as pa
from tests.crash.lives import run
from tests.crash.world import Unheard, World
from tests.crash_files import CrashFiles
from tests.log.small_log import AtOnce

from timeball.io.clock import ManualClock
from timeball.node.node import Node

TURNS = 8  # iterations of the loop: woken tasks have read the clock


class InTurn(World):
    """An executor without threads: a call runs when it is submitted, so the loop's iterations decide the order."""

    async def build(self, node: Node) -> None:
        node._threads = (AtOnce(), AtOnce(), AtOnce(), AtOnce())
        await super().build(node)


def on_node(
    kind: type[World] = World, *, failing: bool = False, **settings: Any
) -> Callable[[Callable[..., Awaitable[None]]], Any]:
    """Make a plain test of a coroutine; `failing`: the test is about a node that fails."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def live(*args: Any, **kwargs: Any) -> None:
            world = kind(CrashFiles(), ManualClock(), **settings)
            run(_live(world, lambda: test(world, *args, **kwargs), failing))

        # pytest and hypothesis must not ask who gives `world`: we do.
        signature = inspect.signature(test)
        others = [p for name, p in signature.parameters.items() if name != "world"]
        live.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        del live.__wrapped__  # type: ignore[attr-defined]
        return live

    return decorate


async def settled(world: World) -> None:
    """Wait until the ticker and the leases have read the clock, and everything that they began is done."""
    world.broker.consuming.wake()
    world.broker.ticker.wake()

    def is_quiet() -> bool:
        scheduler = world.broker.scheduling.scheduler
        due = scheduler.next_due_ms()
        held = [one for queue in world.broker.consuming.leases.all() for one in queue.in_flight.values()]
        return (
            (due is None or due > world.broker.clock.now_ms())
            and not (scheduler.is_busy or scheduler.in_flight_rows or scheduler.durations.is_off)
            and all(one.deadline_ms > world.broker.clock.elapsed_ms() for one in held)
        )

    for _ in range(3):
        for _ in range(TURNS):
            await asyncio.sleep(0)
        await world.until(is_quiet, "all that is due is settled")
        await world.broker.log.writer.flushed()


async def _live(world: World, test: Callable[[], Awaitable[None]], failing: bool) -> None:
    await world.start()
    try:
        await test()
        failure = world.failure
        if world.node is not None and not failing:
            await world.stop()
    finally:
        await world.abandon()
    assert failing or failure is None, repr(failure)
    if world.unheard:
        raise Unheard(world.unheard)


def batch(rows: int = 1, **columns: Any) -> pa.RecordBatch:
    """The columns of a send: `rows` small messages of one topic. Further columns replace or extend these."""
    whole = {"topic": ["orders"] * rows, "body": [b"body"] * rows, **columns}
    return pa.RecordBatch.from_pydict(
        {
            name: pa.array(values, pa.int64()) if name.endswith("_ms") else pa.array(values)
            for name, values in whole.items()
        }
    )


def column(rows: pa.RecordBatch | pa.Table, name: str) -> list[Any]:
    """One column's values."""
    return list(rows.column(name).to_pylist())
