"""Tests of timeball.table.identities: blocks decode to their rows, by number, and every changed byte is detected."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.table.small_table import NOW_MS, table_rows

from timeball.model.errors import Corrupt
from timeball.table import identities
from timeball.table.identities import ID_COLUMNS, Identities, encode, has_identities

BEFORE = b"pages of a Parquet file"
# Null, short texts, Timeball's ids (32 digits in lower case), RocketMQ's (upper case), and texts that are almost ids.
TEXT = st.one_of(
    [st.none(), st.text(max_size=12)]
    + [
        st.text(digits, min_size=32 - spare, max_size=32 + spare)
        for digits, spare in (
            ("0123456789abcdefgA", 1),
            ("09af", 0),
            ("09AF", 0),
            ("09aF", 0),
            ("AFafgG@`PQ\x10\x19", 0),
        )
    ]
)


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(identities, "BLOCK_ROWS", 4)
        patch.setattr(identities, "_CHUNK_ROWS", 8)
        yield


def open_identities(data: bytes) -> Identities:
    """Open identities that are in a file, after other bytes."""
    whole = BEFORE + data
    return Identities(pa.py_buffer(whole).slice, len(whole))


@given(
    st.lists(st.tuples(st.none() | st.integers(0, 1 << 60), TEXT, TEXT), min_size=1, max_size=14),
    st.lists(st.integers(0, 13), max_size=6),
    st.sampled_from([1, 3, 32]),
)
def test_decoded_identities_equal_the_encoded_rows(
    rows: list[tuple[int | None, str | None, str | None]], indexes: list[int], many_rows: int
) -> None:
    """`many_rows`: from this number of rows of a block on, Arrow decodes the block."""
    numbers, ids, keys = zip(*rows, strict=True)
    table = table_rows([NOW_MS + n for n in range(len(rows))], number=numbers, unique_key=ids, keys=keys)
    result, expected = open_identities(encode(table)), table.select(ID_COLUMNS).to_pylist()
    indexes = [index for index in indexes if index < len(rows)]
    assert result.rows == len(rows)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(identities, "MANY_ROWS", many_rows)
        assert result.rows_at(indexes) == [expected[index] for index in indexes]
    result.check()
    with pytest.raises(Corrupt, match="is needed"):
        result.rows_at([len(rows)])


@pytest.mark.parametrize(
    "digits", ["0123456789abcdef", "ABCDEF0123456789", "ABCDEF012345678a", "0123456789abcdeg", "é" * 8]
)
def test_hexadecimal_ids_of_one_case_are_stored_in_16_bytes(digits: str) -> None:
    """In the column `id16`. All other ids stay texts."""
    ids = [digits[n:] + digits + digits[:n] for n in range(16)]
    sliced = table_rows([NOW_MS] * 16, unique_key=ids).slice(3, 12)
    result = open_identities(encode(sliced))
    assert [row["unique_key"] for row in result.rows_at(range(12))] == ids[3:15]
    id16 = pa.ipc.read_record_batch(result._block(0), identities._BLOCK_SCHEMA).column("id16")
    is_stored_so = digits in ("0123456789abcdef", "ABCDEF0123456789")
    assert id16.null_count == (0 if is_stored_so else len(id16))


def test_columns_are_cast_to_the_types_of_the_table() -> None:
    rows = table_rows([NOW_MS] * 5)
    wider = rows.set_column(2, "topic", rows.column("topic").cast(pa.large_string()))
    assert encode(wider) == encode(rows)


def test_every_flipped_bit_is_noticed() -> None:
    data = encode(table_rows([NOW_MS + n for n in range(9)]))
    magic_begin = len(data) - len(identities.MAGIC)
    for position in range(magic_begin):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(Corrupt):
                open_identities(bytes(damaged)).rows_at(range(9))
    for position in range(magic_begin, len(data)):
        damaged = bytearray(data)
        damaged[position] = ord("?")
        assert not has_identities(pa.py_buffer(bytes(damaged)).slice, len(data))


def test_identities_without_their_first_bytes_are_refused() -> None:
    data = encode(table_rows([NOW_MS + n for n in range(9)]))
    for size in range(identities.TRAILER.size, len(data)):
        with pytest.raises(Corrupt, match="shorter"):
            Identities(pa.py_buffer(data[-size:]).slice, size)
    assert not has_identities(pa.py_buffer(b"").slice, 0)


def test_damaged_block_is_decoded_without_the_checksum(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the flipped bits above: if all checksums are equal, a wrong row is read without an error."""
    monkeypatch.setattr(identities.google_crc32c, "value", lambda data: 0)
    monkeypatch.setattr(identities.google_crc32c, "extend", lambda crc, data: 0)
    data = encode(table_rows([NOW_MS + n for n in range(9)]))
    block_rows_begin = len(data) - identities.TRAILER.size + 16  # the field after block_bytes and rows
    damaged = data[:block_rows_begin] + b"\x03" + data[block_rows_begin + 1 :]
    assert open_identities(damaged).rows_at([3]) != open_identities(data).rows_at([3])
