"""Tests of FileKeys: the key run of data files lists all files, and every row by its keys."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from tests.table.small_table import ONE_BUCKET, table_rows

from timeball.model.key_hash import hash_string
from timeball.table import file_keys
from timeball.table.file_keys import KEYS, ROW_BITS, FileKeys, run_path


def keys_of_two_files() -> FileKeys:
    """Add the files `a` with the rows id1 and id2, and `b` with id3 and id4. The first row of each has two keys."""
    keys = FileKeys()
    for first_seq, path in ((1, "a"), (3, "b")):
        rows = table_rows(ONE_BUCKET, first_seq=first_seq, keys=["red blue", None])
        keys.add(path, rows.column("unique_key"), rows.column("keys"))
    return keys


def test_run_maps_every_key_to_its_file_and_row() -> None:
    run = keys_of_two_files().run()
    assert run.names == ("a", "b") and run.pairs == 8
    row_1_of_a, row_0_of_a, row_0_of_b = 1, 0, 1 << ROW_BITS
    positions = {"id2": [row_1_of_a], "id3": [row_0_of_b], "blue": [row_0_of_a, row_0_of_b], "green": []}
    for key, expected in positions.items():
        assert run.find_numbers(np.array([hash_string(key)], np.uint64)).tolist() == expected


def test_run_lists_a_file_without_keys() -> None:
    keys, nulls = FileKeys(), pa.chunked_array([pa.nulls(2, pa.string())])
    assert not keys.has_files
    keys.add("a", nulls, nulls)
    assert keys.has_files and keys.run().names == ("a",) and keys.run().pairs == 0


def test_rows_are_numbered_across_the_chunks_of_a_column() -> None:
    keys = FileKeys()
    ids, nulls = pa.chunked_array([["x"], ["y", "z"]]), pa.chunked_array([pa.nulls(3, pa.string())])
    keys.add("a", ids, nulls)
    assert keys.run().find_numbers(np.array([hash_string("z")], np.uint64)).tolist() == [2]


def test_a_run_is_full_at_the_limit_of_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_keys, "RUN_PAIRS", 8)
    assert keys_of_two_files().is_full and not FileKeys().is_full


def test_run_path_is_unique_and_hidden_from_readers_of_the_table() -> None:
    assert run_path() != run_path()
    assert run_path().startswith(f"{KEYS}/") and KEYS.startswith("_")
