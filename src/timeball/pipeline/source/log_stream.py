"""The log as a stream: an offset is a sequence number, and an idle log starts no micro-batch.

`latestOffset` returns the start itself while there is too little for a micro-batch, which tells Spark to rest. Enough
is `min_rows_per_batch` new rows, or `few_rows` after `max_trigger_delay_ms`: a query that itself appends to the log
(compaction does: one TABLE row) would otherwise wake itself up for ever.

With read=ranges and from_seq=watermark a micro-batch covers [watermark, end), independent of the start in Spark's
checkpoint. The sink's own mark says from where, the offset only how far; so a checkpoint that was lost, is older, or
belongs to a time when another compactor was at work cannot open a hole or attach a row twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from timeball.clock import Clock, SystemClock
from timeball.errors import SetupError
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.source.log_reader import LogPart, check_kept, log_parts, read_part, start_seq
from timeball.pipeline.source.options import ReadOptions, check_stream
from timeball.pipeline.source.pushdown import Wanted, wanted
from timeball.pipeline.source.spark_api import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

Offset = dict[str, Any]


class BrokerStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The part that all streams share: a connection, and the rule when a micro-batch is worth while.

    One instance lives beside the driver for the whole query; tasks only call `read`.
    """

    def __init__(self, options: ReadOptions, clock: Clock | None = None) -> None:
        check_stream(options)
        self.options = options
        self._clock = clock or SystemClock()
        self._idle_since_ns = self._clock.monotonic_ns()
        self._endpoint: Endpoint | None = None

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

    def stop(self) -> None:
        """See DataSourceStreamReader."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    def broker(self) -> Endpoint:
        """Return the driver's connection."""
        if self._endpoint is None:
            self._endpoint = Endpoint(self.options.endpoint)
        return self._endpoint

    def __getstate__(self) -> dict[str, Any]:
        # Tasks receive a copy; a connection and a clock's readings are of no use to them.
        return {**self.__dict__, "_endpoint": None}


class LogStream(BrokerStream):
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
        """Stop at what is durable now."""
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
