"""Adapters to PySpark: schemas, starting queries, and stand-ins for classes that older versions of PySpark lack.

PySpark added these classes to its data source API after 4.0:

    4.1    filters that Spark pushes down; a sink of streams that accepts Arrow batches
    4.2    read limits of micro-batches; availableNow for Python streams

With an empty class in place of each missing one (`Missing`), batch reads and writes work on 4.0 and 4.1, because these
versions never use the missing classes there. Streams are refused (`check_streams`).

Spark compares the types of an Arrow batch with the declared schema exactly. At run time it refuses a dictionary, a
`string_view`, or a field declared as not null. So `_TYPES` has only six types, and every field may be null.
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

from timeball.model.errors import SetupError
from timeball.spark.endpoint import GROUP

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
        """Stands in for a class that this version of PySpark lacks."""

    def _part(module: str, name: str) -> type:
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError):
            return Missing

    globals().update({name: _part("pyspark.sql.datasource", name) for name in _BATCH.split()})
    globals().update({name: _part("pyspark.sql.streaming.datasource", name) for name in _STREAM.split()})


SHUFFLE_PARTITIONS = "spark.sql.shuffle.partitions"
DEFAULT_PARTITIONS = "200"
PARTITION_ROWS = 500_000  # per shuffle partition; the same as the default of the option rows_per_partition
DESCRIPTION = "spark.job.description"


def check_streams() -> None:
    """Raise SetupError if this version of PySpark lacks the classes that streams need (4.2)."""
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
