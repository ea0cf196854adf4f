"""Tests of timeball.pipeline.source.compact_writer: pieces, and what the watermark decides at commit."""

from __future__ import annotations

import logging
from pathlib import Path

import pyarrow as pa
import pytest
from tests.node_fixture import RunningNode
from tests.pipeline.traffic import attached_seqs, log_rows, send

from timeball.errors import OutOfRange, StorageError
from timeball.message import TABLE_SCHEMA, Kind
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.source import compact_writer as compaction
from timeball.pipeline.source.compact_writer import Compacted, CompactWriter, Piece, plan, waiting
from timeball.pipeline.source.options import write_options
from timeball.pipeline.table_store import Store


def test_settled_promises_are_left_out() -> None:
    batch = log_rows(Kind.PROMISE, 4, due_ms=[5, 9, 10, 11], store_ms=[1, 2, 3, 4])
    rows = waiting(batch, 10)
    assert rows.schema == TABLE_SCHEMA
    assert rows.column("due_ms").to_pylist() == [10, 11]
    assert rows.column("accepted_ms").to_pylist() == [3, 4]
    assert waiting(batch, 0).num_rows == 4


@pytest.mark.parametrize(
    ("ranges", "watermark", "left", "done"),
    [
        ([(1, 5), (5, 9)], 1, [1, 5], []),
        ([(5, 9), (1, 5)], 1, [1, 5], []),
        ([(1, 5), (5, 9)], 5, [5], [1]),
        ([(1, 5), (5, 9)], 9, [], [1, 5]),
        ([(1, 5), (5, 9)], 20, [], [1, 5]),
        ([], 3, [], []),
    ],
)
def test_plan(ranges: list[tuple[int, int]], watermark: int, left: list[int], done: list[int]) -> None:
    attach, drop = plan([Piece(a, b) for a, b in ranges], watermark)
    assert [piece.from_seq for piece in attach] == left
    assert [piece.from_seq for piece in drop] == done


@pytest.mark.parametrize(
    ("ranges", "watermark"),
    [([(1, 5), (5, 9)], 3), ([(5, 9)], 1), ([(1, 5), (7, 9)], 1), ([(1, 5), (4, 9)], 1)],
)
def test_what_would_lose_or_double_rows_is_refused(ranges: list[tuple[int, int]], watermark: int) -> None:
    with pytest.raises(OutOfRange, match="planned again"):
        plan([Piece(a, b) for a, b in ranges], watermark)


def task(writer: CompactWriter, *ranges: tuple[int, int]) -> Compacted:
    rows = pa.record_batch({"from_seq": [a for a, _ in ranges], "to_seq": [b for _, b in ranges]})
    done = writer.write(iter([rows]))
    assert isinstance(done, Compacted)
    return done


def data_files(broker: Endpoint) -> set[Path]:
    return set(Path(broker.status().table.uri).glob("bucket=*/*.parquet"))


@pytest.fixture
def writer(node: RunningNode) -> CompactWriter:
    return CompactWriter(write_options({"endpoint": node.endpoint}))


def test_an_epoch_of_two_tasks_is_one_attach(
    node: RunningNode, broker: Endpoint, writer: CompactWriter
) -> None:
    send(node.endpoint, 500)
    version, end = broker.status().table.version, broker.status().log.durable_seq
    messages = [task(writer, (200, end)), task(writer, (1, 100), (100, 200))]
    assert attached_seqs(broker) == []  # nothing before the commit
    writer.commit(messages, 0)
    assert broker.status().watermark == end
    assert broker.status().table.version == version + 1
    assert attached_seqs(broker) == list(range(2, 502))


def test_a_repeated_epoch_changes_nothing(
    node: RunningNode, broker: Endpoint, writer: CompactWriter, caplog: pytest.LogCaptureFixture
) -> None:
    send(node.endpoint, 100)
    end = broker.status().log.durable_seq
    first = task(writer, (1, end))
    writer.commit([first], 0)
    status = broker.status()
    with caplog.at_level(logging.WARNING, "timeball.pipeline"):
        writer.commit([first], 0)  # Spark lost the answer
        writer.commit([task(writer, (1, end))], 0)  # and even the task's
    assert "epoch attached before, skipped" in caplog.text
    assert broker.status().table == status.table
    assert attached_seqs(broker) == list(range(2, 102))
    assert {Path(status.table.uri) / entry.path for entry in first.pieces[0].files} <= data_files(broker)


def test_an_epoch_without_promises_moves_the_watermark(
    node: RunningNode, broker: Endpoint, writer: CompactWriter
) -> None:
    send(node.endpoint, 10)
    writer.commit([task(writer, (1, broker.status().log.durable_seq))], 0)
    begin, end = broker.status().watermark, broker.status().log.durable_seq
    assert begin < end  # the TABLE row itself
    writer.commit([task(writer, (begin, end))], 1)
    assert broker.status().watermark == end
    assert len(attached_seqs(broker)) == 10


def test_another_compactor_at_work(node: RunningNode, broker: Endpoint, writer: CompactWriter) -> None:
    send(node.endpoint, 100)
    stale = task(writer, (1, 101))
    writer.commit([task(writer, (1, 51))], 0)
    with pytest.raises(OutOfRange, match="watermark calls for 51"):
        writer.commit([stale], 1)
    assert broker.status().watermark == 51
    assert attached_seqs(broker) == list(range(2, 51))
    writer.commit([task(writer, (51, 101))], 2)
    assert attached_seqs(broker) == list(range(2, 101))


def test_an_aborted_epoch_leaves_no_files(node: RunningNode, broker: Endpoint, writer: CompactWriter) -> None:
    send(node.endpoint, 50)
    done = task(writer, (1, 51))
    before = data_files(broker)
    writer.abort([done], 0)  # a commit was tried: its outcome may be unknown
    assert data_files(broker) == before != set()
    writer.abort([done, None], 0)
    assert data_files(broker) == set()


def test_a_failed_task_leaves_no_files(node: RunningNode, broker: Endpoint, tmp_path: Path) -> None:
    send(node.endpoint, 50)  # due on three days or more: as many buckets
    whole = compaction.write_piece(broker, Store(str(tmp_path / "whole")), Piece(1, 51))
    buckets = [entry.bucket for entry in whole.files]
    assert len(buckets) >= 3
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / f"bucket={buckets[-1]}").write_text("a file where a folder should be")
    with pytest.raises(StorageError):
        compaction.write_piece(broker, Store(str(tmp_path / "broken")), Piece(1, 51))
    assert list((tmp_path / "broken").glob("*/*.parquet")) == []


def test_rows_that_are_not_there_cannot_be_claimed(
    node: RunningNode, broker: Endpoint, writer: CompactWriter
) -> None:
    send(node.endpoint, 50)
    with pytest.raises(OutOfRange):
        writer.commit([task(writer, (1, 10_000))], 0)
    assert broker.status().watermark == 1
