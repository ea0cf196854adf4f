"""Tests of spark_api.py: schemas that Spark accepts, and descriptions and partitions of its jobs."""

from __future__ import annotations

import pickle
from pathlib import Path

import pyarrow as pa
import pytest
from py4j.protocol import Py4JError
from pyspark.errors import AnalysisException, PySparkException
from pyspark.sql import SparkSession
from tests.spark.two_groups import two_groups

from timeball.model.errors import (
    InvalidMessage,
    OutOfRange,
    SetupError,
    StorageError,
    TimeballError,
    Unavailable,
)
from timeball.model.message import READ_SCHEMA, TABLE_SCHEMA
from timeball.spark.source.log_reader import LogStream
from timeball.spark.source.options import RANGE_SCHEMA, arrow_schema, read_options
from timeball.spark.source.spark_api import (
    PARTITION_ROWS,
    SHUFFLE_PARTITIONS,
    Bounds,
    check_groups_exist,
    described,
    select_topic,
    shuffled_by_size,
    spark_errors,
    spark_schema,
    to_timeball_error,
)


def test_every_column_has_a_spark_type_and_may_be_null() -> None:
    for schema in (READ_SCHEMA, TABLE_SCHEMA, RANGE_SCHEMA):
        fields = spark_schema(schema).fields
        assert [field.name for field in fields] == schema.names
        assert all(field.nullable for field in fields)


def test_spark_types_accept_the_types_that_arrow_sends() -> None:
    types = {field.name: field.dataType.simpleString() for field in spark_schema(READ_SCHEMA).fields}
    assert (types["kind"], types["queue_id"], types["seq"]) == ("tinyint", "int", "bigint")
    assert (types["topic"], types["body"]) == ("string", "binary")


def test_options_choose_schema_and_columns() -> None:
    assert arrow_schema(read_options({})) == READ_SCHEMA
    assert arrow_schema(read_options({"read": "pending"})) == TABLE_SCHEMA
    assert arrow_schema(read_options({"columns": "body,seq"})).names == ["body", "seq"]


@pytest.mark.spark
def test_block_sets_description_and_shuffle_partitions_by_size(spark: SparkSession) -> None:
    def newest() -> tuple[str | None, int]:
        job = spark.sparkContext._jsc.sc().statusStore().jobsList(None).apply(0)
        text = job.description()
        return text.get() if text.isDefined() else None, int(job.numTasks())

    before = spark.conf.get(SHUFFLE_PARTITIONS) or ""
    spark.conf.set(SHUFFLE_PARTITIONS, "7")
    rows = spark.range(100, numPartitions=1).selectExpr("id % 50 as key")
    try:
        rows.collect()
        outside = newest()[0]  # another test of this session may have left one
        with described(spark, "the outer block"):
            with described(spark, "a sum"), shuffled_by_size(spark, 2 * PARTITION_ROWS):
                assert spark.conf.get(SHUFFLE_PARTITIONS) == "2"
                rows.collect()
            assert newest()[0] == "a sum"
            rows.collect()
            assert newest() == ("the outer block", 1)
        with shuffled_by_size(spark, 10**9):
            assert spark.conf.get(SHUFFLE_PARTITIONS) == "7", "no more than is set"
        with shuffled_by_size(spark, 0):
            assert spark.conf.get(SHUFFLE_PARTITIONS) == "1"
        rows.collect()
        assert newest()[0] == outside and spark.conf.get(SHUFFLE_PARTITIONS) == "7"
    finally:
        spark.conf.set(SHUFFLE_PARTITIONS, before)


def test_offset_of_a_missing_group_is_refused() -> None:
    check_groups_exist({"g1": 5}, ["g1", "g2"])
    with pytest.raises(SetupError, match="'g3', which is not there"):
        check_groups_exist({"g1": 5, "g3": 1}, ["g1", "g2"])


def test_each_query_reads_the_current_groups(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        stream = LogStream(read_options({"endpoint": groups.endpoint}))
        assert [group for group, _ in stream.statuses()] == [("g1", groups.endpoint)], "as it was named"
        groups.add()
        result = stream.statuses()
        assert [(group.name, status.group) for group, status in result] == [("g1", "g1"), ("g2", "g2")]
        assert [group.name for group in stream.groups()] == ["g1", "g2"]
        addresses = [f"127.0.0.1:{groups.one.settings.port}", "127.0.0.1:1"]
        groups.tell(groups.one, [{"group": "g1", "addresses": addresses}])
        stream.statuses()
        assert list(stream._opened) == [groups.endpoint], (
            "connections to what is not read any more are closed"
        )
        groups.tell(groups.one, None)
        with pytest.raises(Unavailable, match="has not read yet which other groups there are"):
            stream.groups()
        assert pickle.loads(pickle.dumps(stream))._opened == {}
        stream.stop()


@pytest.mark.parametrize(
    ("limits", "file", "kept"),
    [
        (Bounds(), (1, 2), True),
        (Bounds(low=3), (1, 2), False),
        (Bounds(low=2), (1, 2), True),
        (Bounds(high=0), (1, 2), False),
        (Bounds(high=1), (1, 2), True),
        (Bounds(low=3, high=4), (None, None), True),
    ],
)
def test_a_file_is_left_out_only_if_no_row_can_match(
    limits: Bounds, file: tuple[int | None, int | None], kept: bool
) -> None:
    assert limits.may_hold(*file) is kept


@pytest.mark.parametrize("topic", [None, "a", "c"])
def test_rows_of_a_topic_are_selected(topic: str | None) -> None:
    names = ["a", None, "b", "a"]
    rows = select_topic(pa.record_batch({"topic": pa.array(names, pa.string())}), topic)
    assert rows.column("topic").to_pylist() == [name for name in names if topic in (None, name)]


PAGE = """An error occurred while calling o12.save.
Traceback (most recent call last):
  File "endpoint.py", line 3, in attach
pyarrow._flight.FlightServerError: compact from seq 3: the watermark is 7. Detail: Failed
The above exception was the direct cause of the following exception:
timeball.model.errors.OutOfRange: compact from seq 3: the watermark is 7
\tat org.apache.spark.Something(Something.scala:9)
"""


@pytest.mark.parametrize(
    ("text", "kind", "said"),
    [
        (PAGE, OutOfRange, "^compact from seq 3: the watermark is 7$"),
        ("java.lang.OutOfMemoryError: Java heap space", SetupError, "spark.driver.memory"),
        ("java.io.IOException: No space left on device", StorageError, "no space left"),
        ("ModuleNotFoundError: No module named 'pyarrow'", SetupError, "cannot import pyarrow"),
        (
            'Cannot run program "/opt/v/bin/python": error=2',
            SetupError,
            "no /opt/v/bin/python: set PYSPARK_PYTHON",
        ),
        (
            "[PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.10 than that in driver: 3.11, PySpark",
            SetupError,
            "executors run Python 3.10 and the driver 3.11: set PYSPARK_PYTHON",
        ),
        ("[DATA_SOURCE_NOT_FOUND] Failed to find the data source: timeball", SetupError, "session.register"),
        (
            "Traceback\n  File x\nValueError: seven\n\tat java",
            Unavailable,
            "in a Python worker: ValueError: seven",
        ),
        ("something new\n\tat java.lang", Unavailable, "^Spark failed: something new$"),
        ("timeball.model.errors.NotAnError: x", Unavailable, "Spark failed"),
        (
            "org.apache.spark.SparkException: Python worker failed to connect back.",
            Unavailable,
            "did not start in time: free CPU",
        ),
        (
            "Timed out while waiting for the Python worker to connect back after 15000 ms",
            Unavailable,
            "and repeat the command",
        ),
        (
            "SparkException: EOFException occurred while reading the port number from pyspark.daemon's stdout.",
            Unavailable,
            "did not start in time: free CPU",
        ),
        (
            "[JAVA_GATEWAY_EXITED] Java gateway process exited before",
            Unavailable,
            "is JAVA_HOME a full Java 17",
        ),
    ],
)
def test_stack_traces_become_one_sentence(text: str, kind: type[TimeballError], said: str) -> None:
    result = to_timeball_error(PySparkException(text))
    assert type(result) is kind
    with pytest.raises(kind, match=said):
        raise result


def test_unplannable_query_raises_setup_error() -> None:
    assert "cannot run this: no such column" in str(
        to_timeball_error(AnalysisException("no such column\nlong plan"))
    )


def test_errors_of_timeball_are_not_converted() -> None:
    error = InvalidMessage("tag: too long")
    assert to_timeball_error(error) is error


def test_exception_of_spark_is_the_cause() -> None:
    for cause in (Py4JError("gateway gone"), ConnectionRefusedError("gateway gone")):
        with pytest.raises(Unavailable, match="gateway gone") as caught, spark_errors():
            raise cause
        assert caught.value.__cause__ is cause


def test_other_errors_pass() -> None:
    with pytest.raises(KeyError), spark_errors():
        raise KeyError("a bug of ours is not Spark's failure")
