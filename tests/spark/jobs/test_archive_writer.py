"""Tests of timeball.spark.jobs.archive: the files of rows, and commits with the archive's mark."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.node_fixture import RunningNode
from tests.spark.traffic import log_rows, send_due_now

from timeball.model.errors import OutOfRange, StorageError
from timeball.model.limits import DAY_MS
from timeball.model.message import Kind
from timeball.spark import table_store
from timeball.spark.endpoint import Endpoint
from timeball.spark.jobs import archive
from timeball.spark.jobs.archive import FILE_SCHEMA, archive_piece, commit_epoch
from timeball.spark.table_store import app_version, open_table, sibling


def rows(topics: list[str], store_ms: list[int], **columns: object) -> pa.Table:
    batch = log_rows(Kind.MESSAGE, len(topics), topic=topics, store_ms=store_ms, **columns)
    return pa.Table.from_batches([batch])


@given(st.lists(st.sampled_from(["a", "%RETRY%g", "Z", "é", "aa"]), min_size=1, max_size=40))
def test_archive_rows_are_sorted_by_topic_and_seq(topics: list[str]) -> None:
    ordered = archive.sort_by_topic(rows(topics, [1] * len(topics)))
    pairs = list(zip(ordered.column("topic").to_pylist(), ordered.column("seq").to_pylist(), strict=True))
    assert pairs == sorted(zip(topics, range(1, len(topics) + 1), strict=True))


@given(st.lists(st.integers(0, 5 * DAY_MS), min_size=1, max_size=30))
def test_each_row_goes_to_its_own_day(store_ms: list[int]) -> None:
    parts = dict(archive.split_by_day(rows(["t"] * len(store_ms), store_ms)))
    assert sum(part.num_rows for part in parts.values()) == len(store_ms)
    for day, part in parts.items():
        assert {1 + ms // DAY_MS for ms in part.column("store_ms").to_pylist()} == {int(day[-2:])}
        assert day.startswith("1970-01-") and part.column("seq").to_pylist() == sorted(
            part.column("seq").to_pylist()
        )


def test_statistics_contain_the_bounds_of_a_file() -> None:
    reported = json.loads(archive.delta_statistics(rows(["b", "a"], [7, 9], due_ms=[None, 5])))
    assert reported["numRecords"] == 2
    assert reported["minValues"] == {"seq": 1, "topic": "a", "store_ms": 7, "due_ms": 5}
    assert reported["maxValues"] == {"seq": 2, "topic": "b", "store_ms": 9, "due_ms": 5}
    assert reported["nullCount"]["due_ms"] == 1
    nothing = json.loads(archive.delta_statistics(rows(["b"], [7])))
    assert "due_ms" not in nothing["minValues"] and nothing["nullCount"]["due_ms"] == 1


def test_file_has_the_columns_of_the_log_and_topic_statistics() -> None:
    file = pq.ParquetFile(io.BytesIO(archive.encode_archive_file(rows(["a", "b"], [1, 2]))))
    assert file.schema_arrow.equals(FILE_SCHEMA)
    column = file.metadata.row_group(0).column(FILE_SCHEMA.get_field_index("topic"))
    assert (column.statistics.min, column.statistics.max) == ("a", "b")


# ---- against a broker, without Spark ----------------------------------------------------------------------


@pytest.fixture
def uri(node: RunningNode, broker: Endpoint) -> str:
    """The URI of an empty archive for a broker with five messages that have passed."""
    send_due_now(node.endpoint, 5)
    uri = sibling(broker.status().table.uri, "archive")
    archive.open_archive(uri, broker)
    return uri


def archived_seqs(uri: str) -> list[int]:
    """Read the numbers of all rows in the archive, sorted."""
    return sorted(open_table(uri).to_pyarrow_table(columns=["seq"]).column("seq").to_pylist())


def count_files(uri: str) -> int:
    """Count the data files on disk, in the table or not."""
    return len(list(Path(uri).glob("day=*/*.parquet")))


def test_a_repeated_epoch_adds_nothing(node: RunningNode, broker: Endpoint, uri: str) -> None:
    end = broker.status().log.durable_seq
    written = archive_piece(node.endpoint, uri, (1, end))
    commit_epoch(uri, 1, end, written)
    once = archived_seqs(uri)
    commit_epoch(uri, 1, end, written)
    commit_epoch(uri, 1, end, archive_piece(node.endpoint, uri, (1, end)))
    assert archived_seqs(uri) == once and len(once) == 5
    assert app_version(open_table(uri), archive.APP_ID) == end


@pytest.mark.parametrize(("mark", "from_seq"), [(1, 9), (4, 2)])
def test_an_epoch_that_does_not_begin_at_the_mark_is_refused_and_its_files_are_deleted(
    node: RunningNode, broker: Endpoint, uri: str, mark: int, from_seq: int
) -> None:
    """Its rows begin after the mark 1, or before the mark 4. Rows would be missing, or there twice."""
    end = broker.status().log.durable_seq
    if mark > 1:
        commit_epoch(uri, 1, mark, archive_piece(node.endpoint, uri, (1, mark)))
    files = count_files(uri)
    written = archive_piece(node.endpoint, uri, (from_seq, end))
    assert written
    with pytest.raises(OutOfRange, match="planned again"):
        commit_epoch(uri, from_seq, end, written)
    assert count_files(uri) == files


def test_the_second_of_two_commits_from_one_version_is_refused(
    node: RunningNode, broker: Endpoint, uri: str
) -> None:
    """Delta refuses it, because both commits have the same application id."""
    first, second = open_table(uri), open_table(uri)
    archive.add(first, [], 3)
    with pytest.raises(archive.CommitFailedError, match=r"(?i)concurrent"):
        archive.add(second, [], 4)


def test_epoch_without_messages_moves_the_mark(node: RunningNode, uri: str) -> None:
    assert archive_piece(node.endpoint, uri, (1, 1)) == []
    commit_epoch(uri, 1, 2, [])
    assert app_version(open_table(uri), archive.APP_ID) == 2 and archived_seqs(uri) == []


def test_a_task_that_fails_removes_its_own_files(
    node: RunningNode, broker: Endpoint, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk refuses its third file. The files of an earlier task stay."""
    monkeypatch.setattr(table_store, "CHUNK_ROWS", 1)
    end = broker.status().log.durable_seq
    assert len(archive_piece(node.endpoint, uri, (1, end))) == count_files(uri) == 5
    put, tries = table_store.Store.put, iter(range(9))

    def refuse_third(store: table_store.Store, path: str, data: bytes) -> None:
        if next(tries) == 2:
            raise StorageError("no space left")
        put(store, path, data)

    monkeypatch.setattr(table_store.Store, "put", refuse_third)
    with pytest.raises(StorageError):
        archive_piece(node.endpoint, uri, (1, end))
    assert count_files(uri) == 5
