"""Tests of timeball.pipeline.source.schema."""

from __future__ import annotations

from timeball.message import READ_SCHEMA, TABLE_SCHEMA
from timeball.pipeline.source.options import read_options
from timeball.pipeline.source.schema import RANGE_SCHEMA, arrow_schema, spark_schema


def test_every_column_has_a_spark_type_and_may_be_null() -> None:
    for schema in (READ_SCHEMA, TABLE_SCHEMA, RANGE_SCHEMA):
        fields = spark_schema(schema).fields
        assert [field.name for field in fields] == schema.names
        assert all(field.nullable for field in fields)


def test_types_are_the_ones_arrow_sends() -> None:
    types = {field.name: field.dataType.simpleString() for field in spark_schema(READ_SCHEMA).fields}
    assert (types["kind"], types["queue_id"], types["seq"]) == ("tinyint", "int", "bigint")
    assert (types["topic"], types["body"]) == ("string", "binary")


def test_options_choose_schema_and_columns() -> None:
    assert arrow_schema(read_options({})) == READ_SCHEMA
    assert arrow_schema(read_options({"read": "pending"})) == TABLE_SCHEMA
    assert arrow_schema(read_options({"columns": "body,seq"})).names == ["body", "seq"]
