"""The files of a data folder that belong together at one point of its log, which may be growing, and their used bytes.

The order of the steps makes the backup consistent:

- The segments are listed and mapped first. A mapping stays valid when retention removes the name.
- Then the last segment is read as far as its frames are whole. The backup ends at that row. Before retention removes a
  segment, a snapshot repeats all of its content that still counts, and that snapshot is in the listed segments.
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
from timeball.log.recovery import proof_behind
from timeball.log.segment import FOLDER as LOG
from timeball.log.segment import SUFFIX, segment_name
from timeball.model.errors import Corrupt, NotFound
from timeball.model.message import Kind
from timeball.table import attachment as att
from timeball.table.attachment import Attachment, FileEntry, live_files
from timeball.table.layout import FOLDER as TABLE

LOOKS_MAX = 5  # retention removes files once a minute


@dataclass(frozen=True, slots=True)
class Part:
    """A mapped file, of which the first `used_bytes` count. `is_fixed` means that they never change."""

    name: str
    buffer: pa.Buffer
    used_bytes: int
    is_fixed: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """The content of a backup: rows [first_row, row)."""

    parts: list[Part]
    first_row: int
    row: int


@dataclass(slots=True)
class _Segment:
    name: str
    buffer: pa.Buffer
    first_seq: int
    next_seq: int
    end: int = fmt.ALIGN
    snapshot_at: int | None = None  # the position of the last frame that is a snapshot

    def frames(self) -> Iterator[fmt.Frame]:
        """Read the headers of the frames again, because a list of the frames would fill the memory."""
        position = fmt.ALIGN
        while position < self.end:
            frame = fmt.read_frame_header(self.buffer, position)
            assert frame is not None, "it was whole a moment ago"
            yield frame
            position = frame.end


def plan(files: Files) -> Plan:
    """List the files that belong together now. Raises Corrupt for damage, NotFound for a folder without a log."""
    gone = ""
    for _ in range(LOOKS_MAX):
        try:
            segments = _segments(files)
            data = [_data_file(files, entry) for entry in _live(segments)]
        except _Gone as error:
            gone = str(error)
            continue
        last = segments[-1]
        log = [Part(one.name, one.buffer, one.end, one is not last) for one in segments]
        return Plan([*data, *log], segments[0].first_seq, last.next_seq)
    elsewhere = "; a pending table in an object store (serve --table) cannot be backed up by this command"
    hint = elsewhere if gone.startswith(f"{TABLE}/") else ""
    raise Corrupt(f"{gone} is missing, also when it was looked for again: restore it from a copy{hint}")


class _Gone(Exception):
    """A file was listed or named by the log, and no longer exists."""


def _segments(files: Files) -> list[_Segment]:
    ordinals = sorted(int(n.removesuffix(SUFFIX)) for n in files.list_dir(LOG) if n.endswith(SUFFIX))
    found: list[_Segment] = []
    for ordinal in ordinals:
        name = segment_name(ordinal)
        buffer = _mapped(files, name)
        first_seq = fmt.read_segment_header(buffer)
        if first_seq is None:
            break  # a spare
        found.append(_Segment(name, buffer, first_seq, first_seq))
    if not found:
        raise NotFound(f"{files.external('.')} holds no log of Timeball's: name a data folder")
    for at, segment in enumerate(found):
        _scan(segment, found[at + 1].first_seq if at + 1 < len(found) else None)
    return found


def _scan(segment: _Segment, until_seq: int | None) -> None:
    """Find the whole frames of a segment, each checked against its checksum. Raises Corrupt."""
    for _ in range(LOOKS_MAX):
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
        if until_seq is None and proof_behind(segment.buffer, segment.end, segment.next_seq) is None:
            # the bytes after it belong to a commit that is being written, or that was never acknowledged
            return
        if until_seq == segment.next_seq:
            return
        # Frames that were incomplete when they were read may be whole by now. Damaged frames stay damaged.
    raise Corrupt(
        f"{segment.name}: it ends before seq {segment.next_seq}: {fault}; restore this file from a copy"
    )


def _live(segments: list[_Segment]) -> list[FileEntry]:
    """List the data files that are live at the end of these segments."""
    known = _last_snapshot(segments)
    attaches: list[tuple[int, Attachment]] = []
    for segment in segments:
        if segment.next_seq <= known.seq:
            continue
        for frame in segment.frames():
            if frame.next_seq > known.seq:
                attaches += _attaches(fmt.decode_rows(segment.buffer, frame), frame.first_seq, known.seq)
    return live_files(msgspec.convert(known.files or [], list[FileEntry]), attaches)


def _last_snapshot(segments: list[_Segment]) -> cp.Facts:
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


def _attaches(rows: pa.RecordBatch, first_seq: int, from_seq: int) -> list[tuple[int, Attachment]]:
    kinds = rows.column("kind").to_numpy(zero_copy_only=False)
    found = []
    for at in (kinds == int(Kind.TABLE)).nonzero()[0].tolist():
        change = att.decode_change(rows.column("body")[at].as_py())
        if first_seq + at >= from_seq and isinstance(change, Attachment):
            found.append((first_seq + at, change))
    return found


def _data_file(files: Files, entry: FileEntry) -> Part:
    name = f"{TABLE}/{entry.path}"
    buffer = _mapped(files, name)
    if buffer.size != entry.size_bytes:
        raise Corrupt(
            f"{name} has {buffer.size} bytes, not {entry.size_bytes}: restore this file from a copy"
        )
    return Part(name, buffer, buffer.size, True)


def _mapped(files: Files, name: str) -> pa.Buffer:
    try:
        return files.map_readonly(name)
    except NotFound as error:
        raise _Gone(name) from error
