"""A 64-bit hash of text columns, and key runs, the sorted files that map such hashes to row numbers.

The hash is stored in key runs, so it must be the same on every machine and in every release. No library's hash is used,
because polars and pandas do not promise stability, and there is no vectorised XXH64. The hash is only a filter: a
reader that finds a row by its hash compares the text before it uses the row.

    h = len * K0;  for each 8-byte little-endian word w, the last one zero-padded:  h = mix(h ^ w)
    mix(x): x ^= x >> 32; x *= K1; x ^= x >> 29; x *= K2; x ^= x >> 32      (the finaliser of SplitMix64's family)

A key run is a sorted table from hash to number. With it, finding one scheduled message among a billion reads one or two
blocks per run.

    +---- … ----+- … -+---- … ----+------- … -------+---- … ----+---- … ----+-------+-------------+--------+-----------+
    | block 0   |     | block b-1 | names, as JSON  | b fences  | b crc32c  | pairs | names_bytes | crc32c | "TBKEYS2" |
    +---- … ----+- … -+---- … ----+------- … -------+---- … ----+---- … ----+-------+-------------+--------+-----------+
      hashes, then numbers          padded with        8 bytes     4 bytes    8       8             8        8 bytes
      8 bytes each                  blanks to 8        each        each                 little-endian

A block has BLOCK_PAIRS pairs, and the last block has the rest. A fence is the first hash of a block. With the fences, a
look-up reads only the blocks that may contain its hashes. It verifies the checksum of each block that it reads. The
last checksum covers the bytes between the blocks and itself. The blocks come first, so that a run can be written while
it is merged. Readers map a run into memory instead of loading it. A run is a cache: it is rebuilt if it does not match
its checksums. This module is only a codec and does no I/O.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import google_crc32c
import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball.model.errors import Corrupt
from timeball.model.message import Int64Array

UInt64Array = npt.NDArray[np.uint64]

_HASH_MAX = (1 << 64) - 1
K0, K1, K2 = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xBF58476D1CE4E5B9
_K0, _K1, _K2 = np.uint64(K0), np.uint64(K1), np.uint64(K2)
# Up to this many rows, `hash_text` and `hash_keys` hash text by text, at 3 us each, because numpy's calls take 100 us
# for a column of any length. Look-ups have few texts, and the log's index adds only one row after each cancel.
FEW = 32


def hash_string(text: str) -> int:
    """Hash a single text by the formula of the module docstring."""
    data = text.encode()
    hash_ = len(data) * K0 & _HASH_MAX
    for begin in range(0, len(data), 8):
        x = hash_ ^ int.from_bytes(data[begin : begin + 8], "little")
        x = (x ^ x >> 32) * K1 & _HASH_MAX
        x = (x ^ x >> 29) * K2 & _HASH_MAX
        hash_ = x ^ x >> 32
    return hash_


def hash_text(column: pa.Array) -> UInt64Array:
    """Hash each row of a string column. A null has the hash of the empty string."""
    count = len(column)
    if count <= FEW:
        return np.array([hash_string(text or "") for text in column.to_pylist()], np.uint64)
    column = column.fill_null("") if column.null_count else column
    _, offset_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int32, count=count + 1, offset=column.offset * 4).astype(
        np.int64
    )
    # Eight bytes of padding, so that `words` can read a whole word at the last byte.
    data = np.zeros(int(offsets[-1]) + 8, dtype=np.uint8)
    if offsets[-1]:
        data[:-8] = np.frombuffer(data_buffer, dtype=np.uint8, count=int(offsets[-1]))
    # `words[i]` is the word that begins at byte i: the strides overlap.
    words = np.ndarray(shape=(len(data) - 7,), dtype="<u8", buffer=data, strides=(1,))
    starts, lengths = offsets[:-1], np.diff(offsets)
    return _fold(words, starts, lengths)


def _fold(words: UInt64Array, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> UInt64Array:
    """Hash all texts at once, word by word. `rows` are the texts that are longer than the bytes hashed so far."""
    hashes = lengths.astype(np.uint64) * _K0
    rows = np.arange(len(starts))
    for hashed_bytes in range(0, int(lengths.max(initial=0)), 8):
        rows = rows[lengths[rows] > hashed_bytes]
        left_bytes = lengths[rows] - hashed_bytes
        word = words[starts[rows] + hashed_bytes].astype(np.uint64)
        is_partial = left_bytes < 8
        # A partial word also contains the first bytes of the next text: mask them.
        mask = (np.uint64(1) << (left_bytes[is_partial].astype(np.uint64) * np.uint64(8))) - np.uint64(1)
        word[is_partial] &= mask
        hashes[rows] = _mix(hashes[rows] ^ word)
    return hashes


def _mix(x: UInt64Array) -> UInt64Array:
    """Mix the bits of each number by the formula of the module docstring."""
    x = (x ^ (x >> np.uint64(32))) * _K1
    x = (x ^ (x >> np.uint64(29))) * _K2
    return np.asarray(x ^ (x >> np.uint64(32)), dtype=np.uint64)


def hash_keys(unique_key: pa.Array, keys: pa.Array) -> tuple[UInt64Array, npt.NDArray[np.int64]]:
    """Hash every unique key and every blank-separated key of a batch. Returns (hashes, row numbers), unsorted."""
    if len(keys) <= FEW:
        key_rows = [(key, row) for row, key in enumerate(unique_key.to_pylist()) if key is not None]
        for row, joined_keys in enumerate(keys.to_pylist()):
            key_rows += [(key, row) for key in (joined_keys or "").split(" ") if key]
        hash_list = [hash_string(key) for key, _ in key_rows]
        return np.array(hash_list, np.uint64), np.array([row for _, row in key_rows], np.int64)
    rows = np.flatnonzero(np.asarray(unique_key.is_valid()))
    hashes = hash_text(unique_key)[rows]
    if keys.null_count == len(keys):
        return hashes, rows
    key_lists = pc.split_pattern(keys, " ")
    parent_rows = pc.list_parent_indices(key_lists).to_numpy()
    single_keys = key_lists.flatten()
    is_key = np.asarray(pc.greater(pc.binary_length(single_keys), 0))
    return (
        np.concatenate([hashes, hash_text(single_keys)[is_key]]),
        np.concatenate([rows, parent_rows[is_key].astype(np.int64)]),
    )


# ---- sorted runs ------------------------------------------------------------------------------------------

MAGIC = b"TBKEYS2\x00"
TRAILER = struct.Struct("<QQQ8s")
_COVERED = struct.Struct("<QQ")  # the part of the trailer that its checksum covers
BLOCK_PAIRS = 2_048  # 32 KiB: one disk read, and some microseconds for its checksum
MERGE_PAIRS = 1 << 20  # in memory at once during a merge: some 16 bytes each, four times

Pairs = tuple[UInt64Array, Int64Array]  # hashes, numbers


class KeyRun:
    """A key run: pairs of a hash and a number, sorted by hash, read from a buffer or a mapped file.

    `names` are texts that the writer stored, such as the paths of the files to which the numbers refer.
    """

    def __init__(self, data: pa.Buffer) -> None:
        """Read the trailer, names and fences. Raises Corrupt."""
        if data.size < TRAILER.size:
            raise Corrupt("key run is shorter than its trailer")
        trailer = data.slice(data.size - TRAILER.size)
        self.pairs, names_bytes, crc, magic = TRAILER.unpack(trailer)
        count = -(-self.pairs // BLOCK_PAIRS)
        size_bytes = 16 * self.pairs
        if magic != MAGIC or data.size != size_bytes + names_bytes + 12 * count + TRAILER.size:
            raise Corrupt("not a key run")
        if google_crc32c.value(data.slice(size_bytes, names_bytes + 12 * count + _COVERED.size)) != crc:
            raise Corrupt("key run does not match its checksum")
        self.names: tuple[str, ...] = msgspec.json.decode(
            data.slice(size_bytes, names_bytes), type=tuple[str, ...]
        )
        fences_at = size_bytes + names_bytes
        self._data = data
        self._fences = np.frombuffer(data, dtype="<u8", count=count, offset=fences_at)
        self._checksums = np.frombuffer(data, dtype="<u4", count=count, offset=fences_at + 8 * count)

    @classmethod
    def build(cls, hashes: UInt64Array, numbers: Int64Array, names: Sequence[str] = ()) -> KeyRun:
        """Build a run from unsorted pairs, in memory."""
        order = np.argsort(hashes, kind="stable")
        return cls(pa.py_buffer(b"".join(encode([(hashes[order], numbers[order])], names))))

    @property
    def data(self) -> pa.Buffer:
        """The bytes of the file."""
        return self._data

    def find_numbers(self, hashes: UInt64Array) -> Int64Array:
        """Find the numbers stored under these hashes, in ascending order. The caller must compare the texts.

        Raises Corrupt if a block that may contain a hash does not match its checksum.
        """
        matches, fences = list[Int64Array](), self._fences
        blocks: dict[int, Pairs] = {}
        # A loop over hashes, with methods of the arrays: a look-up has few hashes, and vectorised calls cost three
        # times as much for each array that they make.
        for wanted_hash in hashes:
            # The hash may be in every block that begins with it, and at the end of the block before the first of these.
            first = max(1, int(fences.searchsorted(wanted_hash))) - 1
            for block in range(first, int(fences.searchsorted(wanted_hash, "right"))):
                block_hashes, numbers = blocks.get(block) or blocks.setdefault(block, self._block(block))
                begin = int(block_hashes.searchsorted(wanted_hash))
                end = int(block_hashes.searchsorted(wanted_hash, "right"))
                matches.append(numbers[begin:end])
        if not matches:
            return np.empty(0, np.int64)
        return distinct(np.concatenate(matches))

    def columns(self) -> Pairs:
        """Read all pairs, sorted by hash. Raises Corrupt."""
        return joined([self._block(block) for block in range(len(self._fences))])

    def between(self, low: int, high: int) -> Pairs:
        """Read the pairs with low <= hash < high. Raises Corrupt."""
        begin = max(0, int(np.searchsorted(self._fences, np.uint64(low), side="left")) - 1)
        end = int(np.searchsorted(self._fences, np.uint64(min(high, _HASH_MAX)), side="right"))
        hashes, numbers = joined([self._block(block) for block in range(begin, end)])
        first = int(np.searchsorted(hashes, np.uint64(low), side="left"))
        last = len(hashes) if high > _HASH_MAX else int(np.searchsorted(hashes, np.uint64(high), side="left"))
        return hashes[first:last], numbers[first:last]

    def _block(self, block: int) -> Pairs:
        """Read one block. Raises Corrupt if it does not match its checksum."""
        begin = block * BLOCK_PAIRS
        count = min(BLOCK_PAIRS, self.pairs - begin)
        data = self._data.slice(16 * begin, 16 * count)
        if google_crc32c.value(data) != self._checksums[block]:
            raise Corrupt(f"block {block} of a key run does not match its checksum")
        return np.frombuffer(data, "<u8", count), np.frombuffer(data, "<i8", count, offset=8 * count)


def distinct(numbers: Int64Array) -> Int64Array:
    """Sort numbers and remove duplicates. `np.unique` takes longer for a few, and holds the interpreter for many."""
    ordered = np.sort(numbers)
    is_first = np.ones(len(ordered), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first]


def encode(parts: Iterable[Pairs], names: Sequence[str] = ()) -> Iterator[bytes]:
    """Yield the bytes of a run, piece by piece. The parts are consecutive pieces of the pairs sorted by hash."""
    fences, checksums, pairs = list[int](), list[int](), 0

    def blocks(part: Pairs) -> Iterator[bytes]:
        for begin in range(0, len(part[0]), BLOCK_PAIRS):
            hashes, numbers = (column[begin : begin + BLOCK_PAIRS] for column in part)
            data = hashes.astype("<u8").tobytes() + numbers.astype("<i8").tobytes()
            fences.append(int(hashes[0]))
            checksums.append(google_crc32c.value(data))
            yield data

    unfilled = joined([])  # pairs that do not fill a block yet
    for part in parts:
        hashes, numbers = joined([unfilled, part])
        full_rows = len(hashes) // BLOCK_PAIRS * BLOCK_PAIRS
        yield from blocks((hashes[:full_rows], numbers[:full_rows]))
        unfilled, pairs = (hashes[full_rows:], numbers[full_rows:]), pairs + len(part[0])
    yield from blocks(unfilled)
    names_json = msgspec.json.encode(list(names))
    names_json += b" " * (-len(names_json) % 8)
    tail = names_json + np.array(fences, "<u8").tobytes() + np.array(checksums, "<u4").tobytes()
    crc = google_crc32c.value(tail + _COVERED.pack(pairs, len(names_json)))
    yield tail + TRAILER.pack(pairs, len(names_json), crc, MAGIC)


def merge(runs: Sequence[KeyRun], renumber: Callable[[int, Pairs], Pairs]) -> Iterator[Pairs]:
    """Yield the pairs of all runs sorted by hash, about MERGE_PAIRS at a time. Raises Corrupt.

    `renumber(index of a run, some of its pairs)` returns the pairs to keep, with their new numbers.
    """
    total = sum(run.pairs for run in runs)
    # Hashes are evenly distributed, so equal parts of their range contain about equally many pairs.
    count = max(1, -(-total // MERGE_PAIRS))
    bounds = [(_HASH_MAX + 1) * index // count for index in range(count + 1)]
    for low, high in pairwise(bounds):
        parts = [renumber(index, run.between(low, high)) for index, run in enumerate(runs)]
        hashes, numbers = joined(parts)
        # The stable sort is fast here, because the parts are sorted already.
        order = np.argsort(hashes, kind="stable")
        yield hashes[order], numbers[order]


def joined(parts: Sequence[Pairs]) -> Pairs:
    """Concatenate the hashes of all parts, and their numbers."""
    return (
        np.concatenate([np.empty(0, np.uint64), *(part[0] for part in parts)]),
        np.concatenate([np.empty(0, np.int64), *(part[1] for part in parts)]),
    )
