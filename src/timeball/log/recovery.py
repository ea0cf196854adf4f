"""Recovery of the log at a start, and the frame index, with which a start need not read sealed segments.

A start opens the log after a clean stop, a kill or a power cut. It cuts a torn tail and refuses all other damage:

    1. Segments are taken in order of their ordinals, which must have no gap. Trailing files with an all-zero
       header are spares that were never begun.
    2. In every segment but the last begun one, frames must follow each other up to the first sequence number
       of the next segment: a commit never spans segments, so all of it was acknowledged. If the segment's
       frame index confirms this and no replay needs the rows, they are checked only when they are read.
    3. In the last begun one, the first frame that is not whole is the end, *unless* a whole frame after it states
       (`synced_to`) that these bytes were on disk before it was written. Then they have been damaged since, and
       recovery raises Corrupt: repair by deletion would lose acknowledged messages (G8).
    4. The bytes after the end are overwritten with zeros, so that an old frame can never follow a new one.
    5. Names and bytes are synced before a row is shown. After a kill they may be only in the page cache. Without
       this sync a row could be shown and then be lost in a power cut, although the writer's `synced_to` covers it.

Known limit: damage to the very last commit looks like a torn commit. `durable_before_seq` (the checkpoint's sequence
number) narrows this: the rows below it must exist.

Assumptions about the disk: a sync that returned is permanent. A write in flight may be torn at 512 bytes, in any order.
A synced block changes only through damage. SQLite and raft-wal assume the same.

The frame index is a file beside a sealed segment with the positions of its frames, such as `log/0000000001.frames`:

    byte  0          8   16       24          32         40    48               56              56 + 8n
          +----------+---+--------+-----------+----------+-----+------------------+-- … --------+-- … -------+
          | "TBFRAME1"| n | crc32c | first_seq | next_seq | end | newest_append_ms | n positions | n seqs     |
          +----------+---+--------+-----------+----------+-----+------------------+-- … --------+-- … -------+

Numbers are little-endian, 8 bytes each. The checksum covers all bytes after it. The file is written once, when the
segment is sealed, and then mapped: a start need not read days of log, and a sealed frame takes no heap memory.

It is a cache. If the file is missing, damaged or contradicts the neighbouring segments, it is ignored and the segment
is read from end to end instead. The frames themselves are still checked each time they are decoded.
"""

from __future__ import annotations

import itertools
import logging
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import google_crc32c
import numpy as np
import pyarrow as pa

from timeball.io.files import File, Files, Unreadable, check_readable
from timeball.io.files import load as load_bytes
from timeball.log import format as fmt
from timeball.log.frame_scan import LOAD_BYTES, PAGE_BYTES, FrameScan, read_segment_header
from timeball.log.segment import (
    FOLDER,
    SUFFIX,
    Segment,
    SegmentFile,
    Segments,
    begin_segment,
    prepare,
    segment_name,
)
from timeball.model.errors import Corrupt, SetupError, TimeballError

logger = logging.getLogger(__name__)

# ---- the frame index -----------------------------------------------------------------------------------------

MAGIC = b"TBFRAME1"
HEADER = struct.Struct("<8sQQ")  # magic, number of frames, crc32c of all bytes after it
FACTS = struct.Struct("<QQQq")  # first_seq, next_seq, end, newest_append_ms
ARRAYS_AT = HEADER.size + FACTS.size
assert ARRAYS_AT == 56


def index_name(segment: Segment) -> str:
    """Build the file name of a segment's frame index."""
    return f"{FOLDER}/{segment.ordinal:010d}.frames"


def save_sealed(files: Files, segments: Segments) -> int:
    """Write and load the index of every sealed segment without a loaded one. Returns their number. Blocks."""
    unindexed = [segment for segment in segments.all[:-1] if not segment.is_indexed]
    for segment in unindexed:
        files.replace(index_name(segment), encode(segment))
        # Loaded at once: the mapped arrays replace those in memory, which is the purpose of the file.
        load(files, segment, segment.next_seq)
    return len(unindexed)


def encode(segment: Segment) -> bytes:
    """Encode the frame index of a sealed segment."""
    payload = b"".join(
        [
            FACTS.pack(segment.first_seq, segment.next_seq, segment.end, segment.newest_append_ms),
            np.asarray(segment.frame_positions, "<i8").tobytes(),
            np.asarray(segment.frame_seqs, "<i8").tobytes(),
        ]
    )
    return HEADER.pack(MAGIC, len(segment.frame_seqs), google_crc32c.value(payload)) + payload


def load(files: Files, segment: Segment, next_seq: int) -> bool:
    """Load the frame index of `segment`, which must end at `next_seq`, into the segment.

    Returns false if there is no valid index: the segment must be read.
    """
    name = index_name(segment)
    if not files.exists(name):
        return False
    try:
        data = files.map_readonly(name)
        check_readable(data, 0, data.size)
        magic, count, crc = HEADER.unpack_from(data)
        if magic != MAGIC or data.size != ARRAYS_AT + 16 * count:
            raise ValueError("not a frame index: bad magic or length")
        # Positions are used unchecked afterwards to slice the mapping, so the whole file is checked once, here.
        if google_crc32c.value(data.slice(HEADER.size)) != crc:
            raise ValueError("wrong checksum")
        first_seq, stored_next_seq, end, newest_append_ms = FACTS.unpack_from(data, HEADER.size)
        if (first_seq, stored_next_seq) != (segment.first_seq, next_seq) or end > segment.buffer.size:
            raise ValueError("index of other rows: the segment was replaced")
    except (ValueError, struct.error, TimeballError) as error:
        logger.warning("frame index not used, the segment is read instead file=%s reason=%s", name, error)
        return False
    segment.use_index(
        np.frombuffer(data, dtype="<i8", count=count, offset=ARRAYS_AT),
        np.frombuffer(data, dtype="<i8", count=count, offset=ARRAYS_AT + 8 * count),
        next_seq=next_seq,
        end=end,
        newest_append_ms=newest_append_ms,
    )
    return True


# ---- opening the log -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OpenedLog:
    """The log, ready for a writer. `cut_bytes` is the length of the torn tail that was overwritten."""

    segments: Segments
    file: SegmentFile
    cut_bytes: int


def open_log(files: Files, *, segment_bytes: int, now_ms: int, durable_before_seq: int = 0) -> OpenedLog:
    """Open or create the log below `files`. Raises Corrupt, SetupError (newer format), OverLimit and DiskFailed.

    `durable_before_seq`: the log must have all rows below this number, because a checkpoint covers them.
    """
    files.make_dir(FOLDER)
    begun, spares = _find_segments(files)
    for ordinal in spares:
        files.remove(segment_name(ordinal))  # making a new one costs less than checking this one
    files.sync_dir(FOLDER)  # also syncs names that a killed run has made or removed
    if not begun:
        if durable_before_seq:
            raise Corrupt(
                f"the log is missing, but the checkpoint covers seq {durable_before_seq - 1}: {FOLDER}/ has no "
                "segment, restore it from a copy"
            )
        spare = prepare(files, 1, segment_bytes)
        return OpenedLog(Segments([begin_segment(spare, 1, now_ms)]), spare, 0)
    for segment, following in itertools.pairwise(begun):
        # Rows below `durable_before_seq` are in the caches, so a start need not read the segments that contain only
        # such rows.
        is_needed = following.first_seq > durable_before_seq
        if is_needed or not load(files, segment, following.first_seq):
            _scan_sealed(segment, following)
    damage, written_end = _scan_last(begun[-1])
    # A checkpoint is written after the log is synced, so a log that ends before it has lost acknowledged rows.
    if begun[-1].next_seq < durable_before_seq:
        raise Corrupt(
            f"{begun[-1].name} ends before seq {begun[-1].next_seq}, but the checkpoint covers "
            f"seq {durable_before_seq - 1}: {damage}; restore it from a copy, and "
            f"{segment_name(begun[-1].ordinal + 1)} if there was one"
        )
    last, file = begun[-1], files.open(begun[-1].name)
    cut_bytes = _zero_torn_tail(file, last, written_end)
    # Synced before the writer's first frame, whose `synced_to` states that all bytes before it are on disk.
    file.sync()
    return OpenedLog(Segments(begun), SegmentFile(last.ordinal, file, last.buffer, last.end), cut_bytes)


def read_replica(
    files: Files, *, batch_bytes: int, own_epoch: int = 0, synced: tuple[int, int] = (0, 0)
) -> tuple[list[Segment], str]:
    """Read the segments of a replica's log up to its end or to damage. Returns them and the damage ("" if none).

    Raises SetupError for a newer format. Nothing is changed on the disk.

    A replica syncs after at most `batch_bytes`, and the `synced_to` of a frame refers to the disk of its leader. So a
    frame after a hole proves damage only if it states that more than a batch after the hole was on disk. Frames of
    `own_epoch` refer to this disk, because this replica led in that epoch (0: in none). A log that ends before `synced`
    (ordinal of a segment, byte), to which it was once synced, is damaged, too.
    """
    files.make_dir(FOLDER)
    segments: list[Segment] = []
    reason = ""
    file_names = [file_name for file_name in files.list_dir(FOLDER) if file_name.endswith(SUFFIX)]
    for file_name in file_names:
        ordinal = int(file_name.removesuffix(SUFFIX))
        buffer = files.map_readonly(segment_name(ordinal))
        try:
            first_seq = _read_first_seq(buffer, segment_name(ordinal), is_last=file_name == file_names[-1])
        except Corrupt as error:
            return segments, str(error)
        if first_seq is None:
            continue  # a spare
        segment = Segment(ordinal, first_seq, buffer)
        if segments and (segments[-1].ordinal + 1, segments[-1].next_seq) != (ordinal, first_seq):
            last = segments[-1]
            return (
                segments,
                f"{last.name} ends at seq {last.next_seq} ({reason}), {segment.name} begins later",
            )
        segments.append(segment)
        try:
            reason = _read_frames(segment)
        except Unreadable as error:
            return segments, f"{segment.name}: {error}"
    if segments:
        last = segments[-1]
        proof = find_later_proof(last.buffer, last.end, last.next_seq, batch_bytes, own_epoch)
        if proof is not None:
            return (
                segments,
                f"{last.name}: {reason}; the frame at byte {proof.position} was written behind it",
            )
        if (last.ordinal, last.end) < synced:
            return segments, (
                f"{last.name} ends at byte {last.end} ({reason}); this disk had stored {segment_name(synced[0])} up "
                f"to byte {synced[1]}"
            )
    return segments, ""


def _read_frames(segment: Segment) -> str:
    """Add all whole frames to `segment`. Returns a description of the bytes after them.

    Raises Unreadable, and SetupError for a newer format.
    """
    scan, text = FrameScan(segment.buffer), "nothing behind it"
    try:
        while (frame := scan.read(segment.end)) is not None:
            segment.add(_check_in_sequence(segment, frame))
    except Unreadable:  # although it is a Corrupt: this is a fault of the disk, not the end of the log
        raise
    except Corrupt as error:
        text = str(error)
    # A torn commit is cut only if all its bytes were looked at.
    check_readable(segment.buffer, segment.end, segment.buffer.size)
    return text


def _find_segments(files: Files) -> tuple[list[Segment], list[int]]:
    """Find the begun segments, in order, and the ordinals of the spares. Raises Corrupt for a gap."""
    ordinals = [int(name.removesuffix(SUFFIX)) for name in files.list_dir(FOLDER) if name.endswith(SUFFIX)]
    begun: list[Segment] = []
    spares: list[int] = []
    for ordinal in ordinals:
        buffer = files.map_readonly(segment_name(ordinal))
        first_seq = _read_first_seq(buffer, segment_name(ordinal), is_last=ordinal == ordinals[-1])
        if first_seq is None:
            spares.append(ordinal)
            continue
        # The log rolls to the next ordinal, so a blank segment before a begun one has lost its header.
        if spares or (begun and begun[-1].ordinal + 1 != ordinal):
            raise Corrupt(
                f"{segment_name(ordinal - 1)} is missing or was never begun, but {segment_name(ordinal)} exists: "
                "restore the first from a copy"
            )
        begun.append(Segment(ordinal, first_seq, buffer))
    return begun, spares


def _read_first_seq(buffer: pa.Buffer, name: str, *, is_last: bool) -> int | None:
    """Read a segment's first sequence number, or None for a spare. Raises Corrupt.

    `is_last`: only the last file may have a header that was torn while the segment was begun.
    """
    try:
        first_seq = read_segment_header(buffer)
    except Corrupt as error:
        if is_last and last_written(buffer, 0) <= fmt.ALIGN:
            return None  # torn while it was begun: the header is synced before any frame is written
        raise Corrupt(f"{name}: {error}; restore this file from a copy") from error
    if first_seq is None and last_written(buffer, 0) > fmt.ALIGN:
        raise Corrupt(f"{name} holds data but its header is blank: restore this file from a copy")
    return first_seq


def _scan_sealed(segment: Segment, following: Segment) -> None:
    """Add all frames of a sealed segment. Raises Corrupt unless they reach the first row of the `following` one."""
    scan = FrameScan(segment.buffer)
    try:
        while (frame := scan.read(segment.end)) is not None:
            segment.add(_check_in_sequence(segment, frame))
    except Corrupt as error:
        raise Corrupt(f"{segment.name}: {error}; restore this file from a copy") from error
    # Whole frames that end too early: the file was cut. It is no torn commit, because no commit spans segments.
    if segment.next_seq != following.first_seq:
        raise Corrupt(
            f"{segment.name} ends at seq {segment.next_seq} but {following.name} begins with {following.first_seq}: "
            "restore the first from a copy"
        )


def _scan_last(segment: Segment) -> tuple[str, int]:
    """Add all whole frames to the last begun segment.

    Returns a description of the bytes after them, and the end of these bytes. Raises Corrupt if they are damage and not
    a torn commit.
    """
    try:
        end_state = _read_frames(segment)
    except Unreadable as error:
        raise Corrupt(f"{segment.name}: {error}; restore this file from a copy") from error
    end = last_written(segment.buffer, segment.end)
    # Searched after a clean end too: zeros among acknowledged frames look like the end of the log.
    proof = find_later_proof(segment.buffer, segment.end, segment.next_seq) if end > segment.end else None
    if proof is not None:
        raise Corrupt(
            f"{segment.name}: {end_state}; the frame at byte {proof.position} (seq {proof.first_seq}) proves that it "
            "was acknowledged: restore this file from a copy"
        )
    return end_state, end


def _check_in_sequence(segment: Segment, frame: fmt.Frame) -> fmt.Frame:
    """Return `frame` if it continues the rows of `segment`, else raise Corrupt."""
    if frame.first_seq != segment.next_seq:
        raise Corrupt(
            f"frame at byte {frame.position} begins with seq {frame.first_seq}, expected {segment.next_seq}"
        )
    return frame


# ---- the bytes after the last whole frame --------------------------------------------------------------------


def find_later_proof(
    buffer: pa.Buffer, end: int, next_seq: int, batch_bytes: int = 0, own_epoch: int = 0
) -> fmt.Frame | None:
    """Find a whole frame after `end` whose `synced_to` states that the bytes at `end` were on disk earlier.

    `batch_bytes`: up to this many bytes after `end` may have been written without a sync in between, except by the
    writer of `own_epoch`. Only a `synced_to` after them counts.

    The frame proves that the bytes at `end` were acknowledged, so they are damaged, not torn. Its sequence numbers
    must come after `next_seq`, which the bytes at `end` used: a copy of an older frame in the body of a torn commit
    proves nothing. Returns None if there is no such frame.
    """
    for frame in whole_frames(buffer, end + fmt.ALIGN):
        unsynced_bytes = 0 if frame.epoch == own_epoch else batch_bytes
        if frame.synced_to > end + unsynced_bytes and frame.first_seq > next_seq:
            return frame
    return None


def whole_frames(buffer: pa.Buffer, position: int) -> Iterator[fmt.Frame]:
    """Yield every whole frame at or after the aligned `position`. Skips the bytes between them."""
    scan = FrameScan(buffer)
    for candidate in _magic_positions(buffer, position, last_written(buffer, position)):
        frame = _frame_or_none(scan, candidate)
        if frame is not None:
            yield frame


def _frame_or_none(scan: FrameScan, position: int) -> fmt.Frame | None:
    """Read the frame at `position`, or None if there is no valid one."""
    try:
        return scan.read(position)
    # Most positions among torn or damaged bytes are no frame, and the bytes of a body may look like a frame of any
    # version.
    except (Corrupt, SetupError):
        return None


def _magic_positions(buffer: pa.Buffer, position: int, end: int) -> Iterator[int]:
    """Yield the aligned positions from `position` up to `end` that have a frame's magic."""
    # Frames begin at multiples of ALIGN, so only one word in sixteen is compared.
    words = np.frombuffer(buffer, dtype="<u4", count=(buffer.size // fmt.ALIGN) * (fmt.ALIGN // 4))
    # In steps, because most callers stop at the first frame. A position inside a whole frame counts, too, because that
    # frame may be a copy in a body that was torn.
    for begin, step_end in _readable_steps(buffer, position, end):
        step = words[begin // 4 : step_end // 4 : fmt.ALIGN // 4]
        for hit in np.flatnonzero(step == fmt.FRAME_MAGIC).tolist():
            yield begin + hit * fmt.ALIGN


def _readable_steps(buffer: pa.Buffer, position: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of parts of up to LOAD_BYTES, without the pages that the disk cannot read."""
    while position < end:
        step_end = min(position + LOAD_BYTES, end)
        unreadable = load_bytes(buffer, position, step_end)
        if unreadable is None:
            yield position, step_end
            position = step_end
            continue
        if unreadable > position:
            yield position, unreadable
        position = unreadable - unreadable % PAGE_BYTES + PAGE_BYTES


def last_written(buffer: pa.Buffer, start: int) -> int:
    """Find the position after the last non-zero byte at or after `start`, or `start` if there is none.

    Bytes that the disk cannot read count as written.
    """
    view = np.frombuffer(buffer, dtype=np.uint8)
    begin, end = start, view.size
    # Searched from the back, a megabyte at a time: a fresh segment is 256 MiB of zeros and a few frames.
    for step in (1 << 20, 1 << 16, 1 << 12):
        begin, end = _last_written_part(buffer, view, begin, end, step)
    if load_bytes(buffer, begin, end) is not None:
        return end
    # A copy: a broker may be writing here while a backup reads, and numpy counts and collects in two passes.
    written = np.flatnonzero(view[begin:end].copy())
    return begin + int(written[-1]) + 1 if len(written) else start


def _last_written_part(
    buffer: pa.Buffer, view: np.ndarray, start: int, end: int, step: int
) -> tuple[int, int]:
    """Find begin and end of the last part of `step` bytes in [start, end) that has a non-zero byte.

    A part that the disk cannot read counts as written. Returns (start, start) if there is none.
    """
    for end_at in range(end, start, -step):
        begin = max(start, end_at - step)
        if load_bytes(buffer, begin, end_at) is not None:
            return begin, end_at
        part = view[begin:end_at]
        # Compared as 8-byte words, which is faster: a start examines nearly all of a segment.
        odd_bytes = part.size % 8
        if part[:odd_bytes].any() or part[odd_bytes:].view(np.uint64).max(initial=0):
            return begin, end_at
    return start, start


def _zero_torn_tail(file: File, segment: Segment, end: int) -> int:
    """Overwrite the torn tail up to `end` with zeros, without a sync. Returns its length."""
    size = end - segment.end
    if size:
        logger.warning(
            "torn commit cut file=%s size_bytes=%d behind_seq=%d", segment.name, size, segment.next_seq - 1
        )
        step_bytes = 1 << 20  # of zeros in memory
        for position in range(segment.end, end, step_bytes):
            file.write_at(position, bytes(min(step_bytes, end - position)))
    return size
