"""Rows of the log by sequence number or by range, as column batches. Safe in any thread.

Every frame is checked against its checksum when it is decoded, regardless of how it got into the page cache: a damaged
row is an error (G8), never a message. Some decoded frames are cached, because consumers of a queue and loads of
neighbouring scheduled messages return to the same frames. The bound of the cache is the memory of the frames' objects,
since a frame of one row takes as much as a frame of a thousand.
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

from timeball.log import format as fmt
from timeball.log.frame_scan import NEAR_BYTES, FrameScan
from timeball.log.row_encoder import read_numbered_row, readable
from timeball.log.segment import Segment, Segments
from timeball.model.errors import Corrupt, OutOfRange
from timeball.model.message import LOG_SCHEMA, READ_SCHEMA, Int64Array, ReadRow

# Bounds the heap objects of decoded frames. Their rows are views of the mapping and take no heap.
CACHE_BYTES_MAX = 32 * 1024 * 1024
# Heap of a decoded frame, independent of its rows: the array and buffer objects of every column, all views of the
# mapping. Measured 12.5 kB. A test measures it again.
FRAME_BYTES = 13 * 1024
CACHE_FRAMES_MAX = CACHE_BYTES_MAX // FRAME_BYTES
# Bodies that `read_values` copies at once. The largest frames would give 512 rows 128 MiB.
VALUES_BYTES_MAX = 8 * 1024 * 1024
_BODY = READ_SCHEMA.get_field_index("body")

# Made once, because making it takes as long as reading a few rows.
_NO_ROWS = pa.RecordBatch.from_pylist([], READ_SCHEMA)

T = TypeVar("T")
FrameLocation = tuple[int, int]  # of a frame: ordinal of the segment, position in it


class FrameCache(Generic[T]):
    """A cache of opened frames by location, which drops the least recently used frame first. Safe in any thread.

    Opened frames are views of the mapped segment. When retention removes a segment, its frames are dropped from the
    cache, because they would keep its disk space in use.
    """

    def __init__(self, segments: Segments, frames_max: int) -> None:
        self._frames: OrderedDict[FrameLocation, T] = OrderedDict()
        self._frames_max = frames_max
        self._first_ordinal = 0  # the oldest ordinal that retention has not removed
        self._lock = threading.Lock()
        segments.on_drop.append(self._forget)

    def __len__(self) -> int:
        """The number of cached frames."""
        return len(self._frames)

    def get(self, location: FrameLocation) -> T | None:
        """Get the frame at a location, or None if it is not cached."""
        with self._lock:
            frame = self._frames.get(location)
            if frame is not None:
                self._frames.move_to_end(location)
            return frame

    def keep(self, location: FrameLocation, frame: T) -> None:
        """Cache a frame. Drops the least recently used one when the cache is full."""
        with self._lock:
            if location[0] < self._first_ordinal:  # retention removed it while this thread read it
                return
            self._frames[location] = frame
            if len(self._frames) > self._frames_max:
                self._frames.popitem(last=False)

    def _forget(self, removed: list[Segment]) -> None:
        """Drop the frames of removed segments."""
        ordinals = {segment.ordinal for segment in removed}
        with self._lock:
            self._first_ordinal = max(ordinals) + 1
            for location in [location for location in self._frames if location[0] in ordinals]:
                del self._frames[location]


class LogReader:
    """Reads the durable rows of the log."""

    def __init__(self, segments: Segments) -> None:
        self.segments = segments
        self._cache: FrameCache[tuple[int, pa.RecordBatch]] = FrameCache(segments, CACHE_FRAMES_MAX)
        self._scan: FrameScan | None = None  # of the last segment that was read: the next frame is often near
        segments.on_drop.append(self._forget_scan)

    @property
    def first_seq(self) -> int:
        """The oldest kept sequence number."""
        return self.segments.first_seq

    @property
    def next_seq(self) -> int:
        """The sequence number after the last durable row."""
        return self.segments.next_seq

    def frames(self, from_seq: int, to_seq: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield (first_seq, LOG_SCHEMA rows) of every frame that overlaps [from_seq, to_seq), whole and in order.

        The range may end after the last durable row. Raises OutOfRange if it begins before the first row, and Corrupt.
        """
        # Read once: rows that become durable during the iteration do not belong to this range.
        to_seq = min(to_seq, self.next_seq)
        if from_seq >= to_seq:
            return
        segments, first = self.segments.all, self.segments.find_segment(from_seq)
        for segment in segments:
            if segment.ordinal < first.ordinal:
                continue
            if segment.first_seq >= to_seq:
                return
            yield from self._frames_of(segment, from_seq, to_seq)

    def _frames_of(
        self, segment: Segment, from_seq: int, to_seq: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the frames of one segment that overlap [from_seq, to_seq)."""
        seqs = segment.frame_seqs
        for frame_number in range(max(0, segment.frame_at(from_seq)), len(seqs)):
            if seqs[frame_number] >= to_seq:
                return
            # Not cached: a scan would replace the frames that consumers and loads read again.
            yield self._decode(segment, int(segment.frame_positions[frame_number]), keep=False)

    def rows(
        self, from_seq: int, to_seq: int, kinds: Iterable[int] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield READ_SCHEMA rows of [from_seq, to_seq) of these kinds (None: all), one batch per frame."""
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
        """Yield READ_SCHEMA rows of [from_seq, to_seq), with several small frames combined into one batch.

        Each batch except the last one is made of at least `coalesce_rows` rows of the log, before the filters. This
        saves time: a frame may contain only ten rows, and making a batch takes 120 us, three times as long as decoding
        the frame. Raises OutOfRange as `frames` does, and Corrupt.

        `kinds`: select rows of these kinds (None: all). `columns`: return only these columns of READ_SCHEMA, in this
        order. The other columns are not copied. `placed`: True selects rows with a queue position (visible messages,
        and scheduled messages of delay levels), False rows without one, None all.
        """
        kind_filter = None if kinds is None else np.array(sorted(kinds), dtype=np.int8)
        schema = READ_SCHEMA if columns is None else pa.schema([READ_SCHEMA.field(name) for name in columns])
        needed_columns = (
            LOG_SCHEMA.names
            if columns is None
            else [name for name in LOG_SCHEMA.names if name in {*columns, "kind", "queue_offset"}]
        )
        buffered: list[tuple[int, pa.RecordBatch]] = []
        buffered_rows = 0
        for first_seq, rows in self.frames(from_seq, to_seq):
            # `slice` stops at the last row: a frame that reserves numbers has fewer rows than numbers.
            begin = max(0, from_seq - first_seq)
            part = rows.slice(begin, max(0, to_seq - first_seq - begin))
            buffered.append((first_seq + begin, part if columns is None else part.select(needed_columns)))
            buffered_rows += part.num_rows
            if buffered_rows >= coalesce_rows:
                yield from _join_and_filter(buffered, kind_filter, placed, schema)
                buffered, buffered_rows = [], 0
        yield from _join_and_filter(buffered, kind_filter, placed, schema)

    def row_bytes(self, from_seq: int, to_seq: int) -> int:
        """Estimate the average bytes of a row in the frames that overlap [from_seq, to_seq), without opening them.

        0 if there are none. Reserved numbers count as rows.
        """
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

    def read_rows(self, seqs: Int64Array, columns: Sequence[str] | None = None) -> pa.RecordBatch:
        """Read READ_SCHEMA rows with exactly these sequence numbers, in the given order. Raises OutOfRange, Corrupt.

        `columns`: return only these columns besides `seq`, which comes first. The others are not copied.
        """
        if len(seqs) == 0:
            return _NO_ROWS if columns is None else _NO_ROWS.select(["seq", *columns])
        # Sorted, so that each frame is decoded once for all its wanted rows.
        order = np.argsort(seqs, kind="stable")
        sorted_seqs = seqs[order]
        batches = []
        begin = 0
        while begin < len(sorted_seqs):
            # Rows [begin, end) of the sorted numbers are in one frame.
            seq = int(sorted_seqs[begin])
            segment = self.segments.find_segment(seq)
            first_seq, rows = self._decode(segment, segment.frame_position_of(seq), keep=True)
            end = int(np.searchsorted(sorted_seqs, first_seq + rows.num_rows))
            if end == begin:
                raise OutOfRange(f"seq {seq} was set aside for a bulk attach and is not in the log")
            rows = rows if columns is None else rows.select(columns)
            row_indexes = sorted_seqs[begin:end] - first_seq
            # Consecutive rows (none of them twice) are sliced without a copy, while pyarrow's `take` copies every body.
            consecutive = len(row_indexes) == row_indexes[-1] - row_indexes[0] + 1 and bool(
                np.all(np.diff(row_indexes))
            )
            picked_rows = (
                rows.slice(int(row_indexes[0]), len(row_indexes))
                if consecutive
                else rows.take(pa.array(row_indexes))
            )
            batches.append(picked_rows)
            begin = end
        rows = batches[0] if len(batches) == 1 else pa.concat_batches(batches)
        schema = READ_SCHEMA
        if columns is not None:
            schema = pa.schema([READ_SCHEMA.field("seq"), *rows.schema])
        result = pa.RecordBatch.from_arrays([pa.array(sorted_seqs), *rows.columns], schema=schema)
        # Most callers pass sorted numbers. Then the order is right already.
        if np.array_equal(order, np.arange(len(order))):
            return result
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        return result.take(pa.array(inverse))

    def read_values(self, seqs: Sequence[int]) -> list[ReadRow] | None:
        """Read the rows with these ascending sequence numbers, as tuples with a value for each column of READ_SCHEMA.

        None if the rows must be read as columns: if a frame is large (`readable`), or the bodies have more than
        VALUES_BYTES_MAX together. Reserved numbers have no row, and are left out. Raises OutOfRange, Corrupt.
        """
        values: list[ReadRow] = []
        end_seq = body_bytes = 0
        for seq in seqs:
            if seq >= end_seq:
                segment = self.segments.find_segment(seq)
                position = segment.frame_position_of(seq)
                first_seq, (row_count, message) = self.open_frame(segment, position, _readable_rows)
                end_seq = first_seq + row_count
                if message is None:
                    return None
            if seq < end_seq:
                values.append(read_numbered_row(message, seq - first_seq, seq))
                body_bytes += len(values[-1][_BODY] or b"")
                if body_bytes > VALUES_BYTES_MAX:
                    return None
        return values

    def open_frame(
        self, segment: Segment, position: int, decode: Callable[[pa.Buffer, fmt.Frame], T]
    ) -> tuple[int, T]:
        """Decode a frame with `decode`. Returns its first row and the result. Raises Corrupt on a wrong checksum."""
        try:
            frame = self._scan_of(segment).read(position)
            if frame is None:
                raise Corrupt(f"the frame at byte {position} has become blank")
            return frame.first_seq, decode(segment.buffer, frame)
        except Corrupt as error:
            raise Corrupt(f"{segment.name}: {error}; restore this file from a copy") from error

    def _scan_of(self, segment: Segment) -> FrameScan:
        """Get the scan of the last segment that was read, or begin one of this segment."""
        scan = self._scan
        if scan is None or scan.segment is not segment.buffer:
            scan = self._scan = FrameScan(segment.buffer, NEAR_BYTES)
        return scan

    def _forget_scan(self, _removed: list[Segment]) -> None:
        """Drop the mapping, which would keep the disk space of a removed segment."""
        self._scan = None

    def _decode(self, segment: Segment, position: int, *, keep: bool) -> tuple[int, pa.RecordBatch]:
        """Decode the frame at `position`, or get it from the cache. `keep` puts it into the cache."""
        location = segment.ordinal, position
        frame = self._cache.get(location)
        if frame is None:
            frame = self.open_frame(segment, position, fmt.decode_rows)
            if keep:
                self._cache.keep(location, frame)
        return frame


def _readable_rows(segment: pa.Buffer, frame: fmt.Frame) -> tuple[int, bytes | None]:
    """Count the rows of a checked frame, and copy its message if single rows can be read from it."""
    return frame.rows, readable(segment.slice(frame.position + fmt.ALIGN, frame.payload))


def _row_seqs(frames: list[tuple[int, pa.RecordBatch]], row_count: int) -> Int64Array:
    """Compute the sequence number of each row of these (first_seq, rows) frames, `row_count` rows in total."""
    first_seq, (last_seq, last_rows) = frames[0][0], frames[-1]
    # Usually there is no gap: only a frame that reserves numbers has fewer rows than numbers.
    if last_seq + last_rows.num_rows - first_seq == row_count:
        return np.arange(first_seq, first_seq + row_count, dtype=np.int64)
    return np.concatenate([np.arange(first, first + rows.num_rows, dtype=np.int64) for first, rows in frames])


def _join_and_filter(
    frames: list[tuple[int, pa.RecordBatch]],
    kinds: npt.NDArray[np.int8] | None,
    placed: bool | None,
    schema: pa.Schema,
) -> Iterator[pa.RecordBatch]:
    """Join (first_seq, rows) frames into one batch in `schema` and filter it. Yields nothing when no row is left."""
    frames = [(first_seq, rows) for first_seq, rows in frames if rows.num_rows]
    if not frames:
        return
    rows = frames[0][1] if len(frames) == 1 else pa.concat_batches([frame_rows for _, frame_rows in frames])
    seqs = _row_seqs(frames, rows.num_rows)
    columns = {"seq": pa.array(seqs), **dict(zip(rows.schema.names, rows.columns, strict=True))}
    batch = pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)
    keep = None
    # If every row has a queue position, as in a log without scheduled messages, no filter is needed.
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
