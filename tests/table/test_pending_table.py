"""Tests of timeball.table.pending_table: a table in the data folder. For one in an object store see test_file_cache."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.s3_fixtures import proxy as proxy
from tests.s3_fixtures import server as server
from tests.s3_fixtures import store as store
from tests.s3_server import FaultyStore
from tests.table.small_table import NOW_MS, attachment, table_rows, write

from timeball.io.files import RealFiles
from timeball.model.errors import SetupError, Unavailable
from timeball.model.limits import DAY_MS, HOUR_MS
from timeball.table.attachment import FileEntry
from timeball.table.catalog import Catalog
from timeball.table.key_index import TableKeys
from timeball.table.layout import FOLDER
from timeball.table.object_store import FileCache, ObjectStore
from timeball.table.pending_table import PendingTable, StoredCatalog, open_table


def test_a_table_in_the_data_folder_has_no_cache_in_its_files_and_status(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)
    catalog = Catalog(files)
    catalog.open()
    table = PendingTable(catalog, TableKeys(files, None, catalog.live_files))
    entries = write(files, table_rows([NOW_MS + HOUR_MS]))
    change = attachment(entries, epoch=1, removes=[])
    catalog.sync_data(change.files)
    catalog.commit(change, 1, [], NOW_MS)
    assert table.data_files is table.whole_files is catalog.live_files
    status = table.status()
    assert (status["uri"], status["version"]) == (catalog.uri, catalog.version)
    assert (status["foreign_commits"], status["lost_files"], status["lost_rows"]) == (0, 0, 0)
    assert "cached_bytes" not in status
    asyncio.run(table.leave_store())


def open_table_in_store(
    store: ObjectStore, tmp_path: Path, *, is_known: bool = False
) -> tuple[StoredCatalog, FileCache]:
    """Open the table in the store. `tmp_path`: the data folder of the broker."""
    catalog, cache = open_table(store.uri, RealFiles(tmp_path), 1 << 30, is_known=is_known)
    assert isinstance(catalog, StoredCatalog) and cache is not None
    return catalog, cache


def write_file(tmp_path: Path, first_seq: int) -> list[FileEntry]:
    """Write a file with three rows to a data folder."""
    return write(RealFiles(tmp_path), table_rows([NOW_MS + HOUR_MS] * 3, first_seq=first_seq))


def test_without_a_uri_the_table_is_in_the_data_folder(tmp_path: Path) -> None:
    catalog, cache = open_table("", RealFiles(tmp_path), 1, is_known=False)
    assert type(catalog) is Catalog and cache is None and catalog.uri == str(tmp_path / FOLDER)


@pytest.mark.slow
def test_each_attach_is_one_version_even_after_a_lost_answer(
    store: ObjectStore, proxy: FaultyStore, tmp_path: Path
) -> None:
    catalog, cache = open_table_in_store(store, tmp_path)
    catalog.bring_up([], [], 0, 1, NOW_MS)
    files = write_file(tmp_path, 1)
    catalog.sync_data(files)
    proxy.break_next("lost_answer", "PUT", "_delta_log")
    for _ in range(3):
        try:
            version = catalog.commit(attachment(files), 5, [], NOW_MS)
            break
        except Unavailable:
            continue
    assert (version, catalog.state().attach_seq, catalog.state().files) == (1, 5, files)
    more = write_file(tmp_path, 4)
    catalog.sync_data(more)
    assert catalog.commit(attachment(more, removes=[files[0].path]), 6, files, NOW_MS) == 2
    assert catalog.delete_removed_files(NOW_MS + 1) == 1
    assert list(store.sizes().keys() & {files[0].path, more[0].path}) == [more[0].path]
    assert catalog.vacuum(DAY_MS) == 0
    # A broker whose log has all files of the table may use it. A log without these files is another broker's.
    reopened, other_cache = open_table_in_store(store, tmp_path / "other")
    reopened.bring_up(more, [], 6, 1, NOW_MS)
    with pytest.raises(SetupError, match="another broker's"):
        reopened.bring_up([], [], 0, 1, NOW_MS)
    for opened_cache in (cache, other_cache):
        opened_cache.close()


@pytest.mark.slow
def test_a_start_with_a_silent_store_does_not_recreate_the_table(
    store: ObjectStore, proxy: FaultyStore, tmp_path: Path
) -> None:
    catalog, cache = open_table_in_store(store, tmp_path)
    files = write_file(tmp_path, 1)
    catalog.sync_data(files)
    catalog.bring_up(files, [(5, attachment(files))], 5, 1, NOW_MS)
    assert catalog.version == 1
    proxy.go_away()
    with pytest.raises(SetupError, match="--table"):
        open_table_in_store(store, tmp_path / "new", is_known=False)
    restarted, restarted_cache = open_table_in_store(store, tmp_path, is_known=True)
    with pytest.raises(Unavailable):
        restarted.bring_up(files, [], 5, 1, NOW_MS)
    proxy.heal()
    restarted.bring_up(files, [], 5, 1, NOW_MS)
    assert restarted.version == 1
    for opened_cache in (cache, restarted_cache):
        opened_cache.close()
