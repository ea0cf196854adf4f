"""Messages in RocketMQ's stored form, made once and handed to every group that pulls them.

Consumers of a topic mostly read what has just been written, each group the same messages, eight queues side by
side in one stretch of the log. So the log is encoded in stretches of `STRETCH_ROWS` sequence numbers, and a pull is
a few slices of a list. What is missing of a stretch is encoded on the loop when it is short and was
written a moment ago, in the reader thread otherwise: an old stretch may have to come from the disk.

A cache of the log, bounded in bytes; rows that nobody can see have no entry. Where rows are large, a stretch would
be hundreds of megabytes for an answer of four: there only what is asked for is read, and nothing is kept.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from timeball.broker.components import Components, in_thread
from timeball.errors import OutOfRange
from timeball.message import Int64Array, int64
from timeball.protocols.remoting.codec.implementation import PYTHON, Codec
from timeball.protocols.remoting.codec.records import Host

STRETCH_ROWS = 256
CACHE_BYTES_MAX = 64 * 1024 * 1024
RECORD_BYTES = 192  # of a record besides its bytes: the object, its number and its place in a dictionary
ROW_BYTES_MAX = 32 * 1024  # on the average, of stretches that are kept: 8 MiB
FRESH_ROWS = 65_536  # of the log's end: in the page cache, since they were written a moment ago

Key = tuple[Host, int]


@dataclass(slots=True)
class _Stretch:
    """Records of the sequence numbers from `number * STRETCH_ROWS` up to `next_seq`."""

    next_seq: int
    records: dict[int, bytes] = field(default_factory=dict)
    size_bytes: int = 0


class StoredMessages:
    """Encoded stretches of the log. Belongs to the event loop; only `_encode` runs in the reader thread."""

    def __init__(self, parts: Components, codec: Codec = PYTHON) -> None:
        self._parts, self._codec = parts, codec
        self._stretches: OrderedDict[Key, _Stretch] = OrderedDict()
        self._size_bytes = 0

    def get_now(self, seqs: Int64Array, host: Host) -> list[bytes] | None:
        """The records of these rows, if that takes no disk; None otherwise."""
        parts = []
        for number, wanted in _by_stretch(seqs):
            stretch = self._stretches.get((host, number))
            if stretch is None or stretch.next_seq <= wanted[-1]:
                if wanted[0] < self._parts.reader.next_seq - FRESH_ROWS or self._is_large(number, stretch):
                    return None
                stretch = self._extend((host, number), stretch, self._encode(host, number, stretch))
            else:
                self._stretches.move_to_end((host, number))
            parts += _of(stretch, wanted)
        return parts

    async def get(self, seqs: Int64Array, host: Host) -> list[bytes]:
        """The records of these rows."""
        found: list[bytes] = []
        for number, wanted in _by_stretch(seqs):
            key = (host, number)
            stretch = self._stretches.get(key)
            if stretch is None or stretch.next_seq <= wanted[-1]:
                if self._is_large(number, stretch):
                    found += await in_thread(self._parts.reader_thread, self._encode_these, host, wanted)
                    continue
                new = await in_thread(self._parts.reader_thread, self._encode, host, number, stretch)
                # Let go meanwhile? `new` goes on where it ended, and alone would be a stretch with a hole.
                stretch = self._extend(key, self._stretches.get(key, stretch), new)
            found += _of(stretch, wanted)
        return found

    def _missing(self, number: int, known: _Stretch | None) -> tuple[int, int]:
        """The sequence numbers, from and up to, that a stretch lacks."""
        reader = self._parts.reader
        begin = max(number * STRETCH_ROWS, reader.first_seq) if known is None else known.next_seq
        return begin, min((number + 1) * STRETCH_ROWS, reader.next_seq)

    def _is_large(self, number: int, known: _Stretch | None) -> bool:
        return self._parts.reader.row_bytes(*self._missing(number, known)) > ROW_BYTES_MAX

    def _encode_these(self, host: Host, seqs: list[int]) -> list[bytes]:
        """The records of these rows and no others (reader thread)."""
        rows = self._parts.reader.read_rows(np.array(seqs, dtype=np.int64))
        if rows.column("queue_offset").null_count:
            raise OutOfRange("one of these rows is no visible message")
        return self._codec.encode_each(rows, store_host=host)

    def _encode(self, host: Host, number: int, known: _Stretch | None) -> _Stretch:
        """Encode the missing part of a stretch (any thread)."""
        begin, end = self._missing(number, known)
        new = _Stretch(end)
        for rows in self._parts.reader.coalesced(begin, end, None, STRETCH_ROWS, placed=True):
            records = self._codec.encode_each(rows, store_host=host)
            new.records.update(zip(int64(rows.column("seq")).tolist(), records, strict=True))
            new.size_bytes += sum(map(len, records)) + RECORD_BYTES * len(records)
        return new

    def _extend(self, key: Key, known: _Stretch | None, new: _Stretch) -> _Stretch:
        self._size_bytes += new.size_bytes
        if known is not None:
            self._size_bytes += 0 if key in self._stretches else known.size_bytes
            known.records.update(new.records)
            known.next_seq = max(known.next_seq, new.next_seq)
            known.size_bytes += new.size_bytes
            new = known
        self._stretches[key] = new
        self._stretches.move_to_end(key)
        while self._size_bytes > CACHE_BYTES_MAX and len(self._stretches) > 1:
            _, oldest = self._stretches.popitem(last=False)
            self._size_bytes -= oldest.size_bytes
        return new


def _of(stretch: _Stretch, seqs: list[int]) -> list[bytes]:
    try:
        return [stretch.records[seq] for seq in seqs]
    except KeyError as error:
        raise OutOfRange(f"seq {error} is no visible message") from error


def _by_stretch(seqs: Int64Array) -> list[tuple[int, list[int]]]:
    """Sorted sequence numbers by the stretch they are in."""
    sorted_seqs = seqs.tolist()
    found, at = [], 0
    # A pull asks for some 32, of one stretch or two: a few steps here, where each numpy call costs more than all.
    while at < len(sorted_seqs):
        number = sorted_seqs[at] // STRETCH_ROWS
        end = bisect_left(sorted_seqs, (number + 1) * STRETCH_ROWS, at)
        found.append((number, sorted_seqs[at:end]))
        at = end
    return found
