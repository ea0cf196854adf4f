"""Credit: how many messages one consumer may hold at the same time.

A streaming consumer gets messages as they become visible, up to its credit. Each message that it acknowledges or gives
back, or whose lease ends, returns credit. So a slow consumer uses up its own credit and delays no other one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from timeball.broker.consuming.leases import Leases
from timeball.broker.consuming.requests import Receipt
from timeball.model import limits
from timeball.model.errors import OutOfRange


class Credit:
    """The credit of one consumer. Belongs to the event loop."""

    def __init__(self, rows_max: int) -> None:
        """`rows_max`: how many messages the consumer may hold. Raises OutOfRange."""
        if not 1 <= rows_max <= limits.CREDIT_ROWS_MAX:
            raise OutOfRange(f"credit {rows_max}: 1 to {limits.CREDIT_ROWS_MAX} messages")
        self._rows_max = rows_max
        self._held_rows = 0
        self._freed = asyncio.Event()

    @property
    def free_rows(self) -> int:
        """The number of messages that the consumer may still receive."""
        return self._rows_max - self._held_rows

    def hold(self, leases: Leases, receipts: Iterable[Receipt]) -> None:
        """Use credit for these messages until their leases end. Receipts that are no longer valid use none."""
        for receipt in receipts:
            queue = leases.get(receipt.group, receipt.topic, receipt.queue_id)
            lease = None if queue is None else queue.lease_of(receipt.offset, receipt.pop_ms)
            if lease is not None:
                lease.on_end = self._return
                self._held_rows += 1

    async def wait(self, timeout_s: float) -> None:
        """Wait until there is credit, at most `timeout_s` seconds. Returns in both cases."""
        self._freed.clear()
        if self.free_rows <= 0:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._freed.wait()
            except TimeoutError:
                pass

    def _return(self) -> None:
        """Return the credit of one message (`Lease.on_end`)."""
        self._held_rows -= 1
        self._freed.set()
