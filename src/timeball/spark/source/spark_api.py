"""Adapters to PySpark: schemas, settings of jobs, base classes of stream readers, and errors.

Spark compares the types of an Arrow batch with the declared schema exactly. At run time it refuses a dictionary, a
`string_view`, or a field declared as not null. So `_TYPES` has only six types, and every field may be null.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException, PySparkException
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
from timeball.model import errors
from timeball.model.errors import SetupError, StorageError, TimeballError, Unavailable
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
    """Set the description of the Spark jobs that the block starts. Spark's web UI shows it."""
    context = spark.sparkContext
    old_description = context.getLocalProperty(DESCRIPTION)
    context.setLocalProperty(DESCRIPTION, text)
    try:
        yield
    finally:
        context.setLocalProperty(DESCRIPTION, old_description)  # type: ignore[arg-type]  # None removes it


@contextmanager
def shuffled_by_size(spark: SparkSession, rows: int) -> Iterator[None]:
    """Limit shuffles in the block to one partition per PARTITION_ROWS of `rows`, and at most to Spark's setting."""
    old_partitions = spark.conf.get(SHUFFLE_PARTITIONS, DEFAULT_PARTITIONS) or DEFAULT_PARTITIONS
    spark.conf.set(SHUFFLE_PARTITIONS, max(1, min(int(old_partitions), -(-rows // PARTITION_ROWS))))
    try:
        yield
    finally:
        spark.conf.set(SHUFFLE_PARTITIONS, old_partitions)


def union_groups(frames: Mapping[str | None, DataFrame]) -> DataFrame:
    """Unite the rows of all groups. With several groups, add a column `group`. `frames`: group -> its rows."""
    if len(frames) == 1:
        [only] = frames.values()
        return only
    labelled = [frame.withColumn(GROUP, f.lit(group)) for group, frame in frames.items()]
    return reduce(lambda left, right: left.unionByName(right, allowMissingColumns=True), labelled)


def start_query(writer: DataStreamWriter, name: str, checkpoint: str, trigger: str | None) -> StreamingQuery:
    """Start a streaming query.

    `trigger`: the interval between micro-batches, such as "10 seconds". None: the query ends when it has processed the
    rows that existed at its start.
    """
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
        """Get the maximum number of rows of a micro-batch from Spark's `limit`. None means no limit."""
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


# ---- rows of a read -------------------------------------------------------------------------------------------
# No reader has `pushFilters`. All scans of a DataFrame share one reader in Spark, which would have the filters of the
# scan that was planned last. So the other scans of a query, and later queries, would lack rows.


@dataclass(frozen=True)
class Bounds:
    """An inclusive range low <= value <= high. None means no bound."""

    low: int | None = None
    high: int | None = None

    def may_hold(self, lowest: int | None, highest: int | None) -> bool:
        """Check whether a file with values lowest..highest (None: unknown) may contain a value within the bounds."""
        is_above = self.high is not None and lowest is not None and lowest > self.high
        is_below = self.low is not None and highest is not None and highest < self.low
        return not (is_above or is_below)


def select_topic(batch: pa.RecordBatch, topic: str | None) -> pa.RecordBatch:
    """Select the rows of a topic, with None all rows."""
    if topic is None:
        return batch
    mask = pc.fill_null(pc.equal(batch.column("topic"), topic), False)
    # Often all rows have the topic. A filter would copy all of them.
    return batch if pc.all(mask).as_py() else batch.filter(mask)


# ---- errors ---------------------------------------------------------------------------------------------------
# Spark reports a failure as a page of Java and Python stack traces. If the cause is an error of Timeball, its type and
# text are somewhere in that page. Spark's exception stays chained as the cause, for the log.
#
# Failures that need the operator become SetupError or StorageError. All others become Unavailable, for example a killed
# JVM or worker, or a broken connection. After an Unavailable the runner starts the job again.


_TIMEBALL_ERROR = re.compile(r"timeball\.model\.errors\.(\w+): (.+)")
_MISSING_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
_TRACEBACK_ERROR = re.compile(r"^(?:[\w.]+\.)?(\w*(?:Error|Exception)\b.*)$", re.MULTILINE)
# (pattern in Spark's text, type and text of Timeball's error). \1 is the first group of the pattern.
_KNOWN_FAILURES: list[tuple[re.Pattern[str], type[TimeballError], str]] = [
    (
        re.compile(r"JAVA_GATEWAY_EXITED|Java gateway process exited"),
        Unavailable,
        "Java started but Spark did not: see the lines above; is JAVA_HOME a full Java 17 or later?",
    ),
    (
        re.compile(r'Cannot run program "([^"]*python[^"]*)"'),
        SetupError,
        r"an executor has no \1: set PYSPARK_PYTHON, or --conf spark.pyspark.python=…, to the Python there that has "
        "the packages, for example ./environment/bin/python of a packed one.",
    ),
    (
        re.compile(r"Python worker (?:failed )?to connect back|while reading the port number from"),
        Unavailable,
        "a Python worker did not start in time: free CPU and memory on its machine, check that its Python starts there "
        "(PYSPARK_PYTHON) and that nothing blocks its loopback, and repeat the command.",
    ),
    (
        re.compile(r"PYTHON_VERSION_MISMATCH\D*(\d+\.\d+)\D*(\d+\.\d+)", re.DOTALL),
        SetupError,
        r"executors run Python \1 and the driver \2: set PYSPARK_PYTHON, or --conf spark.pyspark.python=…, to the same "
        "version on all of them.",
    ),
    (
        re.compile(r"OutOfMemoryError|GC overhead limit"),
        SetupError,
        "Spark ran out of memory: raise spark.driver.memory (or spark.executor.memory), or lower max_rows_per_batch.",
    ),
    (
        re.compile(r"No space left on device|Disk quota exceeded"),
        StorageError,
        "Spark found no space left on the disk of its checkpoint, its scratch folder or the table.",
    ),
    (
        re.compile(r"Permission denied|AccessDeniedException"),
        SetupError,
        "Spark may not read or write one of its folders: check the owner of the checkpoint and the table.",
    ),
    (
        re.compile(r"DATA_SOURCE_NOT_FOUND|Failed to find the data source: timeball"),
        SetupError,
        "this Spark session does not know the format 'timeball': call timeball.spark.run.session.register(spark).",
    ),
]


def to_timeball_error(error: BaseException) -> TimeballError:
    """Convert an exception of Spark to an error of Timeball. An error of Timeball is returned as it is."""
    if isinstance(error, TimeballError):
        return error
    text = str(error)
    timeball_errors = _TIMEBALL_ERROR.findall(text)
    if timeball_errors:
        name, sentence = timeball_errors[-1]  # the last one is the cause
        kind = getattr(errors, name, None)
        if isinstance(kind, type) and issubclass(kind, TimeballError):
            return kind(sentence.strip())
    for pattern, kind, sentence in _KNOWN_FAILURES:
        match = pattern.search(text)
        if match is not None:
            return kind(match.expand(sentence))
    missing_module = _MISSING_MODULE.search(text)
    if missing_module:
        return SetupError(
            f"Spark's Python workers cannot import {missing_module.group(1)}: install it on every executor, or name "
            "the Python that has it with PYSPARK_PYTHON."
        )
    # The last line of a worker's Python traceback is more specific than the first line of Spark's message.
    traceback_errors = _TRACEBACK_ERROR.findall(text)
    if traceback_errors:
        return Unavailable(f"Spark failed in a Python worker: {traceback_errors[-1]}")
    first_line = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
    if isinstance(error, AnalysisException):
        return SetupError(f"Spark cannot run this: {first_line}")
    return Unavailable(f"Spark failed: {first_line}")


@contextmanager
def spark_errors() -> Iterator[None]:
    """Convert exceptions of Spark in the block to errors of Timeball, with Spark's exception as the cause."""
    try:
        yield
    except (PySparkException, Py4JError, ConnectionError) as error:  # ConnectionError: the JVM has ended
        raise to_timeball_error(error) from error
