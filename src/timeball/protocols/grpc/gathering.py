"""Sends that wait for the disk together: one batch, one commit, an answer for each call.

A call's messages are one piece: they stand side by side in one batch, so all of them are in the log or none is. What
comes while a commit is under way shares the next one (broker/turns.py). If the broker refuses a batch for something
that was not foreseen when its messages were checked, its calls are handed over one by one, so that the one at fault
alone is told.
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
from timeball.errors import TimeballError, Unavailable

CALLS_PER_TURN = 4_096
BATCH_ROWS_MAX = limits.ROWS_PER_REQUEST_MAX // 2
BATCH_BYTES_MAX = 32 * 1024 * 1024

_BODY, _PROPERTIES = NAMES.index("body"), NAMES.index("properties")

Accept = Callable[[pa.RecordBatch], tuple[Accepted, "asyncio.Future[int]"]]
Rows = Sequence[Row]


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
        self._turns: Turns[Rows, Placed] = Turns(self._commit, CALLS_PER_TURN)

    async def take(self, rows: Rows) -> Placed:
        """Send the rows of one call; returns when they are durable. Raises what the broker raises."""
        return await self._turns.take(rows)

    async def _commit(self, calls: list[Rows]) -> list[Placed | TimeballError]:
        handed_over = [one for batch in _batches(calls) for one in self._hand_over(batch)]
        return [one if isinstance(one, TimeballError) else await _durable(one) for one in handed_over]

    def _hand_over(self, calls: list[Rows]) -> list[_HandedOver | TimeballError]:
        try:
            accepted, durable = self._accept(batch_of([row for rows in calls for row in rows]))
        except TimeballError as error:
            if len(calls) == 1:
                return [error]
            return [one for call in calls for one in self._hand_over([call])]
        offsets = accepted.kept.column("queue_offset").to_pylist()
        found: list[_HandedOver | TimeballError] = []
        at = 0
        for rows in calls:
            placed = Placed(accepted.first_seq + at, offsets[at : at + len(rows)])
            found.append(_HandedOver(placed, durable))
            at += len(rows)
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


def _batches(calls: list[Rows]) -> Iterator[list[Rows]]:
    """The calls in order, as many at a time as one request of the broker takes."""
    batch: list[Rows] = []
    rows_held = size_bytes = 0
    for rows in calls:
        size = sum(len(row[_BODY]) + len(row[_PROPERTIES]) for row in rows)
        if batch and (rows_held + len(rows) > BATCH_ROWS_MAX or size_bytes + size > BATCH_BYTES_MAX):
            yield batch
            batch, rows_held, size_bytes = [], 0, 0
        batch.append(rows)
        rows_held, size_bytes = rows_held + len(rows), size_bytes + size
    if batch:
        yield batch
