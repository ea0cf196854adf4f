"""What is due, brought from outside: a dispatcher reads promises in the pending table's files and hands them in.

    dispatcher lease   gathers leave near rows of files to him (schedule/external_delivery.py)
    release            rows of those files, due by now -> release records, durable; whoever is first releases

He decides nothing. The broker takes what waits and was left to him, at its own instant; the rest it leaves: what was
cancelled, has been brought before, or has been loaded because he was late. So any call may be repeated, by anybody,
and a dispatcher who dies or lies about numbers costs no promise. About bodies he is believed, as is who attaches a
file.

Refuses a batch with a row that is not due yet, whole: it may be brought again.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pyarrow as pa

from timeball import limits
from timeball.broker.delivery import Delivery
from timeball.broker.parts import Parts
from timeball.broker.registry.topics import check_topic
from timeball.errors import OutOfRange
from timeball.message import int64
from timeball.schedule.hour_log.pending import as_promises


@dataclass(frozen=True, slots=True)
class Brought:
    """What became of a batch: rows released by it, durably, and rows left."""

    released: int
    left: int


class Dispatching:
    """See the module. Belongs to the event loop."""

    def __init__(self, parts: Parts, delivery: Delivery) -> None:
        """`delivery` is the way of what the hour log hands out."""
        self._parts, self._delivery = parts, delivery

    def lease(self, lease_ms: int) -> None:
        """A dispatcher is at work for so long; 0 ends it now. At most an hour."""
        self._parts.scheduler.lease(self._parts.clock.now_ms(), lease_ms)

    async def release(self, rows: pa.RecordBatch) -> Brought:
        """Release what may be of these rows (TABLE_SCHEMA, sound); returns when it is durable."""
        parts, delivery = self._parts, self._delivery
        # What is due by itself goes through the same gate: neither may fill the memory with what the disk lacks.
        while parts.scheduler.in_flight_rows >= limits.RELEASE_ROWS_IN_FLIGHT_MAX:
            await parts.writer.flushed()
        now_ms = parts.clock.now_ms()
        last_ms = int(int64(rows.column("due_ms")).max())
        if last_ms > now_ms:
            raise OutOfRange(f"a row is due at {last_ms} and it is {now_ms} here: bring it then")
        for name in rows.column("topic").unique().to_pylist():
            if parts.topics.find(name) is None:
                check_topic(name)  # while nothing is in flight yet
        # No pause from here on: what is in flight stands in the log in the same order.
        promises = parts.scheduler.take_brought(as_promises(pa.Table.from_batches([rows])))
        if promises is None:
            return Brought(0, rows.num_rows)
        await asyncio.shield(delivery.release(promises, now_ms))
        return Brought(promises.num_rows, rows.num_rows - promises.num_rows)
