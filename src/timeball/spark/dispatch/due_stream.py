"""The Spark format `timeball_due`: a stream of pointers to rows of the pending table that are due soon.

    spark.readStream.format("timeball_due").option("endpoint", …).load()     rows: POINTER_SCHEMA
         .writeStream.format("timeball_due").option("endpoint", …)           releases them (release_writer.py)

An offset is a time on the broker's clock: all rows due before it are *planned*, which means assigned to a task. A
micro-batch plans the rows due from the end of the previous one until `lead_ms` from now, so its tasks already run when
their rows are due. All its rows are from one version of the table, which its offset names. `latestOffset` returns the
start offset until a row is due within `lead_ms` / 2. So Spark starts no micro-batch while no message is due soon.

No message depends on the stream. The broker releases a row once even if it is planned twice. It also releases by itself
the rows that are planned too late or never. Rows that were due more than `behind_ms` ago are never planned, because the
broker has already loaded them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from timeball.model import limits
from timeball.model.errors import NotFound, SetupError
from timeball.model.wire import Status
from timeball.spark.dispatch.due_files import (
    POINTER_SCHEMA,
    DueFiles,
    Span,
    cut_into_tasks,
    encode_pointers,
    window_end,
)
from timeball.spark.dispatch.release_writer import ReleaseWriter
from timeball.spark.source import option_values as values
from timeball.spark.source.options import DEFAULT_ENDPOINT, SPARK_OPTIONS
from timeball.spark.source.spark_api import (
    DataSourceStreamArrowWriter,
    ReadLimit,
    spark_schema,
)
from timeball.spark.source.streams import BrokerStream, Offset

NAME = "timeball_due"
LEAD_MS = 1_000
BEHIND_MS = 10_000


class DueOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the stream and its sink. `describe` explains each of them."""

    endpoint: str = DEFAULT_ENDPOINT
    table_uri: str | None = None
    lead_ms: int = LEAD_MS
    behind_ms: int = BEHIND_MS
    rows_per_partition: int = 65_536
    max_rows_per_batch: int = 4_000_000


_PARSERS = {
    "endpoint": values.endpoint,
    "table_uri": values.text,
    "lead_ms": values.count(0, limits.MINUTE_MS),
    "behind_ms": values.count(0, limits.DAY_MS),
    "rows_per_partition": values.count(1),
    "max_rows_per_batch": values.count(1),
}


def describe() -> dict[str, str]:
    """Describe each option by a short text with its default."""
    return {
        "endpoint": f"where the broker listens ({DEFAULT_ENDPOINT})",
        "table_uri": "where driver and executors reach the pending table, if not where the broker says",
        "lead_ms": f"how far ahead of the clock tasks are planned: they wait for their rows ({LEAD_MS})",
        "behind_ms": f"what was due longer ago is left to the broker ({BEHIND_MS})",
        "rows_per_partition": "rows that one task releases, about (65536)",
        "max_rows_per_batch": "rows in one micro-batch, about (4000000)",
    }


def due_options(options: Mapping[str, str]) -> DueOptions:
    """Parse and check the options. Raises SetupError for the first invalid one."""
    return values.parse(options, DueOptions, _PARSERS, ignored=SPARK_OPTIONS)


class DueDataSource(DataSource):
    """The data source of `format("timeball_due")`, for streams only."""

    @classmethod
    def name(cls) -> str:
        """See DataSource."""
        return NAME

    def schema(self) -> StructType:
        """See DataSource."""
        return spark_schema(POINTER_SCHEMA)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """See DataSource."""
        return DueStream(due_options(self.options))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        """See DataSource."""
        if schema.fieldNames() != POINTER_SCHEMA.names:
            raise SetupError(f"{NAME} accepts only the columns of its own stream: {POINTER_SCHEMA.names}")
        options = due_options(self.options)
        return ReleaseWriter(options.endpoint, options.lead_ms)


@dataclass
class DuePart(InputPartition):
    """The pointers of one task, as columns of POINTER_SCHEMA."""

    columns: dict[str, list[Any]]


class DueStream(BrokerStream):
    """The stream of pointers to rows that are due soon. Tasks only call `read`."""

    def __init__(self, options: DueOptions) -> None:
        super().__init__(options.endpoint)
        self.options = options
        self._final_ms: int | None = None  # with Trigger.AvailableNow: the offset at which the query ends
        self._now_ms: int | None = None  # the broker's clock at the latest status
        self._files: DueFiles | None = None

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        """Choose the offset of a new query: `behind_ms` before now, because the broker has loaded all earlier rows."""
        status = self.broker().status()
        begin_ms = status.now_ms - self.options.behind_ms
        return {"due_ms": begin_ms, "from_ms": begin_ms, "version": status.table.version}

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """Choose the end of the next micro-batch.

        Returns `start` while no row is due soon, which starts no micro-batch.
        """
        options, status = self.options, self.broker().status()
        self._now_ms = status.now_ms
        begin_ms = max(int(start["due_ms"]), status.now_ms - options.behind_ms)
        end_ms = status.now_ms + options.lead_ms if self._final_ms is None else self._final_ms
        spans = self._spans(status.table.version, begin_ms, end_ms, status)
        if self._final_ms is None and not self._is_batch_due(spans, status.now_ms):
            return start
        end_ms = (
            max(begin_ms, window_end(spans, options.max_rows_per_batch, end_ms))
            if spans
            else max(begin_ms, end_ms)
        )
        return {"due_ms": end_ms, "from_ms": begin_ms, "version": status.table.version}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Make the query end after the messages that are due now."""
        self._final_ms = self.broker().status().now_ms + 1

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """Report the broker's clock at the latest status, so that Spark's progress shows the lag of the query."""
        return None if self._now_ms is None else {"due_ms": self._now_ms}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """See DataSourceStreamReader. The earliest rows come first, because Spark starts tasks in this order."""
        if start == end:
            return []
        spans = self._spans(int(end["version"]), int(end["from_ms"]), int(end["due_ms"]))
        return [
            DuePart(encode_pointers(task_spans).to_pydict())
            for task_spans in cut_into_tasks(spans, self.options.rows_per_partition)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """See DataSourceStreamReader."""
        if isinstance(partition, DuePart):
            yield pa.RecordBatch.from_pydict(partition.columns, POINTER_SCHEMA)

    def _is_batch_due(self, spans: list[Span], now_ms: int) -> bool:
        """Check whether the first row is due within half of `lead_ms`.

        With the whole `lead_ms`, each micro-batch would be planned as soon as it has its first rows, and be small.
        """
        first_ms = min((int(span.due_ms[0]) for span in spans), default=None)
        return first_ms is not None and first_ms <= now_ms + self.options.lead_ms // 2

    def _spans(self, version: int, begin_ms: int, end_ms: int, status: Status | None = None) -> list[Span]:
        """Find the rows of a table version that are due at begin <= due_ms < end.

        Returns none if its files are not there.
        """
        if begin_ms >= end_ms:
            return []
        if self._files is None:
            uri = self.options.table_uri or (status or self.broker().status()).table.uri
            self._files = DueFiles(uri)
        try:
            self._files.use_version(version)
            return self._files.between(begin_ms, end_ms)
        except (NotFound, OSError):
            # The files of this version are already deleted, or not written yet. Planning nothing is safe, because the
            # broker releases rows that no task sends. The next micro-batch opens the table again.
            self._files = None
            return []

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_files": None}  # tasks do not need the driver's columns
