"""Tests of the sink `timeball_delta` in timeball.spark.source.data_source: each version of the rows is added once."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession

from timeball.model.errors import NotFound, OutOfRange, SetupError
from timeball.spark.source.data_source import DeltaDataSource
from timeball.spark.source.spark_api import spark_errors
from timeball.spark.table_store import app_version

SCHEMA = pa.schema([("a", pa.int64()), ("b", pa.string())])


@pytest.fixture
def uri(tmp_path: Path) -> str:
    DeltaTable.create(str(tmp_path / "t"), SCHEMA)
    return str(tmp_path / "t")


def append(frame: DataFrame, uri: str, version: int, since: int | None = None) -> None:
    """Append a frame that moves the mark of the table from `since`, which is not checked by default, to `version`."""
    with spark_errors():
        options = {"uri": uri, "app_id": "test", "app_version": str(version)}
        options |= {} if since is None else {"app_since": str(since)}
        frame.write.format("timeball_delta").options(**options).mode("append").save()


def rows(uri: str) -> list[int]:
    """The values of column `a`, sorted."""
    return sorted(DeltaTable(uri).to_pyarrow_table().column("a").to_pylist())


@pytest.mark.smoke
@pytest.mark.spark
def test_each_version_is_added_once(spark: SparkSession, uri: str) -> None:
    frame = spark.range(0, 100, numPartitions=3).selectExpr("id as a", "cast(id as string) as b")
    append(frame, uri, 5)
    append(frame, uri, 5)
    append(frame, uri, 4)
    assert rows(uri) == list(range(100))
    append(frame.where("a < 10"), uri, 6)
    assert len(rows(uri)) == 110
    assert app_version(DeltaTable(uri), "test") == 6


@pytest.mark.spark
def test_rows_that_do_not_begin_at_the_end_of_the_table_are_refused(spark: SparkSession, uri: str) -> None:
    """A writer read the mark before another writer moved it, so the table already has half of its rows."""
    frame = spark.range(0, 100, numPartitions=2).selectExpr("id as a", "cast(id as string) as b")
    append(frame, uri, 5, since=0)
    with pytest.raises(OutOfRange, match="the table is at 5, these rows begin at 3"):
        append(frame, uri, 8, since=3)
    append(frame, uri, 5, since=3)  # has nothing that is new
    assert rows(uri) == list(range(100))
    append(frame.where("a < 10"), uri, 8, since=5)
    assert len(rows(uri)) == 110


@pytest.mark.spark
def test_append_without_rows_moves_the_version(spark: SparkSession, uri: str) -> None:
    append(spark.range(0).selectExpr("id as a", "cast(id as string) as b"), uri, 9)
    assert rows(uri) == []
    assert app_version(DeltaTable(uri), "test") == 9


@pytest.mark.spark
def test_other_columns_are_refused(spark: SparkSession, uri: str) -> None:
    with pytest.raises(SetupError, match=r"columns \['id'\] are not those of the table"):
        append(spark.range(3), uri, 1)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"app_id": "x", "app_version": "1"}, "option uri: missing"),
        ({"uri": "/t", "app_id": "x", "app_version": "-1"}, "option app_version='-1'"),
    ],
)
def test_bad_options_are_named(options: dict[str, str], said: str) -> None:
    with pytest.raises(SetupError, match=said):
        DeltaDataSource(options).writer(None, False)  # type: ignore[arg-type]


def test_the_table_must_exist(tmp_path: Path) -> None:
    from pyspark.sql.types import StructType

    options = {"uri": str(tmp_path / "none"), "app_id": "x", "app_version": "1"}
    with pytest.raises(NotFound):
        DeltaDataSource(options).writer(StructType(), False)
    with pytest.raises(SetupError, match="overwrite"):
        DeltaDataSource(options).writer(StructType(), True)
