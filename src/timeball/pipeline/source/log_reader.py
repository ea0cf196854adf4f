"""Read the log, at once or as a stream: from_seq <= seq < to_seq in even partitions, which the tasks fetch over Flight.

    read=log      the rows; the broker filters kinds and columns, the task filters topics and instants in Arrow
    read=ranges   (from_seq, to_seq) of each partition: pointers, for writers that fetch the rows themselves

A range that retention has removed, or that is not durable yet, is refused: a shorter answer would look like a whole.

A read resumes where it broke off when the broker restarts meanwhile. Rows of the log and of queues are numbered and
never change, so a reader that remembers the last number can read on and yield every row once. It waits for the broker
as long as any call does (endpoint.PATIENCE_S). A broker that is there and breaks off TRIES times without a row between
is an error.

An offset of the stream is a sequence number, and an idle log starts no micro-batch. `latestOffset` returns the start
itself while there is too little for a micro-batch, which tells Spark to rest. Enough is `min_rows_per_batch` new rows,
or `few_rows` after `max_trigger_delay_ms`: a query that itself appends to the log (compaction does: one TABLE row)
would otherwise wake itself up for ever.

With read=ranges and from_seq=watermark a micro-batch covers [watermark, end), independent of the start in Spark's
checkpoint. The sink's own mark says from where, the offset only how far; so a checkpoint that was lost, is older, or
belongs to a time when another compactor was at work cannot open a hole or attach a row twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, InputPartition

from timeball.errors import OutOfRange
from timeball.message import READ_SCHEMA
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.source.options import ReadOptions
from timeball.pipeline.source.pushdown import OPEN, Wanted, bounds, kinds, wanted
from timeball.pipeline.source.spark_api import Filter
from timeball.wire import Status

if TYPE_CHECKING:
    from collections.abc import Iterable
import logging
from collections.abc import Callable
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader

from timeball.clock import Clock, SystemClock
from timeball.errors import SetupError, Unavailable
from timeball.pipeline.source.options import check_stream
from timeball.pipeline.source.spark_api import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)


@dataclass
class LogPart(InputPartition):
    """Rows from_seq <= seq < to_seq."""

    from_seq: int
    to_seq: int


def split_range(begin: int, end: int, rows: int) -> list[tuple[int, int]]:
    """Cut a range into even pieces of at most `rows` each; none for an empty range."""
    span = max(0, end - begin)
    pieces = -(-span // rows)
    cuts = [begin + span * i // pieces for i in range(pieces + 1)] if pieces else []
    return list(itertools.pairwise(cuts))


def piece_rows(rows: int, options: ReadOptions) -> int:
    """Return how many of `rows` rows a task gets: no more than rows_per_partition, and less for min_partitions."""
    return max(1, min(options.rows_per_partition, -(-rows // options.min_partitions)))


def log_parts(begin: int, end: int, options: ReadOptions) -> list[LogPart]:
    """Return the pieces of begin <= seq < end that tasks read."""
    return [LogPart(*piece) for piece in split_range(begin, end, piece_rows(end - begin, options))]


def start_seq(position: int | str | None, status: Status, otherwise: str) -> int:
    """Return the sequence number an option names."""
    named = {
        "first": status.log.first_seq,
        "latest": status.log.durable_seq,
        "watermark": status.watermark,
    }
    chosen = otherwise if position is None else position
    return named[chosen] if isinstance(chosen, str) else chosen


def check_kept(from_seq: int, to_seq: int, status: Status) -> None:
    """Refuse a range the broker no longer, or not yet, has."""
    if from_seq < status.log.first_seq:
        raise OutOfRange(
            f"from_seq {from_seq}: retention has removed rows below {status.log.first_seq}; start at 'first'"
        )
    if to_seq > status.log.durable_seq:
        raise OutOfRange(f"to_seq {to_seq}: the log ends at {status.log.durable_seq}")


def read_part(options: ReadOptions, part: LogPart, rows: Wanted) -> Iterator[pa.RecordBatch]:
    """Read the rows of one piece that are wanted, in the columns asked for."""
    if options.read == "ranges":
        row = pa.record_batch({"from_seq": [part.from_seq], "to_seq": [part.to_seq]})
        yield row if options.columns is None else row.select(list(options.columns))
        return
    with Endpoint(options.endpoint) as endpoint:
        columns = needed(options, rows)

        def read(begin: int) -> Iterator[pa.RecordBatch]:
            return endpoint.read_log(
                begin, part.to_seq, options.kinds, columns=columns, placed=options.placed
            )

        for batch in retrying_read(endpoint, read, part.from_seq, behind_last_seq):
            kept = rows.keep(batch)
            if kept.num_rows:
                yield shape(kept, options)


def needed(options: ReadOptions, rows: Wanted) -> list[str] | None:
    """Return the columns that must travel: those asked for, and those by which rows are filtered. None for all."""
    if options.columns is None:
        return None
    names = {"seq", *options.columns, *rows.columns}
    if options.body_kinds is not None and "body" in names:
        names.add("kind")
    return [name for name in READ_SCHEMA.names if name in names]


def shape(batch: pa.RecordBatch, options: ReadOptions) -> pa.RecordBatch:
    """Apply `body_kinds` and `columns`: what the JVM need not see stays out of it."""
    if options.body_kinds is not None and (options.columns is None or "body" in options.columns):
        with_body = pc.is_in(batch.column("kind"), pa.array(options.body_kinds, pa.int8()))
        body = pc.if_else(with_body, batch.column("body"), pa.scalar(None, pa.binary()))
        batch = batch.set_column(batch.schema.get_field_index("body"), "body", body)
    return batch if options.columns is None else batch.select(list(options.columns))


class LogReader(DataSourceReader):
    """A batch read of [from_seq, to_seq); without to_seq, of all that is durable when the read is planned."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self.seqs = OPEN
        self.rows = Wanted() if options.read == "ranges" else wanted((), options.topic, [])

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Narrow the range, the kinds and the rows; every filter is returned, so Spark applies them as well."""
        if self.options.read == "log":
            self.seqs = bounds(filters, "seq")
            self.rows = wanted(("due_ms",), self.options.topic, filters)
            self.options = msgspec.structs.replace(self.options, kinds=kinds(self.options.kinds, filters))
        return filters

    def partitions(self) -> Sequence[InputPartition]:
        """See DataSourceReader."""
        options = self.options
        with Endpoint(options.endpoint) as endpoint:
            status = endpoint.status()
        begin = start_seq(options.from_seq, status, "first")
        end = status.log.durable_seq if options.to_seq is None else options.to_seq
        check_kept(begin, end, status)
        begin, end = self.seqs.clip(begin, end)
        if options.kinds == ():
            return []
        return log_parts(begin, end, options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """See DataSourceReader."""
        # Planned without partitions, Spark asks once all the same, for None.
        return read_part(self.options, partition, self.rows) if isinstance(partition, LogPart) else iter(())


# ---- a read that goes on --------------------------------------------------------------------------------------


LOG = logging.getLogger("timeball.pipeline")

TRIES = 3

Read = Callable[[int], Iterator[pa.RecordBatch]]  # rows from a position on, in order
After = Callable[[pa.RecordBatch, int], int]  # the position behind a batch that began at one


def retrying_read(endpoint: Endpoint, read: Read, position: int, after: After) -> Iterator[pa.RecordBatch]:
    """Yield all batches of `read(position)`; Unavailable when the broker stays away."""
    broken = 0
    while True:
        try:
            for batch in read(position):
                position, broken = after(batch, position), 0
                yield batch
            return
        except Unavailable as error:
            broken += 1
            if broken > TRIES:
                raise
            LOG.warning(
                "read broke off broker=%s at_seq=%d try=%d reason=%s", endpoint.uri, position, broken, error
            )
            endpoint.status()  # returns once the broker is back


def behind_last_seq(batch: pa.RecordBatch, _: int) -> int:
    """Return the position behind rows of the log, which must have their number."""
    return int(batch.column("seq")[-1].as_py()) + 1


def behind_rows(batch: pa.RecordBatch, position: int) -> int:
    """Return the position behind rows of a queue, which has one at each offset."""
    return position + int(batch.num_rows)


# ---- as a stream ----------------------------------------------------------------------------------------------


Offset = dict[str, Any]


class BrokerStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The part that all streams share: a connection.

    One instance lives beside the driver for the whole query; tasks only call `read`.
    """

    def __init__(self, endpoint: str) -> None:
        self._uri = endpoint
        self._endpoint: Endpoint | None = None

    def stop(self) -> None:
        """See DataSourceStreamReader."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    def broker(self) -> Endpoint:
        """Return the driver's connection."""
        if self._endpoint is None:
            self._endpoint = Endpoint(self._uri)
        return self._endpoint

    def __getstate__(self) -> dict[str, Any]:
        # Tasks receive a copy; a connection is of no use to them.
        return {**self.__dict__, "_endpoint": None}


class PacedStream(BrokerStream):
    """A stream with a rule when a micro-batch is worth while."""

    def __init__(self, options: ReadOptions, clock: Clock | None = None) -> None:
        check_stream(options)
        super().__init__(options.endpoint)
        self.options = options
        self._clock = clock or SystemClock()
        self._idle_since_ns = self._clock.monotonic_ns()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Limit a micro-batch to max_rows_per_batch rows."""
        return ReadMaxRows(self.options.max_rows_per_batch)

    def rows_max(self, limit: ReadLimit) -> int | None:
        """Return how many rows a batch may have; None for all there are."""
        if isinstance(limit, ReadAllAvailable):
            return None
        return int(getattr(limit, "max_rows", self.options.max_rows_per_batch))

    def worth(self, rows: int) -> bool:
        """Return whether so many new rows are a micro-batch now."""
        options = self.options
        if rows >= min(options.min_rows_per_batch, options.max_rows_per_batch):
            return True
        waited_ms = (self._clock.monotonic_ns() - self._idle_since_ns) // 1_000_000
        return 0 < options.max_trigger_delay_ms <= waited_ms and rows >= options.few_rows

    def begin_batch(self) -> None:
        """Start the wait of `max_trigger_delay_ms` anew."""
        self._idle_since_ns = self._clock.monotonic_ns()


class LogStream(PacedStream):
    """The log, or ranges of it, as a stream."""

    def __init__(self, options: ReadOptions, clock: Clock | None = None) -> None:
        super().__init__(options, clock)
        # Spark pushes no filters into a stream: the option `topic` is all there is to go by.
        self._rows = Wanted() if options.read == "ranges" else wanted((), options.topic, [])
        self._final_seq: int | None = None
        self._latest_seq: int | None = None

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Return where a new query starts: from_seq, by default the first row that is kept."""
        return {"seq": start_seq(self.options.from_seq, self.broker().status(), "first")}

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Return the end of the next micro-batch; `start` itself when it should not take place."""
        begin = int(start["seq"])
        durable = self.broker().status().log.durable_seq
        if durable < begin:
            raise SetupError(
                f"the checkpoint stands at row {begin} but the broker's log ends at {durable}: it belongs to another "
                "log; remove the checkpoint folder of this query"
            )
        self._latest_seq = durable
        end = durable if self._final_seq is None else max(begin, min(durable, self._final_seq))
        rows_max = self.rows_max(limit)
        if rows_max is not None:
            end = min(end, begin + rows_max)
        if self._final_seq is None and not self.worth(end - begin):
            return start
        self.begin_batch()
        return {"seq": end}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Stop at the rows that are durable now."""
        self._final_seq = self.broker().status().log.durable_seq

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """End of the log when last asked: how far the query lags."""
        return None if self._latest_seq is None else {"seq": self._latest_seq}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """See DataSourceStreamReader."""
        begin, stop = int(start["seq"]), int(end["seq"])
        status = self.broker().status()
        if self.options.read == "ranges" and self.options.from_seq == "watermark":
            begin = status.watermark
        if begin >= stop:
            return []
        check_kept(begin, stop, status)
        return log_parts(begin, stop, self.options)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """See DataSourceStreamReader."""
        return read_part(self.options, partition, self._rows) if isinstance(partition, LogPart) else iter(())
