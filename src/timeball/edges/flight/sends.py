"""Passes batches from streams to the broker, and the broker's answers back to the slots of the batches.

broker/accepting/ingress.py joins small neighbouring batches of one schema. The batches of a release stream contain rows
of the pending table's files, sent by a dispatcher. The broker decides them in the order in which they arrive.

Invariant: every slot is settled once, even if the broker fails.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import Any

import pyarrow as pa

from timeball.broker.accepting.appender import Accepted
from timeball.broker.accepting.ingress import Piece
from timeball.broker.service import Broker
from timeball.edges.flight import codec
from timeball.edges.flight.window import Slot
from timeball.edges.shared.error_codes import log_failure
from timeball.model import wire
from timeball.model.access import Caller
from timeball.model.errors import Unavailable
from timeball.model.message import SendBatch

logger = logging.getLogger(__name__)

STOPPING = "the broker is stopping; send this batch again later or elsewhere"


class _Piece(Piece, gc=False):
    slot: Any  # the Slot that is settled with the answer


class Sends:
    """Passes the batches of send streams to the broker. An Edge of accepting/ingress.py. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker

    def put(self, batch: SendBatch, slot: Slot, caller: Caller, key: str = "") -> None:
        """Pass on a list of rows, or a batch with the types of SEND_SCHEMA. The slot is settled later.

        `key` is the JSON of wire.SendKey, or "" for a batch without an idempotency key.
        """
        piece = _Piece(self, batch, len(batch), slot.size_bytes, 0, caller, slot)
        try:
            if key:
                send_key = codec.decode_send_key(key)
                anew = send_key.if_settled == "send"
                self._broker.keyed_sends.put(piece, send_key.idempotency_key, send_key.attempt, anew=anew)
            else:
                self._broker.sends.put(piece)
        except Exception as error:  # of any kind: the stream sends this answer before all later ones
            self.refuse([piece], error)

    def answer(self, pieces: list[_Piece], accepted: Accepted) -> None:
        """Settle the slots of batches that the broker has accepted."""
        for piece in pieces:
            first_seq = accepted.first_seq + piece.first_row
            ack = wire.SendAck(first_seq, piece.count, accepted.store_ms, *(accepted.sent or ()))
            piece.slot.settle(codec.encode(ack))

    def refuse(self, pieces: list[_Piece], error: BaseException) -> None:
        """Settle the slots of batches that were refused."""
        for piece in pieces:
            piece.slot.settle(refusal_answer(error))


class SourcedSends(Sends):
    """Passes on the batches of source streams.

    The metadata of each batch has the source's positions before and after it.
    """

    def put(self, batch: pa.RecordBatch, slot: Slot, caller: Caller, key: str = "") -> None:
        """Pass on a batch. `key` is the JSON of wire.SourceStep."""
        piece = _Piece(self, batch, batch.num_rows, slot.size_bytes, 0, caller, slot)
        try:
            self._broker.sourced_sends.put(piece, codec.decode_source_step(key))
        except Exception as error:  # of any kind: the stream sends this answer before all later ones
            self.refuse([piece], error)


class Releases:
    """Passes the batches of release streams to the broker. Belongs to the event loop."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._tasks: set[asyncio.Task[bytes]] = set()

    def put(self, batch: pa.RecordBatch, slot: Slot, caller: Caller, key: str = "") -> None:
        """Pass on a batch. `key` is ignored: a release names its scheduled messages, so repeating it is safe."""
        task = asyncio.get_running_loop().create_task(self._release(batch, caller))
        self._tasks.add(task)  # the loop itself only has a weak reference to the task
        task.add_done_callback(partial(self._answer, slot))

    async def _release(self, batch: pa.RecordBatch, caller: Caller) -> bytes:
        result = await self._broker.release(batch, caller)
        return codec.encode(wire.ReleaseAck(result.released, result.left))

    def _answer(self, slot: Slot, task: asyncio.Task[bytes]) -> None:
        """Settle the slot of a batch with the result of its release."""
        self._tasks.discard(task)
        error = Unavailable(STOPPING) if task.cancelled() else task.exception()
        slot.settle(task.result() if error is None else refusal_answer(error))


def refusal_answer(error: BaseException) -> bytes:
    """Log an error, and encode it as the answer to a refused batch.

    The text of an internal fault is only in the log.
    """
    log_failure(logger, "send", error)
    return codec.encode_refusal(error)
