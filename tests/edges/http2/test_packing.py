"""Compressed messages: unpacked within their bound, or refused with gRPC's status."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable

import pytest

from timeball.edges.http2.exchange import Unpackable, unpack
from timeball.edges.http2.frames import GrpcStatus

BYTES_MAX = 1_000


@pytest.mark.parametrize(("packing", "pack"), [("gzip", gzip.compress), ("deflate", zlib.compress)])
@pytest.mark.parametrize("size_bytes", [0, 1, BYTES_MAX])
def test_a_message_up_to_the_bound_is_unpacked(
    packing: str, pack: Callable[[bytes], bytes], size_bytes: int
) -> None:
    data = b"x" * size_bytes
    assert unpack(pack(data), packing, BYTES_MAX) == data


@pytest.mark.parametrize(
    ("data", "packing", "status"),
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
def test_any_other_has_a_status(data: bytes, packing: str, status: GrpcStatus) -> None:
    with pytest.raises(Unpackable) as refused:
        unpack(data, packing, BYTES_MAX)
    assert refused.value.status == status
    assert refused.value.text == str(refused.value)
