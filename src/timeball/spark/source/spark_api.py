"""Adapters to PySpark: schemas, settings of jobs, starting queries, and base classes of stream readers.

Spark compares the types of an Arrow batch with the declared schema exactly. At run time it refuses a dictionary, a
`string_view`, or a field declared as not null. So `_TYPES` has only six types, and every field may be null.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.datasource import DataSourceStreamReader
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    DateType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
)

from timeball.io.clock import Clock
from timeball.model.errors import SetupError
from timeball.spark.endpoint import GROUP, Connections
from timeball.spark.source.options import Pace, ReadOptions, check_stream

SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"
DEFAULT_PARTITIONS = "200"
PARTITION_ROWS = 500_000  # per shuffle partition; the same as the default of the option rows_per_partition
DESCRIPTION = "spark.job.description"

_TYPES: dict[pa.DataType, DataType] = {
    pa.int8(): ByteType(),
    pa.int32(): IntegerType(),
    pa.int64(): LongType(),
    pa.string(): StringType(),
    pa.binary(): BinaryType(),
    pa.date32(): DateType(),
}


def spark_schema(schema: pa.Schema) -> StructType:
    """Convert an Arrow schema to the Spark schema that accepts its batches."""
    return StructType([StructField(field.name, _TYPES[field.type], True) for field in schema])


@contextmanager
def described(spark: SparkSession, text: str) -> Iterator[None]:
    """Set the description of the Spark jobs that the body starts. Spark's web UI shows it."""
    context = spark.sparkContext
    old_description = context.getLocalProperty(DESCRIPTION)
    context.setLocalProperty(DESCRIPTION, text)
    try:
        yield
    finally:
        context.setLocalProperty(DESCRIPTION, old_description)  # type: ignore[arg-type]  # None removes it


@contextmanager
def shuffled_by_size(spark: SparkSession, rows: int) -> Iterator[None]:
    """Limit shuffles in the body to one partition per PARTITION_ROWS of `rows`, and at most to Spark's setting."""
    old_partitions = spark.conf.get(SHUFFLE_PARTITIONS, DEFAULT_PARTITIONS) or DEFAULT_PARTITIONS
    spark.conf.set(SHUFFLE_PARTITIONS, max(1, min(int(old_partitions), -(-rows // PARTITION_ROWS))))
    try:
        yield
    finally:
        spark.conf.set(SHUFFLE_PARTITIONS, old_partitions)


def unite(frames: Mapping[str | None, DataFrame]) -> DataFrame:
    """Unite the rows of all groups. With several groups, add a column `group`."""
    if len(frames) == 1:
        [only] = frames.values()
        return only
    labelled = [frame.withColumn(GROUP, f.lit(group)) for group, frame in frames.items()]
    return reduce(lambda left, right: left.unionByName(right, allowMissingColumns=True), labelled)


def start_query(writer: DataStreamWriter, name: str, checkpoint: str, trigger: str | None) -> StreamingQuery:
    """Start a streaming query. `trigger` is a processing time such as "10 seconds"; None stops after catching up."""
    writer = writer.queryName(name).option("checkpointLocation", checkpoint)
    writer = writer.trigger(availableNow=True) if trigger is None else writer.trigger(processingTime=trigger)
    return writer.start()


# ---- base classes of the stream readers -----------------------------------------------------------------------
# Spark keeps one instance next to the driver for the whole query. The instance asks the broker for the groups before
# each micro-batch, so a group that is added while the query runs is read from its first row on.


Offset = dict[str, Any]


class BrokerStream(Connections, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A stream reader with connections to all groups. Only the driver uses them, because tasks only call `read`."""

    def stop(self) -> None:
        """Close the connections when the query ends."""
        self.close()


class PacedStream(BrokerStream, Pace):
    """A stream reader that starts a micro-batch only when there are enough rows (options.Pace)."""

    def __init__(self, options: ReadOptions, clock: Clock | None = None) -> None:
        check_stream(options)
        BrokerStream.__init__(self, options.endpoint)
        Pace.__init__(self, options, clock)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        """Limit a micro-batch to max_rows_per_batch rows."""
        return ReadMaxRows(self.options.max_rows_per_batch)

    def rows_max(self, limit: ReadLimit) -> int | None:
        """Read the maximum number of rows of a micro-batch from `limit`. None means no limit."""
        if isinstance(limit, ReadAllAvailable):
            return None
        return int(getattr(limit, "max_rows", self.options.max_rows_per_batch))


def check_groups_exist(names: Iterable[str], groups: Collection[str]) -> None:
    """Check that each group in an offset still exists in the cluster. Raises SetupError."""
    for name in names:
        if name not in groups:
            raise SetupError(
                f"the checkpoint has come to a row of the group {name!r}, which is not there: it belongs to another "
                "cluster; remove the checkpoint folder of this query"
            )
