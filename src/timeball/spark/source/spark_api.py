"""Adapters to PySpark: schemas, settings of jobs, and starting queries.

Spark compares the types of an Arrow batch with the declared schema exactly. At run time it refuses a dictionary, a
`string_view`, or a field declared as not null. So `_TYPES` has only six types, and every field may be null.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
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

from timeball.spark.endpoint import GROUP

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
