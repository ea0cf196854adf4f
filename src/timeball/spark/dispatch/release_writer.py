"""The sink of `timeball_due`: a task reads the rows of its pointers, waits until they are due, and sends them.

    read the rows -> sort by (due_ms, seq) -> wait for the broker's clock -> send due rows to the broker, batch by batch

The task estimates the broker's clock. It reads that clock with a `status` call, adds the time that has passed on its
own monotonic clock, and reads the broker's clock again every second. A reading is already old when the answer arrives.
So the estimate is a little late and never ahead. If the broker refuses a batch as early nevertheless, its clock was set
back. The task then sends these rows again later.

The broker decides which rows are released (broker/accepting/delivery.py), so a repeated task changes nothing. If a file
no longer exists, the broker has rewritten it, and its pending rows are in another file. A task waits for at most
`lead_ms` + `PATIENCE_MS`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from timeball.client.outgoing import halves
from timeball.io.clock import Clock, SystemClock
from timeball.model.errors import OutOfRange, from_code
from timeball.model.message import TABLE_SCHEMA, Int64Array, int64
from timeball.spark.dispatch.due_files import read_rows
from timeball.spark.endpoint import Endpoint
from timeball.spark.source.spark_api import DataSourceStreamArrowWriter

LOG = logging.getLogger("timeball.spark")

BATCH_ROWS = 16_384
TICK_MS = 10  # the shortest wait between two batches, when rows become due one by one
CLOCK_EVERY_MS = 1_000
# A task waits longer than its lead only if the broker's clock was set back. After this time it leaves its rows to the
# broker.
PATIENCE_MS = 10_000


@dataclass
class ReleaseCounts(WriterCommitMessage):
    """The result of a task: numbers of rows."""

    released: int = 0
    left_to_broker: int = (
        0  # not released: the broker has settled (released or cancelled) or loaded them already
    )


class BrokerClock:
    """An estimate of the broker's clock that is never ahead of it."""

    def __init__(self, endpoint: Endpoint, clock: Clock | None = None) -> None:
        self._endpoint, self._clock = endpoint, clock or SystemClock()
        self.read_clock()

    def now_ms(self) -> int:
        """Estimate the time of the broker's scheduler, in milliseconds since 1970. Asks the broker once a second."""
        elapsed_ms = (self._clock.monotonic_ns() - self._broker_read_ns) // 1_000_000
        if elapsed_ms >= CLOCK_EVERY_MS:
            self.read_clock()
            elapsed_ms = 0
        return self._broker_ms + elapsed_ms

    def read_clock(self) -> None:
        """Read the broker's clock by a `status` call."""
        self._broker_ms = self._endpoint.status().now_ms
        # Read after the call, so that the estimate is never ahead.
        self._broker_read_ns = self._clock.monotonic_ns()


class ReleaseWriter(DataSourceStreamArrowWriter):
    """The sink of the stream. Spark runs `write` in a task, and `commit` on the driver after each micro-batch."""

    def __init__(self, endpoint: str, lead_ms: int) -> None:
        self._endpoint, self._lead_ms = endpoint, lead_ms

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """See DataSourceStreamArrowWriter."""
        spans = [span for batch in iterator for span in batch.to_pylist()]
        rows = read_all(spans)
        if rows is None:
            return ReleaseCounts()
        with Endpoint(self._endpoint) as endpoint:
            return release_when_due(rows, endpoint, self._lead_ms + PATIENCE_MS)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """See DataSourceStreamWriter. Only logs the counts, because the broker has stored the releases already."""
        counts = [message for message in messages if isinstance(message, ReleaseCounts)]
        LOG.info(
            "epoch done job=dispatch epoch=%d released=%d left=%d",
            *(
                batchId,
                sum(count.released for count in counts),
                sum(count.left_to_broker for count in counts),
            ),
        )

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """See DataSourceStreamWriter.

        There is nothing to undo: the rows sent are released, the broker releases the rest.
        """


def read_all(spans: list[dict[str, object]]) -> pa.RecordBatch | None:
    """Read the rows of these pointers, sorted by (due_ms, seq). Skips deleted files. Returns None without rows."""
    tables = []
    for span in spans:
        try:
            tables.append(
                read_rows(
                    str(span["uri"]), int(str(span["first_row"])), int(str(span["rows"])), TABLE_SCHEMA.names
                )
            )
        except FileNotFoundError:
            LOG.warning("file rewritten meanwhile, the broker releases its rows file=%s", span["uri"])
    if not tables:
        return None
    rows = pa.concat_tables(tables).select(TABLE_SCHEMA.names).cast(TABLE_SCHEMA).combine_chunks()
    if len(tables) > 1:
        order = np.lexsort((rows.column("seq").to_numpy(), rows.column("due_ms").to_numpy()))
        rows = rows.take(pa.array(order)).combine_chunks()
    batches = rows.to_batches()
    return batches[0] if batches else None


def release_when_due(
    rows: pa.RecordBatch, endpoint: Endpoint, patience_ms: int, clock: Clock | None = None
) -> ReleaseCounts:
    """Send sorted rows to the broker as they become due.

    After `patience_ms`, the remaining rows are left to the broker.
    """
    counts, clock = ReleaseCounts(), clock or SystemClock()
    give_up_ns = clock.monotonic_ns() + patience_ms * 1_000_000
    broker_clock = BrokerClock(endpoint, clock)
    remaining: pa.RecordBatch | None = rows
    while remaining is not None and clock.monotonic_ns() < give_up_ns:
        batches = RecordingIterator(due_batches(remaining, broker_clock, give_up_ns, clock))
        refused_as_early = []
        for batch, answer in zip(batches.batches, endpoint.release(batches), strict=True):
            if answer.error == OutOfRange.code:
                refused_as_early.append(batch)
            elif answer.error:
                raise from_code(answer.error, answer.text)
            counts.released += answer.released
            counts.left_to_broker += answer.left
        remaining = pa.concat_batches(refused_as_early) if refused_as_early else None
        if refused_as_early:
            broker_clock.read_clock()
            threading.Event().wait(TICK_MS / 1000)
    return counts


class RecordingIterator:
    """An iterator over batches that records them, so that each can be matched with its answer."""

    def __init__(self, source: Iterator[pa.RecordBatch]) -> None:
        self._source = source
        self.batches: list[pa.RecordBatch] = []

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for batch in self._source:
            self.batches.append(batch)
            yield batch


def due_batches(
    rows: pa.RecordBatch, broker_clock: BrokerClock, give_up_ns: int, clock: Clock
) -> Iterator[pa.RecordBatch]:
    """Yield batches of sorted rows as they become due. Stops at `give_up_ns` on the monotonic clock."""
    due = int64(rows.column("due_ms"))
    next_row = 0
    while next_row < len(due):
        due_rows = _count_due(due, broker_clock.now_ms())
        if due_rows > next_row:
            end = min(due_rows, next_row + BATCH_ROWS)
            yield from halves(rows.slice(next_row, end - next_row))
            next_row = end
        if next_row < len(due) and next_row >= due_rows:
            if clock.monotonic_ns() >= give_up_ns:
                return
            wait_ms = min(max(TICK_MS, int(due[next_row]) - broker_clock.now_ms()), CLOCK_EVERY_MS)
            threading.Event().wait(wait_ms / 1000)


def _count_due(due_ms: Int64Array, now_ms: int) -> int:
    return int(np.searchsorted(due_ms, now_ms, side="right"))
