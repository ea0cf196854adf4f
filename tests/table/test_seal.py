"""A sealed file is a Parquet file like any other, and no bit of its footer may change."""

from __future__ import annotations

import io

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.table.small_table import NOW_MS, table_rows

from timeball.errors import Corrupt
from timeball.table import seal
from timeball.table.layout import encode_file

ROWS = table_rows([NOW_MS, NOW_MS + 1])


def parquet() -> bytes:
    sink = io.BytesIO()
    pq.write_table(ROWS, sink)
    return sink.getvalue()


def footer_begins(data: bytes) -> int:
    return len(data) - 8 - int.from_bytes(data[-8:-4], "little")


def test_readers_do_not_see_the_seal() -> None:
    sealed = seal.seal(parquet())
    assert len(sealed) == len(parquet()) + seal.SEAL.size
    assert pq.read_table(io.BytesIO(sealed)).equals(pq.read_table(io.BytesIO(parquet())))
    seal.check(pa.py_buffer(sealed))


def test_a_file_of_the_table_is_sealed() -> None:
    seal.check(pa.py_buffer(encode_file(ROWS)))


def test_every_bit_of_seal_and_footer_counts() -> None:
    sealed = seal.seal(parquet())
    for at in range(footer_begins(sealed) - seal.SEAL.size, len(sealed)):
        for bit in range(8):
            damaged = bytearray(sealed)
            damaged[at] ^= 1 << bit
            with pytest.raises(Corrupt):
                seal.check(pa.py_buffer(bytes(damaged)))


def test_what_is_short_of_its_end_is_refused() -> None:
    sealed = seal.seal(parquet())
    for size in range(len(sealed)):
        with pytest.raises(Corrupt):
            seal.check(pa.py_buffer(sealed[:size]))


def test_a_file_that_somebody_else_wrote_is_refused() -> None:
    with pytest.raises(Corrupt, match="has no seal"):
        seal.check(pa.py_buffer(parquet()))


def test_only_a_whole_file_is_sealed() -> None:
    with pytest.raises(AssertionError, match="whole Parquet file"):
        seal.seal(parquet()[:-1])
