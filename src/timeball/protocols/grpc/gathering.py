"""Sends that wait for the disk together: one batch, one commit, an answer for each call.

A call's messages are one piece: they stand side by side in one batch, so all of them are in the log or none is. What
comes while a commit is under way shares the next one (broker/turns.py). If the broker refuses a batch for something
that was not foreseen when its messages were checked, its calls are handed over one by one, so that the one at fault
alone is told.

What waits is bounded in bytes: calls whose clients have gone are still here, and count no more as received.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa

from timeball import limits
from timeball.broker.send_rows import NAMES, Row, batch_of
from timeball.broker.service import Accepted
from timeball.broker.turns import Turns
from timeball.errors import OverLimit, TimeballError, Unavailable

CALLS_PER_TURN = 4_096
BATCH_ROWS_MAX = limits.ROWS_PER_REQUEST_MAX // 2
BATCH_BYTES_MAX = 32 * 1024 * 1024
HELD_BYTES_MAX = 4 * BATCH_BYTES_MAX

_BODY, _PROPERTIES = NAMES.index("body"), NAMES.index("properties")

Accept = Callable[[pa.RecordBatch], tuple[Accepted, "asyncio.Future[int]"]]
Rows = Sequence[Row]


class _Call(NamedTuple):
    rows: Rows
    size_bytes: int


class Placed(NamedTuple):
    """Where the messages of one call stand: first_seq, first_seq + 1, …; an offset for those that are in a queue."""

    first_seq: int
    offsets: list[int | None]


class _HandedOver(NamedTuple):
    placed: Placed
    durable: asyncio.Future[int]


class Gathering:
    """Calls on their way to one verb of the broker, `accept`. Belongs to the event loop."""

    def __init__(self, accept: Accept) -> None:
        self._accept = accept
        self._turns: Turns[_Call, Placed] = Turns(self._commit, CALLS_PER_TURN)
        self._held_bytes = 0

    async def take(self, rows: Rows) -> Placed:
        """Send the rows of one call; returns when they are durable. Raises what the broker raises, and OverLimit."""
        call = _Call(rows, sum(len(row[_BODY]) + len(row[_PROPERTIES]) for row in rows))
        if self._held_bytes and self._held_bytes + call.size_bytes > HELD_BYTES_MAX:
            raise OverLimit(
                f"{self._held_bytes} bytes of messages wait for the disk; send this one again later"
            )
        self._held_bytes += call.size_bytes
        return await self._turns.take(call)

    async def _commit(self, calls: list[_Call]) -> list[Placed | TimeballError]:
        try:
            handed_over = [one for batch in _batches(calls) for one in self._hand_over(batch)]
            return [one if isinstance(one, TimeballError) else await _durable(one) for one in handed_over]
        finally:
            # Here, and not when a caller is answered or goes: until now their rows are held.
            self._held_bytes -= sum(call.size_bytes for call in calls)

    def _hand_over(self, calls: list[_Call]) -> list[_HandedOver | TimeballError]:
        try:
            accepted, durable = self._accept(batch_of([row for call in calls for row in call.rows]))
        except TimeballError as error:
            if len(calls) == 1:
                return [error]
            return [one for call in calls for one in self._hand_over([call])]
        offsets = accepted.kept.column("queue_offset").to_pylist()
        found: list[_HandedOver | TimeballError] = []
        at = 0
        for call in calls:
            placed = Placed(accepted.first_seq + at, offsets[at : at + len(call.rows)])
            found.append(_HandedOver(placed, durable))
            at += len(call.rows)
        return found


async def _durable(one: _HandedOver) -> Placed | TimeballError:
    try:
        if not one.durable.done():  # the first of a batch waits for all
            await asyncio.wait([one.durable])
        if one.durable.cancelled():
            return Unavailable("the broker is stopping")
        one.durable.result()
    except TimeballError as error:
        return error
    return one.placed


def _batches(calls: list[_Call]) -> Iterator[list[_Call]]:
    """The calls in order, as many at a time as one request of the broker takes."""
    batch: list[_Call] = []
    rows = size_bytes = 0
    for call in calls:
        if batch and (
            rows + len(call.rows) > BATCH_ROWS_MAX or size_bytes + call.size_bytes > BATCH_BYTES_MAX
        ):
            yield batch
            batch, rows, size_bytes = [], 0, 0
        batch.append(call)
        rows, size_bytes = rows + len(call.rows), size_bytes + call.size_bytes
    if batch:
        yield batch
