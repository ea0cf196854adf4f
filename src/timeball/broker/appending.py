"""The way of rows that are decided into the log: their topics, their places in queues, and who hears of it after.

Two steps, since a decision may stand between them. `prepare` is all that can refuse: a topic that may not be made, a
backlog that is full. `append` refuses nothing but a log that has stopped or a frame too large, gives out the places,
and is called without a pause after whatever was decided; so a promise is never settled for a row that is not written.

Rows of several kinds may share a batch, and then all of them are in the log or none is: a CANCEL beside what takes
the place of the promise it names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from timeball.broker import admission
from timeball.broker.consuming.pull import Waiters
from timeball.broker.parts import Parts
from timeball.broker.queue_entries import stored_sizes
from timeball.broker.rates import TIMER_TOPIC
from timeball.broker.registry.topics import Placement
from timeball.broker.tables.compact import TailCount
from timeball.log.format import with_seq
from timeball.message import LOG_SCHEMA, SCHEDULE_TOPIC, Int64Array, Kind

_QUEUE_ID, _QUEUE_OFFSET = (LOG_SCHEMA.get_field_index(name) for name in ("queue_id", "queue_offset"))
_VISIBLE = [int(Kind.MESSAGE), int(Kind.RELEASE)]


class Appended(NamedTuple):
    """Rows as they stand in the log (LOG_SCHEMA), the first one's number, and when they are durable."""

    first_seq: int
    rows: pa.RecordBatch
    durable: asyncio.Future[int]


@dataclass(frozen=True, slots=True)
class Accepted:
    """A batch is in the log: its rows are first_seq, first_seq + 1, …; those in a queue have their place there."""

    first_seq: int
    rows: int
    store_ms: int
    kept: pa.RecordBatch  # the rows as they stand in the log (LOG_SCHEMA)


class Appending:
    """See the module. Belongs to the event loop. `tail_count` is told of promises that the tail has got."""

    def __init__(self, parts: Parts, waiters: Waiters, tail_count: TailCount) -> None:
        self._parts, self._waiters, self._tail_count = parts, waiters, tail_count

    def prepare(self, rows: pa.RecordBatch, now_ms: int, level: Int64Array | None = None) -> pa.RecordBatch:
        """LOG_SCHEMA rows as they are to stand in the log, places aside; `level` as `admission.admit` gives it.

        Raises what a send raises, changing nothing but that topics are there.
        """
        parts = self._parts
        kinds = rows.column("kind").to_numpy()
        if (kinds != Kind.MESSAGE).any():
            # A promise has its topic from now on, so that tools see what it is for. A CANCEL needs none.
            wanted = kinds != Kind.CANCEL
            for name in admission.topic_names(rows if wanted.all() else rows.filter(pa.array(wanted))):
                parts.topics.ensure(name)
        if level is not None:
            parts.topics.ensure(SCHEDULE_TOPIC, parts.levels.table.queues)
            rows = admission.into_level_queues(rows, level)
        return rows if parts.compacts else admission.kept_by(parts.backlog, rows, now_ms)

    def append(self, rows: pa.RecordBatch, then: Callable[[], None] | None = None) -> Appended:
        """Into the log with rows that `prepare` has returned, or some of them.

        `then` is called in log order when they are durable, after the caches know them.
        """
        kinds = rows.column("kind").to_numpy()
        offsets = rows.column("queue_offset")
        gets_place = np.isin(kinds, _VISIBLE)
        if offsets.null_count < len(offsets):
            gets_place |= np.asarray(offsets.is_valid())
        has_place = np.flatnonzero(gets_place)
        placement = None
        if len(has_place):
            rows, placement = self._place(rows, has_place)
        first_seq = self._parts.writer.next_seq

        def on_durable() -> None:
            self._landed(rows, first_seq, has_place, placement)
            if then is not None:
                then()

        _, durable = self._parts.writer.append(rows, on_durable=on_durable)
        return Appended(first_seq, rows, durable)

    def _place(self, rows: pa.RecordBatch, visible: Int64Array) -> tuple[pa.RecordBatch, Placement]:
        """Give the rows that are visible, or wait in a level's queue, their queue and offset."""
        if len(visible) == rows.num_rows:
            placement = self._parts.topics.place(rows)
            return _with_places(
                rows, pa.array(placement.queue_id.astype(np.int32)), pa.array(placement.queue_offset)
            ), placement
        placement = self._parts.topics.place(rows.take(pa.array(visible)))
        queue_id = rows.column("queue_id").to_numpy().copy()
        queue_offset = np.zeros(rows.num_rows, dtype=np.int64)
        hidden = np.ones(rows.num_rows, dtype=np.bool_)
        queue_id[visible], queue_offset[visible], hidden[visible] = (
            placement.queue_id, placement.queue_offset, False,
        )  # fmt: skip
        return _with_places(rows, pa.array(queue_id), pa.array(queue_offset, mask=hidden)), placement

    def _landed(
        self, rows: pa.RecordBatch, first_seq: int, has_place: Int64Array, placement: Placement | None
    ) -> None:
        """The batch is durable: show what is for now, keep what is for later."""
        if placement is not None:
            placement.index(first_seq, first_seq + has_place)
            placement.count(self._parts.rates)
            self._waiters.wake_queues(placement.queues())
        kinds = rows.column("kind").to_numpy()
        promised = (kinds == Kind.PROMISE) | (kinds == Kind.MOVED)
        if not promised.any():
            return
        parts, promises = self._parts, with_seq(rows, first_seq)
        # A promise with a place in a queue waits for a delay level, and nowhere else.
        in_level = promised & np.asarray(rows.column("queue_offset").is_valid())
        of_level, of_instant = _chosen(promises, in_level), _chosen(promises, promised & ~in_level)
        if of_level is not None:
            parts.scheduler.add(parts.levels, of_level)
        if of_instant is not None:
            later = of_instant.num_rows
            parts.rates.put(TIMER_TOPIC, later, int(stored_sizes(of_instant).sum()))
            parts.scheduler.add(parts.backlog, of_instant)
            if parts.compacts:
                self._tail_count.add(first_seq + rows.num_rows, later)


def _chosen(rows: pa.RecordBatch, mask: npt.NDArray[np.bool_]) -> pa.RecordBatch | None:
    if mask.all():
        return rows
    return rows.filter(pa.array(mask)) if mask.any() else None


def _with_places(rows: pa.RecordBatch, queue_id: pa.Array, queue_offset: pa.Array) -> pa.RecordBatch:
    columns = rows.columns
    columns[_QUEUE_ID], columns[_QUEUE_OFFSET] = queue_id, queue_offset
    return pa.RecordBatch.from_arrays(columns, schema=LOG_SCHEMA)
