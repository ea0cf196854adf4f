"""Delivery: a promise that is due becomes a release record, and with it a message in its queue, exactly once.

The release record *is* the message; there is no second write that could be missing or doubled. It names the
promise it keeps, so a restart that finds it knows that the promise is settled. Never early is asserted here
once more, whatever the schedule above believed (G2).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball import limits
from timeball.broker.parts import Parts
from timeball.broker.registry.topics import Placement
from timeball.message import LOG_SCHEMA, Int64Array, Kind, int64


class Delivery:
    """The way of what is due into the log and its queues, and of what is written again."""

    def __init__(
        self,
        parts: Parts,
        *,
        on_visible: Callable[[list[tuple[str, int]]], None],
        lateness: Lateness,
    ) -> None:
        """`on_visible` is told of queues that have got something: topic and number."""
        self._parts, self._scheduler = parts, parts.scheduler
        self._on_visible, self._lateness = on_visible, lateness

    def release(self, promises: pa.RecordBatch, now_ms: int) -> asyncio.Future[int]:
        """What is due and handed out goes to its queue (called by the ticker); returns when the last is durable."""
        for part in in_frames(promises):
            durable = self._release_frame(part, now_ms)
        return durable

    def _release_frame(self, promises: pa.RecordBatch, now_ms: int) -> asyncio.Future[int]:
        parts = self._parts
        placement = parts.topics.place(promises)
        rows = release_rows(
            promises, now_ms=now_ms, queue_id=placement.queue_id, queue_offset=placement.queue_offset
        )
        first_seq = parts.writer.next_seq
        return parts.writer.append(rows, on_durable=lambda: self._released(promises, first_seq, placement))[1]

    def rewrite(self, promises: pa.RecordBatch, now_ms: int) -> None:
        """What must be written again to go on waiting (called by the ticker)."""
        for part in in_frames(promises):
            self._move_frame(part, now_ms)

    def _move_frame(self, promises: pa.RecordBatch, now_ms: int) -> None:
        first_seq, rows = self._parts.writer.next_seq, promises.num_rows

        def on_durable() -> None:
            row_seq = np.arange(first_seq, first_seq + rows)
            self._scheduler.rewritten(int64(promises.column("seq")), row_seq, self._parts.clock.now_ms())

        self._parts.writer.append(moved_rows(promises, now_ms=now_ms), on_durable=on_durable)

    def _released(self, promises: pa.RecordBatch, first_seq: int, placement: Placement) -> None:
        due_ms, seq = int64(promises.column("due_ms")), int64(promises.column("seq"))
        placement.index(first_seq)
        placement.count(self._parts.rates)
        now_ms = self._parts.clock.now_ms()
        self._scheduler.released(seq)
        self._on_visible(placement.queues())
        self._lateness.add(np.maximum(0, now_ms - due_ms))


def in_frames(promises: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Promises in parts that fit into a frame each: a thousand large bodies may be due in one millisecond."""
    if promises.num_rows == 1 or promises.nbytes <= limits.REQUEST_BYTES_MAX:
        yield promises
        return
    half = promises.num_rows // 2
    yield from in_frames(promises.slice(0, half))
    yield from in_frames(promises.slice(half))


def names(promises: pa.RecordBatch) -> tuple[pa.Array, pa.Array]:
    """Return how rows name these promises: their numbers, and their versions where these differ."""
    moved = promises.column("kind").to_numpy() == Kind.MOVED
    if not moved.any():
        return promises.column("seq"), promises.column("version_seq")  # null, all of it
    mask, seq = pa.array(moved), promises.column("seq")
    return pc.if_else(mask, promises.column("source_seq"), seq), pc.if_else(
        mask, seq, pa.scalar(None, pa.int64())
    )


def release_rows(
    promises: pa.RecordBatch, *, now_ms: int, queue_id: Int64Array, queue_offset: Int64Array
) -> pa.RecordBatch:
    """LOG_SCHEMA release records for READ_SCHEMA promises, in the same order."""
    due_ms = int64(promises.column("due_ms"))
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


def moved_rows(promises: pa.RecordBatch, *, now_ms: int) -> pa.RecordBatch:
    """LOG_SCHEMA rows that hold READ_SCHEMA promises from now on, in the same order."""
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


class Lateness:
    """How late releases were, in milliseconds: counts per power of two, cheap enough for every batch."""

    BOUNDS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 60_000)

    def __init__(self) -> None:
        self._edges = np.array(self.BOUNDS, dtype=np.int64)
        self.counts = np.zeros(len(self.BOUNDS) + 1, dtype=np.int64)
        self.released = 0
        self.max_ms = 0

    def add(self, late_ms: Int64Array) -> None:
        """Count a batch."""
        self.counts += np.bincount(np.searchsorted(self._edges, late_ms), minlength=len(self.counts))
        self.released += len(late_ms)
        self.max_ms = max(self.max_ms, int(late_ms.max()))

    def summary(self) -> dict[str, int | dict[str, int]]:
        """For `status`: how many releases were at most so late."""
        buckets = {f"<={bound}ms": int(n) for bound, n in zip(self.BOUNDS, self.counts, strict=False) if n}
        if self.counts[-1]:
            buckets[f">{self.BOUNDS[-1]}ms"] = int(self.counts[-1])
        return {"released": self.released, "max_ms": self.max_ms, "buckets": buckets}
