"""Tests of key runs that are written with data files: they list all files, and every row by its keys."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from tests.table.small_table import ONE_BUCKET, table_rows

from timeball.model.key_hash import hash_string
from timeball.table import file_keys
from timeball.table.file_keys import KEYS, ROW_BITS, FileKeys, run_path


def gathered() -> FileKeys:
    keys = FileKeys()
    for first_seq, path in ((1, "a"), (3, "b")):
        rows = table_rows(ONE_BUCKET, first_seq=first_seq, keys=["red blue", None])
        keys.add(path, rows.column("unique_key"), rows.column("keys"))
    return keys


def test_run_maps_every_key_to_its_file_and_row() -> None:
    run = gathered().run()
    assert run.names == ("a", "b") and run.pairs == 8
    for text, places in {"id2": [1], "id3": [1 << ROW_BITS], "blue": [0, 1 << ROW_BITS], "green": []}.items():
        assert run.find_numbers(np.array([hash_string(text)], np.uint64)).tolist() == places


def test_run_lists_a_file_without_keys() -> None:
    keys, none = FileKeys(), pa.chunked_array([pa.nulls(2, pa.string())])
    assert not keys.has_files
    keys.add("a", none, none)
    assert keys.has_files and keys.run().names == ("a",) and keys.run().pairs == 0


def test_chunks_are_one_column() -> None:
    keys = FileKeys()
    ids, none = pa.chunked_array([["x"], ["y", "z"]]), pa.chunked_array([pa.nulls(3, pa.string())])
    keys.add("a", ids, none)
    assert keys.run().find_numbers(np.array([hash_string("z")], np.uint64)).tolist() == [2]


def test_collector_is_full_at_the_limit_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_keys, "RUN_PAIRS", 8)
    assert gathered().is_full and not FileKeys().is_full


def test_run_path_is_unique_and_hidden_from_readers_of_the_table() -> None:
    assert run_path() != run_path()
    assert run_path().startswith(f"{KEYS}/") and KEYS.startswith("_")
