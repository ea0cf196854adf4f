"""gRPC's compressed messages: unpacked whole, into no more bytes than a request may have.

What cannot be unpacked is no fault of ours and none of HTTP/2's: the call ends with a status that says why.
"""

from __future__ import annotations

import zlib

from timeball.protocols.http2.frames import GrpcStatus

# zlib's word for the form: a gzip stream, or its own.
PACKINGS = {"gzip": 31, "deflate": 15}


class Unpackable(Exception):
    """The message cannot be unpacked; the call ends with this status."""

    def __init__(self, status: GrpcStatus, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


def unpack(data: bytes, packing: str, bytes_max: int) -> bytes:
    """Return a message that was compressed as `packing` says; raise Unpackable."""
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
