"""Backup and restore: the log up to a row, and the data files that it names, as one consistent copy.

Receives: a data folder, which a broker may be writing at the same time.
Keeps: no state; the manifest of a backup lists its files (`Manifest`).
Hands on: files in a separate folder, or in an empty data folder.

A backup copies files in steps, syncs and checks them, and continues an interrupted copy. The order of the steps makes
it consistent:

- The segments are listed and mapped first. A mapping stays valid when retention removes the file's name.
- Then the last segment is read as far as its frames are whole. The backup ends at that row. Before retention removes a
  segment, a snapshot repeats all of its content that is still valid, and that snapshot is in the listed segments.
- The live data files are those of the last snapshot, changed by the attaches after it. A data file that the table drops
  stays on disk as long as the log is kept, at most a day (broker/maintenance.py), so it still exists. If it does not,
  all steps are repeated, up to a newer row.
- The manifest, `BACKUP.json`, is written last, so a folder without it is not a complete backup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import google_crc32c
import msgspec
import pyarrow as pa

from timeball.io.clock import Clock
from timeball.io.files import Files, Unreadable, check_readable
from timeball.log import checkpoint as cp
from timeball.log import format as fmt
from timeball.log.frame_scan import FrameScan
from timeball.log.recovery import find_later_proof, last_written
from timeball.log.segment import FOLDER as LOG
from timeball.log.segment import SUFFIX, segment_name
from timeball.model.errors import Corrupt, NotFound, SetupError
from timeball.model.message import Kind
from timeball.node.data_folder import FORMAT_NAME, RESTORING
from timeball.table import attachment as att
from timeball.table.attachment import Attachment, FileEntry, live_files
from timeball.table.data_file import check_all
from timeball.table.layout import FOLDER as TABLE

ReportProgress = Callable[
    [int, int], None
]  # called with the bytes copied so far, and the bytes of the whole copy


def backup(
    source: Files, target: Files, clock: Clock, report_progress: ReportProgress = lambda _done, _total: None
) -> Manifest:
    """Copy a data folder, which may be in use, into an empty folder, or into the folder of an interrupted backup.

    Returns the manifest. Raises SetupError for a target with other files, Corrupt for damage, and NotFound for a source
    without a log.
    """
    made_ms, backup_plan = clock.wall_ms(), plan(source)
    target.make_dir(".")
    progress = Progress(target, source.external("."))
    counter = _ProgressCounter(report_progress, sum(planned.used_bytes for planned in backup_plan.files))
    copied: list[CopiedFile] = []
    for planned in backup_plan.files:
        copied_file = progress.copied.get(planned.name)
        # An interrupted run may have copied the file.
        if copied_file is not None and _is_copy_of(copied_file, planned) and _is_copied(target, copied_file):
            counter.add(planned.used_bytes)
        else:
            copied_file = _copy(planned.name, planned.buffer, planned.used_bytes, target, counter)
            progress.add(copied_file)
        copied.append(copied_file)
    _remove_unplanned(target, progress, backup_plan)
    if source.exists(FORMAT_NAME):
        data = source.map_readonly(FORMAT_NAME)
        copied.append(_copy(FORMAT_NAME, data, data.size, target, counter))
    manifest = Manifest(
        row=backup_plan.row,
        first_row=backup_plan.first_row,
        made_ms=made_ms,
        source=source.external("."),
        files=copied,
    )
    save(target, manifest)
    return manifest


def restore(
    source: Files, target: Files, report_progress: ReportProgress = lambda _done, _total: None
) -> Manifest:
    """Copy a backup into an empty data folder, or into the folder of an interrupted restore of the same backup.

    Checks every byte. Returns the manifest. Raises SetupError for a folder with other files, and Corrupt for a damaged
    backup.
    """
    manifest = load(source)
    target.make_dir(".")
    _claim(target, b"%08x" % google_crc32c.value(source.map_readonly(NAME)))
    counter = _ProgressCounter(report_progress, manifest.used_bytes)
    segments = [file.name for file in manifest.files if file.name.endswith(SUFFIX)]
    for file in manifest.files:
        if _is_copied(target, file):
            counter.add(file.used_bytes)
            continue
        copied = _copy(file.name, _map_from_backup(source, file), file.used_bytes, target, counter)
        if copied.crc32c != file.crc32c:
            raise Corrupt(f"{file.name} in this backup does not match its checksum: use another backup")
        # The broker will continue to write the last segment and must not run out of disk space there. So disk blocks
        # are allocated for the rest of this segment only.
        _set_size(target, file.name, file.size_bytes, sparse=file.name != max(segments, default=""))
    target.remove(RESTORING)
    target.sync_dir(".")
    return manifest


def _claim(target: Files, backup_id: bytes) -> None:
    """Mark an empty folder as the unfinished restore of a backup. `backup_id`: the checksum of its manifest.

    Raises SetupError for a folder with other files.
    """
    names = target.list_dir(".")
    if not names:
        target.replace(RESTORING, backup_id)
    elif RESTORING not in names:
        raise SetupError(
            f"{target.external('.')} is not empty: a backup is restored into an empty folder only"
        )
    # Continuing would mix the files of two backups.
    elif bytes(target.map_readonly(RESTORING)) != backup_id:
        raise SetupError(
            f"{target.external('.')} holds an unfinished restore of another backup: remove its files, "
            "or name another folder"
        )


class _ProgressCounter:
    """Counts copied bytes and reports the progress."""

    def __init__(self, report_progress: ReportProgress, total_bytes: int) -> None:
        self._report_progress, self._done_bytes, self._total_bytes = report_progress, 0, total_bytes

    def add(self, size_bytes: int) -> None:
        """Count copied bytes."""
        self._done_bytes += size_bytes
        self._report_progress(min(self._done_bytes, self._total_bytes), self._total_bytes)


def _copy(
    name: str, buffer: pa.Buffer, used_bytes: int, target: Files, counter: _ProgressCounter
) -> CopiedFile:
    """Copy the first `used_bytes` bytes of `buffer` to the new file `name` of `target`. Durable on return.

    Raises Corrupt if the disk cannot read them.
    """
    folder = name.rpartition("/")[0] or "."
    target.make_dir(folder)
    file = target.create(name)
    try:
        for begin in range(0, used_bytes, CHUNK_BYTES):
            chunk = buffer[begin : min(begin + CHUNK_BYTES, used_bytes)]
            _check_readable(name, chunk, 0, chunk.size)
            file.write_at(begin, chunk)
            counter.add(chunk.size)
        file.sync()
    finally:
        file.close()
    target.sync_dir(folder)
    # The checksum is computed from the written file, so it also detects faulty memory or a faulty path to the disk.
    return CopiedFile(name, buffer.size, used_bytes, crc32c(target.map_readonly(name), used_bytes))


def _check_readable(name: str, buffer: pa.Buffer, begin: int, end: int) -> None:
    """Load the bytes [begin, end) of a mapped file. Raises Corrupt if the disk cannot read them."""
    try:
        check_readable(buffer, begin, end)
    except Unreadable as error:
        raise Corrupt(f"{name}: {error}; restore this file from a copy") from error


def _is_copy_of(copied: CopiedFile, planned: PlannedFile) -> bool:
    """Check whether an interrupted run copied exactly the planned bytes, by their checksum."""
    # They may differ: the last segment grows, and the source folder may have been replaced by another one.
    return (copied.size_bytes, copied.used_bytes) == (planned.buffer.size, planned.used_bytes) and (
        copied.crc32c == crc32c(planned.buffer, planned.used_bytes)
    )


def _is_copied(files: Files, file: CopiedFile) -> bool:
    """Check whether a copied file is still there with its content, by its checksum."""
    try:
        buffer = files.map_readonly(file.name)
        return buffer.size >= file.used_bytes and crc32c(buffer, file.used_bytes) == file.crc32c
    except (NotFound, Corrupt):  # Corrupt: the disk of the backup cannot read it, so the file is copied again
        return False


def _map_from_backup(source: Files, file: CopiedFile) -> pa.Buffer:
    """Map a file of a backup. Raises Corrupt if it is missing or too short."""
    try:
        buffer = source.map_readonly(file.name)
    except NotFound:
        raise Corrupt(f"{file.name} is missing in this backup: use another backup") from None
    if buffer.size < file.used_bytes:
        raise Corrupt(
            f"{file.name} in this backup has {buffer.size} bytes, not {file.used_bytes}: use another backup"
        )
    return buffer


def _set_size(files: Files, name: str, size_bytes: int, *, sparse: bool) -> None:
    """Extend a file with zeros to `size_bytes`. With `sparse` the zeros use no disk blocks. Durable on return."""
    file = files.open(name)
    try:
        if sparse:
            file.write_at(size_bytes - 1, b"\0") if files.size(name) < size_bytes else None
        else:
            file.allocate(size_bytes)
        file.sync()
    finally:
        file.close()


def _remove_unplanned(target: Files, progress: Progress, backup_plan: Plan) -> None:
    """Remove files that an interrupted run copied and that are not part of this plan."""
    planned_names = {planned.name for planned in backup_plan.files}
    for name in progress.copied.keys() - planned_names:
        target.remove(name)


# ---- the plan: the files of a consistent copy, while a broker may be writing ---------------------------------

ATTEMPTS_MAX = 5  # enough, because retention removes files only once a minute


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A mapped file, whose first `used_bytes` are backed up."""

    name: str
    buffer: pa.Buffer
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The files of a backup, with the rows first_row <= number < row."""

    files: list[PlannedFile]
    first_row: int
    row: int


@dataclass(slots=True)
class _Segment:
    """A mapped segment, and the result of its scan."""

    name: str
    buffer: pa.Buffer
    first_seq: int
    next_seq: int  # the number after the last row of the whole frames
    end: int = fmt.ALIGN  # the position after the last whole frame
    snapshot_at: int | None = None  # the position of the last frame that is a snapshot

    def frames(self) -> Iterator[fmt.Frame]:
        """Yield the headers of the scanned frames. They are read again, because a list could fill the memory."""
        position = fmt.ALIGN
        while position < self.end:
            frame = fmt.read_frame_header(self.buffer, position)
            assert frame is not None, "the scan has read this frame"
            yield frame
            position = frame.end


def plan(files: Files) -> Plan:
    """List and map the files of a consistent backup. Raises Corrupt for damage, NotFound for a folder without a log.

    If retention removes a file meanwhile, the list is made again.
    """
    missing = ""
    for _ in range(ATTEMPTS_MAX):
        try:
            segments = _list_segments(files)
            data_files = [_plan_data_file(files, entry) for entry in _live_data_files(segments)]
        except _FileRemoved as error:
            missing = str(error)
            continue
        for planned in data_files:
            _check_data_file(planned)
        last = segments[-1]
        log_files = [PlannedFile(segment.name, segment.buffer, segment.end) for segment in segments]
        return Plan([*data_files, *log_files], segments[0].first_seq, last.next_seq)
    hint = ""
    if missing.startswith(f"{TABLE}/"):
        hint = "; a pending table in an object store (serve --table) cannot be backed up by this command"
    raise Corrupt(f"{missing} is missing, also at a second search: restore it from a copy{hint}")


class _FileRemoved(Exception):
    """A file that was listed, or that the log names, no longer exists."""


def _list_segments(files: Files) -> list[_Segment]:
    """Map and scan all segments in use. Raises NotFound if there are none, Corrupt, and _FileRemoved."""
    ordinals = sorted(int(name.removesuffix(SUFFIX)) for name in files.list_dir(LOG) if name.endswith(SUFFIX))
    segments: list[_Segment] = []
    for ordinal in ordinals:
        name = segment_name(ordinal)
        buffer = _map_file(files, name)
        _check_readable(name, buffer, 0, fmt.ALIGN)
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
    """Find the end of a segment's whole frames, and its last snapshot. Each frame is checked against its checksum.

    `until_seq`: the first number of the next segment, or None for the last segment. Raises Corrupt if frames before
    this number are missing, or in the last segment if a later frame proves that a damaged one was acknowledged.
    """
    for _ in range(ATTEMPTS_MAX):
        fault = "no further frame"
        written_end = last_written(segment.buffer, segment.end)
        scan = FrameScan(segment.buffer)
        try:
            while (frame := scan.read(segment.end)) is not None:
                if frame.first_seq != segment.next_seq:
                    raise Corrupt(f"a frame begins with seq {frame.first_seq}, expected {segment.next_seq}")
                if frame.flags & fmt.SNAPSHOT:
                    segment.snapshot_at = frame.position
                segment.end, segment.next_seq = frame.end, frame.next_seq
        except Corrupt as error:
            fault = str(error)
        if until_seq is None:
            _check_readable(segment.name, segment.buffer, segment.end, segment.buffer.size)
        # `written_end` is the end of the bytes before the scan. If the scan has read all of them, the bytes after
        # `segment.end` were written meanwhile. Otherwise they belong to a commit that is being written or was never
        # acknowledged, unless a later frame proves the contrary.
        if until_seq is None and (
            segment.end >= written_end
            or find_later_proof(segment.buffer, segment.end, segment.next_seq) is None
        ):
            return
        if until_seq == segment.next_seq:
            return
        # Frames that were incomplete when they were read may be complete by now. Damaged frames stay damaged.
    raise Corrupt(
        f"{segment.name}: it ends before seq {segment.next_seq}: {fault}; restore this file from a copy"
    )


def _live_data_files(segments: list[_Segment]) -> list[FileEntry]:
    """List the data files that are live at the end of these segments. Raises Corrupt."""
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
    """Decode the last snapshot of these segments. For a log from its first row on without one, build an empty one.

    Raises Corrupt if there is no snapshot and the log does not begin with its first row.
    """
    for segment in reversed(segments):
        if segment.snapshot_at is not None:
            frame = fmt.read_frame_header(segment.buffer, segment.snapshot_at)
            if frame is not None:
                return cp.decode(fmt.decode_rows(segment.buffer, frame).column("body")[0].as_py()).facts
    if segments[0].first_seq != 1:
        raise Corrupt(
            f"the log begins with seq {segments[0].first_seq}, and no snapshot has the state before it"
        )
    return cp.Facts(seq=1)


def _attachments(rows: pa.RecordBatch, first_seq: int, from_seq: int) -> list[tuple[int, Attachment]]:
    """Decode the attachments in rows whose first one is `first_seq`, without those below `from_seq`.

    Returns pairs of a sequence number and an attachment.
    """
    kinds = rows.column("kind").to_numpy(zero_copy_only=False)
    attachments = []
    for index in (kinds == int(Kind.TABLE)).nonzero()[0].tolist():
        change = att.decode_change(rows.column("body")[index].as_py())
        if first_seq + index >= from_seq and isinstance(change, Attachment):
            attachments.append((first_seq + index, change))
    return attachments


def _plan_data_file(files: Files, entry: FileEntry) -> PlannedFile:
    """Map a live data file. Raises Corrupt if it has another size than the log says, and _FileRemoved."""
    name = f"{TABLE}/{entry.path}"
    buffer = _map_file(files, name)
    if buffer.size != entry.size_bytes:
        raise Corrupt(
            f"{name} has {buffer.size} bytes, not {entry.size_bytes}: restore this file from a copy"
        )
    return PlannedFile(name, buffer, buffer.size)


def _check_data_file(planned: PlannedFile) -> None:
    """Check all checksums of a data file. Raises Corrupt."""
    try:
        check_all(planned.buffer)
    except Corrupt as error:
        raise Corrupt(f"{planned.name}: {error}; restore this file from a copy") from error


def _map_file(files: Files, name: str) -> pa.Buffer:
    """Map a file. Raises _FileRemoved if it no longer exists."""
    try:
        return files.map_readonly(name)
    except NotFound as error:
        raise _FileRemoved(name) from error


# ---- the manifest, and the record of an interrupted backup ---------------------------------------------------
# During a backup, `BACKUP.partial` contains a line of JSON for the source, and a line for each file that is copied and
# synced. An interrupted backup that is started again does not copy these files again, unless they have changed.

NAME = "BACKUP.json"
PARTIAL = "BACKUP.partial"
FORMAT = 1  # version of the manifest's format
CHUNK_BYTES = 8 * 1024 * 1024  # size of a write, and of a step of a checksum


class CopiedFile(msgspec.Struct, frozen=True):
    """A copied file: its name and size in the data folder, the number of copied bytes, and their CRC-32C.

    The rest of a segment consists of zeros, which are not copied.
    """

    name: str
    size_bytes: int
    used_bytes: int
    crc32c: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of a complete backup, with the rows first_row <= number < row."""

    product: str = "timeball"
    format: int = FORMAT
    row: int
    first_row: int
    made_ms: int
    source: str
    files: list[CopiedFile]

    @property
    def used_bytes(self) -> int:
        """The number of copied bytes of all files."""
        return sum(file.used_bytes for file in self.files)


class _BackupStart(msgspec.Struct, frozen=True):
    """The first line of BACKUP.partial."""

    source: str


def load(files: Files) -> Manifest:
    """Read the manifest of a backup. Raises SetupError for a folder without a complete backup, and Corrupt."""
    try:
        data = bytes(files.map_readonly(NAME))
    except NotFound:
        unfinished = files.exists(PARTIAL)
        text = (
            "was not finished: run `timeball backup` again with it"
            if unfinished
            else "is no backup of Timeball's"
        )
        raise SetupError(f"{files.external('.')} {text}") from None
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except msgspec.MsgspecError as error:
        raise Corrupt(f"{NAME} cannot be read: {error}") from error
    if manifest.format > FORMAT:
        raise SetupError(f"this backup has format {manifest.format}; this Timeball reads up to {FORMAT}")
    return manifest


def save(files: Files, manifest: Manifest) -> None:
    """Write the manifest, which completes a backup. Durable on return."""
    files.replace(NAME, msgspec.json.format(msgspec.json.encode(manifest), indent=1))
    files.remove(PARTIAL)
    files.sync_dir(".")


class Progress:
    """The record of copied files in the target folder (BACKUP.partial)."""

    def __init__(self, files: Files, source: str) -> None:
        """Begin a backup of the folder `source`, or continue an interrupted one.

        Raises SetupError if the target has other files, or belongs to a backup of another folder.
        """
        self._files = files
        self._lines: list[bytes] = []  # the lines of BACKUP.partial
        self.copied: dict[str, CopiedFile] = {}  # by name
        if files.exists(NAME):
            raise SetupError(f"{files.external('.')} holds a whole backup: name another folder")
        if not files.exists(PARTIAL):
            if files.list_dir("."):
                raise SetupError(
                    f"{files.external('.')} is not empty and holds no unfinished backup: name another folder"
                )
            self._add(_BackupStart(source))
            return
        lines = bytes(files.map_readonly(PARTIAL)).splitlines()
        start = msgspec.json.decode(lines[0], type=_BackupStart)
        if start.source != source:
            raise SetupError(
                f"{files.external('.')} is an unfinished backup of {start.source}: name another folder"
            )
        self._lines = lines
        copied_files = [msgspec.json.decode(line, type=CopiedFile) for line in lines[1:]]
        self.copied = {file.name: file for file in copied_files}

    def add(self, file: CopiedFile) -> None:
        """Record a file that was copied and synced."""
        self._add(file)
        self.copied[file.name] = file

    def _add(self, line: msgspec.Struct) -> None:
        """Add a line to BACKUP.partial, durably."""
        self._lines.append(msgspec.json.encode(line))
        self._files.replace(PARTIAL, b"\n".join(self._lines))


def crc32c(buffer: pa.Buffer, used_bytes: int) -> int:
    """Compute the CRC-32C of the first `used_bytes` of a file, in steps, so that other threads can run in between.

    Raises Unreadable if the disk cannot read them.
    """
    crc = 0
    for begin in range(0, used_bytes, CHUNK_BYTES):
        check_readable(buffer, begin, min(begin + CHUNK_BYTES, used_bytes))
        crc = google_crc32c.extend(crc, bytes(buffer[begin : min(begin + CHUNK_BYTES, used_bytes)]))
    return crc
