"""The run beside a writer's files names them all, and every row by its keys."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from tests.table.small_table import ONE_BUCKET, table_rows

from timeball.model.key_hash import hash_one
from timeball.table import file_keys
from timeball.table.file_keys import KEYS, ROW_BITS, FileKeys, run_path


def gathered() -> FileKeys:
    keys = FileKeys()
    for first_seq, path in ((1, "a"), (3, "b")):
        rows = table_rows(ONE_BUCKET, first_seq=first_seq, keys=["red blue", None])
        keys.add(path, rows.column("unique_key"), rows.column("keys"))
    return keys


def test_every_key_names_its_file_and_row() -> None:
    run = gathered().run()
    assert run.names == ("a", "b") and run.pairs == 8
    for text, places in {"id2": [1], "id3": [1 << ROW_BITS], "blue": [0, 1 << ROW_BITS], "green": []}.items():
        assert run.find_numbers(np.array([hash_one(text)], np.uint64)).tolist() == places


def test_a_file_without_keys_is_spoken_of() -> None:
    keys, none = FileKeys(), pa.chunked_array([pa.nulls(2, pa.string())])
    assert not keys.has_files
    keys.add("a", none, none)
    assert keys.has_files and keys.run().names == ("a",) and keys.run().pairs == 0


def test_chunks_are_one_column() -> None:
    keys = FileKeys()
    ids, none = pa.chunked_array([["x"], ["y", "z"]]), pa.chunked_array([pa.nulls(3, pa.string())])
    keys.add("a", ids, none)
    assert keys.run().find_numbers(np.array([hash_one("z")], np.uint64)).tolist() == [2]


def test_it_is_full_before_it_is_too_much_to_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_keys, "RUN_PAIRS", 8)
    assert gathered().is_full and not FileKeys().is_full


def test_a_path_is_fresh_and_where_readers_of_the_table_do_not_look() -> None:
    assert run_path() != run_path()
    assert run_path().startswith(f"{KEYS}/") and KEYS.startswith("_")
