"""Tests of timeball.spark.source.table_reader: selection of files, row groups and rows of a table."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake
from hypothesis import given
from hypothesis import strategies as st
from tests.node_fixture import RunningNode
from tests.spark.traffic import send

from timeball.model.errors import NotFound, SetupError
from timeball.model.message import TABLE_SCHEMA
from timeball.spark.endpoint import Endpoint
from timeball.spark.source.options import read_options
from timeball.spark.source.table_reader import (
    Slice,
    TablePart,
    TableReader,
    cast_batch,
    cut_file,
    divide_among_tasks,
    read_slice,
    row_groups_of,
)
from timeball.spark.table_store import created_at_ms, load_version_at, open_table
from timeball.table.layout import ROW_GROUP_ROWS

SCHEMA = pa.schema([("due_ms", pa.int64()), ("topic", pa.string())])


@given(st.lists(st.integers(0, 5 * ROW_GROUP_ROWS), max_size=30), st.integers(1, 6 * ROW_GROUP_ROWS))
def test_each_row_group_is_assigned_to_one_task(rows: list[int], rows_per_part: int) -> None:
    files = [(f"file{i}", count) for i, count in enumerate(rows)]
    parts = divide_among_tasks(files, rows_per_part)
    assert all(part.slices for part in parts)
    dealt = [piece for part in parts for piece in part.slices]
    for uri, count in files:
        own = [piece for piece in dealt if piece.uri == uri]
        assert sum(piece.rows for piece in own) == count
        for start in range(0, max(count, 1), ROW_GROUP_ROWS):
            assert sum(p.begin_row <= start and (p.end_row is None or start < p.end_row) for p in own) == 1


def test_large_files_are_cut_and_small_ones_joined() -> None:
    large, small = ("large", 10 * ROW_GROUP_ROWS), [(f"small{i}", 10) for i in range(20)]
    assert len(divide_among_tasks([large], 2 * ROW_GROUP_ROWS)) == 5
    assert len(divide_among_tasks([large], 1)) == 10  # no finer than row groups
    assert len(divide_among_tasks(small, 100)) == 2
    assert divide_among_tasks([], 100) == []
    assert cut_file("f", 10, 100) == [Slice("f", 0, None, 10)]


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A file with four row groups of ten rows, due 0 to 39, with one topic for even rows and another for odd ones."""
    rows = pa.table({"due_ms": range(40), "topic": ["even", "odd"] * 20}, schema=SCHEMA)
    pq.write_table(rows, tmp_path / "file.parquet", row_group_size=10, write_statistics=["due_ms"])
    return str(tmp_path / "file.parquet")


def test_row_groups_are_read_where_they_begin(file: str) -> None:
    footer = pq.read_metadata(file)
    assert row_groups_of(footer, Slice(file, 0, 15, 15)) == [0, 1]
    assert row_groups_of(footer, Slice(file, 15, None, 25)) == [2, 3]


def test_slice_filters_rows_and_completes_columns(file: str) -> None:
    schema = pa.schema([("queue", pa.int32()), ("topic", pa.string())])
    (batch, *more) = read_slice(Slice(file, 0, None, 40), schema, "even")
    result = pa.Table.from_batches([batch, *more])
    assert result.schema == schema
    assert result.to_pydict() == {"queue": [None] * 20, "topic": ["even"] * 20}
    due = pa.schema([("due_ms", pa.int64())])
    assert pa.Table.from_batches(read_slice(Slice(file, 20, None, 20), due, "odd"))["due_ms"][0].as_py() == 21
    assert list(read_slice(Slice(file, 0, None, 40), schema, "neither")) == []


def test_types_are_those_declared() -> None:
    batch = pa.record_batch({"topic": pa.array(["a", "b"]).dictionary_encode(), "due_ms": [1, 2]})
    assert cast_batch(batch, SCHEMA).schema == SCHEMA


def reader(node: RunningNode, **options: str) -> TableReader:
    return TableReader(read_options({"endpoint": node.endpoint, "read": "pending", **options}))


def rows_of(chosen: TableReader) -> pa.Table:
    batches = [batch for part in chosen.partitions() for batch in chosen.read(part)]
    return pa.Table.from_batches(batches, TABLE_SCHEMA)


def test_rows_and_topics_of_the_pending_table(node: RunningNode, broker: Endpoint) -> None:
    send(node.endpoint, 300, topic="orders")
    send(node.endpoint, 300, topic="cards")
    node.run(node.broker.compact())
    assert rows_of(reader(node)).num_rows == 600
    assert rows_of(reader(node, topic="cards")).num_rows == 300
    assert rows_of(reader(node, topic="others")).num_rows == 0


def test_time_before_the_table_and_deleted_file_raise_not_found(node: RunningNode, broker: Endpoint) -> None:
    send(node.endpoint, 10)
    node.run(node.broker.compact())
    uri = broker.status().table.uri
    with pytest.raises(NotFound, match=r"has no version so old: the first is of 20"):
        load_version_at(open_table(uri), 1_000_000_000_000)
    assert load_version_at(open_table(uri), 4_000_000_000_000).version() == broker.status().table.version
    deleted = TablePart([Slice(f"{uri}/bucket=2020-01/no.parquet", 0, None, 1)])
    with pytest.raises(NotFound, match=r"no\.parquet is gone: this version of the table has been swept"):
        list(reader(node).read(deleted))


def test_the_version_of_a_time_long_before_the_newest(tmp_path: Path) -> None:
    for value in range(4):
        write_deltalake(str(tmp_path), pa.table({"a": [value]}), mode="append")
        modified_s = 1_800_000_000 + value * 60
        entry = tmp_path / "_delta_log" / f"{value:020}.json"
        # delta-rs finds the version by the file's modification time, and the commit has its own.
        text = re.sub(r'"timestamp":\d+', f'"timestamp":{modified_s * 1000}', entry.read_text())
        entry.write_text(text)
        os.utime(entry, (modified_s, modified_s))
    for value in range(4):
        asked_ms = (1_800_000_000 + value * 60 + 30) * 1000
        assert load_version_at(open_table(str(tmp_path)), asked_ms).version() == value
        assert created_at_ms(open_table(str(tmp_path), value)) == asked_ms - 30_000


def test_a_column_of_the_ledger_is_checked_once_it_is_known() -> None:
    from timeball.spark.source.options import arrow_schema

    with pytest.raises(
        SetupError, match="option columns: no column 'colour' when read=ledger; there are event"
    ):
        arrow_schema(read_options({"read": "ledger", "columns": "colour"}))
