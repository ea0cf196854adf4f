"""Tests of timeball.table.object_store: the local copies of files in an object store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from tests.s3_fixtures import proxy as proxy
from tests.s3_fixtures import server as server
from tests.s3_fixtures import store as store
from tests.s3_server import FaultyStore
from tests.table.small_table import NOW_MS, table_rows, write

from timeball.io.files import RealFiles
from timeball.model.errors import Corrupt, NotFound, Unavailable
from timeball.model.limits import HOUR_MS
from timeball.table.attachment import FileEntry
from timeball.table.data_file import DataFile
from timeball.table.layout import FOLDER
from timeball.table.object_store import FileCache, ObjectStore, RangedFiles

pytestmark = pytest.mark.slow


def put_files(store: ObjectStore, tmp_path: Path, count: int = 3) -> list[FileEntry]:
    """Put files of another writer into the store. Their due times are an hour apart."""
    elsewhere = RealFiles(tmp_path / "elsewhere")
    entries = []
    for hour in range(count):
        [entry] = write(elsewhere, table_rows([NOW_MS + (hour + 1) * HOUR_MS] * 100))
        store.put(f"{FOLDER}/{entry.path}", elsewhere.map_readonly(f"{FOLDER}/{entry.path}"))
        entries.append(entry)
    return entries


def open_cache(store: ObjectStore, tmp_path: Path, size_bytes_max: int = 1 << 30) -> FileCache:
    """Open the cache as a start of the broker does."""
    return FileCache(RealFiles(tmp_path / "data"), store, size_bytes_max)


def test_file_is_fetched_once_and_reused_after_a_restart(
    store: ObjectStore, proxy: FaultyStore, tmp_path: Path
) -> None:
    [entry, *_] = put_files(store, tmp_path)
    cache = open_cache(store, tmp_path)
    cache.check([entry])
    assert not cache.is_local(entry.path)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(cache.fetch, [entry.path] * 8))
    assert (cache.fetched_files, cache.size_bytes) == (1, entry.size_bytes) and cache.is_local(entry.path)
    cache.close()
    (tmp_path / "data" / FOLDER / f"{entry.path}.fetched").write_bytes(b"an incomplete copy")
    proxy.go_away()
    restarted = open_cache(store, tmp_path)
    assert not restarted.is_local(entry.path), "its copy is not checked yet"
    restarted.fetch(entry.path)
    assert restarted.is_local(entry.path) and restarted.fetched_files == 0
    names = [path.name for path in (tmp_path / "data" / FOLDER).glob("bucket=*/*")]
    assert names == [entry.path.rpartition("/")[2]], "the incomplete copy is deleted"
    restarted.close()


def test_pinned_files_stay_and_least_recently_used_are_evicted_first(
    store: ObjectStore, tmp_path: Path
) -> None:
    first, second, third = put_files(store, tmp_path)
    cache = open_cache(store, tmp_path, first.size_bytes + second.size_bytes + 10)
    cache.upload_missing([first, second, third])
    cache.pin([first.path])
    for entry in (first, second, third):
        cache.map_readonly(f"{FOLDER}/{entry.path}")
    assert [cache.is_local(entry.path) for entry in (first, second, third)] == [True, False, True]
    cache.pin([])
    cache.fetch(third.path)
    cache.fetch(second.path)
    assert [cache.is_local(entry.path) for entry in (first, second, third)] == [False, True, True]
    cache.close()


def test_a_file_that_differs_from_its_entry_is_damaged_or_missing_is_refused(
    store: ObjectStore, tmp_path: Path
) -> None:
    [entry, *_] = put_files(store, tmp_path)
    cache = open_cache(store, tmp_path)
    with pytest.raises(Corrupt, match="rows 100, its attach says 99"):
        cache.check([msgspec.structs.replace(entry, rows=99)])
    name = f"{FOLDER}/{entry.path}"
    data = bytearray(store.map_readonly(name))
    data[len(data) // 3] ^= 1
    store.put(name, pa.py_buffer(bytes(data)))
    with pytest.raises(Corrupt, match="restore this file"):
        cache.fetch(entry.path)
    store.remove(name)
    for read in (lambda: cache.check([entry]), lambda: cache.fetch(entry.path)):
        with pytest.raises(NotFound):
            read()
    with pytest.raises(Corrupt, match="is missing"):
        cache.upload_missing([entry])
    assert not cache.is_local(entry.path) and cache.size_bytes == 0
    cache.close()


def test_large_file_is_read_by_ranges_until_it_is_local(
    store: ObjectStore, proxy: FaultyStore, tmp_path: Path
) -> None:
    elsewhere = RealFiles(tmp_path / "elsewhere")
    generator = np.random.default_rng(1)
    bodies = [generator.bytes(100) for _ in range(20_000)]
    [entry] = write(elsewhere, table_rows([NOW_MS + HOUR_MS] * 20_000, body=bodies))
    name = f"{FOLDER}/{entry.path}"
    store.put(name, elsewhere.map_readonly(name))
    cache = open_cache(store, tmp_path)
    file = DataFile(RangedFiles(cache, 1), entry)
    proxy.asked.clear()
    assert [row["unique_key"] for row in file.identities_at([7, 19_000])] == ["id8", "id19001"]
    ranges = [byte_range for method, _, byte_range in proxy.asked if method == "GET"]
    assert len(ranges) <= 4 and sum(map(_range_bytes, ranges)) < entry.size_bytes / 20
    proxy.asked.clear()
    assert file.rows_of(np.array([NOW_MS + HOUR_MS]), np.array([8])).num_rows == 1
    assert not cache.is_local(entry.path)
    assert any(method == "GET" for method, _, _ in proxy.asked)
    proxy.go_away()
    with pytest.raises(Unavailable):
        file.identities_at([7])
    proxy.heal()
    cache.fetch(entry.path)
    proxy.go_away()
    assert len(DataFile(RangedFiles(cache, 1), entry).identities_at([7])) == 1
    cache.close()


def _range_bytes(header: str) -> int:
    """Compute the length of the range in a header `Range`."""
    begin, end = header.removeprefix("bytes=").split("-")
    return int(end) - int(begin) + 1


def test_after_a_failed_request_look_ups_fail_without_a_request_until_a_probe_succeeds(
    store: ObjectStore, proxy: FaultyStore, tmp_path: Path
) -> None:
    [entry, *_] = put_files(store, tmp_path)
    cache = FileCache(RealFiles(tmp_path / "data"), store, 1 << 30)
    proxy.go_away()
    for _ in range(2):
        with pytest.raises(Unavailable):
            cache.map_readonly(f"{FOLDER}/{entry.path}")
    assert cache.failures == 1 and cache.problem
    proxy.heal()
    cache.probe()
    cache.map_readonly(f"{FOLDER}/{entry.path}")
    assert not cache.problem
    cache.close()
