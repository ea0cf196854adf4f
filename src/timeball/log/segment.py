"""One mapped file of the commit log, and the row of them that is the log.

A segment has its whole length from its beginning and is mapped once, so that reading it is slicing memory. Its room on
the disk is reserved in steps ahead of the frames: reserved whole, a segment of a few frames would take 256 MiB.
It is named by its ordinal and says itself which sequence number it begins with: a spare can be prepared, name and all,
before anyone knows what its first row will be. The spare's header is zero until the log rolls into it.

Frames are known by two parallel arrays a segment. Only the event loop appends to them, after the commit is
durable, and always position before sequence number, so that a reader thread that bisects the sequence
numbers never finds one whose position is missing. Once a segment is sealed, the same numbers come from a mapped
file instead (frame_index.py), so that memory does not grow with the log that is kept.

Retention removes a segment that is older than the retention time and lies wholly below every position that is still
needed (broker/upkeep.py gathers them): the watermark of the pending table, the checkpoint, the oldest open half
message, the oldest row a backlog reads. The newest segment stays, so the log goes on in another one when the first rows
of the newest are half as old as the retention time, however little it holds. A streaming job that lags further behind
than the retention time has lost rows it never saw, and says so (OutOfRange).

Each life of the log's writer has a number, the *epoch*, in the header of its frames. Epochs only grow, so a new one is
found by bisection, from a few headers however long the log is. Between the last frame of one life and the first of the
next no broker ran: a promise that fell due there was late for that reason. A life that wrote nothing leaves no trace,
and needs none.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from timeball.errors import Corrupt, OutOfRange
from timeball.files import File, Files
from timeball.log import format as fmt
from timeball.message import Int64Array
from timeball.wire import Start

FOLDER = "log"
SUFFIX = ".log"
STEP_BYTES = 16 * 1024 * 1024  # room on the disk is reserved by so much; 20 us of the disk thread each time


def segment_name(ordinal: int) -> str:
    """File name of a segment; the ordinal is padded so that names sort."""
    return f"{FOLDER}/{ordinal:010d}{SUFFIX}"


def holds_log(files: Files) -> bool:
    """Return whether the data folder holds a log of ours; other files may be missing."""
    names = [f"{FOLDER}/{name}" for name in files.list_dir(FOLDER) if name.endswith(SUFFIX)]
    return any(bytes(files.map_readonly(name)[:8]) == fmt.SEGMENT_MAGIC for name in names)


class Segment:
    """A segment in use or sealed. `end` is where the next frame goes; `next_seq` what it starts with."""

    def __init__(self, ordinal: int, first_seq: int, buffer: pa.Buffer) -> None:
        self.ordinal = ordinal
        self.first_seq = first_seq
        self.next_seq = first_seq
        self.buffer = buffer
        self.end = fmt.ALIGN
        self.last_append_ms = 0
        self.frame_positions: array[int] | Int64Array = array("q")
        self.frame_seqs: array[int] | Int64Array = array("q")

    @property
    def name(self) -> str:
        """File name, relative to the data folder."""
        return segment_name(self.ordinal)

    def add(self, frame: fmt.Frame) -> None:
        """Add a frame that is durable (or was found by recovery)."""
        # Invariant: frames follow each other without a hole, in bytes and in numbers. Bisection relies on it.
        assert frame.first_seq == self.next_seq and frame.position == self.end
        assert isinstance(self.frame_positions, array) and isinstance(self.frame_seqs, array)
        # Position before number: a reader thread bisects the numbers, and must find a position for each (see the
        # module).
        self.frame_positions.append(frame.position)
        self.frame_seqs.append(frame.first_seq)
        self.end, self.next_seq, self.last_append_ms = frame.end, frame.next_seq, frame.append_ms

    @property
    def first_append_ms(self) -> int | None:
        """Return when its first rows came; None while it is empty."""
        if not len(self.frame_positions):
            return None
        frame = fmt.read_frame_header(self.buffer, int(self.frame_positions[0]))
        return None if frame is None else frame.append_ms

    def frame_position_of(self, seq: int) -> int:
        """Return the position of the frame that holds `seq`."""
        return int(self.frame_positions[self.frame_at(seq)])

    def frame_bytes(self, position: int) -> int:
        """Return the length of the frame at `position`."""
        frame = fmt.read_frame_header(self.buffer, position)
        return 0 if frame is None else frame.length

    def frame_at(self, seq: int) -> int:
        """Return the number, within the segment, of the frame that holds `seq`; -1 below the first one."""
        return bisect_right(self.frame_seqs, seq) - 1

    @property
    def is_indexed(self) -> bool:
        """Return whether the frames come from a mapped index."""
        return isinstance(self.frame_seqs, np.ndarray)

    def use_index(
        self, positions: Int64Array, seqs: Int64Array, *, next_seq: int, end: int, last_append_ms: int
    ) -> None:
        """Replace the frame arrays of this sealed segment with mapped ones (frame_index.py)."""
        self.frame_positions, self.frame_seqs = positions, seqs
        self.next_seq, self.end, self.last_append_ms = next_seq, end, last_append_ms


class Segments:
    """The segments of the log, oldest first; the last one is being written.

    The list is replaced, never changed in place, so that a reader in another thread keeps a consistent view.
    Two threads replace it, the event loop's when the log rolls and the reader's for retention, hence the lock:
    a segment forgotten here would have its name given to the next one, and its rows overwritten.
    """

    def __init__(self, segments: list[Segment]) -> None:
        self._segments = segments
        self._changing = threading.Lock()
        # Called with segments that retention lets go, in its thread: a cache of them would keep their files' room.
        self.on_drop: list[Callable[[list[Segment]], None]] = []

    @property
    def all(self) -> list[Segment]:
        """All segments, oldest first."""
        return self._segments

    @property
    def last(self) -> Segment:
        """The segment being written."""
        return self._segments[-1]

    @property
    def first_seq(self) -> int:
        """Oldest sequence number kept."""
        return self._segments[0].first_seq

    @property
    def next_seq(self) -> int:
        """Sequence number after the last durable row."""
        return self._segments[-1].next_seq

    @property
    def size_bytes(self) -> int:
        """Bytes of all frames."""
        return sum(segment.end for segment in self._segments)

    def add(self, segment: Segment) -> None:
        """Roll into a new segment."""
        with self._changing:
            assert segment.first_seq == self.next_seq
            self._segments = [*self._segments, segment]

    def cut(self, kept: list[Segment]) -> None:
        """Go on with the first of the segments; the last may have fewer frames. Behind them nothing was committed."""
        with self._changing:
            assert kept == self._segments[: len(kept)] and kept
            self._segments = kept

    def drop(self, segments: list[Segment]) -> None:
        """Remove segments that retention lets go from the list; they must be the oldest."""
        with self._changing:
            assert segments == self._segments[: len(segments)] and len(segments) < len(self._segments)
            self._segments = self._segments[len(segments) :]
        for forget in self.on_drop:
            forget(segments)

    def expired(self, *, now_ms: int, retention_ms: int, needed_from_seq: int) -> list[Segment]:
        """Return the oldest segments that may go, in order."""
        found = []
        for segment in self._segments[:-1]:
            if segment.next_seq > needed_from_seq or segment.last_append_ms > now_ms - retention_ms:
                # A hole in the log is damage to recovery, so the first segment that must stay keeps all behind it.
                break
            found.append(segment)
        return found

    def remove(self, files: Files, gone: list[Segment]) -> None:
        """Drop `gone` from the log and from the disk, oldest first, so that a crash leaves no hole.

        Readers that hold a mapping keep it until they are done.
        """
        if not gone:
            return
        # Out of the list before the disk: a reader that asks meanwhile gets OutOfRange, never a file that has gone.
        self.drop(gone)
        for segment in gone:
            files.remove(segment.name)
            for cache in ("keys", "frames"):
                files.remove(f"{FOLDER}/{segment.ordinal:010d}.{cache}")
            # Synced one by one: a later name must never be gone while an earlier one is back.
            files.sync_dir(FOLDER)

    def holding(self, seq: int) -> Segment:
        """Return the segment that holds `seq`; raises OutOfRange with the range that the log keeps."""
        segments = self._segments
        if not segments[0].first_seq <= seq < segments[-1].next_seq:
            raise OutOfRange(
                f"seq {seq}: the log keeps {segments[0].first_seq} to {segments[-1].next_seq - 1}"
            )
        low, high = 0, len(segments)
        while high - low > 1:
            middle = (low + high) // 2
            if segments[middle].first_seq <= seq:
                low = middle
            else:
                high = middle
        return segments[low]


class SegmentFile:
    """The file of a spare or of the segment being written: to begin it then needs no descriptor.

    Belongs to the disk thread; the event loop reads the numbers alone.
    """

    def __init__(self, ordinal: int, file: File, mapped: pa.Buffer, used_bytes: int) -> None:
        self.ordinal, self.file, self.mapped = ordinal, file, mapped
        # Of a file that was written before, the step of its next frame has room: not asked for again, so that a
        # broker starts on a full disk.
        self.reserved_to = self._step_end(used_bytes + 1) if used_bytes else 0

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return int(self.mapped.size)

    def reserve(self, end: int) -> None:
        """Reserve room up to `end` at least, by whole steps; raises OverLimit when the disk is full."""
        end = self._step_end(end)
        if end > self.reserved_to:
            self.file.reserve(self.reserved_to, end)
            self.reserved_to = end

    def _step_end(self, end: int) -> int:
        return min(-(-end // STEP_BYTES) * STEP_BYTES, self.size_bytes)


def prepare(files: Files, ordinal: int, size_bytes: int) -> SegmentFile:
    """A spare segment: named, durable, all zeros, with room for its first step.

    Raises OverLimit when the disk is full, or no descriptor is left.
    """
    file = files.create(segment_name(ordinal))
    try:
        file.allocate(size_bytes, reserved=False)
        spare = SegmentFile(ordinal, file, files.map_readonly(segment_name(ordinal)), 0)
        spare.reserve(fmt.ALIGN)
        file.sync()
        files.sync_dir(FOLDER)
        return spare
    except BaseException:
        # Half a spare would look like a short segment to recovery; without the name it never was.
        file.close()
        files.remove(segment_name(ordinal))
        raise


def begin_segment(spare: SegmentFile, first_seq: int, now_ms: int) -> Segment:
    """Turn a spare into the segment being written; durable before its first frame.

    The header has a sync of its own: frames in a segment without a valid header are then always damage, and
    never an interrupted roll.
    """
    spare.file.write_at(0, fmt.encode_segment_header(first_seq, now_ms))
    spare.file.sync()
    return Segment(spare.ordinal, first_seq, spare.mapped)


# ---- the starts of the log ------------------------------------------------------------------------------------


def last_epoch(segments: Segments) -> int:
    """Return the epoch of the newest frame; 0 for a log without one."""
    for segment in reversed(segments.all):
        if len(segment.frame_positions):
            return frame_of(segment, len(segment.frame_positions) - 1).epoch
    return 0


def starts(segments: Segments, from_seq: int, to_seq: int) -> list[Start]:
    """Return every start whose first row lies in [from_seq, to_seq), oldest first.

    The first start of a log does not count, and for the oldest frame that is kept it cannot be told. Raises Corrupt.
    """
    found: list[Start] = []
    before: fmt.Frame | None = None
    for segment in segments.all:
        count = len(segment.frame_positions)
        at = 0
        while at < count:
            frame = frame_of(segment, at)
            # `before` may stand in the segment before this one: a restart goes on in the same file, a roll in the
            # same life.
            if before is not None and frame.epoch != before.epoch and from_seq <= frame.first_seq < to_seq:
                found.append(Start(frame.first_seq, frame.append_ms, before.append_ms))
            at = _end_of_epoch(segment, at, count, frame.epoch)
            before = frame_of(segment, at - 1)
    return found


def epoch_ends(segment: Segment) -> list[fmt.Frame]:
    """Return the last frame of each epoch in a segment, oldest first. Raises Corrupt."""
    found, at, count = [], 0, len(segment.frame_positions)
    while at < count:
        at = _end_of_epoch(segment, at, count, frame_of(segment, at).epoch)
        found.append(frame_of(segment, at - 1))
    return found


def _end_of_epoch(segment: Segment, low: int, high: int, epoch: int) -> int:
    """Return the number of the first frame in (low, high) of a later epoch; `high` when there is none."""
    # The usual case, a whole segment of one life, costs one header.
    if frame_of(segment, high - 1).epoch == epoch:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        if frame_of(segment, middle).epoch == epoch:
            low = middle
        else:
            high = middle
    return high


def frame_of(segment: Segment, number: int) -> fmt.Frame:
    """Return the header of a segment's frame."""
    position = int(segment.frame_positions[number])
    frame = fmt.read_frame_header(segment.buffer, position)
    if frame is None:
        raise Corrupt(f"{segment.name}: the frame at byte {position} has become blank")
    return frame
