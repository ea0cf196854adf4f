"""Asking producers about the halves they have not ended: one loop for the producers of all edges.

Each edge registers an `Asker`, which knows who is connected there. A half is given to the first of them that finds a
producer for it. A half whose producers are all away is not asked about, and that does not count: a producer that was
down for an hour finds its transactions when it comes back. A half that was asked about too often, or is too old, is
rolled back.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

import numpy as np
import pyarrow as pa

from timeball.broker.components import Components, in_thread
from timeball.broker.transactions import Half, Transactions
from timeball.errors import Corrupt, OutOfRange, OverLimit, RequestError

logger = logging.getLogger(__name__)

LOOK_S = 1.0
# After a restart many halves may be due at once: no more than this a look, so that clients can take it.
CHECKS_PER_LOOK = 1_000
BYTES_PER_LOOK = 8 * 1024 * 1024


class Asker(Protocol):
    """An edge, as far as it is about asking. Both run on the event loop."""

    def has_producer(self, half: Half) -> bool:
        """Return whether a producer is connected that may be asked about this half."""

    def ask(self, half: Half, row: pa.RecordBatch) -> int:
        """Push the half message, a row of READ_SCHEMA, to a producer; return the bytes pushed, 0 when none took it."""


class TransactionChecks:
    """Asks producers through the edges. `run` asks until it is cancelled."""

    def __init__(self, parts: Components, transactions: Transactions) -> None:
        self._parts, self._transactions = parts, transactions
        self.askers: list[Asker] = []

    async def run(self) -> None:
        """Ask about every open half in time; ends when cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.ask_due()
            except (RequestError, OverLimit) as error:
                logger.warning("transactions not checked, trying again later reason=%s", error)
            except Exception as error:
                # No caller awaits this task: checks that break must stop the broker, and not just end.
                self._parts.on_failure(error)
                return

    async def ask_due(self) -> None:
        """Ask about every half that is due, or give it up."""
        now_ms, size_bytes = self._parts.clock.elapsed_ms(), 0
        given_up = []
        for _ in range(CHECKS_PER_LOOK):
            half = self._transactions.take_due(now_ms)
            if half is None:
                break
            why = self._transactions.given_up(half, now_ms)
            if why is not None:
                given_up.append(self._transactions.discard(half, why))
            # By bytes as well as by number: each check pushes a whole message.
            elif size_bytes >= BYTES_PER_LOOK:
                # Due again at once: the bytes of this look are used up, and the half comes first in the next.
                self._transactions.put_off(half, now_ms)
                break
            else:
                size_bytes += await self._ask(half)
        await asyncio.gather(*given_up)

    async def _ask(self, half: Half) -> int:
        """Have one of the half's producers asked, if there are any; returns the bytes pushed."""
        if not any(asker.has_producer(half) for asker in self.askers):
            return 0
        parts = self._parts
        try:
            row = await in_thread(
                parts.reader_thread, parts.reader.read_rows, np.array([half.seq], dtype=np.int64)
            )
        except OutOfRange:
            return 0  # ended meanwhile, and let go
        except Corrupt as error:
            # One message that cannot be asked about; the others are.
            logger.error("transaction not checked seq=%d reason=%s", half.seq, error)
            return 0
        # One producer is enough, of any edge: it speaks for its group.
        for asker in self.askers:
            size_bytes = asker.ask(half, row) if asker.has_producer(half) else 0
            if size_bytes:
                half.checks += 1
                return size_bytes
        return 0
