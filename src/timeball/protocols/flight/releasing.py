"""A release stream: rows of the pending table's files, brought by whoever dispatches them, one answer a batch.

The rows are TABLE_SCHEMA, all columns, in any order: who brings them has read them from a file of ours. As a send's, a
batch is a claim about buffers until it is proven sound. Batches of a stream are decided in the order they came in.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from timeball import limits, rules, wire
from timeball.access import Caller
from timeball.errors import InvalidMessage, OverLimit, Unavailable
from timeball.message import TABLE_SCHEMA
from timeball.protocols.flight import codec
from timeball.protocols.flight.columns import check_bytes
from timeball.protocols.flight.sends import STOPPING, refusal
from timeball.protocols.flight.window import Slot

if TYPE_CHECKING:
    from timeball.broker.service import Broker

REQUIRED = ("seq", "due_ms", "topic", "body", "accepted_ms")


class ReleaseColumns:
    """The columns of one stream."""

    def __init__(self, schema: pa.Schema) -> None:
        """Check names and types; raises InvalidMessage naming the column."""
        for field in TABLE_SCHEMA:
            if schema.names.count(field.name) != 1 or schema.field(field.name).type != field.type:
                raise InvalidMessage(
                    f"column {field.name!r} must be there once, as {field.type}: bring rows as they are in the table"
                )
        unknown = [name for name in schema.names if name not in TABLE_SCHEMA.names]
        if unknown:
            raise InvalidMessage(f"unknown column {unknown[0][:80]!r}; the table has {TABLE_SCHEMA.names}")

    def adopt(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The batch in TABLE_SCHEMA, proven sound; raises InvalidMessage, OverLimit."""
        if not 0 < batch.num_rows <= limits.ROWS_PER_REQUEST_MAX:
            raise OverLimit(
                f"{batch.num_rows} rows: between 1 and {limits.ROWS_PER_REQUEST_MAX} in one batch"
            )
        try:
            batch.validate(full=True)
            check_bytes(batch.nbytes)
        except (pa.ArrowException, ValueError) as error:
            raise InvalidMessage(f"not a sound record batch: {error}") from error
        batch = batch.select(TABLE_SCHEMA.names)
        for name in REQUIRED:
            if batch.column(name).null_count:
                raise InvalidMessage(f"column {name!r} has rows without a value")
        rules.check_columns({"body": batch.column("body")})
        return pa.RecordBatch.from_arrays(batch.columns, schema=TABLE_SCHEMA)


class Releases:
    """Hands batches to the broker, and its answers back. Invariant: every slot put in is settled, once."""

    def __init__(self, broker: Broker, loop: asyncio.AbstractEventLoop) -> None:
        self._broker, self._loop = broker, loop
        self._tasks: set[asyncio.Task[bytes]] = set()

    def put(self, batch: pa.RecordBatch, slot: Slot, caller: Caller) -> None:
        """Callable from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._begin, batch, slot, caller)
        except RuntimeError:  # the loop is closed
            slot.settle(refusal(Unavailable(STOPPING)))

    def _begin(self, batch: pa.RecordBatch, slot: Slot, caller: Caller) -> None:
        task = self._loop.create_task(self._release(batch, caller))
        self._tasks.add(task)  # the loop itself keeps no task alive
        task.add_done_callback(partial(self._answer, slot))

    async def _release(self, batch: pa.RecordBatch, caller: Caller) -> bytes:
        brought = await self._broker.release(batch, caller)
        return codec.encode(wire.ReleaseAck(brought.released, brought.left))

    def _answer(self, slot: Slot, task: asyncio.Task[bytes]) -> None:
        self._tasks.discard(task)
        error = Unavailable(STOPPING) if task.cancelled() else task.exception()
        slot.settle(task.result() if error is None else refusal(error))
