"""Planning a backup: finds the files of a data folder that form a consistent copy, while a broker may be writing.

The order of the steps makes the backup consistent:

- The segments are listed and mapped first. A mapping stays valid when retention removes the file's name.
- Then the last segment is read as far as its frames are whole. The backup ends at that row. Before retention removes a
  segment, a snapshot repeats all of its content that is still valid, and that snapshot is in the listed segments.
- The live data files are those of the last snapshot, changed by the attaches after it. A data file that the table drops
  stays on disk as long as the log is kept, at most a day (broker/maintenance.py), so it still exists. If it does not,
  all steps are repeated, up to a newer row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pyarrow as pa

from timeball.io.files import Files
from timeball.log import checkpoint as cp
from timeball.log import format as fmt
from timeball.log.recovery import find_later_proof
from timeball.log.segment import FOLDER as LOG
from timeball.log.segment import SUFFIX, segment_name
from timeball.model.errors import Corrupt, NotFound
from timeball.model.message import Kind
from timeball.table import attachment as att
from timeball.table.attachment import Attachment, FileEntry, live_files
from timeball.table.layout import FOLDER as TABLE

ATTEMPTS_MAX = 5  # enough, because retention removes files only once a minute


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A mapped file, whose first `used_bytes` are backed up. `is_fixed` means that these bytes never change."""

    name: str
    buffer: pa.Buffer
    used_bytes: int
    is_fixed: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """The files of a backup, with the rows first_row <= number < row."""

    files: list[PlannedFile]
    first_row: int
    row: int


@dataclass(slots=True)
class _Segment:
    """A mapped segment, and the result of its scan: frames up to `end`, rows below `next_seq`."""

    name: str
    buffer: pa.Buffer
    first_seq: int
    next_seq: int
    end: int = fmt.ALIGN  # the position after the last whole frame
    snapshot_at: int | None = None  # the position of the last frame that is a snapshot

    def frames(self) -> Iterator[fmt.Frame]:
        """Read the headers of the scanned frames. They are read again, because a list could fill the memory."""
        position = fmt.ALIGN
        while position < self.end:
            frame = fmt.read_frame_header(self.buffer, position)
            assert frame is not None, "the scan has read this frame"
            yield frame
            position = frame.end


def plan(files: Files) -> Plan:
    """List the files of a consistent backup. Raises Corrupt for damage, NotFound for a folder without a log."""
    missing = ""
    for _ in range(ATTEMPTS_MAX):
        try:
            segments = _list_segments(files)
            data_files = [_plan_data_file(files, entry) for entry in _live_data_files(segments)]
        except _FileRemoved as error:
            missing = str(error)
            continue
        last = segments[-1]
        log_files = [
            PlannedFile(segment.name, segment.buffer, segment.end, segment is not last)
            for segment in segments
        ]
        return Plan([*data_files, *log_files], segments[0].first_seq, last.next_seq)
    object_store_hint = (
        "; a pending table in an object store (serve --table) cannot be backed up by this command"
    )
    hint = object_store_hint if missing.startswith(f"{TABLE}/") else ""
    raise Corrupt(f"{missing} is missing, also when it was looked for again: restore it from a copy{hint}")


class _FileRemoved(Exception):
    """A file that was listed, or that the log names, no longer exists."""


def _list_segments(files: Files) -> list[_Segment]:
    """Map and scan all segments in use. Raises NotFound if there are none, and Corrupt."""
    ordinals = sorted(int(n.removesuffix(SUFFIX)) for n in files.list_dir(LOG) if n.endswith(SUFFIX))
    segments: list[_Segment] = []
    for ordinal in ordinals:
        name = segment_name(ordinal)
        buffer = _map_file(files, name)
        first_seq = fmt.read_segment_header(buffer)
        if first_seq is None:
            break  # a spare segment, which is not in use yet
        segments.append(_Segment(name, buffer, first_seq, first_seq))
    if not segments:
        raise NotFound(f"{files.external('.')} holds no log of Timeball's: name a data folder")
    for index, segment in enumerate(segments):
        _scan(segment, segments[index + 1].first_seq if index + 1 < len(segments) else None)
    return segments


def _scan(segment: _Segment, until_seq: int | None) -> None:
    """Find the end of a segment's whole frames, and its last snapshot. Raises Corrupt.

    Each frame is checked against its checksum. `until_seq` is the first number of the next segment, or None for the
    last segment.
    """
    for _ in range(ATTEMPTS_MAX):
        fault = "nothing behind it"
        try:
            while (frame := fmt.read_frame(segment.buffer, segment.end)) is not None:
                if frame.first_seq != segment.next_seq:
                    raise Corrupt(f"a frame begins with seq {frame.first_seq}, expected {segment.next_seq}")
                if frame.flags & fmt.SNAPSHOT:
                    segment.snapshot_at = frame.position
                segment.end, segment.next_seq = frame.end, frame.next_seq
        except Corrupt as error:
            fault = str(error)
        if until_seq is None and find_later_proof(segment.buffer, segment.end, segment.next_seq) is None:
            # The bytes after the last whole frame belong to a commit that is being written or was never acknowledged.
            return
        if until_seq == segment.next_seq:
            return
        # Frames that were incomplete when they were read may be complete by now. Damaged frames stay damaged.
    raise Corrupt(
        f"{segment.name}: it ends before seq {segment.next_seq}: {fault}; restore this file from a copy"
    )


def _live_data_files(segments: list[_Segment]) -> list[FileEntry]:
    """List the data files that are live at the end of these segments."""
    snapshot = _last_snapshot(segments)
    attachments: list[tuple[int, Attachment]] = []
    for segment in segments:
        if segment.next_seq <= snapshot.seq:
            continue
        for frame in segment.frames():
            if frame.next_seq > snapshot.seq:
                rows = fmt.decode_rows(segment.buffer, frame)
                attachments += _attachments(rows, frame.first_seq, snapshot.seq)
    return live_files(msgspec.convert(snapshot.files or [], list[FileEntry]), attachments)


def _last_snapshot(segments: list[_Segment]) -> cp.Facts:
    """Decode the last snapshot, or an empty one for a log from its first row on. Raises Corrupt if both are missing."""
    for segment in reversed(segments):
        if segment.snapshot_at is not None:
            frame = fmt.read_frame_header(segment.buffer, segment.snapshot_at)
            if frame is not None:
                return cp.decode(fmt.decode_rows(segment.buffer, frame).column("body")[0].as_py()).facts
    if segments[0].first_seq != 1:
        raise Corrupt(
            f"the log begins with seq {segments[0].first_seq}, and no snapshot says what stood before"
        )
    return cp.Facts(seq=1)


def _attachments(rows: pa.RecordBatch, first_seq: int, from_seq: int) -> list[tuple[int, Attachment]]:
    """Decode the attachments in the rows from `from_seq` on, with their numbers. The first row is `first_seq`."""
    kinds = rows.column("kind").to_numpy(zero_copy_only=False)
    attachments = []
    for index in (kinds == int(Kind.TABLE)).nonzero()[0].tolist():
        change = att.decode_change(rows.column("body")[index].as_py())
        if first_seq + index >= from_seq and isinstance(change, Attachment):
            attachments.append((first_seq + index, change))
    return attachments


def _plan_data_file(files: Files, entry: FileEntry) -> PlannedFile:
    name = f"{TABLE}/{entry.path}"
    buffer = _map_file(files, name)
    if buffer.size != entry.size_bytes:
        raise Corrupt(
            f"{name} has {buffer.size} bytes, not {entry.size_bytes}: restore this file from a copy"
        )
    return PlannedFile(name, buffer, buffer.size, True)


def _map_file(files: Files, name: str) -> pa.Buffer:
    try:
        return files.map_readonly(name)
    except NotFound as error:
        raise _FileRemoved(name) from error
