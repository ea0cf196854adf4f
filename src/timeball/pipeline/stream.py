"""The log as a stream: an offset is a sequence number, and an idle log starts no batch.

`latestOffset` answers with the start itself while there is nothing worth a batch, which is how Spark knows that it
may rest. "Worth a batch" is `min_rows_per_batch` new rows, or `few_rows` after `max_trigger_delay_ms`: a consumer
that itself appends to the log (compaction does: one ATTACH row) would otherwise wake itself up for ever.

With read=ranges and from_seq=watermark an epoch covers [watermark, end), whatever Spark's checkpoint gives as
its start. The sink's own mark says from where, the offset only how far; so a checkpoint that was lost, is older, or
belongs to a time when another compactor was at work cannot open a hole or attach a row twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from timeball.clock import Clock, SystemClock
from timeball.errors import SetupError
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.options import ReadOptions
from timeball.pipeline.source import LogPart, check_kept, read_part, split_range, start_seq

Offset = dict[str, Any]


class LogStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """See the module. One instance lives beside the driver for the whole query; tasks only call `read`."""

    def __init__(self, options: ReadOptions, clock: Clock | None = None) -> None:
        if options.read == "pending":
            raise SetupError("option read=pending: the pending table is a batch source; use spark.read")
        if options.to_seq is not None:
            raise SetupError("option to_seq: only for batch reads; a stream has no end")
        self.options = options
        self._clock = clock or SystemClock()
        self._final_seq: int | None = None
        self._idle_since_ns = self._clock.monotonic_ns()
        self._latest_seq: int | None = None
        self._endpoint: Endpoint | None = None

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Where a new query starts: from_seq, by default the first row that is kept."""
        return {"seq": start_seq(self.options.from_seq, self._broker().status(), "first")}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """At most max_rows_per_batch rows of the log."""
        return ReadMaxRows(self.options.max_rows_per_batch)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """The end of the next micro-batch; `start` itself when it should not take place."""
        begin = int(start["seq"])
        durable = self._broker().status().log.durable_seq
        if durable < begin:
            raise SetupError(
                f"the checkpoint stands at row {begin} but the broker's log ends at {durable}: it belongs to another "
                "log; remove the checkpoint folder of this query"
            )
        self._latest_seq = durable
        end = durable if self._final_seq is None else max(begin, min(durable, self._final_seq))
        if not isinstance(limit, ReadAllAvailable):
            end = min(end, begin + getattr(limit, "max_rows", self.options.max_rows_per_batch))
        if self._final_seq is None and not self._worth(end - begin):
            return start
        self._idle_since_ns = self._clock.monotonic_ns()
        return {"seq": end}

    def _worth(self, rows: int) -> bool:
        options = self.options
        if rows >= min(options.min_rows_per_batch, options.max_rows_per_batch):
            return True
        waited_ms = (self._clock.monotonic_ns() - self._idle_since_ns) // 1_000_000
        return 0 < options.max_trigger_delay_ms <= waited_ms and rows >= options.few_rows

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Stop at what is durable now."""
        self._final_seq = self._broker().status().log.durable_seq

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """End of the log when last asked: how far the query lags."""
        return None if self._latest_seq is None else {"seq": self._latest_seq}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """See DataSourceStreamReader."""
        begin, stop = int(start["seq"]), int(end["seq"])
        status = self._broker().status()
        if self.options.read == "ranges" and self.options.from_seq == "watermark":
            begin = status.watermark
        if begin >= stop:
            return []
        check_kept(begin, stop, status)
        return split_range(begin, stop, self.options.rows_per_partition)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """See DataSourceStreamReader."""
        return read_part(self.options, partition) if isinstance(partition, LogPart) else iter(())

    def stop(self) -> None:
        """See DataSourceStreamReader."""
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    def _broker(self) -> Endpoint:
        if self._endpoint is None:
            self._endpoint = Endpoint(self.options.endpoint)
        return self._endpoint

    def __getstate__(self) -> dict[str, Any]:
        # Tasks receive a copy; a connection and a clock's readings are of no use to them.
        return {**self.__dict__, "_endpoint": None}
