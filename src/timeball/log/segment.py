"""One mapped file of the commit log (`Segment`), and the list of all of them, which is the log (`Segments`).

A segment file has its full length from the start and is mapped once, so that reading it is slicing memory. Its disk
space is reserved in steps ahead of the frames: reserved at once, a segment of a few frames would take 256 MiB. The file
is named by its ordinal, and its header contains its first sequence number. So a spare can be prepared and named before
its first row is known. The spare's header is zero until the log rolls into it.

Two parallel arrays per segment index the frames. Only the event loop appends to them, after the commit is durable, and
always the position before the sequence number. So a reader thread that bisects the sequence numbers never finds one
without a position. When a segment is sealed, a mapped file replaces the arrays (recovery.py), so that memory does
not grow with the kept log.

Retention removes a segment that is older than the retention time if all its rows are below every row that is still
needed (computed by broker/maintenance.py): the watermark of the pending table, the checkpoint, the oldest open half
message, and the oldest row that a backlog reads. The newest segment is never removed. So that its rows can expire too,
the log rolls when the first rows of the newest segment are half as old as the retention time, even if it is nearly
empty. A streaming job that lags more than the retention time has missed rows, and gets OutOfRange. A wall clock that
was ahead for a moment leaves frames with a time in the future. Retention does not wait for that time: the rows of the
segments after them are newer, so their times bound the age.

Each run of the log's writer has a number, the *epoch*, in the header of its frames. Epochs only grow, so a bisection
finds the restarts of the broker from a few headers, even in a long log. Between the last frame of one epoch and the
first of the next, no broker ran, which explains why a message that became due in that time is late. A run that wrote
nothing has no frame with its epoch.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable

import numpy as np
import pyarrow as pa

from timeball.io.files import File, Files
from timeball.log import format as fmt
from timeball.model.answers import Start
from timeball.model.errors import Corrupt, OutOfRange
from timeball.model.message import Int64Array

FOLDER = "log"
SUFFIX = ".log"
STEP_BYTES = 16 * 1024 * 1024  # disk space is reserved in these steps; each takes 20 us in the disk thread


def segment_name(ordinal: int) -> str:
    """Build the file name of a segment. The ordinal is padded so that names sort."""
    return f"{FOLDER}/{ordinal:010d}{SUFFIX}"


def contains_log(files: Files) -> bool:
    """Check whether the data folder contains a log of Timeball. Other files may be missing."""
    names = [f"{FOLDER}/{name}" for name in files.list_dir(FOLDER) if name.endswith(SUFFIX)]
    return any(bytes(files.map_readonly(name)[:8]) == fmt.SEGMENT_MAGIC for name in names)


class Segment:
    """A segment, sealed or being written. The next frame goes to position `end` and begins with number `next_seq`."""

    def __init__(self, ordinal: int, first_seq: int, buffer: pa.Buffer) -> None:
        self.ordinal = ordinal
        self.first_seq = first_seq
        self.next_seq = first_seq
        self.buffer = buffer
        self.end = fmt.ALIGN  # frames begin after the header
        # The latest time of an append. The last frame may have an earlier one, if the clock was set back before it.
        self.newest_append_ms = 0
        # Parallel: byte position and first sequence number of each frame. Mapped arrays once the segment is sealed.
        self.frame_positions: array[int] | Int64Array = array("q")
        self.frame_seqs: array[int] | Int64Array = array("q")

    @property
    def name(self) -> str:
        """File name relative to the data folder."""
        return segment_name(self.ordinal)

    def add(self, frame: fmt.Frame) -> None:
        """Add a frame that is durable, or that recovery found."""
        # Invariant: frames follow each other without a gap, in bytes and in numbers. Bisection relies on it.
        assert frame.first_seq == self.next_seq and frame.position == self.end
        assert isinstance(self.frame_positions, array) and isinstance(self.frame_seqs, array)
        # Position before number: a reader thread bisects the numbers, and must find a position for each one.
        self.frame_positions.append(frame.position)
        self.frame_seqs.append(frame.first_seq)
        self.end, self.next_seq = frame.end, frame.next_seq
        self.newest_append_ms = max(self.newest_append_ms, frame.append_ms)

    @property
    def first_append_ms(self) -> int | None:
        """The time of the first append, or None while the segment is empty."""
        if not len(self.frame_positions):
            return None
        frame = fmt.read_frame_header(self.buffer, int(self.frame_positions[0]))
        return None if frame is None else frame.append_ms

    def frame_position_of(self, seq: int) -> int:
        """Find the byte position of the frame that contains row `seq`, which must be in the segment."""
        return int(self.frame_positions[self.frame_at(seq)])

    def frame_bytes(self, position: int) -> int:
        """Read the length in bytes of the frame at `position`, or 0 if there is none."""
        frame = fmt.read_frame_header(self.buffer, position)
        return 0 if frame is None else frame.length

    def frame_at(self, seq: int) -> int:
        """Find the index, within the segment, of the frame that contains row `seq`, or -1 below the first frame."""
        return bisect_right(self.frame_seqs, seq) - 1

    @property
    def is_indexed(self) -> bool:
        """True if the frames come from a mapped index."""
        return isinstance(self.frame_seqs, np.ndarray)

    def use_index(
        self, positions: Int64Array, seqs: Int64Array, *, next_seq: int, end: int, newest_append_ms: int
    ) -> None:
        """Replace the frame arrays of this sealed segment with mapped ones (recovery.py)."""
        self.frame_positions, self.frame_seqs = positions, seqs
        self.next_seq, self.end, self.newest_append_ms = next_seq, end, newest_append_ms


class Segments:
    """The segments of the log, oldest first. The last one is being written.

    The list is replaced, never changed in place, so that a reader in another thread keeps a consistent view. Two
    threads replace it: the event loop when the log rolls, and the reader thread for retention. The lock prevents lost
    updates: if a segment were lost from the list, the next one would get its name and overwrite its rows.
    """

    def __init__(self, segments: list[Segment]) -> None:
        self._segments = segments
        self._lock = threading.Lock()
        # Called with the segments that retention removes, in its thread. A cached view of them would keep their disk
        # space.
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
        """The oldest kept sequence number."""
        return self._segments[0].first_seq

    @property
    def next_seq(self) -> int:
        """The sequence number after the last durable row."""
        return self._segments[-1].next_seq

    @property
    def size_bytes(self) -> int:
        """Bytes of all frames."""
        return sum(segment.end for segment in self._segments)

    def add(self, segment: Segment) -> None:
        """Add a new segment, which is written from now on."""
        with self._lock:
            assert segment.first_seq == self.next_seq
            self._segments = [*self._segments, segment]

    def cut(self, first_segments: list[Segment]) -> None:
        """Keep only these first segments. The last of them may have lost frames.

        No row that is cut was committed.
        """
        with self._lock:
            assert first_segments == self._segments[: len(first_segments)] and first_segments
            self._segments = first_segments

    def drop(self, segments: list[Segment]) -> None:
        """Remove expired segments from the list. They must be the oldest."""
        with self._lock:
            assert segments == self._segments[: len(segments)] and len(segments) < len(self._segments)
            self._segments = self._segments[len(segments) :]
        for callback in self.on_drop:
            callback(segments)

    def expired(self, *, now_ms: int, retention_ms: int, needed_from_seq: int) -> list[Segment]:
        """List the oldest segments that retention may remove, in order: old enough, and below `needed_from_seq`."""
        expired = []
        for segment, append_ms in zip(self._segments[:-1], self._append_times(now_ms), strict=False):
            if segment.next_seq > needed_from_seq or append_ms > now_ms - retention_ms:
                # Recovery treats a gap in the log as damage, so all segments after one that must stay are kept, too.
                break
            expired.append(segment)
        return expired

    def _append_times(self, now_ms: int) -> list[int]:
        """Bound the time (ms) of the latest append of each segment: the time in its frames, unless it is in the future.

        A time in the future is wrong. The wall clock was ahead when the frames were written, or has been set back
        since. The next segment without such a time bounds it, because rows are appended in the order of the log.
        """
        times, bound_ms = list[int](), now_ms  # from the newest segment to the oldest one
        for segment in reversed(self._segments):
            if segment.next_seq > segment.first_seq and segment.newest_append_ms <= now_ms:
                bound_ms = segment.newest_append_ms
            times.append(bound_ms)
        return times[::-1]

    def remove(self, files: Files, expired: list[Segment]) -> None:
        """Remove the `expired` segments from the list and the disk, oldest first, so that a crash leaves no gap.

        Readers with a mapping can use it until they are done.
        """
        if not expired:
            return
        # The list first: a reader that looks for these rows meanwhile gets OutOfRange instead of a missing file.
        self.drop(expired)
        for segment in expired:
            files.remove(segment.name)
            for cache in ("keys", "frames"):
                files.remove(f"{FOLDER}/{segment.ordinal:010d}.{cache}")
            # Synced one by one: after a crash no later name may be gone while an earlier one is back.
            files.sync_dir(FOLDER)

    def find_segment(self, seq: int) -> Segment:
        """Find the segment that contains row `seq`. Raises OutOfRange, naming the range that the log keeps."""
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
    """The open file of a spare or of the segment being written. Rolling into a spare needs no new descriptor.

    Belongs to the disk thread. The event loop reads only its numbers.
    """

    def __init__(self, ordinal: int, file: File, mapped: pa.Buffer, used_bytes: int) -> None:
        self.ordinal, self.file, self.mapped = ordinal, file, mapped
        # In a file with content, the step of the next frame is already reserved. It is not reserved again, so that a
        # broker can start on a full disk.
        self.reserved_to = self._step_end(used_bytes + 1) if used_bytes else 0

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return int(self.mapped.size)

    def reserve(self, end: int) -> None:
        """Reserve space up to at least `end`, in whole steps. Raises OverLimit when the disk is full."""
        end = self._step_end(end)
        if end > self.reserved_to:
            self.file.reserve(self.reserved_to, end)
            self.reserved_to = end

    def _step_end(self, end: int) -> int:
        return min(-(-end // STEP_BYTES) * STEP_BYTES, self.size_bytes)


def prepare(files: Files, ordinal: int, size_bytes: int) -> SegmentFile:
    """Create a spare segment: named, durable, all zeros, with space for its first step.

    Raises OverLimit when the disk is full or no descriptor is left.
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
        # Recovery would take half a spare for a short segment. Without its name it does not exist.
        file.close()
        files.remove(segment_name(ordinal))
        raise


def begin_segment(spare: SegmentFile, first_seq: int, now_ms: int) -> Segment:
    """Turn a spare into the segment being written, whose first row will be `first_seq`. Raises DiskFailed.

    The header has a sync of its own, before the first frame. So frames in a segment without a valid header are always
    damage, never an interrupted roll.
    """
    spare.file.write_at(0, fmt.encode_segment_header(first_seq, now_ms))
    spare.file.sync()
    return Segment(spare.ordinal, first_seq, spare.mapped)


# ---- the starts of the log ------------------------------------------------------------------------------------


def last_epoch(segments: Segments) -> int:
    """Read the epoch of the newest frame, or 0 for an empty log."""
    for segment in reversed(segments.all):
        if len(segment.frame_positions):
            return frame_of(segment, len(segment.frame_positions) - 1).epoch
    return 0


def starts(segments: Segments, from_seq: int, to_seq: int) -> list[Start]:
    """List the restarts of the broker whose first row is in [from_seq, to_seq), oldest first. Raises Corrupt.

    A restart is a change of the epoch between two frames. So the run that wrote the oldest kept frame is not listed.
    """
    restarts: list[Start] = []
    previous: fmt.Frame | None = None
    for segment in segments.all:
        frame_count = len(segment.frame_positions)
        frame_number = 0
        while frame_number < frame_count:
            frame = frame_of(segment, frame_number)
            # `previous` may be in the segment before, because the epoch need not change at the start of a segment.
            if (
                previous is not None
                and frame.epoch != previous.epoch
                and from_seq <= frame.first_seq < to_seq
            ):
                restarts.append(Start(frame.first_seq, frame.append_ms, previous.append_ms))
            frame_number = _find_epoch_end(segment, frame_number, frame_count, frame.epoch)
            previous = frame_of(segment, frame_number - 1)
    return restarts


def epoch_ends(segment: Segment) -> list[fmt.Frame]:
    """List the last frame of each epoch in a segment, oldest first. Raises Corrupt."""
    last_frames, frame_number, frame_count = [], 0, len(segment.frame_positions)
    while frame_number < frame_count:
        frame_number = _find_epoch_end(
            segment, frame_number, frame_count, frame_of(segment, frame_number).epoch
        )
        last_frames.append(frame_of(segment, frame_number - 1))
    return last_frames


def _find_epoch_end(segment: Segment, low: int, high: int, epoch: int) -> int:
    """Find the first frame after number `low` that is not of `epoch`, or `high` if all frames before it are.

    Frame `low` is of `epoch`. Raises Corrupt.
    """
    # The usual case, a whole segment of one epoch, costs one header.
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
    """Read the header of frame `number` of a segment, counted from 0. Raises Corrupt."""
    position = int(segment.frame_positions[number])
    frame = fmt.read_frame_header(segment.buffer, position)
    if frame is None:
        raise Corrupt(f"{segment.name}: the frame at byte {position} has become blank")
    return frame
