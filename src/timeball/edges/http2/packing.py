"""Unpack gRPC's compressed messages, each as a whole and within the maximum size of a request.

A message that cannot be unpacked breaks no rule of HTTP/2. Its call ends with a status that contains the reason.
"""

from __future__ import annotations

import zlib

from timeball.edges.http2.frames import GrpcStatus

# The `wbits` argument of zlib: for a gzip stream, and for zlib's own format.
PACKINGS = {"gzip": 31, "deflate": 15}


class Unpackable(Exception):
    """The message cannot be unpacked. The call ends with this status."""

    def __init__(self, status: GrpcStatus, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


def unpack(data: bytes, packing: str, bytes_max: int) -> bytes:
    """Unpack a message that was compressed with `packing`. Raises Unpackable."""
    form = PACKINGS.get(packing)
    if form is None:
        known = ", ".join(PACKINGS)
        raise Unpackable(GrpcStatus.UNIMPLEMENTED, f"grpc-encoding {packing[:40]!r}: {known} or identity")
    unpacking = zlib.decompressobj(form)
    try:
        found = unpacking.decompress(data, bytes_max + 1)
    except zlib.error as error:
        raise Unpackable(
            GrpcStatus.INTERNAL, f"the request is not compressed with {packing}: {error}"
        ) from error
    if len(found) > bytes_max:
        raise Unpackable(GrpcStatus.RESOURCE_EXHAUSTED, f"a request unpacks to more than {bytes_max} bytes")
    if not unpacking.eof:
        raise Unpackable(GrpcStatus.INTERNAL, f"the request ends within its {packing} stream")
    return found
