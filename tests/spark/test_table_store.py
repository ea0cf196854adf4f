"""Tests of timeball.spark.table_store."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from timeball.model.errors import NotFound, OutOfRange, SetupError, StorageError
from timeball.model.message import TABLE_SCHEMA
from timeball.spark import table_store as module
from timeball.spark.source import scheduled_writer
from timeball.spark.table_store import (
    Store,
    app_version,
    append_once,
    as_dataset,
    chunks,
    open_table,
    sibling,
    table_schema,
    write_file,
)
from timeball.table import layout

NOW_MS = 1_800_000_000_000


def test_files_are_written_below_the_table_and_removed_again(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.put("bucket=x/a.parquet", b"1234")
    assert (tmp_path / "bucket=x/a.parquet").read_bytes() == b"1234"
    store.remove(["bucket=x/a.parquet", "bucket=x/never.parquet"])
    assert list((tmp_path / "bucket=x").iterdir()) == []


def test_rows_become_readable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "FILE_ROWS", 1)
    due = [NOW_MS + 3_600_000 * i for i in range(5)]
    rows_given = pa.table({"topic": ["t"] * 5, "body": ["b"] * 5, "due_ms": due})
    rows = scheduled_writer.numbered(scheduled_writer.to_table_columns(rows_given, NOW_MS), 1)
    entries = list(Store(tmp_path.as_uri()).put_rows(rows, NOW_MS))
    result = pa.concat_tables(pq.read_table(tmp_path / entry.path, partitioning=None) for entry in entries)
    assert result.schema == TABLE_SCHEMA
    assert result.column("due_ms").to_pylist() == due
    assert len(entries) == 5


def test_a_failed_write_names_the_file_and_a_wrong_uri_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot write bucket=x/a\.parquet"):
        Store(str(tmp_path / "file")).put("bucket=x/a.parquet", b"")
    with pytest.raises(SetupError, match="nosuch://place/table: not a storage URI"):
        Store("nosuch://place/table")


def test_a_missing_table_or_version_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no Delta table"):
        open_table(str(tmp_path / "none"))
    DeltaTable.create(str(tmp_path / "t"), pa.schema([("a", pa.int64())]))
    assert open_table(str(tmp_path / "t")).version() == 0
    with pytest.raises(NotFound, match="no version 7"):
        open_table(str(tmp_path / "t"), 7)


def test_a_sibling_lies_in_the_same_folder_or_bucket() -> None:
    assert sibling("/data/pending", "ledger") == "/data/ledger"
    assert sibling("s3://bucket/data/pending/", "ledger") == "s3://bucket/data/ledger"


def test_a_version_is_read_with_the_columns_asked_for(tmp_path: Path) -> None:
    schema = pa.schema([("a", pa.int64()), ("later", pa.string())])
    table = DeltaTable.create(str(tmp_path / "t"), pa.schema([("a", pa.int64())]))
    assert as_dataset(table, schema).to_table().num_rows == 0
    for number in (1, 2):
        write_deltalake(str(tmp_path / "t"), pa.table({"a": [number]}), mode="append")
    then = DeltaTable(str(tmp_path / "t"), version=1)
    assert as_dataset(then, schema).to_table().to_pylist() == [{"a": 1, "later": None}]


@given(st.lists(st.integers(0, 30), max_size=20), st.integers(1, 20), st.integers(1, 500))
def test_chunks_lose_no_row_and_stay_within_the_limits(
    counts: list[int], most_rows: int, most_bytes: int
) -> None:
    before = module.CHUNK_ROWS, module.CHUNK_BYTES
    module.CHUNK_ROWS, module.CHUNK_BYTES = most_rows, most_bytes
    try:
        batches = [
            pa.record_batch({"a": pa.array([i] * count, pa.int64())}) for i, count in enumerate(counts)
        ]
        tables = list(chunks(iter(batches)))
    finally:
        module.CHUNK_ROWS, module.CHUNK_BYTES = before
    assert [v for t in tables for v in t.column("a").to_pylist()] == [
        i for i, n in enumerate(counts) for _ in range(n)
    ]
    assert all(0 < table.num_rows <= most_rows for table in tables)
    assert all(table.nbytes <= most_bytes or len(table.column("a").chunks) == 1 for table in tables)


SCHEMA = pa.schema([("a", pa.int64())])


@pytest.fixture
def uri(tmp_path: Path) -> str:
    DeltaTable.create(str(tmp_path / "table"), SCHEMA)
    return str(tmp_path / "table")


def batches(*rows: int) -> list[pa.RecordBatch]:
    """One batch for each row."""
    return [pa.record_batch({"a": [row]}) for row in rows]


def values(uri: str) -> list[int]:
    """The values of the table at `uri`, sorted."""
    return sorted(DeltaTable(uri).to_pyarrow_table().column("a").to_pylist())


def test_append_with_an_existing_mark_adds_nothing(uri: str) -> None:
    written = [write_file(uri, SCHEMA, batches(1, 2)), write_file(uri, SCHEMA, [])]
    assert [each.rows for each in written] == [2, 0]
    for _ in range(2):
        append_once(uri, "job", None, 5, written)
    assert values(uri) == [1, 2] and app_version(DeltaTable(uri), "job") == 5
    assert table_schema(DeltaTable(uri)) == SCHEMA


def test_rows_that_do_not_begin_at_the_mark_are_refused(uri: str) -> None:
    append_once(uri, "job", 0, 5, [write_file(uri, SCHEMA, batches(1))])
    with pytest.raises(OutOfRange, match="the table is at 5, these rows begin at 4; planned again"):
        append_once(uri, "job", 4, 9, [write_file(uri, SCHEMA, batches(2))])
    append_once(uri, "other", 0, 2, [write_file(uri, SCHEMA, batches(3))])
    assert values(uri) == [1, 3]


def test_a_folder_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot write"):
        write_file(str(tmp_path / "nowhere"), SCHEMA, batches(1))
