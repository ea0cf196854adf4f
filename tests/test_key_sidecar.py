"""The key table as bytes: it comes back, it finds, and a byte that is not its own is noticed."""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.errors import Corrupt
from timeball.key_sidecar import HEADER, MAGIC, KeySidecar

few_hashes = st.integers(0, 5) | st.integers(0, 2**64 - 1)
pairs = st.lists(st.tuples(few_hashes, st.integers(0, 2**40)), max_size=40)


def build(items: list[tuple[int, int]]) -> KeySidecar:
    return KeySidecar.build(
        np.array([h for h, _ in items], np.uint64), np.array([row for _, row in items], np.int64)
    )


def parse(data: bytes) -> KeySidecar:
    return KeySidecar.parse(pa.py_buffer(data))


@given(pairs, st.lists(few_hashes, max_size=5))
def test_it_finds_what_a_plain_search_finds_before_and_after_a_file(
    items: list[tuple[int, int]], wanted: list[int]
) -> None:
    expected = sorted({row for h, row in items if h in wanted})
    sidecar = build(items)
    hashes = np.array(wanted, np.uint64)
    assert sidecar.find(hashes).tolist() == expected
    assert parse(sidecar.encode()).find(hashes).tolist() == expected


def test_the_bytes_are_those_of_the_drawing() -> None:
    data = build([(9, 1), (3, 2)]).encode()
    assert data[:8] == b"TBKEYS1\x00" == MAGIC
    assert struct.unpack_from("<Q", data, 8) == (2,)
    assert data[24:] == struct.pack("<QQqq", 3, 9, 2, 1)


def test_an_empty_one_is_a_file_too() -> None:
    sidecar = parse(build([]).encode())
    assert sidecar.find(np.array([1], np.uint64)).tolist() == []


def test_every_flipped_bit_is_noticed() -> None:
    data = build([(h * 77, h) for h in range(8)]).encode()
    for at in range(len(data)):
        for bit in (1, 128):
            damaged = bytearray(data)
            damaged[at] ^= bit
            with pytest.raises(Corrupt):
                parse(bytes(damaged))


def test_every_other_length_is_noticed() -> None:
    data = build([(1, 1), (2, 2)]).encode()
    for length in range(len(data)):
        with pytest.raises(Corrupt):
            parse(data[:length])
    with pytest.raises(Corrupt):
        parse(data + b"\x00")


def test_a_count_beyond_all_memory_is_refused_by_the_size_alone() -> None:
    with pytest.raises(Corrupt):
        parse(HEADER.pack(MAGIC, 2**60, 0))


def test_who_asks_for_no_check_gets_none() -> None:
    data = bytearray(build([(1, 1)]).encode())
    data[-1] ^= 1
    KeySidecar.parse(pa.py_buffer(bytes(data)), verify=False)
