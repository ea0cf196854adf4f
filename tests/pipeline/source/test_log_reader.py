"""Tests of timeball.pipeline.source.log_reader: pieces of the log, their rows and columns."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import EqualTo, Filter, GreaterThan
from tests.node_fixture import RunningNode
from tests.pipeline.traffic import log_rows, send

from timeball.message import READ_SCHEMA, Kind
from timeball.pipeline.source.log_reader import (
    LogPart,
    LogReader,
    log_parts,
    needed,
    read_part,
    shape,
    split_range,
)
from timeball.pipeline.source.options import read_options
from timeball.pipeline.source.pushdown import Wanted, wanted


@given(st.integers(0, 1000), st.integers(-5, 1000), st.integers(1, 300))
def test_pieces_cover_the_range_once(begin: int, span: int, rows: int) -> None:
    parts = split_range(begin, begin + span, rows)
    covered = [seq for low, high in parts for seq in range(low, high)]
    assert covered == list(range(begin, begin + span))
    assert all(0 < high - low <= rows for low, high in parts)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, 1),
        ({"rows_per_partition": "400"}, 3),
        ({"min_partitions": "8"}, 8),
        ({"min_partitions": "5000"}, 1000),
    ],
)
def test_as_many_pieces_as_asked_for(options: dict[str, str], parts: int) -> None:
    assert len(log_parts(1, 1001, read_options(options))) == parts


def test_bodies_of_other_kinds_are_left_out() -> None:
    batch = log_rows(Kind.PROMISE, 2, body=[b"a", b"b"])
    assert shape(batch, read_options({"body_kinds": "table"})).column("body").null_count == 2
    assert shape(batch, read_options({"body_kinds": "promise"})).column("body").to_pylist() == [b"a", b"b"]
    assert shape(batch, read_options({"columns": "body,seq"})).schema.names == ["body", "seq"]


def test_only_columns_that_somebody_looks_at_travel() -> None:
    by_topic = wanted((), "orders", [])
    assert needed(read_options({}), by_topic) is None
    assert needed(read_options({"columns": "body,seq"}), Wanted()) == ["seq", "body"]
    assert needed(read_options({"columns": "seq"}), by_topic) == ["seq", "topic"]
    with_bodies = read_options({"columns": "body", "body_kinds": "table"})
    assert needed(with_bodies, Wanted()) == ["seq", "kind", "body"]  # by seq a read goes on after a break
    assert needed(read_options({"columns": "seq", "body_kinds": "table"}), Wanted()) == ["seq"]


def rows_of(node: RunningNode, filters: list[Filter], **options: str) -> pa.Table:
    """What the tasks of a batch read hand to Spark, which would apply the filters again."""
    reader = LogReader(read_options({"endpoint": node.endpoint, **options}))
    assert list(reader.pushFilters(filters)) == filters
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    return pa.Table.from_batches(batches, batches[0].schema if batches else READ_SCHEMA)


def test_topics_and_instants_are_left_out_before_the_jvm(node: RunningNode) -> None:
    send(node.endpoint, 40, topic="orders")
    send(node.endpoint, 10, topic="cards")
    everything = rows_of(node, [])
    assert rows_of(node, [], topic="cards").num_rows == 10
    assert rows_of(node, [EqualTo(("topic",), "cards")], columns="seq,body").column_names == ["seq", "body"]
    assert rows_of(node, [EqualTo(("topic",), "cards")], topic="orders").num_rows == 0
    due = sorted(each for each in everything.column("due_ms").to_pylist() if each is not None)
    later = rows_of(node, [GreaterThan(("due_ms",), due[24])], columns="seq")
    assert later.num_rows == len([each for each in due if each > due[24]])
    assert rows_of(node, [EqualTo(("seq",), 3)], columns="seq").to_pydict() == {"seq": [3]}


def test_ranges_are_pointers_whatever_the_rows(node: RunningNode) -> None:
    options = read_options({"endpoint": node.endpoint, "read": "ranges", "columns": "to_seq"})
    (batch,) = read_part(options, LogPart(3, 9), Wanted())
    assert batch.to_pydict() == {"to_seq": [9]}
