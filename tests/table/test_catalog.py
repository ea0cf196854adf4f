"""Tests of the pending table's Delta log: durable commits, repeated torn commits, and readers outside the broker."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from tests.crash_files import CrashFiles, PowerCut
from tests.table.small_table import NOW_MS, attachment, table_rows, write

from timeball.io.files import Files, RealFiles
from timeball.model.errors import Corrupt, MissingFile
from timeball.model.limits import DAY_MS, HOUR_MS
from timeball.table import catalog as catalog_module
from timeball.table import layout, live_files
from timeball.table.attachment import Attachment, FileEntry
from timeball.table.catalog import DELTA_LOG, Catalog, TableState
from timeball.table.delta_rs import APP_ID
from timeball.table.layout import FOLDER

DUES = [NOW_MS + hour * HOUR_MS for hour in (1, 2, 3)]


def open_catalog(files: Files) -> Catalog:
    """Open the table, or create it."""
    catalog = Catalog(files)
    catalog.open()
    return catalog


def put(catalog: Catalog, files: Files, seq: int, removed: list[FileEntry] | None = None) -> list[FileEntry]:
    """Attach a file with one row, in all steps. `seq`: the number of the row, and that of the attach's TABLE row.

    `removed`: files that the attach removes.
    """
    entries = write(files, table_rows([DUES[seq % 3]], first_seq=seq))
    change = attachment(entries, epoch=seq, removes=[entry.path for entry in removed or []])
    catalog.sync_data(change.files)
    catalog.commit(change, seq, removed or [], NOW_MS)
    return entries


def as_delta(catalog: Catalog) -> DeltaTable:
    """Open the table as another program does."""
    return DeltaTable(catalog.uri)


def seqs(table: DeltaTable) -> list[int]:
    """Read the numbers of all rows, sorted."""
    return sorted(table.to_pyarrow_table(columns=["seq"]).column("seq").to_pylist())


def commits(files: Files) -> list[str]:
    """List the entries of the Delta log."""
    return [name for name in files.list_dir(DELTA_LOG) if name.endswith(".json")]


@pytest.fixture(autouse=True)
def _a_file_for_each_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few rows make several files."""
    monkeypatch.setattr(layout, "FILE_ROWS", 1)


@pytest.fixture(params=["real", "in memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return RealFiles(tmp_path) if request.param == "real" else CrashFiles()


# ---- attach -------------------------------------------------------------------------------------------------


def test_new_table_is_empty_and_reopens_unchanged(files: Files) -> None:
    first = Catalog(files).open()
    assert first == Catalog(files).open() == TableState(0, 0, [])
    assert len(commits(files)) == 1


def test_attach_adds_and_removes_files(files: Files) -> None:
    catalog = open_catalog(files)
    one, two = put(catalog, files, 5), put(catalog, files, 9)
    three = put(catalog, files, 12, removed=one)
    for state in (catalog.state(), Catalog(files).open()):
        assert (state.version, state.attach_seq) == (3, 12)
        assert len(state.files) == 2
        assert {entry.path: entry for entry in state.files} == {entry.path: entry for entry in [*two, *three]}
    assert catalog.version == 3


def test_repeated_attach_changes_nothing(files: Files) -> None:
    catalog = open_catalog(files)
    entries = put(catalog, files, 9)
    before = commits(files)
    for seq in (9, 8, 1):
        assert catalog.commit(attachment(entries), seq, [], NOW_MS) == 1
    assert commits(files) == before
    assert len(catalog.state().files) == 1


def test_deltalake_reads_rows_statistics_and_our_transaction(files: Files) -> None:
    catalog = open_catalog(files)
    rows = table_rows([*DUES, NOW_MS + 500 * DAY_MS], first_seq=100)
    change = attachment(write(files, rows), job="compact", to_seq=104)
    catalog.sync_data(change.files)
    catalog.commit(change, 77, [], NOW_MS)
    table = as_delta(catalog)
    read = table.to_pyarrow_table().sort_by("seq")
    assert read.select(rows.column_names).cast(rows.schema).equals(rows)
    assert set(read.column("bucket").to_pylist()) == {entry.bucket for entry in change.files}
    assert table.transaction_version(APP_ID) == 77
    assert table.metadata().partition_columns == ["bucket"]
    assert {key: table.history(1)[0][key] for key in ("watermark", "job")} == {
        "watermark": "104",
        "job": "compact",
    }
    statistics = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    assert {(action["num_records"], action["min.due_ms"]) for action in statistics} == {
        (1, due) for due in [*DUES, rows["due_ms"][3].as_py()]
    }


def test_rewrite_commits_without_data_change(files: Files) -> None:
    """A stream that follows the table must not get the same rows again from their new file."""
    catalog = open_catalog(files)
    one = put(catalog, files, 5)
    put(catalog, files, 6, removed=one)
    lines = bytes(files.map_readonly(f"{DELTA_LOG}/{commits(files)[-1]}")).splitlines()
    actions = [next(iter(action.items())) for action in map(json.loads, lines)]
    data_changes = {kind: fields["dataChange"] for kind, fields in actions if kind in ("add", "remove")}
    assert data_changes == {"add": False, "remove": False}


def test_readers_of_an_older_version_are_undisturbed(files: Files) -> None:
    catalog = open_catalog(files)
    one = put(catalog, files, 5)
    old = as_delta(catalog)
    put(catalog, files, 6, removed=one)
    assert (seqs(old), seqs(as_delta(catalog))) == ([5], [6])


def test_checkpoint_is_written_at_regular_versions(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "CHECKPOINT_EVERY", 3)
    catalog = open_catalog(files)
    for seq in range(1, 8):
        put(catalog, files, seq)
    checkpoints = [name for name in files.list_dir(DELTA_LOG) if name.endswith(".checkpoint.parquet")]
    assert [int(name[:20]) for name in checkpoints] == [3, 6]
    assert seqs(as_delta(catalog)) == list(range(1, 8))


# ---- torn commits -------------------------------------------------------------------------------------------


def test_torn_newest_commit_is_removed_and_repeated(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)
    catalog = open_catalog(files)
    put(catalog, files, 5)
    entries = write(files, table_rows(DUES[1:2], first_seq=6))
    newest = f"{DELTA_LOG}/{2:020d}.json"
    for size in (0, 1, 40, 300, -1):
        catalog = open_catalog(files)
        catalog.commit(attachment(entries), 6, [], NOW_MS)
        whole = bytes(files.map_readonly(newest))
        (tmp_path / newest).write_bytes(whole[:size])
        repeated = Catalog(files).open()
        assert (repeated.version, repeated.attach_seq, len(repeated.files)) == (1, 5, 1)
    catalog = open_catalog(files)
    assert catalog.commit(attachment(entries), 6, [], NOW_MS) == 2
    assert seqs(as_delta(catalog)) == [5, 6]


def test_commit_entry_of_zeros_counts_as_torn(files: Files) -> None:
    """After a power cut, a file system may have the size of a file but not its content."""
    catalog = open_catalog(files)
    put(catalog, files, 5)
    files.replace(f"{DELTA_LOG}/{1:020d}.json", bytes(700))
    assert Catalog(files).open() == TableState(0, 0, [])


def test_interrupted_creation_of_the_table_is_repeated(files: Files) -> None:
    open_catalog(files)
    files.replace(f"{DELTA_LOG}/{0:020d}.json", b'{"protocol":{"minReader')
    assert Catalog(files).open() == TableState(0, 0, [])
    assert len(commits(files)) == 1


def test_temporary_files_of_delta_are_removed_at_open(files: Files) -> None:
    catalog = open_catalog(files)
    put(catalog, files, 5)
    files.replace(f"{DELTA_LOG}/_commit_1234.json.tmp", b"{")
    files.replace(f"{DELTA_LOG}/_last_checkpoint", b'{"version":1,"si')
    assert Catalog(files).open().attach_seq == 5
    remaining = files.list_dir(DELTA_LOG)
    assert not [name for name in remaining if name.endswith(".tmp") or name == "_last_checkpoint"]


# ---- a table that differs from the log ----------------------------------------------------------------------


def attach_three_times(files: Files) -> list[FileEntry]:
    """Make attaches with the TABLE rows 5, 6 and 9. The last removes the file of the first. Returns the live files."""
    catalog = open_catalog(files)
    one, two = put(catalog, files, 5), put(catalog, files, 6)
    return [*two, *put(catalog, files, 9, removed=one)]


def bring_up(files: Files, live: list[FileEntry]) -> Catalog:
    """Open the table as a start does. According to the log, its last TABLE row is 9."""
    catalog = Catalog(files)
    catalog.bring_up(live, [], 9, 7, NOW_MS)
    return catalog


def test_table_that_agrees_with_the_log_is_not_changed(files: Files) -> None:
    live = attach_three_times(files)
    before = {name: bytes(files.map_readonly(f"{DELTA_LOG}/{name}")) for name in files.list_dir(DELTA_LOG)}
    assert bring_up(files, live).version == 3
    assert before == {name: bytes(files.map_readonly(f"{DELTA_LOG}/{name}")) for name in before}


def replace_text(files: Files, name: str, old: bytes, new: bytes) -> None:
    """Replace a text in an entry of the Delta log."""
    data = bytes(files.map_readonly(f"{DELTA_LOG}/{name}"))
    assert old in data
    files.replace(f"{DELTA_LOG}/{name}", data.replace(old, new))


def replace_newest_by_checkpoint(files: Files) -> None:
    """Write a checkpoint of the newest version and delete its entry. delta-rs can open this table, but not commit."""
    DeltaTable(Catalog(files).uri).create_checkpoint()
    files.absorb(FOLDER)
    files.remove(f"{DELTA_LOG}/{NEWEST}")


SECOND, NEWEST = f"{2:020d}.json", f"{3:020d}.json"
DAMAGE: dict[str, Callable[[Files], None]] = {
    "no entries": lambda files: [files.remove(f"{DELTA_LOG}/{name}") for name in files.list_dir(DELTA_LOG)],
    "an older entry is no JSON": lambda files: files.replace(f"{DELTA_LOG}/{SECOND}", b"rot"),
    "an older entry is missing": lambda files: files.remove(f"{DELTA_LOG}/{SECOND}"),
    "the newest entry is missing": lambda files: files.remove(f"{DELTA_LOG}/{NEWEST}"),
    "the newest entry is a checkpoint": replace_newest_by_checkpoint,
    "another due time": lambda files: replace_text(files, SECOND, b'\\"due_ms\\": 17', b'\\"due_ms\\": 16'),
    "another row count": lambda files: replace_text(
        files, NEWEST, b'\\"numRecords\\": 1', b'\\"numRecords\\": 7'
    ),
    "no count of nulls": lambda files: replace_text(files, NEWEST, b"nullCount", b"nullCounu"),
    "another file name": lambda files: replace_text(files, NEWEST, b'"bucket=', b'"cucket='),
    "another TABLE row": lambda files: replace_text(files, NEWEST, b'"version":9', b'"version":8'),
    "other columns": lambda files: replace_text(files, f"{0:020d}.json", b"born_ms", b"borm_ms"),
    "no columns": lambda files: replace_text(files, f"{0:020d}.json", b"schemaString", b"schemaStrinf"),
    "an older entry is no text": lambda files: files.replace(f"{DELTA_LOG}/{SECOND}", b"\xff\xfe"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_table_that_differs_from_the_log_is_recreated(
    files: Files, damage: Callable[[Files], None], caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise one changed digit of an entry could hide scheduled messages from readers."""
    live = attach_three_times(files)
    damage(files)
    catalog = bring_up(files, live)
    assert "table recreated from the log folder=pending/_delta_log" in caplog.text
    for state in (catalog.state(), Catalog(files).open()):
        assert state.attach_seq == 9
        assert {entry.path: entry for entry in state.files} == {entry.path: entry for entry in live}
    assert seqs(as_delta(catalog)) == [6, 9]
    put(catalog, files, 12)
    assert seqs(as_delta(catalog)) == [6, 9, 12]


def test_missing_or_truncated_data_file_is_named_in_the_error(files: Files) -> None:
    live = attach_three_times(files)
    name = f"{FOLDER}/{live[0].path}"
    data = bytes(files.map_readonly(name))
    Catalog(files).check_data(live)
    files.replace(name, data[:-1])
    with pytest.raises(Corrupt, match=f"{live[0].path} has {len(data) - 1} bytes"):
        Catalog(files).check_data(live)
    live_files.remove(files, live[0].path)  # with its link, from which it would be restored
    with pytest.raises(MissingFile, match=f"{live[0].path} is missing"):
        Catalog(files).check_data(live)


# ---- vacuum -------------------------------------------------------------------------------------------------


@pytest.fixture
def on_disk(tmp_path: Path) -> tuple[RealFiles, Catalog]:
    files = RealFiles(tmp_path)
    return files, open_catalog(files)


def age(files: RealFiles, entries: list[FileEntry], hours: int = 48) -> None:
    """Make files look like those of a job that failed long ago. deltalake compares them with the machine's clock."""
    then = time.time() - hours * 3_600
    for entry in entries:
        os.utime(files.root / FOLDER / entry.path, (then, then))


def exist(files: Files, entries: list[FileEntry]) -> list[bool]:
    """Check which of these files exist."""
    return [files.exists(f"{FOLDER}/{entry.path}") for entry in entries]


def test_vacuum_removes_old_files_of_no_version_without_a_commit(
    on_disk: tuple[RealFiles, Catalog],
) -> None:
    files, catalog = on_disk
    removed, live = put(catalog, files, 5), put(catalog, files, 6)
    put(catalog, files, 7, removed=removed)
    unattached = write(files, table_rows(DUES[:1], first_seq=90))
    fresh_unattached = write(files, table_rows(DUES[:1], first_seq=91))
    age(files, [*removed, *live, *unattached])
    commits_before, state = commits(files), catalog.state()
    assert catalog.vacuum(DAY_MS) == 2
    assert exist(files, [*removed, *unattached]) == [False, False]
    # A job may still be running that attaches the fresh file.
    assert exist(files, [*live, *fresh_unattached]) == [True, True]
    assert (commits(files), catalog.state()) == (commits_before, state)
    assert seqs(as_delta(catalog)) == [6, 7]
    assert catalog.vacuum(DAY_MS) == 0


def test_vacuum_keeps_files_of_versions_within_the_age_limit(on_disk: tuple[RealFiles, Catalog]) -> None:
    files, catalog = on_disk
    one = put(catalog, files, 5)
    change = attachment([], epoch=6, removes=[one[0].path])
    catalog.commit(change, 6, one, int(time.time() * 1_000))
    age(files, one)
    assert catalog.vacuum(DAY_MS) == 0
    assert exist(files, one) == [True]


def test_files_removed_before_the_given_time_are_deleted(on_disk: tuple[RealFiles, Catalog]) -> None:
    files, catalog = on_disk
    removed, live = put(catalog, files, 5), put(catalog, files, 6)
    put(catalog, files, 7, removed=removed)
    assert catalog.delete_removed_files(NOW_MS) == 0
    assert exist(files, [*removed, *live]) == [True, True]
    assert catalog.delete_removed_files(NOW_MS + 1) == 1
    assert exist(files, [*removed, *live]) == [False, True]
    assert catalog.delete_removed_files(NOW_MS + 1) == 0
    assert seqs(as_delta(catalog)) == [6, 7]


# ---- a power cut at every call of the file system -----------------------------------------------------------

SEQS = [5, 6, 7, 8]
TableRow = tuple[Attachment, int]  # an attach and the number of its TABLE row


def attach_four_times(files: CrashFiles, done: list[TableRow], log: list[TableRow]) -> None:
    """Make four attaches, one of which removes a file.

    Adds the TABLE rows to `log`, and those whose commit has returned to `done`. Both are filled up to a power cut.
    """
    catalog = open_catalog(files)
    removed: list[FileEntry] = []
    for seq in SEQS:
        entries = write(files, table_rows([DUES[seq % 3]], first_seq=seq))
        change = attachment(entries, epoch=seq, removes=[entry.path for entry in removed])
        catalog.sync_data(change.files)
        log.append((change, seq))
        catalog.commit(change, seq, removed, NOW_MS)
        done.append((change, seq))
        removed = entries if seq == 6 else []


def recover(files: CrashFiles, log: list[TableRow]) -> tuple[TableState, Catalog]:
    """Open the table as a start does, and repeat the commits that it lacks. Returns the state before, and the table."""
    catalog = Catalog(files)
    state = catalog.open()
    for change, seq in log:
        if seq > state.attach_seq:
            live = {entry.path: entry for entry in catalog.state().files}
            catalog.commit(change, seq, [live[path] for path in change.removes if path in live], NOW_MS)
    return state, catalog


def find_faults(files: CrashFiles, done: list[TableRow], log: list[TableRow]) -> Iterator[str]:
    """Describe lost commits, wrong files and missing rows after a power cut."""
    state, catalog = recover(files, log)
    if done and state.attach_seq < done[-1][1]:
        yield f"attach {done[-1][1]} had returned; the table ends at {state.attach_seq}"
    removed = {path for change, _ in log for path in change.removes}
    expected = {entry.path: entry for change, _ in log for entry in change.files if entry.path not in removed}
    paths = {entry.path for entry in catalog.state().files}
    if paths != expected.keys():
        yield f"files {paths ^ expected.keys()}"
    elif seqs(as_delta(catalog)) != sorted(entry.min_seq for entry in expected.values()):
        yield "rows are missing"


def faults_of_cut(call: int, seeds: range, **disk_faults: bool) -> list[str]:
    """Cut the power at this call. Returns the faults of the table on the disk for each seed.

    With seed 0 the disk loses all unsynced changes, with other seeds a random part of them.
    """
    files = CrashFiles(crash_at=call, **disk_faults)
    done: list[TableRow] = []
    log: list[TableRow] = []
    with suppress(PowerCut):
        attach_four_times(files, done, log)
    faults = []
    for seed in seeds:
        disk = files.crash(seed, "nothing" if seed == 0 else "random")
        try:
            faults += list(find_faults(disk, done, log))
        except (Corrupt, OSError) as error:
            faults.append(repr(error))
    return [f"call {call}: {fault}" for fault in faults]


def count_calls() -> int:
    """Count the calls of the file system in `attach_four_times`."""
    files = CrashFiles()
    attach_four_times(files, [], [])
    return files.calls


@pytest.mark.parametrize("first_call", range(1, 4))  # three tests, which may run in parallel
def test_commits_survive_a_power_cut_at_every_call(first_call: int) -> None:
    calls = range(first_call, count_calls() + 1, 3)
    assert [fault for call in calls for fault in faults_of_cut(call, range(2))] == []


@pytest.mark.parametrize("disk_fault", ["forget_sync", "forget_sync_dir"])
def test_a_disk_that_forgets_is_noticed(disk_fault: str) -> None:
    assert faults_of_cut(count_calls() - 1, range(4), **{disk_fault: True})
