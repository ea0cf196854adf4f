"""Transaction checks: ask producers about half messages that they have neither committed nor rolled back.

One loop serves the producers of all edges. Each edge registers an `Asker`, which knows its connected producers. The
first edge that has a producer for a half message asks it. If no producer is connected, this does not count as a check.
So a producer that was down for an hour finds its transactions when it returns. A half message is rolled back after too
many checks, or when it is too old.
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

LOOK_S = 1.0  # interval of the rounds
# After a restart many half messages may be due at once. This limit per round lets the clients keep up.
CHECKS_PER_LOOK = 1_000
BYTES_PER_LOOK = 8 * 1024 * 1024


class Asker(Protocol):
    """The interface of an edge that asks its producers. Both methods run on the event loop."""

    def has_producer(self, half: Half) -> bool:
        """Check whether a producer that may be asked about this half message is connected."""

    def ask(self, half: Half, row: pa.RecordBatch) -> int:
        """Push the half message, a row of READ_SCHEMA, to a producer.

        Returns the bytes pushed, 0 if none accepted it.
        """


class TransactionChecks:
    """Asks producers through the `askers` of the edges. `run` asks until it is cancelled."""

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
        """Call `ask_due` once a second, until cancelled."""
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
        """Ask about half messages that are due for a check, or roll them back. Limited by number and bytes."""
        now_ms, size_bytes = self._clock.elapsed_ms(), 0
        rollbacks = []
        for _ in range(CHECKS_PER_LOOK):
            half = self._transactions.take_due(now_ms)
            if half is None:
                break
            reason = self._transactions.reason_to_give_up(half, now_ms)
            if reason is not None:
                rollbacks.append(self._transactions.discard(half, reason))
            # Limited by bytes as well as by number, because each check pushes a whole message.
            elif size_bytes >= BYTES_PER_LOOK:
                # The bytes of this round are used up. This half message is due again at once, for the next round.
                self._transactions.postpone(half, now_ms)
                break
            else:
                size_bytes += await self._ask(half)
        await asyncio.gather(*rollbacks)

    async def _ask(self, half: Half) -> int:
        """Ask one producer of the half message, if any is connected. Returns the bytes pushed."""
        if not any(asker.has_producer(half) for asker in self.askers):
            return 0
        try:
            row = await in_thread(
                self._reader_thread, self._reader.read_rows, np.array([half.seq], dtype=np.int64)
            )
        except OutOfRange:
            return 0  # the half message has ended meanwhile, and retention has removed it
        except Corrupt as error:
            # The row is damaged, so only this half message cannot be asked about.
            logger.error("transaction not checked seq=%d reason=%s", half.seq, error)
            return 0
        # One producer of any edge is enough, because it answers for its group.
        for asker in self.askers:
            size_bytes = asker.ask(half, row) if asker.has_producer(half) else 0
            if size_bytes:
                half.checks += 1
                return size_bytes
        return 0
