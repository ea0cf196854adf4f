"""Tests of timeball.spark.jobs.joining: small files of the archive and the ledger are joined, and no row changes."""

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
        files = list(archive.write_archive_files(Store(uri), rows))
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
    """Read the values of a column, sorted."""
    return sorted(open_table(uri).to_pyarrow_table().column(column).to_pylist())


@TABLES
def test_a_second_join_of_the_same_version_is_refused(
    tmp_path: Path, fill: Fill, write: Write, column: str
) -> None:
    """By itself, delta-rs would accept it, and all rows would be there twice (test_delta_rs.py)."""
    uri = str(tmp_path / "table")
    fill(uri)
    before = open_table(uri).to_pyarrow_table().sort_by(column)
    first, second = open_table(uri), open_table(uri)
    assert joining.join_small_files(first, write) == EPOCHS
    with pytest.raises(CommitFailedError, match=r"(?i)concurrent"):
        joining.join_small_files(second, write)
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
def test_a_join_is_refused_if_a_row_was_deleted_meanwhile(
    tmp_path: Path, fill: Fill, write: Write, column: str
) -> None:
    uri = str(tmp_path / "table")
    fill(uri)
    table = open_table(uri)
    open_table(uri).delete(f"{column} = 5")
    with pytest.raises(CommitFailedError):
        joining.join_small_files(table, write)
    assert values(uri, column) == [seq for seq in range(1, EPOCHS * EPOCH_ROWS + 1) if seq != 5]


def test_a_column_that_a_file_lacks_is_null_in_the_joined_file(tmp_path: Path) -> None:
    """Files of an older ledger lack columns."""
    uri, older = str(tmp_path / "ledger"), EVENT_SCHEMA.remove(len(EVENT_SCHEMA) - 1)
    ledger.open_ledger(uri, 1)
    for low, schema in ((1, older), (2, EVENT_SCHEMA)):
        event = {"event": "cancelled", "first_seq": low, "event_seq": low, "reason": "replaced"}
        batches = pa.Table.from_pylist([event], schema).to_batches()
        append_once(uri, LEDGER_APP_ID, low, low + 1, [write_file(uri, schema, batches)])
    assert joining.join_small_files(open_table(uri), ledger.write_joined) == 2
    rows = DeltaTable(uri).to_pyarrow_table().sort_by("event_seq")
    assert rows.column("reason").to_pylist() == [None, "replaced"]


def test_files_are_joined_only_every_tidy_every_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_files_are_joined_up_to_the_limit_of_uncompressed_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fill: Fill, write: Write, column: str
) -> None:
    """The limit admits two of the four files, so there are two joined files."""
    uri = str(tmp_path / "table")
    fill(uri)
    footers = [pq.read_metadata(path) for path in map(str, open_table(uri).file_uris())]
    raw_bytes = max(footer.row_group(0).total_byte_size for footer in footers)
    monkeypatch.setattr(joining, "JOINED_RAW_BYTES", 2 * raw_bytes)
    assert joining.join_small_files(open_table(uri), write) == EPOCHS
    assert len(open_table(uri).file_uris()) == 2
    assert values(uri, column) == list(range(1, EPOCHS * EPOCH_ROWS + 1))


def test_after_a_failed_join_the_checkpoint_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The join fails because a data file is damaged. Unused files are deleted in the same step as the checkpoint."""
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
def test_adjacent_files_are_of_one_day_and_as_many_as_the_limits_admit(
    drawn: list[tuple[int, int, int, int]],
) -> None:
    """`drawn`: (day, rows, bytes, uncompressed bytes) of each file."""
    drawn.sort()
    small = [
        SmallFile(str(index), {"day": str(day)}, rows, size_bytes, index)
        for index, (day, rows, size_bytes, _) in enumerate(drawn)
    ]
    raw_bytes = {str(index): raw for index, (*_, raw) in enumerate(drawn)}

    def is_allowed(files: list[SmallFile]) -> bool:
        """Check that the files are of one day and stay within all limits of a joined file."""
        return (
            len({file.partition["day"] for file in files}) == 1
            and sum(file.rows for file in files) <= JOINED_ROWS
            and sum(file.size_bytes for file in files) <= JOINED_BYTES
            and sum(raw_bytes[file.path] for file in files) <= JOINED_RAW_BYTES
        )

    groups = list(adjacent_files(small, raw_bytes.__getitem__))
    assert all(len(group) > 1 and is_allowed(group) for group in groups)
    joined = [file.first_seq for group in groups for file in group]
    assert joined == sorted(set(joined))
    for group in groups:
        next_files = small[group[-1].first_seq + 1 :]
        assert not next_files or not is_allowed([*group, next_files[0]]), "the next file would fit, too"
