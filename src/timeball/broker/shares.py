"""A long list in small shares, between which the event loop does other work.

A hundred thousand groups or topics may exist. What walks them all on the loop would keep every message waiting for
seconds; in shares it takes a little longer, and no message waits for more than one of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

T = TypeVar("T")

GROUPS_AT_ONCE = 64  # or topics: some 20 us each with eight queues, and more with more


async def shares(items: Iterable[T], rows: int = GROUPS_AT_ONCE) -> AsyncIterator[list[T]]:
    """Yield the items as they are at the first step, so many at a time."""
    listed = list(items)
    for begin in range(0, len(listed), rows):
        if begin:
            # Every task that is ready has its turn, and the walk goes on behind the last of them.
            await asyncio.sleep(0)
        yield listed[begin : begin + rows]
