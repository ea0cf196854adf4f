"""Tests of timeball.spark.delta_append without Spark. With Spark: tests/spark/source/test_delta_writer.py."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from timeball.model.errors import OutOfRange, StorageError
from timeball.spark.delta_append import app_version, append_once, table_schema, write_file

SCHEMA = pa.schema([("a", pa.int64())])


@pytest.fixture
def uri(tmp_path: Path) -> str:
    DeltaTable.create(str(tmp_path / "table"), SCHEMA)
    return str(tmp_path / "table")


def batches(*rows: int) -> list[pa.RecordBatch]:
    return [pa.record_batch({"a": [row]}) for row in rows]


def held(uri: str) -> list[int]:
    return sorted(DeltaTable(uri).to_pyarrow_table().column("a").to_pylist())


def test_append_with_an_existing_mark_adds_nothing(uri: str) -> None:
    written = [write_file(uri, SCHEMA, batches(1, 2)), write_file(uri, SCHEMA, [])]
    assert [each.rows for each in written] == [2, 0]
    for _ in range(2):
        append_once(uri, "job", None, 5, written)
    assert held(uri) == [1, 2] and app_version(DeltaTable(uri), "job") == 5
    assert table_schema(DeltaTable(uri)) == SCHEMA


def test_rows_that_do_not_begin_at_the_mark_are_refused(uri: str) -> None:
    append_once(uri, "job", 0, 5, [write_file(uri, SCHEMA, batches(1))])
    with pytest.raises(OutOfRange, match="the table is at 5, these rows begin at 4; planned again"):
        append_once(uri, "job", 4, 9, [write_file(uri, SCHEMA, batches(2))])
    append_once(uri, "other", 0, 2, [write_file(uri, SCHEMA, batches(3))])
    assert held(uri) == [1, 3]


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write"):
        write_file(str(tmp_path / "nowhere"), SCHEMA, batches(1))
