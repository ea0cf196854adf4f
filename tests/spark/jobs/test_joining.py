"""Tests of timeball.spark.jobs.joining: small files of the archive and the ledger become one, and no row two."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError
from hypothesis import given
from hypothesis import strategies as st
from tests.spark.traffic import log_rows

from timeball.model.message import Kind
from timeball.spark.jobs import archive, joining, ledger
from timeball.spark.jobs.joining import (
    JOINED_BYTES,
    JOINED_RAW_BYTES,
    JOINED_ROWS,
    SmallFile,
    Write,
    adjacent_files,
)
from timeball.spark.log_events import ARCHIVE_SCHEMA, EVENT_SCHEMA, LEDGER_APP_ID
from timeball.spark.table_store import Store, append_once, create_table, open_table, write_file

EPOCHS, EPOCH_ROWS = 4, 10
Fill = Callable[[str], None]


def fill_archive(uri: str) -> None:
    """Make an archive of EPOCHS files of one day."""
    create_table(
        uri,
        ARCHIVE_SCHEMA,
        partition_by=[archive.PARTITION],
        configuration={archive.SINCE: "1", archive.SINCE_MS: "0"},
        raise_if_key_not_exists=False,
        commit_properties=CommitProperties(app_transactions=[Transaction(archive.APP_ID, 1)]),
    )
    for low in range(1, EPOCHS * EPOCH_ROWS, EPOCH_ROWS):
        seq = list(range(low, low + EPOCH_ROWS))
        batch = log_rows(Kind.MESSAGE, EPOCH_ROWS, topic=["t"] * EPOCH_ROWS, store_ms=seq)
        rows = pa.Table.from_batches([batch.set_column(0, "seq", pa.array(seq))])
        files = list(archive.write_files(Store(uri), rows))
        archive.commit_epoch(uri, low, low + EPOCH_ROWS, files)


def fill_ledger(uri: str) -> None:
    """Make a ledger of EPOCHS files."""
    ledger.open_ledger(uri, 1)
    for low in range(1, EPOCHS * EPOCH_ROWS, EPOCH_ROWS):
        events = [
            {"event": "accepted", "first_seq": seq, "rows": 1, "event_seq": seq}
            for seq in range(low, low + EPOCH_ROWS)
        ]
        written = write_file(uri, EVENT_SCHEMA, pa.Table.from_pylist(events, EVENT_SCHEMA).to_batches())
        append_once(uri, LEDGER_APP_ID, low, low + EPOCH_ROWS, [written])


TABLES = pytest.mark.parametrize(
    ("fill", "write", "column"),
    [
        pytest.param(fill_archive, archive.write_joined, "seq", id="archive"),
        pytest.param(fill_ledger, ledger.write_joined, "event_seq", id="ledger"),
    ],
)


def values(uri: str, column: str) -> list[int]:
    return sorted(open_table(uri).to_pyarrow_table().column(column).to_pylist())


@TABLES
def test_two_jobs_that_tidy_one_version_double_no_row(
    tmp_path: Path, fill: Fill, write: Write, column: str
) -> None:
    """delta-rs finds no conflict by itself: both remove the same files without a change of data."""
    uri = str(tmp_path / "table")
    fill(uri)
    before = open_table(uri).to_pyarrow_table().sort_by(column)
    mine, other = open_table(uri), open_table(uri)
    assert joining.join_small_files(mine, write) == EPOCHS
    with pytest.raises(CommitFailedError, match=r"(?i)concurrent"):
        joining.join_small_files(other, write)
    table = open_table(uri)
    assert len(table.file_uris()) == 1 and table.to_pyarrow_table().sort_by(column) == before
    assert joining.join_small_files(table, write) == 0, "nothing is left to join"


@TABLES
def test_an_epoch_may_be_added_while_files_are_joined(
    tmp_path: Path, fill: Fill, write: Write, column: str
) -> None:
    uri = str(tmp_path / "table")
    fill(uri)
    table, last = open_table(uri), EPOCHS * EPOCH_ROWS
    if fill is fill_archive:
        archive.commit_epoch(uri, last + 1, last + 2, [])
    else:
        append_once(uri, LEDGER_APP_ID, last + 1, last + 2, [])
    assert joining.join_small_files(table, write) == EPOCHS
    assert values(uri, column) == list(range(1, last + 1))


@TABLES
def test_a_row_that_was_deleted_meanwhile_does_not_come_back(
    tmp_path: Path, fill: Fill, write: Write, column: str
) -> None:
    uri = str(tmp_path / "table")
    fill(uri)
    table = open_table(uri)
    open_table(uri).delete(f"{column} = 5")
    with pytest.raises(CommitFailedError):
        joining.join_small_files(table, write)
    assert values(uri, column) == [seq for seq in range(1, EPOCHS * EPOCH_ROWS + 1) if seq != 5]


def test_rows_of_files_that_lack_a_column_keep_null_in_it(tmp_path: Path) -> None:
    """An older ledger has such files."""
    uri, older = str(tmp_path / "ledger"), EVENT_SCHEMA.remove(len(EVENT_SCHEMA) - 1)
    ledger.open_ledger(uri, 1)
    for low, schema in ((1, older), (2, EVENT_SCHEMA)):
        event = {"event": "cancelled", "first_seq": low, "event_seq": low, "reason": "replaced"}
        batches = pa.Table.from_pylist([event], schema).to_batches()
        append_once(uri, LEDGER_APP_ID, low, low + 1, [write_file(uri, schema, batches)])
    assert joining.join_small_files(open_table(uri), ledger.write_joined) == 2
    rows = DeltaTable(uri).to_pyarrow_table().sort_by("event_seq")
    assert rows.column("reason").to_pylist() == [None, "replaced"]


def test_only_every_hundredth_version_is_tidied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = str(tmp_path / "archive")
    fill_archive(uri)
    assert open_table(uri).version() == EPOCHS
    joining.maintain("archive", uri, archive.write_joined)
    assert open_table(uri).version() == EPOCHS
    monkeypatch.setattr(joining, "TIDY_EVERY", EPOCHS + 1)
    joining.maintain("archive", uri, archive.write_joined)
    assert len(open_table(uri).file_uris()) == 1
    assert list((tmp_path / "archive/_delta_log").glob("*.checkpoint*"))


@TABLES
def test_rows_that_compress_well_are_joined_within_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fill: Fill, write: Write, column: str
) -> None:
    """Few bytes of Parquet may be many in memory: two of these files fit, three do not."""
    uri = str(tmp_path / "table")
    fill(uri)
    sizes = [pq.read_metadata(path) for path in map(str, open_table(uri).file_uris())]
    raw = max(metadata.row_group(0).total_byte_size for metadata in sizes)
    monkeypatch.setattr(joining, "JOINED_RAW_BYTES", 2 * raw)
    assert joining.join_small_files(open_table(uri), write) == EPOCHS
    assert len(open_table(uri).file_uris()) == 2
    assert values(uri, column) == list(range(1, EPOCHS * EPOCH_ROWS + 1))


def test_a_join_that_fails_keeps_nothing_from_being_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A data file was damaged. The Delta log still gets its checkpoints."""
    uri = str(tmp_path / "archive")
    fill_archive(uri)
    Path(open_table(uri).file_uris()[0]).write_bytes(b"PAR1 no footer PAR1")
    monkeypatch.setattr(joining, "TIDY_EVERY", EPOCHS + 1)
    joining.maintain("archive", uri, archive.write_joined)
    assert "not tidied job=archive" in caplog.text
    assert len(open_table(uri).file_uris()) == EPOCHS
    assert list((tmp_path / "archive/_delta_log").glob("*.checkpoint*"))


@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.integers(1, JOINED_ROWS // 2),
            st.integers(1, JOINED_BYTES // 2),
            st.integers(1, 2 * JOINED_RAW_BYTES),
        )
    )
)
def test_neighbours_are_of_one_day_and_stay_within_bounds(drawn: list[tuple[int, int, int, int]]) -> None:
    drawn.sort()
    small = [SmallFile(str(i), {"day": str(d)}, rows, size, i) for i, (d, rows, size, _) in enumerate(drawn)]
    raw_bytes = {str(i): raw for i, (*_, raw) in enumerate(drawn)}
    groups = list(adjacent_files(small, raw_bytes.__getitem__))
    assert all(len(group) > 1 and len({each.partition["day"] for each in group}) == 1 for group in groups)
    assert all(sum(each.rows for each in group) <= JOINED_ROWS for group in groups)
    assert all(sum(each.size_bytes for each in group) <= JOINED_BYTES for group in groups)
    assert all(sum(raw_bytes[each.path] for each in group) <= JOINED_RAW_BYTES for group in groups)
    joined = [each.first_seq for group in groups for each in group]
    assert joined == sorted(set(joined))
    # Nothing is left lying that would still have gone into the group before it.
    for group in groups:
        last = group[-1].first_seq
        for after in small[last + 1 : last + 2]:
            too_many = sum(each.rows for each in group) + after.rows > JOINED_ROWS
            too_large = sum(each.size_bytes for each in group) + after.size_bytes > JOINED_BYTES
            is_raw = sum(raw_bytes[each.path] for each in [*group, after]) > JOINED_RAW_BYTES
            assert after.partition != group[0].partition or too_many or too_large or is_raw
