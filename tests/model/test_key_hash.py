"""The hash of texts, compared with a slow reference, and key runs, in which any damaged byte is noticed."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from timeball.model import key_hash
from timeball.model.errors import Corrupt
from timeball.model.key_hash import MAGIC, TRAILER, KeyRun, encode, hash_keys, hash_string, hash_text, merge

WRAP = (1 << 64) - 1


def slow_hash(text: str) -> int:
    """Compute the hash by the formula of key_hash.py."""
    data = text.encode()
    hash_ = len(data) * 0x9E3779B97F4A7C15 & WRAP
    for begin in range(0, len(data), 8):
        x = hash_ ^ int.from_bytes(data[begin : begin + 8], "little")
        x = (x ^ x >> 32) * 0xD6E8FEB86659FD93 & WRAP
        x = (x ^ x >> 29) * 0xBF58476D1CE4E5B9 & WRAP
        hash_ = x ^ x >> 32
    return hash_


# Key runs hold these numbers: a change of the hash would find nothing in them.
FROZEN = {
    "": 0,
    "a": 0x5D869C772317DC2D,
    "order-1": 0x6802FD3DA1386F3D,
    "7F0000010B2C18B4AAC2345678900000": 0x93C17BAA1526782F,
    "Ζεύς ⚡ 宙斯": 0x4844E752D9C931ED,
}

TEXTS = st.lists(st.none() | st.text(max_size=40), max_size=20)


@pytest.fixture(params=[-1, 20], ids=["columns", "text by text"], autouse=True, scope="module")
def few(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run each test with both ways to hash a column, for columns of any length."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_hash, "FEW", request.param)
        yield


@pytest.mark.parametrize(
    ("text", "expected"), FROZEN.items(), ids=["empty", "letter", "key", "message id", "unicode"]
)
def test_the_hash_of_a_text_never_changes(text: str, expected: int) -> None:
    assert hash_string(text) == expected


@given(st.text(max_size=100))
@example("")
@example("12345678")
@example("1234567")
@example("123456789")
@example("\x00")
@example("\x00" * 16)
@example("é" * 9)
@example("👩‍👩‍👧" * 3)
def test_the_hash_matches_a_slow_reference(text: str) -> None:
    assert hash_string(text) == slow_hash(text)


@given(TEXTS)
def test_each_row_of_a_column_is_hashed_and_null_as_empty(column: list[str | None]) -> None:
    assert hash_text(pa.array(column, pa.string())).tolist() == [slow_hash(text or "") for text in column]


@given(TEXTS, st.integers(0, 20), st.integers(0, 20))
def test_a_slice_is_hashed_without_the_other_rows(column: list[str | None], begin: int, count: int) -> None:
    array = pa.array(column, pa.string()).slice(begin, count)
    assert hash_text(array).tolist() == [slow_hash(text or "") for text in array.to_pylist()]


def test_texts_of_zeros_of_different_lengths_have_different_hashes() -> None:
    zeros = ["\x00" * n for n in range(40)]
    assert len(set(hash_text(pa.array(zeros)).tolist())) == 40


def test_a_hundred_thousand_ids_do_not_collide() -> None:
    ids = pa.array([f"order-{n}" for n in range(100_000)])
    hashes = hash_text(ids)
    assert hashes.dtype == np.uint64
    assert len(np.unique(hashes)) == 100_000
    # And the top bits are used: a sorted table of them is searched evenly.
    assert len(np.unique(hashes >> np.uint64(56))) == 256


# ---- keys of a batch -------------------------------------------------------------------------------------


def slow_keys(unique_key: list[str | None], keys: list[str | None]) -> set[tuple[int, int]]:
    pairs = {(slow_hash(text), row) for row, text in enumerate(unique_key) if text is not None}
    return pairs | {
        (slow_hash(key), row) for row, text in enumerate(keys) for key in (text or "").split(" ") if key
    }


ID_AND_KEYS = st.lists(
    st.tuples(
        st.none() | st.text("ab", max_size=9),
        st.none() | st.text("k z", max_size=12),
    ),
    max_size=12,
)


@given(ID_AND_KEYS, st.integers(0, 6))
def test_every_id_and_every_key_is_found_at_its_row(
    rows: list[tuple[str | None, str | None]], begin: int
) -> None:
    unique_key = pa.array([r[0] for r in rows], pa.string()).slice(begin)
    keys = pa.array([r[1] for r in rows], pa.string()).slice(begin)
    hashes, positions = hash_keys(unique_key, keys)
    assert positions.dtype == np.int64
    pairs = set(zip(hashes.tolist(), positions.tolist(), strict=True))
    assert pairs == slow_keys(unique_key.to_pylist(), keys.to_pylist())


def test_several_blanks_between_keys_make_no_empty_key() -> None:
    hashes, rows = hash_keys(pa.array([None], pa.string()), pa.array(["  a   b "]))
    assert sorted(hashes.tolist()) == sorted([slow_hash("a"), slow_hash("b")])
    assert rows.tolist() == [0, 0]


few_hashes = st.integers(0, 5) | st.integers(0, 2**64 - 1)
pairs = st.lists(st.tuples(few_hashes, st.integers(0, 2**40)), max_size=40)
Items = list[tuple[int, int]]


@contextmanager
def small_blocks() -> Iterator[None]:
    """Use blocks of four pairs, and merges of eight pairs at a time. A fixture would not be reset for each example."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(key_hash, "BLOCK_PAIRS", 4)
        patch.setattr(key_hash, "MERGE_PAIRS", 8)
        yield


def build(items: Items, names: Sequence[str] = ()) -> KeyRun:
    return KeyRun.build(
        np.array([h for h, _ in items], np.uint64), np.array([row for _, row in items], np.int64), names
    )


def parse(data: bytes) -> KeyRun:
    return KeyRun(pa.py_buffer(data))


def items_of(columns: key_hash.Pairs) -> Items:
    return list(zip(columns[0].tolist(), columns[1].tolist(), strict=True))


@given(pairs, st.lists(few_hashes, max_size=5))
def test_find_numbers_finds_the_numbers_of_a_plain_search(items: Items, wanted: list[int]) -> None:
    with small_blocks():
        run = parse(bytes(build(items, ["a file", "é"]).data))
        numbers = run.find_numbers(np.array(wanted, np.uint64))
        assert numbers.tolist() == sorted({row for h, row in items if h in wanted})
        assert sorted(items_of(run.columns())) == sorted(items)
        assert (run.pairs, run.names) == (len(items), ("a file", "é"))


@given(pairs, few_hashes, few_hashes)
def test_between_returns_the_pairs_of_a_filter(items: Items, low: int, high: int) -> None:
    with small_blocks():
        run = build(items)
        for end in (high, 1 << 64):
            inside = sorted(item for item in items if low <= item[0] < end)
            assert sorted(items_of(run.between(low, end))) == inside


@given(st.lists(pairs, max_size=5), st.integers(0, 3))
def test_a_merged_run_has_the_renumbered_pairs_of_all_runs(
    items_of_runs: list[Items], dropped_run: int
) -> None:
    def renumber(index: int, pairs: key_hash.Pairs) -> key_hash.Pairs:
        hashes, numbers = pairs
        return (hashes[:0], numbers[:0]) if index == dropped_run else (hashes, numbers + index)

    with small_blocks():
        merged = parse(b"".join(encode(merge([build(items) for items in items_of_runs], renumber))))
        expected = [
            (hash_, row + index)
            for index, items in enumerate(items_of_runs)
            if index != dropped_run
            for hash_, row in items
        ]
        hashes, _ = columns = merged.columns()
        assert sorted(items_of(columns)) == sorted(expected)
        assert np.all(hashes[1:] >= hashes[:-1])


def test_the_bytes_of_a_run_have_the_documented_format() -> None:
    data = bytes(build([(9, 1), (3, 2)], ["x"]).data)
    assert data[:32] == struct.pack("<QQqq", 3, 9, 2, 1)
    assert data[32:40] == b'["x"]   '
    assert data[40:52] == struct.pack("<QI", 3, google_crc32c.value(data[:32]))
    assert data[52:] == TRAILER.pack(2, 8, google_crc32c.value(data[32:68]), MAGIC)


def test_an_empty_run_finds_nothing() -> None:
    run = parse(bytes(build([]).data))
    assert run.find_numbers(np.array([1], np.uint64)).tolist() == []


def test_every_flipped_bit_is_noticed() -> None:
    with small_blocks():
        data = bytes(build([(h * 77, h) for h in range(8)], ["name"]).data)
        for at in range(len(data)):
            for bit in (1, 128):
                damaged = bytearray(data)
                damaged[at] ^= bit
                with pytest.raises(Corrupt):
                    parse(bytes(damaged)).columns()


def test_a_damaged_block_is_noticed_when_it_is_read_and_not_before() -> None:
    with small_blocks():
        damaged = bytearray(build([(h * 77, h) for h in range(12)]).data)
        damaged[16 * 4] ^= 1
        run = parse(bytes(damaged))
        assert run.find_numbers(np.array([77, 9 * 77], np.uint64)).tolist() == [1, 9]
        with pytest.raises(Corrupt, match="block 1"):
            run.find_numbers(np.array([5 * 77], np.uint64))


def test_every_other_length_is_noticed() -> None:
    data = bytes(build([(1, 1), (2, 2)]).data)
    for length in range(len(data)):
        with pytest.raises(Corrupt):
            parse(data[:length])
    with pytest.raises(Corrupt):
        parse(data + b"\x00")


def test_a_count_beyond_all_memory_is_refused_by_the_size_alone() -> None:
    with pytest.raises(Corrupt):
        parse(TRAILER.pack(2**60, 0, 0, MAGIC))
