"""Batches on their way from reading threads to the broker's loop, and their answers on the way back.

Many batches cross with one wake-up of the loop. Small ones that have come meanwhile, of whichever streams, are
put together and handed to the broker as one: admitting a batch costs about the same for one row as for a
hundred. Each still has an answer of its own. A batch remains accepted or refused by itself: when the broker
refuses what was put together, each of its batches is handed over alone.

Invariant: every slot put in is settled, once, whatever happens to the broker or its loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from timeball.access import Caller
from timeball.errors import RequestError, TimeballError, Unavailable
from timeball.protocols.flight import codec
from timeball.protocols.flight.failures import internal
from timeball.protocols.flight.window import Slot

if TYPE_CHECKING:
    from timeball.broker.service import Accepted, Broker

STOPPING = "the broker is stopping; send this batch again later or elsewhere"

# Beyond some hundred rows a batch carries its own cost; copying it to save the admission's would be a loss.
SMALL_ROWS = 256
SMALL_BYTES = 256 * 1024
TOGETHER_ROWS = 8_192
TOGETHER_BYTES = 4 * 1024 * 1024

Entry = tuple[pa.RecordBatch, Slot, Caller]


class Inbox:
    """See the module."""

    def __init__(self, broker: Broker, loop: asyncio.AbstractEventLoop) -> None:
        self._broker = broker
        self._loop = loop
        self._waiting: deque[Entry] = deque()
        self._woken = False

    def put(self, batch: pa.RecordBatch, slot: Slot, caller: Caller) -> None:
        """Hand over a batch with the types of SEND_SCHEMA; its slot will be settled. Callable from any thread."""
        self._waiting.append((batch, slot, caller))
        # The loop clears the flag before it empties the queue: whoever sees it set is served by that drain.
        if not self._woken:
            self._woken = True
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the loop is closed
                self._refuse_all()

    def _drain(self) -> None:
        self._woken = False
        for group in groups(self._waiting):
            self._send(group)

    def _send(self, group: list[Entry]) -> None:
        try:
            batch = group[0][0] if len(group) == 1 else pa.concat_batches([batch for batch, _, _ in group])
            accepted, durable = self._broker.send_nowait(batch, group[0][2])
        except RequestError as error:
            if len(group) == 1:
                group[0][1].settle(refusal(error))
                return
            for entry in group:
                self._send([entry])
        except Exception as error:  # whatever it is, these batches get an answer and the next ones their turn
            answer = refusal(error)
            for _, slot, _ in group:
                slot.settle(answer)
        else:
            durable.add_done_callback(partial(_committed, group, accepted))

    def _refuse_all(self) -> None:
        while self._waiting:
            self._waiting.popleft()[1].settle(refusal(Unavailable(STOPPING)))


def groups(waiting: deque[Entry]) -> Iterator[list[Entry]]:
    """Empty the queue, in order: neighbours that are small and of one schema together, others alone."""
    while waiting:
        batch, slot, caller = waiting.popleft()
        group = [(batch, slot, caller)]
        rows, size_bytes = batch.num_rows, slot.size_bytes
        while waiting and _is_small(rows, size_bytes, len(group)):
            batch, slot, its_caller = waiting[0]
            rows, size_bytes = rows + batch.num_rows, size_bytes + slot.size_bytes
            fits = its_caller == caller and rows <= TOGETHER_ROWS and size_bytes <= TOGETHER_BYTES
            if not (
                fits and _is_small(batch.num_rows, slot.size_bytes, 1) and batch.schema == group[0][0].schema
            ):
                break
            group.append(waiting.popleft())
        yield group


def _is_small(rows: int, size_bytes: int, batches: int) -> bool:
    return rows <= SMALL_ROWS * batches and size_bytes <= SMALL_BYTES * batches


def _committed(group: list[Entry], accepted: Accepted, durable: asyncio.Future[int]) -> None:
    """The commit that these batches were part of has ended; answer them."""
    failure: BaseException | None = Unavailable(STOPPING) if durable.cancelled() else durable.exception()
    if failure is not None:
        answer = refusal(failure)
        for _, slot, _ in group:
            slot.settle(answer)
        return
    first_seq = accepted.first_seq
    for batch, slot, _ in group:
        slot.settle(codec.encode(codec.SendAck(first_seq, batch.num_rows, accepted.store_ms)))
        first_seq += batch.num_rows


def refusal(error: BaseException) -> bytes:
    """The answer to a batch that was not taken."""
    return codec.encode_refusal(error if isinstance(error, TimeballError) else internal(error, "send"))
