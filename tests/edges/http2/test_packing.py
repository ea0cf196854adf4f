"""Compressed messages are decompressed up to a maximum size, or refused with a gRPC status."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import pytest

from timeball.edges.http2.exchange import DecompressionError, decompress
from timeball.edges.http2.frames import GrpcStatus

BYTES_MAX = 1_000


@pytest.mark.parametrize(("encoding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
@pytest.mark.parametrize("size_bytes", [0, 1, BYTES_MAX])
def test_a_message_up_to_the_maximum_is_decompressed(
    encoding: str, compress: Callable[[bytes], bytes], size_bytes: int
) -> None:
    data = b"x" * size_bytes
    assert decompress(compress(data), encoding, BYTES_MAX) == data


@pytest.mark.parametrize(
    ("data", "encoding", "status"),
    [
        (b"", "identity", GrpcStatus.UNIMPLEMENTED),
        (b"", "snappy", GrpcStatus.UNIMPLEMENTED),
        (b"no gzip", "gzip", GrpcStatus.INTERNAL),
        (
            gzip.compress(b"abc", mtime=0)[:-1],
            "gzip",
            GrpcStatus.INTERNAL,
        ),  # these bytes are part of the test's name
        (zlib.compress(bytes(BYTES_MAX + 1)), "deflate", GrpcStatus.RESOURCE_EXHAUSTED),
    ],
)
def test_an_invalid_or_too_large_message_is_refused_with_a_status(
    data: bytes, encoding: str, status: GrpcStatus
) -> None:
    with pytest.raises(DecompressionError) as refused:
        decompress(data, encoding, BYTES_MAX)
    assert refused.value.status == status
    assert refused.value.text == str(refused.value)
