"""Delivery: a promise that is due becomes a release record, and with it a message in its queue, exactly once.

The release record *is* the message; there is no second write that could be missing or doubled. It names the
promise it keeps, so a restart that finds it knows that the promise is settled. Never early is asserted here
once more, independently of the schedule (G2).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball import limits
from timeball.broker.components import Components
from timeball.broker.registry.few_places import FewPlaces
from timeball.broker.registry.topics import Placement, Topics, check_topic
from timeball.errors import OutOfRange
from timeball.log.few_rows import (
    Build,
    EncodedRows,
    NumberedRows,
    Pairs,
    ReadRows,
    builder_of,
    pairs_of,
    read_batch,
    stored_size,
)
from timeball.message import LOG_SCHEMA, READ_SCHEMA, Int64Array, Kind, LogRow, ReadRow, int64
from timeball.schedule.columns import FEW, with_column
from timeball.schedule.hour_log.pending import as_promises
from timeball.schedule.level_cascade.timing_list import NAME as TIMING_LIST
from timeball.schedule.level_cascade.timing_list import without_list

FEW_ROWS = 64  # from there on columns cost less
FEW_BYTES = limits.REQUEST_BYTES_MAX // 64
_RELEASE = int(Kind.RELEASE)
_BODY, _PROPERTIES, _DUE_MS, _STORE_MS = map(
    READ_SCHEMA.get_field_index, ("body", "properties", "due_ms", "store_ms")
)


@dataclass(frozen=True, slots=True)
class Brought:
    """The outcome of a batch: rows released by it, durably, and rows left."""

    released: int
    left: int


class Delivery:
    """Appends due promises as release records, and writes others again that must go on waiting."""

    def __init__(
        self,
        parts: Components,
        *,
        on_visible: Callable[[list[tuple[str, int]]], None],
        lateness: Lateness,
    ) -> None:
        """`on_visible` is told of queues that have got something: topic and number."""
        self._parts, self._scheduler = parts, parts.scheduler
        self._on_visible, self._lateness, self._traces = on_visible, lateness, parts.traces
        self._build = builder_of(parts.settings.codec)

    def release(self, promises: ReadRows, now_ms: int) -> asyncio.Future[int]:
        """Append release records for handed-out promises (called by the ticker); the future is done with the last."""
        few = few_values(promises)
        if few is not None:
            return self._release_few(promises, few, now_ms)
        for part in in_frames(read_batch(promises)):
            durable = self._release_frame(part, now_ms)
        return durable

    def _release_few(self, promises: ReadRows, values: Sequence[ReadRow], now_ms: int) -> asyncio.Future[int]:
        parts, pairs = self._parts, pairs_of(promises)
        few, places = few_release_rows(values, parts.topics, now_ms, self._build)
        first_seq = parts.writer.next_seq
        # Not earlier than it was accepted: an instant that had passed then is none that the broker missed.
        begin_ms = np.array([max(row[_DUE_MS], row[_STORE_MS]) for row in values], dtype=np.int64)
        durable = parts.writer.append(
            few, on_durable=lambda: self._released(promises, pairs, begin_ms, first_seq, places)
        )[1]
        places.give_out()  # without a pause behind the append, so that no other row gets these places
        return durable

    def _release_frame(self, promises: pa.RecordBatch, now_ms: int) -> asyncio.Future[int]:
        parts = self._parts
        promises = without_lists(promises)  # first: the index and the rates count what a consumer gets
        # The places are given out here and the row is appended without a pause, so offsets grow in the order of the
        # log.
        placement = parts.topics.place(promises)
        rows = release_rows(
            promises, now_ms=now_ms, queue_id=placement.queue_id, queue_offset=placement.queue_offset
        )
        first_seq, pairs = parts.writer.next_seq, pairs_of(promises)
        begin_ms = np.maximum(pairs[0], int64(promises.column("store_ms")))  # as in `_release_few`
        return parts.writer.append(
            rows, on_durable=lambda: self._released(promises, pairs, begin_ms, first_seq, placement)
        )[1]

    def rewrite(self, promises: pa.RecordBatch, now_ms: int) -> None:
        """Append promises again that must be rewritten to go on waiting (called by the ticker)."""
        for part in in_frames(promises):
            self._move_frame(part, now_ms)

    def _move_frame(self, promises: pa.RecordBatch, now_ms: int) -> None:
        first_seq, rows = self._parts.writer.next_seq, promises.num_rows

        def on_durable() -> None:
            row_seq = np.arange(first_seq, first_seq + rows)
            # Only when durable: until then the promise counts as waiting in its old row, where a restart would find
            # it.
            self._scheduler.rewritten(int64(promises.column("seq")), row_seq, self._parts.clock.now_ms())

        self._parts.writer.append(moved_rows(promises, now_ms=now_ms), on_durable=on_durable)

    def _released(
        self,
        promises: ReadRows,
        pairs: Pairs,
        begin_ms: Int64Array,
        first_seq: int,
        placement: Placement | FewPlaces,
    ) -> None:
        seq = pairs[1]
        placement.index(first_seq)
        placement.count(self._parts.rates, released=True)
        now_ms = self._parts.clock.now_ms()
        # After the index: a consumer must find the message before the promise counts as released.
        self._scheduler.released(seq)
        if self._parts.lease_counts.waiting_rows:
            # Few that come as values are as they were accepted: none was moved.
            numbers = seq if isinstance(promises, NumberedRows) else names(promises)[0].to_numpy()
            self._parts.lease_counts.end(numbers)
        self._on_visible(placement.queues())
        self._lateness.add(np.maximum(0, now_ms - begin_ms))
        if self._traces is not None:
            self._traces.released(read_batch(promises), now_ms)

    # -- releases by a dispatcher outside: it reads due promises in the table's files and hands them in ----------

    def lease_to_dispatcher(self, lease_ms: int) -> None:
        """Leave promises in files to a dispatcher for so long, at most an hour; 0 ends it now."""
        self._parts.scheduler.lease(self._parts.clock.now_ms(), lease_ms)

    async def release_brought(self, rows: pa.RecordBatch) -> Brought:
        """Release those of these rows (TABLE_SCHEMA, sound) that wait; return when they are durable.

        A dispatcher decides nothing: what was cancelled, brought before or loaded because it was late is left, so any
        call may be repeated. Its bodies are believed, as those of an attached file are. Raises OutOfRange for a batch
        with a row that is not due yet; it may be brought again.
        """
        parts = self._parts
        # What is due by itself goes through the same gate: neither may fill the memory with what the disk lacks.
        while parts.scheduler.in_flight_rows >= limits.RELEASE_ROWS_IN_FLIGHT_MAX:
            await parts.writer.flushed()
        now_ms = parts.clock.now_ms()
        last_ms = int(int64(rows.column("due_ms")).max())
        # By the broker's clock alone: a dispatcher whose clock is ahead must not release early (G2).
        if last_ms > now_ms:
            raise OutOfRange(f"a row is due at {last_ms} and it is {now_ms} here: bring it then")
        for name in rows.column("topic").unique().to_pylist():
            if parts.topics.find_topic(name) is None:
                check_topic(name)  # while nothing is in flight yet
        # No pause from here on: what is in flight stands in the log in the same order.
        promises = parts.scheduler.take_brought(as_promises(pa.Table.from_batches([rows])))
        if promises is None:
            return Brought(0, rows.num_rows)
        # Shielded: the rows are in flight, and a dispatcher that goes away must not cancel the commit of others.
        await asyncio.shield(self.release(promises, now_ms))
        return Brought(promises.num_rows, rows.num_rows - promises.num_rows)


def in_frames(promises: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yield promises in parts that fit into a frame each: a thousand large bodies may be due in one millisecond."""
    # Not `nbytes`, which asks each column, and takes as long as to release a row.
    if promises.num_rows == 1 or pa.ipc.get_record_batch_size(promises) <= limits.REQUEST_BYTES_MAX:
        yield promises
        return
    # By halves of the rows, whose sizes differ; a single row always fits (limits.BODY_BYTES_MAX).
    half = promises.num_rows // 2
    yield from in_frames(promises.slice(0, half))
    yield from in_frames(promises.slice(half))


def names(promises: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
    """Return how rows name these promises: their numbers, and their versions where these differ."""
    moved = promises.column("kind").to_numpy() == Kind.MOVED
    # Nearly always: then the columns are passed on as they are.
    if not moved.any():
        return promises.column("seq"), promises.column("version_seq")  # null, all of it
    mask, seq = pa.array(moved), promises.column("seq")
    return pc.if_else(mask, promises.column("source_seq"), seq), pc.if_else(
        mask, seq, pa.scalar(None, pa.int64())
    )


def without_lists(promises: pa.RecordBatch) -> pa.RecordBatch:
    """Return promises without the levels that a cascade has noted on them.

    Here and in no backlog: a promise may have gone to another strategy, or into a file, with its list.
    """
    properties = promises.column("properties")
    if not pc.any(pc.match_substring(properties, TIMING_LIST)).as_py():  # mostly none is
        return promises
    return with_column(promises, "properties", without_list(properties))


def release_rows(
    promises: pa.RecordBatch, *, now_ms: int, queue_id: Int64Array, queue_offset: Int64Array
) -> pa.RecordBatch:
    """Return LOG_SCHEMA release records for READ_SCHEMA promises, in the same order."""
    due_ms = int64(promises.column("due_ms"))
    # Guarantee G2, checked once more here, since everything above is a cache.
    assert len(due_ms) and int(due_ms.max()) <= now_ms, "a promise must never be kept before its instant"
    number, version = names(promises)
    changed = {
        "kind": pa.array(np.full(len(due_ms), Kind.RELEASE, dtype=np.int8)),
        "queue_id": pa.array(queue_id.astype(np.int32)),
        "queue_offset": pa.array(queue_offset),
        "store_ms": pa.array(np.full(len(due_ms), now_ms, dtype=np.int64)),
        "accepted_ms": promises.column("store_ms"),
        "source_seq": number,
        "version_seq": version,
    }
    return pa.RecordBatch.from_arrays(
        [changed.get(name, promises.column(name)) for name in LOG_SCHEMA.names], schema=LOG_SCHEMA
    )


def few_values(promises: ReadRows) -> list[ReadRow] | None:
    """Return these READ_SCHEMA promises as values if they go row by row: few, of usual sizes, without a cascade's list.

    None when they go as columns.
    """
    if promises.num_rows > FEW_ROWS:
        return None
    if isinstance(promises, NumberedRows):
        values = promises.values
    elif pa.ipc.get_record_batch_size(promises) >= FEW_BYTES:
        return None
    else:
        values = list(zip(*(column.to_pylist() for column in promises.columns), strict=True))
    size_bytes = 0
    for row in values:
        # By lengths alone: that of a text in bytes is at most four times that, and the bound is far from a frame's.
        body, properties = row[_BODY], row[_PROPERTIES]
        size_bytes += len(body or b"")
        if properties:
            size_bytes += len(properties)
            if TIMING_LIST in properties:
                return None
    return values if size_bytes < FEW_BYTES else None


def few_release_rows(
    promises: Sequence[ReadRow], topics: Topics, now_ms: int, build: Build
) -> tuple[EncodedRows, FewPlaces]:
    """Return what `Topics.place` and `release_rows` give for a few promises; the places are still to be given out.

    A tick of a steady load hands out one promise, or some; one promise by columns costs half a millisecond, as many do
    (decision 0037). `tests/broker/test_few_releases.py` holds that both ways give the same.
    """
    places = FewPlaces()
    built: list[LogRow] = []
    for at, row in enumerate(promises):
        (
            seq, kind, topic, queue_id, _, tag, keys, unique_key, body, properties, born_ms, born_host, store_ms,
            store_host, flag, sys_flag, reconsume_times, due_ms, _, source_seq, version_seq, from_due_ms,
        ) = row  # fmt: skip
        # Guarantee G2, as in `release_rows`.
        assert due_ms <= now_ms, "a promise must never be kept before its instant"
        # As `names` has it.
        number, version = (source_seq, seq) if kind == Kind.MOVED else (seq, version_seq)
        queue_id, offset = places.choose(
            topics.find_topic(topic) or topics.ensure(topic),
            at, -1 if queue_id is None else queue_id, stored_size(topic, body, properties), tag, properties,
        )  # fmt: skip
        built.append(
            (
                _RELEASE, topic, queue_id, offset, tag, keys, unique_key, body, properties, born_ms, born_host, now_ms,
                store_host, flag, sys_flag, reconsume_times, due_ms, store_ms, number, version, from_due_ms,
            )
        )  # fmt: skip
    return build(built), places


def moved_rows(promises: pa.RecordBatch, *, now_ms: int) -> pa.RecordBatch:
    """Return LOG_SCHEMA rows that hold READ_SCHEMA promises from now on, in the same order."""
    count, (number, version) = promises.num_rows, names(promises)
    changed = {
        "kind": pa.array(np.full(count, Kind.MOVED, dtype=np.int8)),
        "store_ms": pa.array(np.full(count, now_ms, dtype=np.int64)),
        "accepted_ms": promises.column("store_ms"),
        "source_seq": number,
        "version_seq": version,
    }
    return pa.RecordBatch.from_arrays(
        [changed.get(name, promises.column(name)) for name in LOG_SCHEMA.names], schema=LOG_SCHEMA
    )


def as_moves(promises: pa.RecordBatch, before: pa.RecordBatch) -> pa.RecordBatch:
    """Return LOG_SCHEMA promises as moves of the READ_SCHEMA promises `before`."""
    number, version = names(before)
    changed = {
        "kind": pa.array(np.full(promises.num_rows, Kind.MOVED, dtype=np.int8)),
        "accepted_ms": before.column("store_ms"),
        "source_seq": number,
        "version_seq": version,
        "from_due_ms": before.column("due_ms"),
    }
    return pa.RecordBatch.from_arrays(
        [changed.get(name, promises.column(name)) for name in LOG_SCHEMA.names], schema=LOG_SCHEMA
    )


class Lateness:
    """How late releases were, in milliseconds: counts per power of two, cheap enough for every batch."""

    BOUNDS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 60_000)

    def __init__(self) -> None:
        # The number of bounds is fixed, so that a batch costs one search and one addition of two short arrays.
        self._edges = np.array(self.BOUNDS, dtype=np.int64)
        self.counts = np.zeros(len(self.BOUNDS) + 1, dtype=np.int64)
        self.released = 0
        self.max_ms = self.sum_ms = 0

    def add(self, late_ms: Int64Array) -> None:
        """Count a batch."""
        self.released += len(late_ms)
        if len(late_ms) <= FEW:
            for late in late_ms.tolist():
                self.counts[bisect_left(self.BOUNDS, late)] += 1
                self.sum_ms += late
                self.max_ms = max(self.max_ms, late)
            return
        self.counts += np.bincount(np.searchsorted(self._edges, late_ms), minlength=len(self.counts))
        self.sum_ms += int(late_ms.sum())
        self.max_ms = max(self.max_ms, int(late_ms.max()))

    def summary(self) -> dict[str, int | dict[str, int]]:
        """Return, for `status`, how many releases were at most so late."""
        buckets = {f"<={bound}ms": int(n) for bound, n in zip(self.BOUNDS, self.counts, strict=False) if n}
        if self.counts[-1]:
            buckets[f">{self.BOUNDS[-1]}ms"] = int(self.counts[-1])
        return {"released": self.released, "max_ms": self.max_ms, "buckets": buckets}
