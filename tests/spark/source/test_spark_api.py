"""Tests of spark_api.py: schemas that Spark accepts, and descriptions and partitions of its jobs."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from tests.spark.two_groups import two_groups

from timeball.model.errors import SetupError, Unavailable
from timeball.model.message import READ_SCHEMA, TABLE_SCHEMA
from timeball.spark.source.log_reader import LogStream
from timeball.spark.source.options import RANGE_SCHEMA, arrow_schema, read_options
from timeball.spark.source.spark_api import (
    PARTITION_ROWS,
    SHUFFLE_PARTITIONS,
    check_groups_exist,
    described,
    shuffled_by_size,
    spark_schema,
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
