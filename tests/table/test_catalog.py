"""The Delta log of the pending table: durable commits, torn ones made again, and a table others can read."""

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
from timeball.table import live_files
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
    """Attach a file of one row, numbered as the TABLE row it stands for; all steps, in their order."""
    entries = write(files, table_rows([DUES[seq % 3]], first_seq=seq))
    change = attachment(entries, epoch=seq, removes=[entry.path for entry in removed or []])
    catalog.sync_data(change.files)
    catalog.commit(change, seq, removed or [], NOW_MS)
    return entries


def as_delta(catalog: Catalog) -> DeltaTable:
    """The table as a stranger sees it."""
    return DeltaTable(catalog.uri)


def seqs(table: DeltaTable) -> list[int]:
    return sorted(table.to_pyarrow_table(columns=["seq"]).column("seq").to_pylist())


def commits(files: Files) -> list[str]:
    return [name for name in files.list_dir(DELTA_LOG) if name.endswith(".json")]


@pytest.fixture(params=["real", "in memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Files:
    return RealFiles(tmp_path) if request.param == "real" else CrashFiles()


# ---- attach -------------------------------------------------------------------------------------------------


def test_a_new_table_is_empty_and_opened_again_as_it_was(files: Files) -> None:
    first = Catalog(files).open()
    assert first == Catalog(files).open() == TableState(0, 0, [])
    assert len(commits(files)) == 1


def test_files_join_and_leave(files: Files) -> None:
    catalog = opened(files)
    one, two = put(catalog, files, 5), put(catalog, files, 9)
    three = put(catalog, files, 12, removed=one)
    for state in (catalog.state(), Catalog(files).open()):
        assert (state.version, state.attach_seq) == (3, 12)
        assert len(state.files) == 2
        assert {entry.path: entry for entry in state.files} == {entry.path: entry for entry in [*two, *three]}
    assert catalog.version == 3


def test_an_attach_that_the_table_has_changes_nothing(files: Files) -> None:
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


def test_a_rewrite_is_no_change_of_the_data(files: Files) -> None:
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


def test_a_checkpoint_now_and_then_spares_readers_the_log(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog_module, "CHECKPOINT_EVERY", 3)
    catalog = opened(files)
    for seq in range(1, 8):
        put(catalog, files, seq)
    checkpoints = [name for name in files.list_dir(DELTA_LOG) if name.endswith(".checkpoint.parquet")]
    assert [int(name[:20]) for name in checkpoints] == [3, 6]
    assert seqs(as_delta(catalog)) == list(range(1, 8))


# ---- torn commits -------------------------------------------------------------------------------------------


def test_a_newest_commit_that_is_torn_is_dropped_and_made_again(tmp_path: Path) -> None:
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
        again = Catalog(files).open()
        if again.attach_seq == 6:  # only the last newline was missing
            assert size == -1
            (tmp_path / newest).unlink()
        else:
            assert (again.version, again.attach_seq, len(again.files)) == (1, 5, 1)
    catalog = opened(files)
    assert catalog.commit(attachment(entries), 6, [], NOW_MS) == 2
    assert seqs(as_delta(catalog)) == [5, 6]


def test_zeros_where_a_commit_should_be_are_torn_too(files: Files) -> None:
    """What a file system shows whose size was durable and whose content was not."""
    catalog = opened(files)
    put(catalog, files, 5)
    files.replace(f"{DELTA_LOG}/{1:020d}.json", bytes(700))
    assert Catalog(files).open() == TableState(0, 0, [])


def test_a_table_that_was_being_created_is_created_again(files: Files) -> None:
    opened(files)
    files.replace(f"{DELTA_LOG}/{0:020d}.json", b'{"protocol":{"minReader')
    assert Catalog(files).open() == TableState(0, 0, [])
    assert len(commits(files)) == 1


def test_what_is_left_of_writing_is_swept(files: Files) -> None:
    catalog = opened(files)
    put(catalog, files, 5)
    files.replace(f"{DELTA_LOG}/_commit_1234.json.tmp", b"{")
    files.replace(f"{DELTA_LOG}/_last_checkpoint", b'{"version":1,"si')
    assert Catalog(files).open().attach_seq == 5
    left = files.list_dir(DELTA_LOG)
    assert not [name for name in left if name.endswith(".tmp") or name == "_last_checkpoint"]


# ---- a table that is not what the log says ------------------------------------------------------------------


def lived(files: Files) -> list[FileEntry]:
    """Three attaches; what lives after them."""
    catalog = opened(files)
    one, two = put(catalog, files, 5), put(catalog, files, 6)
    return [*two, *put(catalog, files, 9, removed=one)]


def as_the_log_says(files: Files, live: list[FileEntry]) -> Catalog:
    catalog = Catalog(files)
    catalog.bring_up(live, [], 9, 7, NOW_MS)
    return catalog


def test_a_table_that_is_as_the_log_says_is_left_alone(files: Files) -> None:
    live = lived(files)
    before = {name: bytes(files.map_readonly(f"{DELTA_LOG}/{name}")) for name in files.list_dir(DELTA_LOG)}
    assert as_the_log_says(files, live).version == 3
    assert before == {name: bytes(files.map_readonly(f"{DELTA_LOG}/{name}")) for name in before}


def flipped(files: Files, name: str, old: bytes, new: bytes) -> None:
    data = bytes(files.map_readonly(f"{DELTA_LOG}/{name}"))
    assert old in data
    files.replace(f"{DELTA_LOG}/{name}", data.replace(old, new))


def left_with_a_checkpoint(files: Files) -> None:
    """delta-rs opens such a table, and can commit nothing to it."""
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
def test_a_table_that_differs_from_the_log_is_made_anew(
    files: Files, damage: Callable[[Files], None], caplog: pytest.LogCaptureFixture
) -> None:
    """One flipped digit of an entry was two scheduled messages that never came."""
    live = lived(files)
    damage(files)
    catalog = as_the_log_says(files, live)
    assert "table made anew from the log folder=pending/_delta_log" in caplog.text
    for state in (catalog.state(), Catalog(files).open()):
        assert state.attach_seq == 9
        assert {entry.path: entry for entry in state.files} == {entry.path: entry for entry in live}
    assert seqs(as_delta(catalog)) == [6, 9]
    put(catalog, files, 12)
    assert seqs(as_delta(catalog)) == [6, 9, 12]


def test_a_data_file_that_is_gone_or_cut_is_named(files: Files) -> None:
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
    """As old as files of a job that failed long ago; deltalake looks at the machine's clock, so must we."""
    then = time.time() - hours * 3_600
    for entry in entries:
        os.utime(files.root / FOLDER / entry.path, (then, then))


def there(files: Files, entries: list[FileEntry]) -> list[bool]:
    return [files.exists(f"{FOLDER}/{entry.path}") for entry in entries]


def test_vacuum_removes_what_nobody_names_and_leaves_no_entry(on_disk: tuple[RealFiles, Catalog]) -> None:
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


def test_vacuum_keeps_what_a_reader_of_the_last_hours_may_need(on_disk: tuple[RealFiles, Catalog]) -> None:
    files, catalog = on_disk
    one = put(catalog, files, 5)
    change = attachment([], epoch=6, removes=[one[0].path])
    catalog.commit(change, 6, one, int(time.time() * 1_000))
    age(files, one)
    assert catalog.vacuum(DAY_MS) == 0
    assert there(files, one) == [True]


def test_what_this_life_took_out_goes_when_its_time_is_over(on_disk: tuple[RealFiles, Catalog]) -> None:
    files, catalog = on_disk
    one, two = put(catalog, files, 5), put(catalog, files, 6)
    put(catalog, files, 7, removed=one)
    assert catalog.remove_left(NOW_MS) == 0
    assert there(files, [*one, *two]) == [True, True]
    assert catalog.remove_left(NOW_MS + 1) == 1
    assert there(files, [*one, *two]) == [False, True]
    assert catalog.remove_left(NOW_MS + 1) == 0
    assert seqs(as_delta(catalog)) == [6, 7]


# ---- the power goes at every call ---------------------------------------------------------------------------

SEQS = [5, 6, 7, 8]


def life(files: CrashFiles, done: list[tuple[Attachment, int]], log: list[tuple[Attachment, int]]) -> None:
    """Four attaches, one of which takes a file out; `log` is what the TABLE rows say, `done` what has returned."""
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
    """What recovery does: open, and commit again what the table has not got."""
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
    gone = {path for change, _ in log for path in change.removes}
    wanted = {entry.path for change, _ in log for entry in change.files} - gone
    found = {entry.path for entry in catalog.state().files}
    if found != wanted:
        yield f"files {found ^ wanted}"
    elif seqs(as_delta(catalog)) != sorted(
        e.min_seq for change, _ in log for e in change.files if e.path in wanted
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
    found = []
    for seed in seeds:
        image = files.crash(seed, "nothing" if seed == 0 else "random")
        try:
            found += list(wrong_after(image, done, log))
        except (Corrupt, OSError) as error:
            found.append(repr(error))
    return [f"call {call}: {fault}" for fault in found]


def calls_of_a_life() -> int:
    files = CrashFiles()
    life(files, [], [])
    return files.calls


@pytest.mark.parametrize("third", range(3))
def test_every_commit_survives_the_power(third: int) -> None:
    wrong = [
        fault
        for call in range(1 + third, calls_of_a_life() + 1, 3)
        for fault in faults_of_cut(call, range(2))
    ]
    assert wrong == []


@pytest.mark.parametrize("control", ["forget_sync", "forget_sync_dir"])
def test_a_disk_that_forgets_is_noticed(control: str) -> None:
    assert faults_of_cut(calls_of_a_life() - 1, range(4), **{control: True})
