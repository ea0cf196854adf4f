"""Tests of timeball.table.pending_table: a table in the data folder. For one in an object store see test_file_cache."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.table.small_table import NOW_MS, attachment, table_rows, write

from timeball.io.files import RealFiles
from timeball.model.limits import HOUR_MS
from timeball.table.catalog import Catalog
from timeball.table.key_index import TableKeys
from timeball.table.pending_table import PendingTable


def test_the_files_of_a_table_in_the_data_folder_are_read_without_a_cache(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)
    catalog = Catalog(files)
    catalog.open()
    table = PendingTable(catalog, TableKeys(files, None, catalog.data))
    entries = write(files, table_rows([NOW_MS + HOUR_MS]))
    change = attachment(entries, epoch=1, removes=[])
    catalog.sync_data(change.files)
    catalog.commit(change, 1, [], NOW_MS)
    assert table.data_files is table.whole_files is catalog.data
    status = table.status()
    assert (status["uri"], status["version"]) == (catalog.uri, catalog.version)
    assert (status["foreign_commits"], status["lost_files"], status["lost_rows"]) == (0, 0, 0)
    assert "cached_bytes" not in status
    asyncio.run(table.leave_store())
