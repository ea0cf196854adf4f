"""A checksum of a Parquet file's footer, in the file itself.

Parquet has checksums for pages and none for the footer, on which everything depends: one bit of it decides which row
groups are read, hence which promises are seen, and a reader given a wrong one may abort the process instead of
raising. So nobody parses a footer of ours before its seal has been checked. Readers find the footer from the
end of the file and never look between it and the last page, where the seal stands:

        +------- … -------+-----------+----------+-------- … --------+--------+--------+
        | "PAR1", pages   | "TBSEAL1" | crc32c   | footer (thrift)   | length | "PAR1" |
        +------- … -------+-----------+----------+-------- … --------+--------+--------+
                            8 bytes     8 bytes    length bytes        4        4
                                                   `------------ covered by crc32c ----'

Codec only: no I/O here.
"""

from __future__ import annotations

import struct

import google_crc32c
import pyarrow as pa

from timeball.errors import Corrupt

MAGIC = b"TBSEAL1\x00"
SEAL = struct.Struct("<8sQ")
TRAILER = struct.Struct("<I4s")
PARQUET_MAGIC = b"PAR1"


def seal(data: bytes) -> bytes:
    """A finished Parquet file, sealed."""
    length, magic = TRAILER.unpack_from(data, len(data) - TRAILER.size)
    begin = len(data) - TRAILER.size - length
    assert magic == PARQUET_MAGIC and begin > 0, "only a whole Parquet file can be sealed"
    footer = data[begin:]
    return b"".join([data[:begin], SEAL.pack(MAGIC, google_crc32c.value(footer)), footer])


def check(data: pa.Buffer) -> None:
    """Raise Corrupt unless the file has a seal and its footer matches it."""
    if data.size < SEAL.size + TRAILER.size:
        raise Corrupt("it is shorter than a footer")
    length, magic = TRAILER.unpack_from(data, data.size - TRAILER.size)
    begin = data.size - TRAILER.size - length
    if magic != PARQUET_MAGIC or begin < SEAL.size:
        raise Corrupt("its end is not that of a Parquet file")
    ours, crc = SEAL.unpack_from(data, begin - SEAL.size)
    if ours != MAGIC:
        raise Corrupt("its footer has no seal: files of the pending table are written by layout.cut_files")
    if google_crc32c.value(data.slice(begin)) != crc:
        raise Corrupt("its footer does not match its checksum")
