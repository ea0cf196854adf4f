"""Turns: what is asked for while the last turn is under way shares the next one.

A look-up in the log and an append cost nearly the same for one row and for a hundred. So requests that each need both
are not begun one by one: the first begins a turn, and all that come before it ends are the next. Nobody waits
for others to come.

A turn that is refused as a whole is taken again item by item, so that the one at fault alone is told.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from timeball.errors import RequestError, TimeballError

T = TypeVar("T")
R = TypeVar("R")


class Turns(Generic[T, R]):
    """`handle` gives each item of a turn its result, or an error that is the item's alone."""

    def __init__(
        self, handle: Callable[[list[T]], Awaitable[Sequence[R | TimeballError]]], items_max: int
    ) -> None:
        self._handle, self._items_max = handle, items_max
        self._waiting: deque[tuple[T, asyncio.Future[R]]] = deque()
        self._task: asyncio.Task[None] | None = None

    def take(self, item: T) -> asyncio.Future[R]:
        """The item's result, when its turn has ended."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._waiting.append((item, future))
        if self._task is None:
            self._task = loop.create_task(self._run())
        return future

    async def _run(self) -> None:
        try:
            while self._waiting:
                count = min(len(self._waiting), self._items_max)
                await self._turn([self._waiting.popleft() for _ in range(count)])
        finally:
            self._task = None

    async def _turn(self, entries: list[tuple[T, asyncio.Future[R]]]) -> None:
        try:
            results = await self._handle([item for item, _ in entries])
        except RequestError as error:
            if len(entries) > 1:
                for entry in entries:
                    await self._turn([entry])
            else:
                _settle(entries[0][1], error)
        except Exception as error:  # whatever it is, those who wait are told and the next turn comes
            for _, future in entries:
                _settle(future, error)
        else:
            for (_, future), result in zip(entries, results, strict=True):
                _settle(future, result)


def _settle(future: asyncio.Future[R], result: R | Exception) -> None:
    if future.done():
        return  # who asked has gone away
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
