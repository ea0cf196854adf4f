"""Ask producers about half messages that they have not ended. One loop serves the producers of all edges.

Each edge registers an `Asker`, which has the list of its connected producers. The first edge with a producer for a half
message asks about it. If no producer of the half message is connected, nothing is asked, and this does not count as a
check. So a producer that was down for an hour finds its transactions when it returns. A half message is rolled back if
it was asked about too often or is too old.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Protocol

import numpy as np
import pyarrow as pa

from timeball.broker.transacting.transactions import Half, Transactions
from timeball.io.clock import SchedulerClock
from timeball.io.threads import in_thread
from timeball.log.reader import LogReader
from timeball.model.errors import Corrupt, OutOfRange, OverLimit, RequestError

logger = logging.getLogger(__name__)

LOOK_S = 1.0
# After a restart many half messages may be due at once. This limit per look lets clients keep up.
CHECKS_PER_LOOK = 1_000
BYTES_PER_LOOK = 8 * 1024 * 1024


class Asker(Protocol):
    """The part of an edge that asks producers. Both methods run on the event loop."""

    def has_producer(self, half: Half) -> bool:
        """Check whether a producer is connected that may be asked about this half message."""

    def ask(self, half: Half, row: pa.RecordBatch) -> int:
        """Push the half message, a row of READ_SCHEMA, to a producer. Returns the bytes pushed.

        0 means that no producer accepted it.
        """


class TransactionChecks:
    """Asks producers through the edges. `run` asks until it is cancelled."""

    def __init__(
        self,
        transactions: Transactions,
        *,
        clock: SchedulerClock,
        reader: LogReader,
        reader_thread: Executor,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._transactions = transactions
        self._clock, self._reader, self._reader_thread = clock, reader, reader_thread
        self._on_failure = on_failure
        self.askers: list[Asker] = []

    async def run(self) -> None:
        """Ask about every open half message when it is due. Ends when cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.ask_due()
            except (RequestError, OverLimit) as error:
                logger.warning("transactions not checked, trying again later reason=%s", error)
            except Exception as error:
                # No caller awaits this task, so an unexpected error must stop the broker.
                self._on_failure(error)
                return

    async def ask_due(self) -> None:
        """Ask about all half messages that are due, or roll them back."""
        now_ms, size_bytes = self._clock.elapsed_ms(), 0
        given_up = []
        for _ in range(CHECKS_PER_LOOK):
            half = self._transactions.take_due(now_ms)
            if half is None:
                break
            why = self._transactions.given_up(half, now_ms)
            if why is not None:
                given_up.append(self._transactions.discard(half, why))
            # Limited by bytes as well as by number, because each check pushes a whole message.
            elif size_bytes >= BYTES_PER_LOOK:
                # Due again at once: the bytes of this look are used up, and this half message is first in the next
                # look.
                self._transactions.put_off(half, now_ms)
                break
            else:
                size_bytes += await self._ask(half)
        await asyncio.gather(*given_up)

    async def _ask(self, half: Half) -> int:
        """Ask one producer of the half message, if any is connected. Returns the bytes pushed."""
        if not any(asker.has_producer(half) for asker in self.askers):
            return 0
        try:
            row = await in_thread(
                self._reader_thread, self._reader.read_rows, np.array([half.seq], dtype=np.int64)
            )
        except OutOfRange:
            return 0  # it has ended meanwhile, and retention has removed it
        except Corrupt as error:
            # Only this message cannot be asked about. The others can.
            logger.error("transaction not checked seq=%d reason=%s", half.seq, error)
            return 0
        # One producer of any edge is enough, because it answers for its group.
        for asker in self.askers:
            size_bytes = asker.ask(half, row) if asker.has_producer(half) else 0
            if size_bytes:
                half.checks += 1
                return size_bytes
        return 0
