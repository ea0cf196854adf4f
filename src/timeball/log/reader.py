"""Rows of the log by sequence number or by range, as column batches; safe in any thread.

Every frame is checked against its checksum when it is decoded, however it got into the page cache: a row that
rotted is an error (G8), never a message. Some decoded frames are kept, because consumers of a queue and gathers of
neighbouring promises come back to the same ones; their bound is the memory of their objects, since a frame of one
row costs as much as a frame of a thousand.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball.errors import Corrupt, OutOfRange
from timeball.log import format as fmt
from timeball.log.segment import Segment, Segments
from timeball.message import LOG_SCHEMA, READ_SCHEMA, Int64Array

# Bounds the heap objects of decoded frames. Their rows are views of the mapping and cost no heap.
CACHE_BYTES_MAX = 32 * 1024 * 1024
# What a decoded frame holds, however many its rows: the arrays and buffers of every column, all views of the mapping.
# Measured 12.5 kB; a test weighs it again.
FRAME_BYTES = 13 * 1024
CACHE_FRAMES_MAX = CACHE_BYTES_MAX // FRAME_BYTES

_NO_ROWS = pa.RecordBatch.from_pylist([], READ_SCHEMA)  # made once: it takes as long as to read some

T = TypeVar("T")
Place = tuple[int, int]  # ordinal of the segment, position of the frame in it


class FrameCache(Generic[T]):
    """Opened frames by their place, those used last; safe in any thread.

    What is opened are views of the mapped segment, so those of a segment that retention has removed are forgotten: they
    would keep its disk space used.
    """

    def __init__(self, segments: Segments, frames_max: int) -> None:
        self._frames: OrderedDict[Place, T] = OrderedDict()
        self._frames_max = frames_max
        self._first_ordinal = 0  # of the segments that were not removed
        self._lock = threading.Lock()
        segments.on_drop.append(self._forget)

    def __len__(self) -> int:
        """Number of frames."""
        return len(self._frames)

    def get(self, place: Place) -> T | None:
        """Return the frame at a place, if it is kept."""
        with self._lock:
            found = self._frames.get(place)
            if found is not None:
                self._frames.move_to_end(place)
            return found

    def keep(self, place: Place, frame: T) -> None:
        """Keep a frame, in place of the one that was not used the longest."""
        with self._lock:
            if place[0] < self._first_ordinal:  # removed while another thread read it
                return
            self._frames[place] = frame
            if len(self._frames) > self._frames_max:
                self._frames.popitem(last=False)

    def _forget(self, gone: list[Segment]) -> None:
        """Drop the frames of segments that were removed."""
        ordinals = {segment.ordinal for segment in gone}
        with self._lock:
            self._first_ordinal = max(ordinals) + 1
            for place in [place for place in self._frames if place[0] in ordinals]:
                del self._frames[place]


class LogReader:
    """Reads what the writer has made durable."""

    def __init__(self, segments: Segments) -> None:
        self.segments = segments
        self._cache: FrameCache[tuple[int, pa.RecordBatch]] = FrameCache(segments, CACHE_FRAMES_MAX)

    @property
    def first_seq(self) -> int:
        """Oldest sequence number kept."""
        return self.segments.first_seq

    @property
    def next_seq(self) -> int:
        """Sequence number after the last durable row."""
        return self.segments.next_seq

    def frames(self, from_seq: int, to_seq: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield (first_seq, LOG_SCHEMA rows) of every frame that touches [from_seq, to_seq), whole, in order.

        Raises OutOfRange when the range begins before the log's first row; it may end beyond the last durable one.
        """
        # Read once: rows that become durable while a caller iterates are not part of this range.
        to_seq = min(to_seq, self.next_seq)
        if from_seq >= to_seq:
            return
        segments, first = self.segments.all, self.segments.holding(from_seq)
        for segment in segments:
            if segment.ordinal < first.ordinal:
                continue
            if segment.first_seq >= to_seq:
                return
            yield from self._frames_of(segment, from_seq, to_seq)

    def _frames_of(
        self, segment: Segment, from_seq: int, to_seq: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        seqs = segment.frame_seqs
        for i in range(max(0, segment.frame_at(from_seq)), len(seqs)):
            if seqs[i] >= to_seq:
                return
            # Not kept: a scan would push out the frames that consumers and gathers come back to.
            yield self._decode(segment, int(segment.frame_positions[i]), keep=False)

    def rows(
        self, from_seq: int, to_seq: int, kinds: Iterable[int] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield READ_SCHEMA rows of [from_seq, to_seq), a batch a frame, only of these kinds."""
        return self.coalesced(from_seq, to_seq, kinds, 1)

    def coalesced(
        self,
        from_seq: int,
        to_seq: int,
        kinds: Iterable[int] | None,
        coalesce_rows: int,
        columns: Sequence[str] | None = None,
        placed: bool | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """Yield what `rows` does, in batches made of at least `coalesce_rows` rows of the log (the last one aside).

        A frame may hold ten rows: to decode one costs some 40 us, to make it a batch of its own three times that.
        `columns`: only these of READ_SCHEMA, in this order; the others are not even copied. `placed`: only rows that
        have a place in a queue (visible messages, promises of delay levels), or only those that have none.
        """
        wanted = None if kinds is None else np.array(sorted(kinds), dtype=np.int8)
        schema = READ_SCHEMA if columns is None else pa.schema([READ_SCHEMA.field(name) for name in columns])
        needed = (
            LOG_SCHEMA.names
            if columns is None
            else [n for n in LOG_SCHEMA.names if n in {*columns, "kind", "queue_offset"}]
        )
        held: list[tuple[int, pa.RecordBatch]] = []
        count = 0
        for first_seq, rows in self.frames(from_seq, to_seq):
            # `slice` clips at the rows there are: a frame that sets numbers aside has fewer rows than numbers.
            begin = max(0, from_seq - first_seq)
            part = rows.slice(begin, max(0, to_seq - first_seq - begin))
            held.append((first_seq + begin, part if columns is None else part.select(needed)))
            count += part.num_rows
            if count >= coalesce_rows:
                yield from _joined(held, wanted, placed, schema)
                held, count = [], 0
        yield from _joined(held, wanted, placed, schema)

    def row_bytes(self, from_seq: int, to_seq: int) -> int:
        """Return the average bytes of a row in the frames that touch [from_seq, to_seq), without opening them."""
        rows = size_bytes = 0
        if from_seq >= to_seq:
            return 0
        for segment in reversed(self.segments.all):
            if segment.next_seq <= from_seq:
                break
            if segment.first_seq >= to_seq or not len(segment.frame_seqs):
                continue
            begin, end = max(0, segment.frame_at(from_seq)), segment.frame_at(to_seq - 1) + 1
            is_last = end == len(segment.frame_seqs)
            rows += (segment.next_seq if is_last else int(segment.frame_seqs[end])) - int(
                segment.frame_seqs[begin]
            )
            size_bytes += (segment.end if is_last else int(segment.frame_positions[end])) - int(
                segment.frame_positions[begin]
            )
        return size_bytes // rows if rows else 0

    def read_rows(self, seqs: Int64Array) -> pa.RecordBatch:
        """Return READ_SCHEMA rows with exactly these sequence numbers, in the order given; raises OutOfRange."""
        if len(seqs) == 0:
            return _NO_ROWS
        # Sorted, so that each frame is decoded once, however many of its rows are asked for, in any order.
        order = np.argsort(seqs, kind="stable")
        wanted = seqs[order]
        batches = []
        done = 0
        while done < len(wanted):
            segment = self.segments.holding(int(wanted[done]))
            first_seq, rows = self._decode(segment, segment.frame_position_of(int(wanted[done])), keep=True)
            end = int(np.searchsorted(wanted, first_seq + rows.num_rows))
            if end == done:
                raise OutOfRange(f"seq {wanted[done]} was set aside for a bulk attach and is not in the log")
            picked = wanted[done:end] - first_seq
            # Neighbours are sliced, which copies nothing; pyarrow's `take` copies every body.
            whole = len(picked) == picked[-1] - picked[0] + 1 and bool(np.all(np.diff(picked)))  # none twice
            part = rows.slice(int(picked[0]), len(picked)) if whole else rows.take(pa.array(picked))
            batches.append(part)
            done = end
        rows = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        result = pa.RecordBatch.from_arrays([pa.array(wanted), *rows.columns], schema=READ_SCHEMA)
        # Most callers ask in order; then there is nothing to put back.
        if np.array_equal(order, np.arange(len(order))):
            return result
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return result.take(pa.array(back))

    def open_frame(
        self, segment: Segment, position: int, decode: Callable[[pa.Buffer, fmt.Frame], T]
    ) -> tuple[int, T]:
        """Return a frame's first row and what `decode` makes of it; raises Corrupt when its checksum is wrong."""
        try:
            frame = fmt.read_frame(segment.buffer, position)
            if frame is None:
                raise Corrupt(f"the frame at byte {position} has become blank")
            return frame.first_seq, decode(segment.buffer, frame)
        except Corrupt as error:
            raise Corrupt(f"{segment.name}: {error}; restore this file from a copy") from error

    def _decode(self, segment: Segment, position: int, *, keep: bool) -> tuple[int, pa.RecordBatch]:
        place = segment.ordinal, position
        entry = self._cache.get(place)
        if entry is None:
            entry = self.open_frame(segment, position, fmt.decode_rows)
            if keep:
                self._cache.keep(place, entry)
        return entry


def _numbers(parts: list[tuple[int, pa.RecordBatch]], count: int) -> Int64Array:
    """Return the number of each row of these parts, which hold so many."""
    begin, (last_seq, last) = parts[0][0], parts[-1]
    # Nearly always without a hole: only a frame that sets numbers aside has fewer rows than numbers.
    if last_seq + last.num_rows - begin == count:
        return np.arange(begin, begin + count, dtype=np.int64)
    return np.concatenate([np.arange(first, first + part.num_rows, dtype=np.int64) for first, part in parts])


def _joined(
    parts: list[tuple[int, pa.RecordBatch]],
    kinds: npt.NDArray[np.int8] | None,
    placed: bool | None,
    schema: pa.Schema,
) -> Iterator[pa.RecordBatch]:
    """Yield parts of the log and their first sequence numbers as one batch in `schema`; none when no row is left."""
    parts = [(first_seq, rows) for first_seq, rows in parts if rows.num_rows]
    if not parts:
        return
    rows = parts[0][1] if len(parts) == 1 else pa.concat_batches([part for _, part in parts])
    seq = _numbers(parts, rows.num_rows)
    columns = {"seq": pa.array(seq), **dict(zip(rows.schema.names, rows.columns, strict=True))}
    batch = pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)
    keep = None
    # Where each row has a place, as in a topic that is only written to, there is nothing to filter.
    if placed is not None and (columns["queue_offset"].null_count or not placed):
        keep = columns["queue_offset"].is_valid() if placed else columns["queue_offset"].is_null()
    if kinds is not None:
        mask = np.isin(columns["kind"].to_numpy(), kinds)
        if not mask.all():
            keep = pa.array(mask) if keep is None else pc.and_(keep, pa.array(mask))
    if keep is not None:
        batch = batch.filter(keep)
    if batch.num_rows:
        yield batch
