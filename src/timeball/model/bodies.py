"""Bodies that their producers have compressed.

RocketMQ's remoting producers compress a large body (Java's by default above 4 KiB). Bits of `sys_flag` name the
compression. Remoting consumers read these bits and decompress the body themselves. Every other receiver gets the
readable body: HTTP, streams, live tails, push, gRPC, Kafka, and the messages of the Python client. Rows as columns
(Flight, Spark) are as the log has them, because they have the column `sys_flag`.
"""

from __future__ import annotations

import zlib

import pyarrow as pa

from timeball.model import limits

# Bits of RocketMQ's sysFlag: the body is compressed, and how.
COMPRESSED_BIT, COMPRESSION_BITS, COMPRESSION_SHIFT = 1, 0x700, 8
LZ4, ZSTD = 1, 2  # values of the compression bits; 0 and 3 are zlib
# The maximum body of a producer. A body that decompresses to more stays as it is stored.
DECOMPRESSED_BYTES_MAX = limits.BODY_BYTES_MAX
_ZLIB_OR_GZIP = 32 + zlib.MAX_WBITS


def readable_body(body: bytes, sys_flag: int | None) -> bytes:
    """Return the body as its sender wrote it: decompressed, if `sys_flag` says that it is compressed.

    A body that does not decompress, or to too much, is returned as it is.
    """
    # None and 0 are the usual values, and this runs for every message.
    if not sys_flag or not sys_flag & COMPRESSED_BIT:
        return body
    decompressed = decompressed_body(body, sys_flag)
    return body if decompressed is None else decompressed


def decompressed_body(body: bytes, sys_flag: int) -> bytes | None:
    """Decompress a body as these bits say. Returns None if that fails or the result is too large."""
    compression = (sys_flag & COMPRESSION_BITS) >> COMPRESSION_SHIFT
    try:
        if compression in (LZ4, ZSTD):
            stream = pa.CompressedInputStream(pa.BufferReader(body), "lz4" if compression == LZ4 else "zstd")
            result: bytes = stream.read(DECOMPRESSED_BYTES_MAX + 1)
            return result if len(result) <= DECOMPRESSED_BYTES_MAX else None
        decompressor = zlib.decompressobj(_ZLIB_OR_GZIP)
        result = decompressor.decompress(body, DECOMPRESSED_BYTES_MAX)
        return result if decompressor.eof else None
    except (zlib.error, pa.ArrowInvalid, OSError):
        return None
