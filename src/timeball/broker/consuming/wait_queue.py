"""Consumers that wait for the same messages stand in one line: the first one watches and passes the turn on.

A thousand consumers of a group may wait for one topic. If each were woken by each message, each message would cost a
thousand looks to serve one of them; in a line it costs two: by the one that gets it, and by the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from timeball import limits
from timeball.errors import OverLimit


@dataclass(slots=True)
class _Line:
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    length: int = 0


class WaitQueue:
    """One line for each key. Belongs to the event loop."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, _Line] = {}
        self.length = 0

    @asynccontextmanager
    async def turn(self, key: Hashable, until_s: float) -> AsyncIterator[bool]:
        """Wait for the turn until `until_s` on the loop's clock; false when the time is up. Raise OverLimit."""
        if self.length >= limits.PULLS_WAITING_MAX:
            raise OverLimit(f"{self.length} consumers wait already; ask without waiting, or try again")
        line = self._lines.setdefault(key, _Line())
        line.length += 1
        self.length += 1
        has_turn = False
        try:
            try:
                async with asyncio.timeout_at(until_s):
                    has_turn = await line.turn.acquire()
            except TimeoutError:
                pass
            yield has_turn
        finally:
            if has_turn:
                line.turn.release()
            line.length -= 1
            self.length -= 1
            if not line.length:
                del self._lines[key]
