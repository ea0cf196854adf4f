"""A 64-bit hash of text columns, computed on whole columns, identical on every machine and in every release.

The hash is stored in key runs, so it may never change. That is why it is not a library's hash: polars and pandas do not
scheduled message stability, and there is no vectorised XXH64. It is only a filter: a reader that finds a row by its
hash compares the text before it uses the row.

    h = len * K0;  for each 8-byte little-endian word w, the last one zero-padded:  h = mix(h ^ w)
    mix(x): x ^= x >> 32; x *= K1; x ^= x >> 29; x *= K2; x ^= x >> 32      (the finaliser of SplitMix64's family)

A key run is a sorted table from hash to number. With it, finding one scheduled message among a billion reads one or two
blocks per run.

    +---- … ----+- … -+---- … ----+------- … -------+---- … ----+---- … ----+-------+-------------+--------+-----------+
    | block 0   |     | block b-1 | names, as JSON  | b fences  | b crc32c  | pairs | names_bytes | crc32c | "TBKEYS2" |
    +---- … ----+- … -+---- … ----+------- … -------+---- … ----+---- … ----+-------+-------------+--------+-----------+
      hashes, then numbers          padded with        8 bytes     4 bytes    8       8             8        8 bytes
      8 bytes each                  blanks to 8        each        each                 little-endian

A block has BLOCK_PAIRS pairs, the last block the rest. A fence is the first hash of a block, so that a look-up reads
only the blocks that may contain its hashes, and compares each with its checksum at the read. The last checksum covers
the bytes between the blocks and itself. The blocks come first, so that a run can be written while it is merged. A run
is mapped, never loaded. It is a cache: a run that does not match its checksums is rebuilt. This module is only a codec
and does no I/O.
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

_TOP = (1 << 64) - 1
K0, K1, K2 = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xBF58476D1CE4E5B9
_K0, _K1, _K2 = np.uint64(K0), np.uint64(K1), np.uint64(K2)
# Up to this many rows, `hash_text` and `hash_keys` hash text by text, at 3 us each: numpy's calls take 100 us for a
# column of any length. Look-ups have so few texts, and so has the log's index, which adds one row after each cancel.
FEW = 32


def hash_one(text: str) -> int:
    """Hash a single text."""
    data = text.encode()
    h = len(data) * K0 & _TOP
    for at in range(0, len(data), 8):
        x = h ^ int.from_bytes(data[at : at + 8], "little")
        x = (x ^ x >> 32) * K1 & _TOP
        x = (x ^ x >> 29) * K2 & _TOP
        h = x ^ x >> 32
    return h


def hash_text(column: pa.Array) -> UInt64Array:
    """Hash each row of a string column. A null has the hash of the empty string."""
    count = len(column)
    if count <= FEW:
        return np.array([hash_one(text or "") for text in column.to_pylist()], np.uint64)
    column = column.fill_null("") if column.null_count else column
    _, offset_buffer, data_buffer = column.buffers()
    offsets = np.frombuffer(offset_buffer, dtype=np.int32, count=count + 1, offset=column.offset * 4).astype(
        np.int64
    )
    # Eight bytes of padding, so that the last word of the last row can be read whole.
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


def hash_keys(unique_key: pa.Array, keys: pa.Array) -> tuple[UInt64Array, npt.NDArray[np.int64]]:
    """Hash every unique key and every blank-separated key of a batch. Returns (hashes, row numbers), unsorted."""
    if len(keys) <= FEW:
        texts = [(key, row) for row, key in enumerate(unique_key.to_pylist()) if key is not None]
        for row, joined_keys in enumerate(keys.to_pylist()):
            texts += [(key, row) for key in (joined_keys or "").split(" ") if key]
        found = [hash_one(text) for text, _ in texts]
        return np.array(found, np.uint64), np.array([row for _, row in texts], np.int64)
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


# ---- sorted runs ------------------------------------------------------------------------------------------

MAGIC = b"TBKEYS2\x00"
TRAILER = struct.Struct("<QQQ8s")
_COVERED = struct.Struct("<QQ")  # the part of the trailer that its checksum covers
BLOCK_PAIRS = 2_048  # 32 KiB: one disk read, and some microseconds for its checksum
MERGE_PAIRS = 1 << 20  # in memory at once during a merge: some 16 bytes each, four times

Pairs = tuple[UInt64Array, Int64Array]  # hashes, numbers


class KeyRun:
    """Pairs of a hash and a number, sorted by hash, read from bytes, which may be a mapped file.

    `names`: texts stored by the writer, such as the paths of the files to which the numbers refer.
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
        self._sums = np.frombuffer(data, dtype="<u4", count=count, offset=fences_at + 8 * count)

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
        """Find the numbers, ascending, of keys that may have one of these hashes. The caller compares the texts.

        Raises Corrupt when a block that may contain one of them does not match its checksum.
        """
        found, fences = set[int](), self._fences
        blocks: dict[int, Pairs] = {}
        # A loop over hashes, with methods of the arrays: a look-up has few hashes, and vectorised calls cost three
        # times as much for each array that they make.
        for wanted in hashes:
            # The hash may be at the end of the block before the first block that begins with it, and in all that begin
            # with it.
            first = max(1, int(fences.searchsorted(wanted))) - 1
            for block in range(first, int(fences.searchsorted(wanted, "right"))):
                inside, numbers = blocks.get(block) or blocks.setdefault(block, self._block(block))
                begin = int(inside.searchsorted(wanted))
                end = int(inside.searchsorted(wanted, "right"))
                found.update(numbers[begin:end].tolist())
        return np.array(sorted(found), np.int64)

    def columns(self) -> Pairs:
        """Read all pairs, sorted by hash. Raises Corrupt."""
        return joined([self._block(block) for block in range(len(self._fences))])

    def between(self, low: int, high: int) -> Pairs:
        """Read the pairs with low <= hash < high. Raises Corrupt."""
        begin = max(0, int(np.searchsorted(self._fences, np.uint64(low), side="left")) - 1)
        end = int(np.searchsorted(self._fences, np.uint64(min(high, _TOP)), side="right"))
        hashes, numbers = joined([self._block(block) for block in range(begin, end)])
        at = int(np.searchsorted(hashes, np.uint64(low), side="left"))
        to = len(hashes) if high > _TOP else int(np.searchsorted(hashes, np.uint64(high), side="left"))
        return hashes[at:to], numbers[at:to]

    def _block(self, block: int) -> Pairs:
        begin = block * BLOCK_PAIRS
        count = min(BLOCK_PAIRS, self.pairs - begin)
        data = self._data.slice(16 * begin, 16 * count)
        if google_crc32c.value(data) != self._sums[block]:
            raise Corrupt(f"block {block} of a key run does not match its checksum")
        return np.frombuffer(data, "<u8", count), np.frombuffer(data, "<i8", count, offset=8 * count)


def encode(parts: Iterable[Pairs], names: Sequence[str] = ()) -> Iterator[bytes]:
    """Yield the bytes of a run, piece by piece, from parts of pairs that are sorted by hash."""
    fences, sums, pairs = list[int](), list[int](), 0

    def blocks(part: Pairs) -> Iterator[bytes]:
        for at in range(0, len(part[0]), BLOCK_PAIRS):
            hashes, numbers = (column[at : at + BLOCK_PAIRS] for column in part)
            data = hashes.astype("<u8").tobytes() + numbers.astype("<i8").tobytes()
            fences.append(int(hashes[0]))
            sums.append(google_crc32c.value(data))
            yield data

    left = joined([])
    for part in parts:
        hashes, numbers = joined([left, part])
        whole = len(hashes) // BLOCK_PAIRS * BLOCK_PAIRS
        yield from blocks((hashes[:whole], numbers[:whole]))
        left, pairs = (hashes[whole:], numbers[whole:]), pairs + len(part[0])
    yield from blocks(left)
    said = msgspec.json.encode(list(names))
    said += b" " * (-len(said) % 8)
    tail = said + np.array(fences, "<u8").tobytes() + np.array(sums, "<u4").tobytes()
    crc = google_crc32c.value(tail + _COVERED.pack(pairs, len(said)))
    yield tail + TRAILER.pack(pairs, len(said), crc, MAGIC)


def merge(runs: Sequence[KeyRun], changed: Callable[[int, Pairs], Pairs]) -> Iterator[Pairs]:
    """Yield the pairs of these runs in one order, some MERGE_PAIRS at a time. Raises Corrupt.

    `changed(index of a run, pairs of it)` returns the pairs to keep, with their new numbers.
    """
    total = sum(run.pairs for run in runs)
    # Hashes are evenly distributed, so equal parts of their range contain about equally many pairs.
    count = max(1, -(-total // MERGE_PAIRS))
    bounds = [(_TOP + 1) * at // count for at in range(count + 1)]
    for low, high in pairwise(bounds):
        parts = [changed(at, run.between(low, high)) for at, run in enumerate(runs)]
        hashes, numbers = joined(parts)
        # The stable sort is fast here, because the parts are sorted already.
        order = np.argsort(hashes, kind="stable")
        yield hashes[order], numbers[order]


def joined(parts: Sequence[Pairs]) -> Pairs:
    """Concatenate these pairs."""
    return (
        np.concatenate([np.empty(0, np.uint64), *(part[0] for part in parts)]),
        np.concatenate([np.empty(0, np.int64), *(part[1] for part in parts)]),
    )
