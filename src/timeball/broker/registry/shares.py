"""Process a long list in small shares, between which the event loop does other work.

There may be a hundred thousand groups or topics. A loop over all of them would delay every message for seconds. In
shares the loop takes a little longer, and delays a message by one share at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

T = TypeVar("T")

GROUPS_AT_ONCE = 64  # groups or topics in a share; about 20 us each with eight queues, more with more queues


async def shares(items: Iterable[T], rows: int = GROUPS_AT_ONCE) -> AsyncIterator[list[T]]:
    """Yield the items in lists of `rows`. Items that are added after the first step are not included."""
    listed = list(items)
    for begin in range(0, len(listed), rows):
        if begin:
            # Let every ready task run before the next share.
            await asyncio.sleep(0)
        yield listed[begin : begin + rows]
