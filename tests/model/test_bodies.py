"""Bodies that a producer has compressed become readable, and all others stay as they are."""

from __future__ import annotations

import gzip
import zlib

import pyarrow as pa
import pytest

from timeball.model import bodies, limits
from timeball.model.bodies import readable_body

TEXT = b"a line of text\n" * 400


def lz4(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "lz4") as stream:
        stream.write(data)
    return bytes(sink.getvalue().to_pybytes())


# name -> (sys_flag, compressed body)
COMPRESSED = {
    "zlib": (1, zlib.compress(TEXT)),
    "zlib, named": (1 | 3 << 8, zlib.compress(TEXT)),
    "lz4": (1 | 1 << 8, lz4(TEXT)),
    "zstd": (1 | 2 << 8, pa.compress(TEXT, "zstd", asbytes=True)),
    "gzip": (1, gzip.compress(TEXT)),
    "zlib in a transaction": (1 | 8, zlib.compress(TEXT)),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_a_compressed_body_becomes_readable(name: str) -> None:
    sys_flag, compressed = COMPRESSED[name]
    assert readable_body(compressed, sys_flag) == TEXT


@pytest.mark.parametrize("sys_flag", [None, 0, 8, 1 << 8])
def test_a_body_without_the_compressed_bit_is_returned_unchanged(sys_flag: int | None) -> None:
    compressed = zlib.compress(TEXT)
    assert readable_body(compressed, sys_flag) is compressed


@pytest.mark.parametrize("compression", [0, 1, 2, 3])
@pytest.mark.parametrize("body", [b"", b"not packed at all", zlib.compress(TEXT)[:-5]])
def test_a_body_that_does_not_decompress_stays_as_it_is(compression: int, body: bytes) -> None:
    assert readable_body(body, 1 | compression << 8) is body


@pytest.mark.parametrize("compression", [0, 1, 2])
def test_a_body_that_decompresses_to_too_much_stays_as_it_is(compression: int) -> None:
    assert bodies.DECOMPRESSED_BYTES_MAX == limits.BODY_BYTES_MAX
    for size_bytes, is_readable in ((limits.BODY_BYTES_MAX, True), (limits.BODY_BYTES_MAX + 1, False)):
        large = bytes(size_bytes)
        compressed = {0: zlib.compress, 1: lz4, 2: lambda data: pa.compress(data, "zstd", asbytes=True)}[
            compression
        ](large)
        assert (readable_body(compressed, 1 | compression << 8) == large) is is_readable
