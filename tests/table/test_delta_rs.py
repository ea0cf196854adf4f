"""Tests of timeball.table.delta_rs: no table, a new table, an attach, and an unreadable table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError
from tests.table.small_table import NOW_MS

from timeball.table import delta_rs
from timeball.table.attachment import Attachment, FileEntry

FILE = FileEntry(
    path="bucket=2026-11-26/a.parquet", bucket="2026-11-26", rows=3, size_bytes=9,
    min_due_ms=1, max_due_ms=4, min_seq=2, max_seq=5,
)  # fmt: skip


def test_a_table_is_opened_only_when_there_is_one(tmp_path: Path) -> None:
    assert delta_rs.open_table(str(tmp_path), None) is None
    delta_rs.create_table(str(tmp_path), None)
    table = delta_rs.open_table(str(tmp_path), None)
    assert table is not None
    assert table.version() == 0


def test_a_replaced_table_is_empty_and_keeps_its_older_versions(tmp_path: Path) -> None:
    table = delta_rs.create_table(str(tmp_path), None)
    attach = Attachment(job="compact", job_id="j", epoch=1, files=[FILE], to_seq=6)
    delta_rs.commit(table, attach, 77, [], NOW_MS)
    replaced = delta_rs.replace_table(str(tmp_path), None)
    assert (replaced.version(), replaced.file_uris()) == (2, [])
    assert DeltaTable(str(tmp_path), version=1).file_uris() == [f"{tmp_path}/{FILE.path}"]


def test_commit_stores_the_attach_and_its_table_row(tmp_path: Path) -> None:
    table = delta_rs.create_table(str(tmp_path), None)
    attach = Attachment(job="compact", job_id="j", epoch=1, files=[FILE], to_seq=6)
    delta_rs.commit(table, attach, 77, [], NOW_MS)
    result = delta_rs.open_table(str(tmp_path), None)
    assert result is not None
    assert result.transaction_version(delta_rs.APP_ID) == 77
    assert result.file_uris() == [f"{tmp_path}/{FILE.path}"]
    deleted = Attachment(job="rewrite", job_id="j", epoch=2, removes=[FILE.path])
    delta_rs.commit(result, deleted, 78, [FILE], NOW_MS)
    result.update_incremental()
    assert result.file_uris() == []


def test_error_of_unreadable_table_is_formatted_as_one_line(tmp_path: Path) -> None:
    delta_rs.create_table(str(tmp_path), None)
    (entry,) = (tmp_path / "_delta_log").glob("*.json")
    entry.write_text("not an entry")
    with pytest.raises(delta_rs.DeltaError) as failure:
        delta_rs.open_table(str(tmp_path), None)
    assert "\n" not in delta_rs.one_line(failure.value)


def test_history_of_an_older_version_ends_with_its_own_commit(tmp_path: Path) -> None:
    for value in range(4):
        write_deltalake(str(tmp_path), pa.table({"x": [value]}), mode="append")
    newest_first = DeltaTable(str(tmp_path)).history()
    times = [commit["timestamp"] for commit in DeltaTable(str(tmp_path), version=1).history(1)]
    assert times == [commit["timestamp"] for commit in newest_first[:3]]  # versions 3, 2 and 1


# ---- two commits that begin at one version: docs/formats/pending-table.md, docs/pipeline/archive.md ------------------


def _delete(table: DeltaTable) -> None:
    table.delete("x = 3")


def _compact(table: DeltaTable) -> None:
    table.optimize.compact()


def _overwrite(table: DeltaTable) -> None:
    write_deltalake(table, pa.table({"x": [99]}), mode="overwrite")


@pytest.mark.parametrize(
    ("files", "first", "second", "rows"),
    [
        pytest.param(2, _compact, _compact, [1, 1, 2, 2, 3, 3, 4, 4], id="two OPTIMIZEs double all rows"),
        pytest.param(1, _delete, _compact, [1, 2, 4], id="one file has nothing to compact"),
        pytest.param(2, _delete, _compact, None, id="DELETE, then a stale OPTIMIZE"),
        pytest.param(2, _delete, _delete, None, id="two DELETEs"),
        pytest.param(2, _delete, _overwrite, None, id="DELETE, then a stale overwrite"),
    ],
)
def test_delta_rs_refuses_or_applies_a_second_commit_of_the_same_version(
    tmp_path: Path,
    files: int,
    first: Callable[[DeltaTable], None],
    second: Callable[[DeltaTable], None],
    rows: list[int] | None,
) -> None:
    """This is the behaviour of delta-rs, faults included. A release of delta-rs that changes it fails here.

    `files`: how many files the rows are in. `rows`: the rows afterwards, None if the second commit is refused.
    """
    for part in ([1, 2], [3, 4]) if files == 2 else ([1, 2, 3, 4],):
        write_deltalake(str(tmp_path), pa.table({"x": part}), mode="append")
    first_table, second_table = DeltaTable(str(tmp_path)), DeltaTable(str(tmp_path))
    first(first_table)
    if rows is None:
        with pytest.raises(CommitFailedError):
            second(second_table)
        return
    second(second_table)
    assert sorted(DeltaTable(str(tmp_path)).to_pyarrow_table()["x"].to_pylist()) == rows
