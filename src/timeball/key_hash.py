"""A 64-bit hash of text columns, computed on whole columns, the same on every machine and in every release.

The value is stored in key sidecars, so it may never change; that is why it is not a library's hash (polars and
pandas do not promise stability, and no vectorised XXH64 is at hand). It is only a filter: whoever finds a
row by hash compares the text before believing it.

    h = len * K0;  for each 8-byte little-endian word w, the last one zero-padded:  h = mix(h ^ w)
    mix(x): x ^= x >> 32; x *= K1; x ^= x >> 29; x *= K2; x ^= x >> 32      (the finaliser of SplitMix64's family)
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

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
