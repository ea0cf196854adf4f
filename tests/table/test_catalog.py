"""Tests of the pending table's Delta log: durable commits, repeated torn commits, and readers outside the broker."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
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


def opened(files: Files) -> Catalog:
    catalog = Catalog(files)
    catalog.open()
    return catalog


def put(catalog: Catalog, files: Files, seq: int, removed: list[FileEntry] | None = None) -> list[FileEntry]:
    """Attach a file of one row, with its number as the TABLE row. Does all steps in their order."""
    entries = write(files, table_rows([DUES[seq % 3]], first_seq=seq))
    change = attachment(entries, epoch=seq, removes=[entry.path for entry in removed or []])
    catalog.sync_data(change.files)
    catalog.commit(change, seq, removed or [], NOW_MS)
    return entries


def as_delta(catalog: Catalog) -> DeltaTable:
    """Open the table as another program does."""
    return DeltaTable(catalog.uri)


def seqs(table: DeltaTable) -> list[int]:
    return sorted(table.to_pyarrow_table(columns=["seq"]).column("seq").to_pylist())


def commits(files: Files) -> list[str]:
    return [name for name in files.list_dir(DELTA_LOG) if name.endswith(".json")]


@pytest.fixture(autouse=True)
def _a_file_for_each_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows then make several files."""
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
    catalog = opened(files)
    one, two = put(catalog, files, 5), put(catalog, files, 9)
    three = put(catalog, files, 12, removed=one)
    for state in (catalog.state(), Catalog(files).open()):
        assert (state.version, state.attach_seq) == (3, 12)
        assert len(state.files) == 2
        assert {entry.path: entry for entry in state.files} == {entry.path: entry for entry in [*two, *three]}
    assert catalog.version == 3


def test_repeated_attach_changes_nothing(files: Files) -> None:
    catalog = opened(files)
    entries = put(catalog, files, 9)
    before = commits(files)
    for seq in (9, 8, 1):
        assert catalog.commit(attachment(entries), seq, [], NOW_MS) == 1
    assert commits(files) == before
    assert len(catalog.state().files) == 1


def test_deltalake_reads_rows_statistics_and_our_transaction(files: Files) -> None:
    catalog = opened(files)
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
    assert {(a["num_records"], a["min.due_ms"]) for a in statistics} == {
        (1, due) for due in [*DUES, rows["due_ms"][3].as_py()]
    }


def test_rewrite_commits_without_data_change(files: Files) -> None:
    """A stream that follows the table must not see rows again because they moved."""
    catalog = opened(files)
    one = put(catalog, files, 5)
    put(catalog, files, 6, removed=one)
    text = bytes(files.map_readonly(f"{DELTA_LOG}/{commits(files)[-1]}")).splitlines()
    removes = [action["remove"] for action in map(json.loads, text) if "remove" in action]
    assert [remove["dataChange"] for remove in removes] == [False]


def test_readers_of_an_older_version_are_undisturbed(files: Files) -> None:
    catalog = opened(files)
    one = put(catalog, files, 5)
    old = as_delta(catalog)
    put(catalog, files, 6, removed=one)
    assert (seqs(old), seqs(as_delta(catalog))) == ([5], [6])


def test_checkpoint_is_written_at_regular_versions(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog_module, "CHECKPOINT_EVERY", 3)
    catalog = opened(files)
    for seq in range(1, 8):
        put(catalog, files, seq)
    checkpoints = [name for name in files.list_dir(DELTA_LOG) if name.endswith(".checkpoint.parquet")]
    assert [int(name[:20]) for name in checkpoints] == [3, 6]
    assert seqs(as_delta(catalog)) == list(range(1, 8))


# ---- torn commits -------------------------------------------------------------------------------------------


def test_torn_newest_commit_is_removed_and_repeated(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)
    catalog = opened(files)
    put(catalog, files, 5)
    entries = write(files, table_rows(DUES[1:2], first_seq=6))
    newest = f"{DELTA_LOG}/{2:020d}.json"
    for size in (0, 1, 40, 300, -1):
        catalog = opened(files)
        catalog.commit(attachment(entries), 6, [], NOW_MS)
        whole = bytes(files.map_readonly(newest))
        (tmp_path / newest).write_bytes(whole[:size] if size else b"")
        repeated = Catalog(files).open()
        if repeated.attach_seq == 6:  # only the last newline was missing
            assert size == -1
            (tmp_path / newest).unlink()
        else:
            assert (repeated.version, repeated.attach_seq, len(repeated.files)) == (1, 5, 1)
    catalog = opened(files)
    assert catalog.commit(attachment(entries), 6, [], NOW_MS) == 2
    assert seqs(as_delta(catalog)) == [5, 6]


def test_commit_entry_of_zeros_counts_as_torn(files: Files) -> None:
    """What a file system shows whose size was durable and whose content was not."""
    catalog = opened(files)
    put(catalog, files, 5)
    files.replace(f"{DELTA_LOG}/{1:020d}.json", bytes(700))
    assert Catalog(files).open() == TableState(0, 0, [])


def test_interrupted_creation_of_the_table_is_repeated(files: Files) -> None:
    opened(files)
    files.replace(f"{DELTA_LOG}/{0:020d}.json", b'{"protocol":{"minReader')
    assert Catalog(files).open() == TableState(0, 0, [])
    assert len(commits(files)) == 1


def test_temporary_files_of_delta_are_removed_at_open(files: Files) -> None:
    catalog = opened(files)
    put(catalog, files, 5)
    files.replace(f"{DELTA_LOG}/_commit_1234.json.tmp", b"{")
    files.replace(f"{DELTA_LOG}/_last_checkpoint", b'{"version":1,"si')
    assert Catalog(files).open().attach_seq == 5
    remaining = files.list_dir(DELTA_LOG)
    assert not [name for name in remaining if name.endswith(".tmp") or name == "_last_checkpoint"]


# ---- a table that is not what the log says ------------------------------------------------------------------


def lived(files: Files) -> list[FileEntry]:
    """Make three attaches. Returns the live files."""
    catalog = opened(files)
    one, two = put(catalog, files, 5), put(catalog, files, 6)
    return [*two, *put(catalog, files, 9, removed=one)]


def as_the_log_says(files: Files, live: list[FileEntry]) -> Catalog:
    catalog = Catalog(files)
    catalog.bring_up(live, [], 9, 7, NOW_MS)
    return catalog


def test_table_that_agrees_with_the_log_is_not_changed(files: Files) -> None:
    live = lived(files)
    before = {name: bytes(files.map_readonly(f"{DELTA_LOG}/{name}")) for name in files.list_dir(DELTA_LOG)}
    assert as_the_log_says(files, live).version == 3
    assert before == {name: bytes(files.map_readonly(f"{DELTA_LOG}/{name}")) for name in before}


def flipped(files: Files, name: str, old: bytes, new: bytes) -> None:
    data = bytes(files.map_readonly(f"{DELTA_LOG}/{name}"))
    assert old in data
    files.replace(f"{DELTA_LOG}/{name}", data.replace(old, new))


def left_with_a_checkpoint(files: Files) -> None:
    """Leave only a checkpoint. delta-rs opens this table, but cannot commit to it."""
    DeltaTable(Catalog(files).uri).create_checkpoint()
    files.absorb(FOLDER)
    files.remove(f"{DELTA_LOG}/{NEWEST}")


SECOND, NEWEST = f"{2:020d}.json", f"{3:020d}.json"
DAMAGE: dict[str, Callable[[Files], None]] = {
    "folder gone": lambda files: [files.remove(f"{DELTA_LOG}/{name}") for name in files.list_dir(DELTA_LOG)],
    "an older entry is rot": lambda files: files.replace(f"{DELTA_LOG}/{SECOND}", b"rot"),
    "an older entry is gone": lambda files: files.remove(f"{DELTA_LOG}/{SECOND}"),
    "the newest entry is gone": lambda files: files.remove(f"{DELTA_LOG}/{NEWEST}"),
    "only a checkpoint is left of the newest": left_with_a_checkpoint,
    "another instant": lambda files: flipped(files, SECOND, b'\\"due_ms\\": 17', b'\\"due_ms\\": 16'),
    "another count": lambda files: flipped(files, NEWEST, b'\\"numRecords\\": 1', b'\\"numRecords\\": 7'),
    "no count of nulls": lambda files: flipped(files, NEWEST, b"nullCount", b"nullCounu"),
    "another name": lambda files: flipped(files, NEWEST, b'"bucket=', b'"cucket='),
    "another TABLE row": lambda files: flipped(files, NEWEST, b'"version":9', b'"version":8'),
    "other columns": lambda files: flipped(files, f"{0:020d}.json", b"born_ms", b"borm_ms"),
    "no columns": lambda files: flipped(files, f"{0:020d}.json", b"schemaString", b"schemaStrinf"),
    "no text": lambda files: files.replace(f"{DELTA_LOG}/{SECOND}", b"\xff\xfe"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_table_that_differs_from_the_log_is_recreated(
    files: Files, damage: Callable[[Files], None], caplog: pytest.LogCaptureFixture
) -> None:
    """One flipped digit of an entry was two scheduled messages that never came."""
    live = lived(files)
    damage(files)
    catalog = as_the_log_says(files, live)
    assert "table recreated from the log folder=pending/_delta_log" in caplog.text
    for state in (catalog.state(), Catalog(files).open()):
        assert state.attach_seq == 9
        assert {entry.path: entry for entry in state.files} == {entry.path: entry for entry in live}
    assert seqs(as_delta(catalog)) == [6, 9]
    put(catalog, files, 12)
    assert seqs(as_delta(catalog)) == [6, 9, 12]


def test_missing_or_truncated_data_file_is_named_in_the_error(files: Files) -> None:
    live = lived(files)
    name = f"{FOLDER}/{live[0].path}"
    data = bytes(files.map_readonly(name))
    Catalog(files).check_data(live)
    files.replace(name, data[:-1])
    with pytest.raises(Corrupt, match=f"{live[0].path} has {len(data) - 1} bytes"):
        Catalog(files).check_data(live)
    live_files.remove(files, live[0].path)  # both names: from the second one the first is put back
    with pytest.raises(MissingFile, match=f"{live[0].path} is missing"):
        Catalog(files).check_data(live)


# ---- vacuum -------------------------------------------------------------------------------------------------


@pytest.fixture
def on_disk(tmp_path: Path) -> tuple[RealFiles, Catalog]:
    files = RealFiles(tmp_path)
    return files, opened(files)


def age(files: RealFiles, entries: list[FileEntry], hours: int = 48) -> None:
    """Make files look like those of a job that failed long ago. deltalake compares them with the machine's clock."""
    then = time.time() - hours * 3_600
    for entry in entries:
        os.utime(files.root / FOLDER / entry.path, (then, then))


def there(files: Files, entries: list[FileEntry]) -> list[bool]:
    return [files.exists(f"{FOLDER}/{entry.path}") for entry in entries]


def test_vacuum_removes_unnamed_files_without_a_log_entry(on_disk: tuple[RealFiles, Catalog]) -> None:
    files, catalog = on_disk
    one, two = put(catalog, files, 5), put(catalog, files, 6)
    put(catalog, files, 7, removed=one)
    orphan = write(files, table_rows(DUES[:1], first_seq=90))
    fresh_orphan = write(files, table_rows(DUES[:1], first_seq=91))
    age(files, [*one, *two, *orphan])
    before, state = commits(files), catalog.state()
    assert catalog.vacuum(DAY_MS) == 2
    assert there(files, [*one, *orphan]) == [False, False]
    assert there(files, [*two, *fresh_orphan]) == [True, True]  # a job may still be writing, and attach later
    assert (commits(files), catalog.state()) == (before, state)
    assert seqs(as_delta(catalog)) == [6, 7]
    assert catalog.vacuum(DAY_MS) == 0


def test_vacuum_keeps_files_of_versions_within_the_age_limit(on_disk: tuple[RealFiles, Catalog]) -> None:
    files, catalog = on_disk
    one = put(catalog, files, 5)
    change = attachment([], epoch=6, removes=[one[0].path])
    catalog.commit(change, 6, one, int(time.time() * 1_000))
    age(files, one)
    assert catalog.vacuum(DAY_MS) == 0
    assert there(files, one) == [True]


def test_files_removed_in_this_run_are_deleted_after_their_time(on_disk: tuple[RealFiles, Catalog]) -> None:
    files, catalog = on_disk
    one, two = put(catalog, files, 5), put(catalog, files, 6)
    put(catalog, files, 7, removed=one)
    assert catalog.delete_removed_files(NOW_MS) == 0
    assert there(files, [*one, *two]) == [True, True]
    assert catalog.delete_removed_files(NOW_MS + 1) == 1
    assert there(files, [*one, *two]) == [False, True]
    assert catalog.delete_removed_files(NOW_MS + 1) == 0
    assert seqs(as_delta(catalog)) == [6, 7]


# ---- the power goes at every call ---------------------------------------------------------------------------

SEQS = [5, 6, 7, 8]


def life(files: CrashFiles, done: list[tuple[Attachment, int]], log: list[tuple[Attachment, int]]) -> None:
    """Make four attaches, one of which removes a file. `log` gets the TABLE rows, `done` the attaches that returned."""
    catalog = opened(files)
    removed: list[FileEntry] = []
    for seq in SEQS:
        entries = write(files, table_rows([DUES[seq % 3]], first_seq=seq))
        change = attachment(entries, epoch=seq, removes=[entry.path for entry in removed])
        catalog.sync_data(change.files)
        log.append((change, seq))
        catalog.commit(change, seq, removed, NOW_MS)
        done.append((change, seq))
        removed = entries if seq == 6 else []


def brought_up(files: CrashFiles, log: list[tuple[Attachment, int]]) -> tuple[TableState, Catalog]:
    """Open the table as recovery does, and repeat the commits that it lacks."""
    catalog = Catalog(files)
    state = first = catalog.open()
    for change, seq in log:
        if seq > state.attach_seq:
            live = {entry.path: entry for entry in catalog.state().files}
            catalog.commit(change, seq, [live[path] for path in change.removes if path in live], NOW_MS)
    return first, catalog


def wrong_after(
    files: CrashFiles, done: list[tuple[Attachment, int]], log: list[tuple[Attachment, int]]
) -> Iterator[str]:
    state, catalog = brought_up(files, log)
    if done and state.attach_seq < done[-1][1]:
        yield f"attach {done[-1][1]} had returned; the table stands at {state.attach_seq}"
    deleted = {path for change, _ in log for path in change.removes}
    expected = {entry.path for change, _ in log for entry in change.files} - deleted
    result = {entry.path for entry in catalog.state().files}
    if result != expected:
        yield f"files {result ^ expected}"
    elif seqs(as_delta(catalog)) != sorted(
        e.min_seq for change, _ in log for e in change.files if e.path in expected
    ):
        yield "rows are missing"


def faults_of_cut(call: int | None, seeds: range, **control: bool) -> list[str]:
    files = CrashFiles(crash_at=call, **control)
    done: list[tuple[Attachment, int]] = []
    log: list[tuple[Attachment, int]] = []
    try:
        life(files, done, log)
    except PowerCut:
        pass
    result = []
    for seed in seeds:
        image = files.crash(seed, "nothing" if seed == 0 else "random")
        try:
            result += list(wrong_after(image, done, log))
        except (Corrupt, OSError) as error:
            result.append(repr(error))
    return [f"call {call}: {fault}" for fault in result]


def calls_of_a_life() -> int:
    files = CrashFiles()
    life(files, [], [])
    return files.calls


@pytest.mark.parametrize("third", range(3))
def test_commits_survive_a_power_cut_at_every_call(third: int) -> None:
    wrong = [
        fault
        for call in range(1 + third, calls_of_a_life() + 1, 3)
        for fault in faults_of_cut(call, range(2))
    ]
    assert wrong == []


@pytest.mark.parametrize("control", ["forget_sync", "forget_sync_dir"])
def test_a_disk_that_forgets_is_noticed(control: str) -> None:
    assert faults_of_cut(calls_of_a_life() - 1, range(4), **{control: True})
