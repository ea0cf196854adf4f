"""A 64-bit hash of text columns, computed on whole columns, the same on every machine and in every release.

The value is stored in key sidecars, so it may never change; that is why it is not a library's hash (polars and
pandas do not promise stability, and no vectorised XXH64 is at hand). It is only a filter: a reader that finds a
row by hash compares the text before it uses the row.

    h = len * K0;  for each 8-byte little-endian word w, the last one zero-padded:  h = mix(h ^ w)
    mix(x): x ^= x >> 32; x *= K1; x ^= x >> 29; x *= K2; x ^= x >> 32      (the finaliser of SplitMix64's family)

A key sidecar is a sorted table from hash to row: what makes one promise among 100 million cost a few binary searches.

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
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball.errors import Corrupt
from timeball.message import Int64Array

UInt64Array = npt.NDArray[np.uint64]

_K0 = np.uint64(0x9E3779B97F4A7C15)
_K1 = np.uint64(0xD6E8FEB86659FD93)
_K2 = np.uint64(0xBF58476D1CE4E5B9)


def hash_text(column: pa.Array) -> UInt64Array:
    """Hashes of a string column, one a row; the hash of a null is that of the empty string."""
    column = column.fill_null("") if column.null_count else column
    count = len(column)
    if count == 0:
        return np.empty(0, dtype=np.uint64)
    _, offset_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int32, count=count + 1, offset=column.offset * 4).astype(
        np.int64
    )
    # Eight bytes of padding let the last word of the last row be read whole.
    data = np.zeros(int(offsets[-1]) + 8, dtype=np.uint8)
    if offsets[-1]:
        data[:-8] = np.frombuffer(data_buffer, dtype=np.uint8, count=int(offsets[-1]))
    words = np.ndarray(shape=(len(data) - 7,), dtype="<u8", buffer=data, strides=(1,))
    starts, lengths = offsets[:-1], np.diff(offsets)
    return _fold(words, starts, lengths)


def _fold(words: UInt64Array, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> UInt64Array:
    hashes = lengths.astype(np.uint64) * _K0
    rows = np.arange(len(starts))
    for done in range(0, int(lengths.max(initial=0)), 8):
        rows = rows[lengths[rows] > done]
        left = lengths[rows] - done
        word = words[starts[rows] + done].astype(np.uint64)
        short = left < 8
        keep = (np.uint64(1) << (left[short].astype(np.uint64) * np.uint64(8))) - np.uint64(1)
        word[short] &= keep
        hashes[rows] = _mix(hashes[rows] ^ word)
    return hashes


def _mix(x: UInt64Array) -> UInt64Array:
    x = (x ^ (x >> np.uint64(32))) * _K1
    x = (x ^ (x >> np.uint64(29))) * _K2
    return np.asarray(x ^ (x >> np.uint64(32)), dtype=np.uint64)


def hash_one(text: str) -> int:
    """The hash of a single text."""
    return int(hash_text(pa.array([text], pa.string()))[0])


def hash_keys(unique_key: pa.Array, keys: pa.Array) -> tuple[UInt64Array, npt.NDArray[np.int64]]:
    """(hashes, row numbers) of every unique key and every blank-separated key of a batch; unsorted."""
    rows = np.flatnonzero(np.asarray(unique_key.is_valid()))
    hashes = hash_text(unique_key)[rows]
    if keys.null_count == len(keys):
        return hashes, rows
    lists = pc.split_pattern(keys, " ")
    parents = pc.list_parent_indices(lists).to_numpy()
    parts = lists.flatten()
    filled = np.asarray(pc.greater(pc.binary_length(parts), 0))
    return (
        np.concatenate([hashes, hash_text(parts)[filled]]),
        np.concatenate([rows, parents[filled].astype(np.int64)]),
    )


# ---- the sidecar ------------------------------------------------------------------------------------------

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

    def find_rows(self, hashes: UInt64Array) -> Int64Array:
        """Rows whose key may be one of those hashed, ascending; compare the text before believing it."""
        low = np.searchsorted(self.hashes, hashes, side="left")
        high = np.searchsorted(self.hashes, hashes, side="right")
        hits = [self.rows[begin:end] for begin, end in zip(low, high, strict=True) if end > begin]
        return np.unique(np.concatenate(hits)) if hits else np.empty(0, np.int64)
