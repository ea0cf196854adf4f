"""Spark's schemas for ours, the start of a query, and stand-ins for what PySpark's data source API got after 4.0.

    4.1    filters that Spark pushes down; a stream's sink that takes Arrow batches
    4.2    how much a stream's micro-batch may read; availableNow for Python streams

So batch reads and writes work on 4.0 and 4.1. A stand-in is the base or the type of nothing: no Spark of that version
asks for what it stands in for, but for a stream, which is refused.

Spark compares an Arrow batch with the declared schema by type, exactly: it refuses a dictionary, a `string_view` or a
field declared not null at run time. So there are six types, and every field may be null.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from importlib import import_module
from typing import TYPE_CHECKING

import pyarrow as pa
import pyspark
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

from timeball.errors import SetupError
from timeball.pipeline.groups import GROUP

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as DataSourceStreamArrowWriter
    from pyspark.sql.datasource import EqualTo as EqualTo
    from pyspark.sql.datasource import Filter as Filter
    from pyspark.sql.datasource import GreaterThan as GreaterThan
    from pyspark.sql.datasource import GreaterThanOrEqual as GreaterThanOrEqual
    from pyspark.sql.datasource import In as In
    from pyspark.sql.datasource import LessThan as LessThan
    from pyspark.sql.datasource import LessThanOrEqual as LessThanOrEqual
    from pyspark.sql.streaming.datasource import ReadAllAvailable as ReadAllAvailable
    from pyspark.sql.streaming.datasource import ReadLimit as ReadLimit
    from pyspark.sql.streaming.datasource import ReadMaxRows as ReadMaxRows
    from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow as SupportsTriggerAvailableNow
else:
    _BATCH = "EqualTo Filter GreaterThan GreaterThanOrEqual In LessThan LessThanOrEqual DataSourceStreamArrowWriter"
    _STREAM = "ReadAllAvailable ReadLimit ReadMaxRows SupportsTriggerAvailableNow"

    class Missing:
        """Stands for a class that this PySpark has not got."""

    def _part(module: str, name: str) -> type:
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError):
            return Missing

    globals().update({name: _part("pyspark.sql.datasource", name) for name in _BATCH.split()})
    globals().update({name: _part("pyspark.sql.streaming.datasource", name) for name in _STREAM.split()})


PARTITIONS = "spark.sql.shuffle.partitions"
DEFAULT_PARTITIONS = "200"
PARTITION_ROWS = 500_000  # as a reader's partition
DESCRIPTION = "spark.job.description"


def check_streams() -> None:
    """Raise SetupError unless this PySpark has all that streams need."""
    if SupportsTriggerAvailableNow.__module__ == __name__:
        raise SetupError(
            f"streams need pyspark 4.2 or later, and this is {pyspark.__version__}; batch reads and writes work"
        )


_TYPES: dict[pa.DataType, DataType] = {
    pa.int8(): ByteType(),
    pa.int32(): IntegerType(),
    pa.int64(): LongType(),
    pa.string(): StringType(),
    pa.binary(): BinaryType(),
    pa.date32(): DateType(),
}


def spark_schema(schema: pa.Schema) -> StructType:
    """Return the Spark schema that reads batches of this Arrow schema."""
    return StructType([StructField(field.name, _TYPES[field.type], True) for field in schema])


@contextmanager
def described(spark: SparkSession, text: str) -> Iterator[None]:
    """Describe what Spark runs in a block, for the pages of its UI."""
    context = spark.sparkContext
    before = context.getLocalProperty(DESCRIPTION)
    context.setLocalProperty(DESCRIPTION, text)
    try:
        yield
    finally:
        context.setLocalProperty(DESCRIPTION, before)  # type: ignore[arg-type]  # None: none


@contextmanager
def shuffled_by_size(spark: SparkSession, rows: int) -> Iterator[None]:
    """Shuffle about so many rows in a block into as many partitions as they are worth, and no more than is set."""
    before = spark.conf.get(PARTITIONS, DEFAULT_PARTITIONS) or DEFAULT_PARTITIONS
    spark.conf.set(PARTITIONS, max(1, min(int(before), -(-rows // PARTITION_ROWS))))
    try:
        yield
    finally:
        spark.conf.set(PARTITIONS, before)


def unite(frames: Mapping[str | None, DataFrame]) -> DataFrame:
    """Return the rows of all groups, with a column `group` where there are several."""
    if len(frames) == 1:
        [only] = frames.values()
        return only
    named = [frame.withColumn(GROUP, f.lit(group)) for group, frame in frames.items()]
    return reduce(lambda one, other: one.unionByName(other, allowMissingColumns=True), named)


def start_query(writer: DataStreamWriter, name: str, checkpoint: str, trigger: str | None) -> StreamingQuery:
    """Start a streaming query; without a trigger it stops when it has caught up."""
    writer = writer.queryName(name).option("checkpointLocation", checkpoint)
    writer = writer.trigger(availableNow=True) if trigger is None else writer.trigger(processingTime=trigger)
    return writer.start()
