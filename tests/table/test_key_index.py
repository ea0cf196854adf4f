"""Tests of the key index: it answers like a scan of all live files, after each change, loss and power cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.crash_files import CrashFiles, PowerCut
from tests.table.small_table import GROUP_ROWS, NOW_MS, ONE_BUCKET, small_groups, table_rows

from timeball.broker.tables.compact import write_files
from timeball.io.files import Files
from timeball.model import key_hash
from timeball.model.errors import Corrupt, NotFound
from timeball.model.key_hash import KeyRun, hash_text
from timeball.table import identities, key_index
from timeball.table.attachment import FileEntry
from timeball.table.data_file import DataFile
from timeball.table.file_keys import FileSet
from timeball.table.identities import ID_COLUMNS
from timeball.table.key_index import TableKeys
from timeball.table.layout import FOLDER, KEYS_FOLDER

WORDS = ["red", "blue", "green", "k" * 40, "é"]
BEGIN_MS = ONE_BUCKET[0]


@contextmanager
def small_limits() -> Iterator[None]:
    """Use blocks of four pairs, merges from three runs on, and few open and mapped files, within the block."""
    with small_groups(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_hash, "BLOCK_PAIRS", 4)
        patch.setattr(key_hash, "MERGE_PAIRS", 8)
        patch.setattr(key_index, "RUNS_MIN", 3)
        patch.setattr(key_index, "OPEN_GROUPS_MAX", 3)
        patch.setattr(key_index, "MAPPED_FILES_MAX", 2)
        yield


def hashes(texts: Sequence[str]) -> np.ndarray:
    return hash_text(pa.array(texts, pa.string()))


@dataclass
class Table:
    """The files of a table, and their rows, by path."""

    files: CrashFiles
    rows: dict[str, pa.Table] = field(default_factory=dict)
    entries: dict[str, FileEntry] = field(default_factory=dict)
    next_seq: int = 1

    @property
    def live(self) -> FileSet:
        return FileSet(self.entries.values())

    def add(self, keys: Sequence[str | None], *, with_run: bool = True) -> None:
        """Write and attach a file, with or without the run that its writer leaves."""
        rows = table_rows([BEGIN_MS + n for n in range(len(keys))], first_seq=self.next_seq, keys=keys)
        before = self.files.list_dir(KEYS_FOLDER)
        [entry] = write_files(self.files, rows, NOW_MS)
        if not with_run:
            for name in set(self.files.list_dir(KEYS_FOLDER)) - set(before):
                self.files.remove(f"{KEYS_FOLDER}/{name}")
        self.entries[entry.path], self.rows[entry.path] = entry, rows
        self.next_seq += len(keys)

    def remove(self, age: int) -> None:
        """Remove a file from the table and from the disk: 0 is the oldest, and numbers wrap around."""
        path = sorted(self.entries, key=lambda path: self.entries[path].min_seq)[age % len(self.entries)]
        del self.entries[path], self.rows[path]
        self.files.remove(f"{FOLDER}/{path}")

    def find_by_scan(self, texts: Sequence[str]) -> list[int]:
        """Find the numbers of the rows with one of these keys by reading all rows."""
        return sorted(
            row["seq"]
            for rows in self.rows.values()
            for row in rows.to_pylist()
            if {row["unique_key"], *(row["keys"] or "").split(" ")} & set(texts)
        )


def find(index: TableKeys, live: FileSet, texts: Sequence[str]) -> list[int]:
    """Find the numbers of the rows with one of these keys by the index."""
    rows = index.find_keys(live, hashes(texts))
    assert all(list(row) == ID_COLUMNS for row in rows)
    # Texts are compared, as a caller does, because different texts may have the same hash.
    return sorted(
        row["seq"] for row in rows if {row["unique_key"], *(row["keys"] or "").split(" ")} & set(texts)
    )


KEYS = st.none() | st.lists(st.sampled_from(WORDS), max_size=2).map(" ".join)
FILES = st.lists(KEYS, min_size=1, max_size=2 * GROUP_ROWS)
STEPS = st.one_of(
    st.tuples(st.just("add"), FILES),
    st.tuples(st.just("add without run"), FILES),
    st.tuples(st.just("remove"), st.integers(0, 9)),
    st.tuples(
        st.sampled_from(["bring up", "merge", "sweep", "start", "lose", "damage"]), st.integers(0, 999)
    ),
)


@settings(max_examples=40)
@given(
    st.lists(STEPS, min_size=1, max_size=14), st.lists(st.sampled_from([*WORDS, "id3", "id9"]), min_size=1)
)
def test_index_answers_like_a_scan_of_all_files(steps: list[tuple[str, object]], keys: list[str]) -> None:
    with small_limits():
        table = Table(CrashFiles())
        index = TableKeys(table.files)
        for step, argument in steps:
            live = run_step(table, index, step, argument)
            index = TableKeys(table.files) if step == "start" else index
            assert find(index, live, keys) == table.find_by_scan(keys), step
            seqs = index.find_seqs(live, np.arange(3, 30, 4)).column("seq").to_pylist()
            all_seqs = [row["seq"] for rows in table.rows.values() for row in rows.to_pylist()]
            assert sorted(seqs) == sorted(set(all_seqs) & set(range(3, 30, 4)))


def run_step(table: Table, index: TableKeys, step: str, argument: object) -> FileSet:
    """Run one of STEPS. Returns the live files afterwards. `argument`: keys of new rows, or a number."""
    if step.startswith("add"):
        assert isinstance(argument, list)
        table.add(argument, with_run=step == "add")
    elif step == "remove" and table.entries:
        assert isinstance(argument, int)
        table.remove(argument)
    live = table.live
    runs = table.files.list_dir(KEYS_FOLDER)
    if step == "bring up":
        index.bring_up(live)
    elif step == "merge":
        index.bring_up(live)
        while index.merge(live):
            pass
    elif step == "sweep":
        index.bring_up(live)
        index.sweep()
        assert len(table.files.list_dir(KEYS_FOLDER)) == index.statistics()["key_runs"]
    elif step in ("lose", "damage") and runs:
        assert isinstance(argument, int)
        name = f"{KEYS_FOLDER}/{runs[argument % len(runs)]}"
        if step == "lose":
            table.files.remove(name)
        elif data := table.files.content(name):
            position = argument % len(data)
            table.files.open(name).write_at(position, bytes([data[position] ^ 1]))
    return live


def test_index_that_skips_a_file_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of `find` and `find_by_scan`. Without `_unlisted`, the index misses a file that no run lists."""
    monkeypatch.setattr(TableKeys, "_unlisted", lambda self, live: {})
    table = Table(CrashFiles())
    table.add(["red"], with_run=False)
    assert find(TableKeys(table.files), table.live, ["red"]) != table.find_by_scan(["red"])


def table_with_files(count: int) -> Table:
    """Make a table with files of three rows. The rows of a file have one key, of WORDS in turn."""
    table = Table(CrashFiles())
    for number in range(count):
        table.add([WORDS[number % len(WORDS)]] * 3)
    return table


def test_merge_reduces_runs_and_drops_pairs_of_removed_files() -> None:
    with small_limits():
        table = table_with_files(9)
        index = TableKeys(table.files)
        index.bring_up(table.live)
        assert index.statistics() == {"key_runs": 9, "key_pairs": 54}
        table.remove(0)
        index.bring_up(table.live)
        assert index.merge(table.live) and not index.merge(table.live)
        assert index.statistics() == {"key_runs": 1, "key_pairs": 48}
        for age in range(5):
            table.remove(age)
        live = table.live
        index.bring_up(live)
        assert index.merge(live), "most files of the run have left the table"
        assert index.statistics() == {"key_runs": 1, "key_pairs": 18}
        assert len(table.files.list_dir(KEYS_FOLDER)) == 1


def test_run_without_live_files_is_removed() -> None:
    table = table_with_files(2)
    index = TableKeys(table.files)
    index.bring_up(table.live)
    table.remove(0)
    index.bring_up(table.live)
    assert index.statistics()["key_runs"] == len(table.files.list_dir(KEYS_FOLDER)) == 1


def test_look_up_reads_only_the_files_that_the_runs_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = table_with_files(5)
    index, live, read_files, opened_files = TableKeys(table.files), table.live, [], []
    index.bring_up(live)
    identities_at, check = DataFile.identities_at, DataFile.check

    def record_read(file: DataFile, *arguments: Any) -> Any:
        read_files.append(file.entry.min_seq)
        return identities_at(file, *arguments)

    def record_open(file: DataFile) -> None:
        opened_files.append(file.entry.min_seq)
        check(file)

    monkeypatch.setattr(DataFile, "identities_at", record_read)
    monkeypatch.setattr(DataFile, "check", record_open)
    assert find(index, live, ["id4"]) == [4]
    assert find(index, live, ["nothing"]) == []
    assert read_files == [4] and opened_files == [], "a look-up by key opens no footer"
    [rows] = index.rows_of(live, np.array([BEGIN_MS]), np.array([4]))
    assert rows.column("seq").to_pylist() == [4] and opened_files == [4]
    index.rows_of(live, np.array([BEGIN_MS]), np.array([4]))
    assert opened_files == [4], "it stays open for the next look-up"


def test_least_recently_used_files_are_closed() -> None:
    with small_limits():
        table = table_with_files(9)
        index, live = TableKeys(table.files), table.live
        for seq in range(1, 28):
            assert index.find_seqs(live, np.array([seq])).num_rows == 1
            assert (
                1 <= index._open_groups == sum(file.group_count() for file in index._open_files.values()) <= 3
            )


def test_mapped_files_are_limited_and_live() -> None:
    with small_limits():
        table = table_with_files(5)
        index = TableKeys(table.files)
        for seq in (1, 4, 7, 4):
            assert find(index, table.live, [f"id{seq}"]) == [seq]
        assert [table.entries[path].min_seq for path in index._mapped] == [4, 7], "the two mapped last"
        deleted = next(iter(index._mapped))
        del table.entries[deleted]
        index.bring_up(table.live)
        assert deleted not in index._mapped and len(index._mapped) == 1
        assert find(index, table.live, ["id4"]) == []


def test_damaged_mapped_file_raises_until_it_is_restored() -> None:
    table = table_with_files(2)
    index, path = TableKeys(table.files), next(iter(table.entries))
    whole = bytes(table.files.map_readonly(f"{FOLDER}/{path}"))
    position = whole.index(identities.MAGIC) - identities.TRAILER.size - 40  # in its last block
    damaged = whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :]
    table.files.replace(f"{FOLDER}/{path}", damaged)
    for _ in range(2):
        with pytest.raises(Corrupt, match=path):
            find(index, table.live, ["id1"])
    table.files.replace(f"{FOLDER}/{path}", whole)
    assert find(index, table.live, ["id1"]) == [1]


def test_damaged_file_without_a_run_raises_and_never_gives_an_empty_result() -> None:
    table = table_with_files(1)
    table.add(["red"], with_run=False)
    path = list(table.entries)[1]
    table.files.replace(f"{FOLDER}/{path}", b"PAR1 and then no Parquet")
    index = TableKeys(table.files)
    # Without a run, the index reads the file itself.
    index.bring_up(table.live)
    for _ in range(2):  # twice: the failure is not cached
        with pytest.raises(Corrupt, match=path):
            index.find_keys(table.live, hashes(["red"]))


def test_look_up_in_deleted_file_raises_not_found() -> None:
    table = table_with_files(1)
    index, live = TableKeys(table.files), table.live
    table.remove(0)
    with pytest.raises(NotFound):
        index.find_keys(live, hashes(["id1"]))


# ---- power cuts ---------------------------------------------------------------------------------------------------


def change_often(files: Files, table: Table) -> None:
    """Attach five files, make runs for all of them, merge the runs, attach three more, and merge again."""
    index = TableKeys(files)
    for number in range(5):
        table.add([WORDS[number % 3]] * 2, with_run=number != 2)
        # An attach makes its files durable before its row. Their keys need not be durable.
        [entry] = list(table.entries.values())[-1:]
        files.sync_file(f"{FOLDER}/{entry.path}")
        files.sync_dir(f"{FOLDER}/{entry.path.rpartition('/')[0]}")
    index.bring_up(table.live)
    index.merge(table.live)
    for _ in range(3):
        table.add(["red"])
    index.bring_up(table.live)
    while index.merge(table.live):
        pass


@pytest.mark.slow
def test_index_answers_like_a_scan_after_a_power_cut_at_every_call() -> None:
    with small_limits():
        uncut = CrashFiles()
        change_often(uncut, Table(uncut))
        for call in range(1, uncut.calls + 1):
            table = Table(CrashFiles(crash_at=call))
            with pytest.raises(PowerCut):
                change_often(table.files, table)
            for seed in range(2):
                disk = table.files.crash(seed)
                # Only complete files can be live, because a row of the log names only complete files.
                entries = {path: entry for path, entry in table.entries.items() if is_complete(disk, entry)}
                remaining = Table(disk, {path: table.rows[path] for path in entries}, entries)
                disk.make_dir(KEYS_FOLDER)
                index = TableKeys(disk)
                assert find(index, remaining.live, WORDS) == remaining.find_by_scan(WORDS), (call, seed)
                assert find(index, remaining.live, ["id3"]) == remaining.find_by_scan(["id3"]), (call, seed)


def is_complete(files: CrashFiles, entry: FileEntry) -> bool:
    """Check whether all rows of a file can be read."""
    try:
        DataFile(files, entry).check()
        DataFile(files, entry).rows_between((0, 0), (1 << 62, 0))
    except (Corrupt, NotFound):
        return False
    return True


def test_runs_left_over_from_a_merge_give_no_row_twice() -> None:
    with small_limits():
        table = table_with_files(4)
        old_runs = {
            name: table.files.content(f"{KEYS_FOLDER}/{name}") for name in table.files.list_dir(KEYS_FOLDER)
        }
        index, live = TableKeys(table.files), table.live
        index.bring_up(live)
        assert index.merge(live)
        for name, data in old_runs.items():
            table.files.replace(f"{KEYS_FOLDER}/{name}", data)
        restarted = TableKeys(table.files)
        restarted.bring_up(live)
        assert restarted.statistics() == {"key_runs": 1, "key_pairs": 24}
        assert find(restarted, live, ["red"]) == table.find_by_scan(["red"])


def test_failed_write_of_a_run_leaves_no_file() -> None:
    files = CrashFiles()

    def pieces() -> Iterator[bytes]:
        yield b"some"
        raise Corrupt("a block of a run that is merged")

    with pytest.raises(Corrupt):
        key_index.write_pieces(files, f"{KEYS_FOLDER}/x.keys", pieces())
    assert files.list_dir(KEYS_FOLDER) == []
    run = KeyRun.build(np.arange(5, dtype=np.uint64), np.arange(5))
    key_index.write_pieces(files, f"{KEYS_FOLDER}/x.keys", [run.data.slice(0, 7), run.data.slice(7)])
    assert files.content(f"{KEYS_FOLDER}/x.keys") == bytes(run.data)
