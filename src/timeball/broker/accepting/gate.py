"""A shared and exclusive lock: cancels and reschedules share it, the resume of a campaign excludes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """A lock that requests share (`passing`) and a resume holds exclusively (`alone`). Belongs to the event loop.

    A request that cancels or moves scheduled messages finds a message, waits for the disk, and then decides by the due
    time and number that it found. A resume changes due times, so no request may be between these steps at that moment.
    `passing` does not yield to the event loop, unless a resume holds the lock or waits for it.
    """

    def __init__(self) -> None:
        self._exclusive = asyncio.Lock()
        self._holders = 0
        self._no_holders = asyncio.Event()
        self._no_holders.set()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Hold the lock together with other requests."""
        async with self._exclusive:
            # Under `_exclusive`: while a caller of `alone` waits, no request can enter, so its wait ends.
            self._holders += 1
            self._no_holders.clear()
        try:
            yield
        finally:
            self._holders -= 1
            if not self._holders:
                self._no_holders.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Hold the lock exclusively. Waits until all requests have released it, and keeps new ones waiting."""
        async with self._exclusive:
            await self._no_holders.wait()
            yield
