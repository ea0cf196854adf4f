"""Counts the work between two iterations of the event loop, in which no other task can run."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopTurns:
    """Counts calls by iterations of the loop."""

    def __init__(self) -> None:
        self._turn, self._counts = 0, Counter[int]()

    def count(self) -> None:
        """Count one call in this iteration."""
        self._counts[self._turn] += 1

    async def most(self, work: Coroutine[Any, Any, T]) -> tuple[T, int]:
        """Return the work's result, and the count of the busiest iteration."""
        self._counts.clear()
        task = asyncio.ensure_future(work)
        while not task.done():
            self._turn += 1
            await asyncio.sleep(0)
        return task.result(), max(self._counts.values(), default=0)


class Watched(dict[Any, Any]):
    """A table whose look-ups are counted."""

    def __init__(self, table: dict[Any, Any], turns: LoopTurns) -> None:
        super().__init__(table)
        self._turns = turns

    def get(self, key: Any, default: Any = None) -> Any:
        self._turns.count()
        return super().get(key, default)
