"""A sorted table from key hash to row, as bytes: what makes one promise among 100 million cost a few binary searches.

    byte  0          8        16         24                24 + 8n           24 + 16n
          +----------+--------+----------+--------- … -----+--------- … -----+
          | "TBKEYS1"| n      | crc32c   | n hashes, sorted| n row numbers   |   little-endian, 8 bytes each
          +----------+--------+----------+--------- … -----+--------- … -----+

Mapped, never loaded: a look-up touches log2(n) pages of the hashes and one of the rows. A sidecar is a cache of
its data file; one that does not match its checksum is built again. Codec only: no I/O here.
"""

from __future__ import annotations

import struct

import google_crc32c
import numpy as np
import pyarrow as pa

from timeball.errors import Corrupt
from timeball.key_hash import UInt64Array
from timeball.message import Int64Array

MAGIC = b"TBKEYS1\x00"
HEADER = struct.Struct("<8sQQ")
assert HEADER.size == 24


class KeySidecar:
    """Sorted (hash, row) pairs, over arrays or over a mapped file."""

    def __init__(self, hashes: UInt64Array, rows: Int64Array) -> None:
        self.hashes, self.rows = hashes, rows

    @classmethod
    def build(cls, hashes: UInt64Array, rows: Int64Array) -> KeySidecar:
        """From unsorted pairs."""
        order = np.argsort(hashes, kind="stable")
        return cls(hashes[order], rows[order])

    @classmethod
    def parse(cls, data: pa.Buffer, *, verify: bool = True) -> KeySidecar:
        """From bytes; raises Corrupt."""
        if data.size < HEADER.size:
            raise Corrupt("key sidecar is shorter than its header")
        magic, count, crc = HEADER.unpack_from(data)
        if magic != MAGIC or data.size != HEADER.size + 16 * count:
            raise Corrupt("not a key sidecar")
        if verify and google_crc32c.value(data.slice(HEADER.size)) != crc:
            raise Corrupt("key sidecar does not match its checksum")
        hashes = np.frombuffer(data, dtype="<u8", count=count, offset=HEADER.size)
        return cls(hashes, np.frombuffer(data, dtype="<i8", count=count, offset=HEADER.size + 8 * count))

    def encode(self) -> bytes:
        """Bytes of the file."""
        payload = self.hashes.astype("<u8").tobytes() + self.rows.astype("<i8").tobytes()
        return HEADER.pack(MAGIC, len(self.hashes), google_crc32c.value(payload)) + payload

    def find(self, hashes: UInt64Array) -> Int64Array:
        """Rows whose key may be one of those hashed, ascending; compare the text before believing it."""
        low = np.searchsorted(self.hashes, hashes, side="left")
        high = np.searchsorted(self.hashes, hashes, side="right")
        hits = [self.rows[begin:end] for begin, end in zip(low, high, strict=True) if end > begin]
        return np.unique(np.concatenate(hits)) if hits else np.empty(0, np.int64)
