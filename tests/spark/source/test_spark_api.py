"""Tests of spark_api.py: placeholders replace classes that PySpark 4.0 and 4.1 do not have, and streams are refused."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

import pytest
from pyspark.sql import SparkSession, datasource

from timeball.model.errors import SetupError
from timeball.model.message import READ_SCHEMA, TABLE_SCHEMA
from timeball.spark.source import spark_api
from timeball.spark.source.options import RANGE_SCHEMA, arrow_schema, read_options
from timeball.spark.source.spark_api import (
    PARTITION_ROWS,
    SHUFFLE_PARTITIONS,
    described,
    shuffled_by_size,
    spark_schema,
)


def lacking(monkeypatch: pytest.MonkeyPatch, *names: str) -> ModuleType:
    """Load the module as if PySpark's modules of these names were missing."""

    def load(name: str) -> ModuleType:
        if name in names:
            raise ModuleNotFoundError(name)
        return real(name)

    real = importlib.import_module
    monkeypatch.setattr(importlib, "import_module", load)
    spec = importlib.util.spec_from_file_location(spark_api.__name__, spark_api.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_existing_classes_are_those_of_pyspark() -> None:
    spark_api.check_streams()
    assert spark_api.EqualTo is datasource.EqualTo
    assert spark_api.DataSourceStreamArrowWriter is datasource.DataSourceStreamArrowWriter


def test_streams_are_refused_before_4_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """What 4.1 has is used all the same."""
    module = lacking(monkeypatch, "pyspark.sql.streaming.datasource")
    with pytest.raises(SetupError, match=r"streams need pyspark 4\.2 or later, and this is 4\..*batch reads"):
        module.check_streams()
    assert module.EqualTo is datasource.EqualTo


def test_placeholder_class_has_no_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    module = lacking(monkeypatch, "pyspark.sql.datasource", "pyspark.sql.streaming.datasource")
    assert not isinstance(datasource.EqualTo(("topic",), "a"), module.EqualTo)
    assert type("Sink", (module.DataSourceStreamArrowWriter,), {})()


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
