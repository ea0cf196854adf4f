"""Tests as coroutines on a whole node in memory: `@on_node()` above `async def test_…(world: World, …)`.

The disk is a CrashFiles, the clock stands still until told, nothing listens. An exception that reached nobody
but the event loop fails the test; so does one that stopped the node, unless the test is about that.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import pyarrow as pa
from tests.crash.lives import run
from tests.crash.world import Unheard, World
from tests.crash_files import CrashFiles
from tests.log.small_log import AtOnce

from timeball.clock import ManualClock
from timeball.node import Node


class InTurn(World):
    """No threads: what they would do is done when it is asked for, so that turns of the loop are all there is."""

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
    """What a client sends: `rows` small messages of one topic; columns given replace or join these."""
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
