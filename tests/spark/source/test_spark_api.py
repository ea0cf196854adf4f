"""Tests of spark_api.py: schemas that Spark accepts, and descriptions and partitions of its jobs."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession

from timeball.model.message import READ_SCHEMA, TABLE_SCHEMA
from timeball.spark.source.options import RANGE_SCHEMA, arrow_schema, read_options
from timeball.spark.source.spark_api import (
    PARTITION_ROWS,
    SHUFFLE_PARTITIONS,
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
