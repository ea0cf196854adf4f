"""A gate that keeps cancels and reschedules apart from a campaign's resume."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Gate:
    """Keeps requests that cancel or move scheduled messages apart from a resume. Belongs to the event loop.

    Such a request finds a message, waits for the disk, and then decides by the due time and number that it found. A
    resume changes due times, so no request may be between these steps at that moment. Passing the gate does not give up
    the loop, unless a resume is inside alone or waits for it.
    """

    def __init__(self) -> None:
        self._alone = asyncio.Lock()
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @asynccontextmanager
    async def passing(self) -> AsyncIterator[None]:
        """Be inside together with others."""
        async with self._alone:
            # Inside the lock: while a caller of `alone` waits, no other can enter, so its wait ends.
            self._inside += 1
            self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()

    @asynccontextmanager
    async def alone(self) -> AsyncIterator[None]:
        """Be inside alone. Waits until the others have left, and keeps new ones out until the end."""
        async with self._alone:
            await self._empty.wait()
            yield
