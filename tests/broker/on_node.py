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

TURNS = 8  # turns of the event loop after which tasks that were woken have read the clock


class InTurn(World):
    """A world without threads: a call of a thread runs when it is submitted, so the event loop decides the order."""

    async def build(self, node: Node) -> None:
        node._threads = (AtOnce(), AtOnce(), AtOnce(), AtOnce())
        await super().build(node)


def on_node(
    kind: type[World] = World, *, failing: bool = False, **settings: Any
) -> Callable[[Callable[..., Awaitable[None]]], Any]:
    """Convert a coroutine to a test without asyncio, which runs it on a started node.

    `failing`: the test expects the node to fail.
    """

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        @functools.wraps(test)
        def live(*args: Any, **kwargs: Any) -> None:
            world = kind(CrashFiles(), ManualClock(), **settings)
            run(_live(world, lambda: test(world, *args, **kwargs), failing))

        # Without `world`, so that pytest and hypothesis do not look for a value of this parameter.
        signature = inspect.signature(test)
        parameters = [p for name, p in signature.parameters.items() if name != "world"]
        live.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
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
        leases = [
            lease for queue in world.broker.consuming.leases.all() for lease in queue.in_flight.values()
        ]
        return (
            (due is None or due > world.broker.clock.now_ms())
            and not (scheduler.is_busy or scheduler.in_flight_rows or scheduler.durations.is_off)
            and all(lease.deadline_ms > world.broker.clock.elapsed_ms() for lease in leases)
        )

    for _ in range(3):
        for _ in range(TURNS):
            await asyncio.sleep(0)
        await world.until(is_quiet, "all that is due is settled")
        await world.broker.log.writer.flushed()


async def _live(world: World, test: Callable[[], Awaitable[None]], failing: bool) -> None:
    """Run a test on a started node, and check that no exception was lost."""
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
    """Build the columns of a send: `rows` small messages of one topic. `columns` replace or extend these columns."""
    all_columns = {"topic": ["orders"] * rows, "body": [b"body"] * rows, **columns}
    return pa.RecordBatch.from_pydict(
        {
            name: pa.array(values, pa.int64()) if name.endswith("_ms") else pa.array(values)
            for name, values in all_columns.items()
        }
    )


def column(rows: pa.RecordBatch | pa.Table, name: str) -> list[Any]:
    """List the values of a column."""
    return list(rows.column(name).to_pylist())
