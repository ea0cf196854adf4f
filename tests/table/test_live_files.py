"""Tests of the links of live data files: made by an attach, used to restore files, removed with the file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from deltalake import DeltaTable
from tests.crash_files import CrashFiles
from tests.table.small_table import NOW_MS, attachment, table_rows, write

from timeball.io.files import RealFiles
from timeball.model.errors import MissingFile, NotFound
from timeball.model.limits import HOUR_MS
from timeball.table.attachment import FileEntry
from timeball.table.catalog import Catalog
from timeball.table.layout import FOLDER
from timeball.table.live_files import LIVE_FOLDER, LiveFiles, live_name, remove


def write_live_files(folder: Path, count: int = 2) -> tuple[RealFiles, LiveFiles, list[FileEntry]]:
    """Write files with one row each, and make their links."""
    files = RealFiles(folder)
    entries = [
        entry
        for seq in range(1, count + 1)
        for entry in write(files, table_rows([NOW_MS + seq * HOUR_MS], first_seq=seq))
    ]
    data = LiveFiles(files)
    data.link_only({entry.path: entry for entry in entries})
    return files, data, entries


def test_a_missing_file_is_restored_from_its_link(tmp_path: Path) -> None:
    files, data, (one, two) = write_live_files(tmp_path)
    content = files.map_readonly(f"{FOLDER}/{one.path}").to_pybytes()
    for entry in (one, two):
        files.remove(f"{FOLDER}/{entry.path}")
        (tmp_path / FOLDER / entry.path).parent.rmdir()
    assert data.map_readonly(f"{FOLDER}/{one.path}").to_pybytes() == content
    assert data.restore_missing() == []
    assert all(files.exists(f"{FOLDER}/{entry.path}") for entry in (one, two))


def test_lost_file_is_named_in_the_error(tmp_path: Path) -> None:
    files, data, (one, two) = write_live_files(tmp_path)
    remove(files, one.path)
    assert data.restore_missing() == [one]
    with pytest.raises(MissingFile, match=f"{one.path} is missing: put this file back"):
        data.map_readonly(f"{FOLDER}/{one.path}")
    data.link_only({two.path: two})  # it has left the table
    with pytest.raises(NotFound, match="no such file"):
        data.map_readonly(f"{FOLDER}/{one.path}")


def test_a_file_is_not_restored_from_a_link_of_another_size(tmp_path: Path) -> None:
    files, data, (one, _) = write_live_files(tmp_path)
    files.remove(f"{FOLDER}/{one.path}")
    with (tmp_path / live_name(one.path)).open("ab") as file:
        file.write(b"!")
    assert data.restore_missing() == [one]


def test_only_live_files_have_links(tmp_path: Path) -> None:
    """A link that stays would keep the disk space of its file. Links from earlier runs are removed, too."""
    files, data, (_one, two) = write_live_files(tmp_path)
    assert len(files.list_dir(LIVE_FOLDER)) == 2
    data.link_only({two.path: two})
    assert files.list_dir(LIVE_FOLDER) == [live_name(two.path).rpartition("/")[2]]
    remove(files, two.path)
    assert files.list_dir(LIVE_FOLDER) == files.list_dir(f"{FOLDER}/bucket={two.bucket}") == []


def test_other_programs_see_neither_links_nor_rows_twice(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)
    catalog = Catalog(files)
    catalog.open()
    entries = write(files, table_rows([NOW_MS + HOUR_MS], first_seq=1))
    catalog.sync_data(entries)
    catalog.commit(attachment(entries), 1, [], NOW_MS)
    assert len(files.list_dir(LIVE_FOLDER)) == 1
    table = DeltaTable(catalog.uri)
    assert table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=True, full=True) == []
    assert not [name for name in files.list_dir(LIVE_FOLDER) if name.endswith(".parquet")]


def test_without_hard_links_a_missing_file_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse_link(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse_link)
    files, data, (one, _) = write_live_files(tmp_path)
    assert files.list_dir(LIVE_FOLDER) == []
    files.remove(f"{FOLDER}/{one.path}")
    assert data.restore_missing() == [one]
    in_memory = LiveFiles(CrashFiles())  # has no links at all
    in_memory.link_only({one.path: one})
    assert in_memory.restore_missing() == [one]
