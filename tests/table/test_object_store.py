"""Tests of timeball.table.object_store: which URIs are accepted, all operations, and a missing or silent store."""

from __future__ import annotations

import pyarrow as pa
import pytest
from tests.bounds import BOUND_S
from tests.s3_fixtures import proxy as proxy
from tests.s3_fixtures import server as server
from tests.s3_fixtures import store as store
from tests.s3_server import BUCKET, FaultyStore

from timeball.model.errors import NotFound, SetupError, Unavailable
from timeball.table.layout import FOLDER
from timeball.table.object_store import ObjectStore

NAME = f"{FOLDER}/bucket=2026-11/file.parquet"


def test_a_uri_outside_object_stores_is_refused() -> None:
    for uri in ("/var/lib/timeball", "file:///var/lib/timeball", "hdfs://name/pending"):
        with pytest.raises(SetupError, match="s3://bucket/path"):
            ObjectStore(uri)


@pytest.mark.slow
def test_files_are_put_read_listed_and_removed(store: ObjectStore) -> None:
    store.check(BOUND_S)
    assert store.uri.startswith("s3://") and store.external(FOLDER) == store.uri
    assert (store.list_dir(FOLDER), store.sizes(), store.exists(NAME)) == ([], {}, False)
    data = b"x" * 100_000 + b"the end"
    store.put(NAME, pa.py_buffer(data))
    assert (store.exists(NAME), store.size(NAME)) == (True, len(data))
    assert store.sizes() == {"bucket=2026-11/file.parquet": len(data)}
    assert store.list_dir(f"{FOLDER}/bucket=2026-11") == ["file.parquet"]
    assert store.map_readonly(NAME).to_pybytes() == data
    assert store.read_range(store.open(NAME), len(data) - 7, 7) == b"the end"
    store.remove(NAME)
    store.remove(NAME)  # a missing file is no error
    assert store.sizes() == {}
    for read in (store.size, store.map_readonly, store.open):
        with pytest.raises(NotFound):
            read(NAME)


@pytest.mark.slow
def test_a_missing_bucket_is_a_setup_error_and_a_silent_store_is_unavailable(
    store: ObjectStore, proxy: FaultyStore
) -> None:
    with pytest.raises(SetupError, match="there is no bucket not-"):
        ObjectStore(f"s3://not-{BUCKET}/pending").check(BOUND_S)
    proxy.go_away()
    for request in (
        lambda: store.check(BOUND_S),
        lambda: store.put(NAME, pa.py_buffer(b"x")),
        lambda: store.remove(NAME),
    ):
        with pytest.raises(Unavailable, match="does not answer"):
            request()
    proxy.heal()
    store.check(BOUND_S)
