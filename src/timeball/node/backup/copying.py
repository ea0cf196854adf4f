"""Backup and restore: copies files in steps, syncs and checks them, and continues an interrupted copy."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from timeball.io.clock import Clock
from timeball.io.files import Files
from timeball.log.segment import SUFFIX
from timeball.model.errors import Corrupt, NotFound, SetupError
from timeball.node.backup import manifest as mf
from timeball.node.backup.manifest import CopiedFile, Manifest, Progress
from timeball.node.backup.plan import Plan, plan
from timeball.node.data_folder import FORMAT_NAME, RESTORING

ReportProgress = Callable[
    [int, int], None
]  # called with the bytes copied so far, and the bytes of the whole copy


def backup(
    source: Files, target: Files, clock: Clock, report_progress: ReportProgress = lambda _done, _total: None
) -> Manifest:
    """Copy a data folder, which may be in use, into an empty folder, or into the folder of an interrupted backup.

    Raises SetupError for a target with other files, Corrupt for damage, and NotFound for a source without a log.
    """
    made_ms, backup_plan = clock.wall_ms(), plan(source)
    target.make_dir(".")
    progress = Progress(target, source.external("."))
    counter = _ProgressCounter(report_progress, sum(planned.used_bytes for planned in backup_plan.files))
    copied: list[CopiedFile] = []
    for planned in backup_plan.files:
        copied_file = progress.copied.get(planned.name)
        if copied_file is None or not (planned.is_fixed and _is_copied(target, copied_file)):
            copied_file = _copy(planned.name, planned.buffer, planned.used_bytes, target, counter)
            progress.add(copied_file)
        else:
            counter.add(planned.used_bytes)
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
    mf.save(target, manifest)
    return manifest


def restore(
    source: Files, target: Files, report_progress: ReportProgress = lambda _done, _total: None
) -> Manifest:
    """Copy a backup into an empty data folder, or into the folder of an interrupted restore. Checks every byte.

    Raises SetupError for a folder with other files, and Corrupt for a damaged backup.
    """
    manifest = mf.load(source)
    target.make_dir(".")
    names = target.list_dir(".")
    if names and RESTORING not in names:
        raise SetupError(
            f"{target.external('.')} is not empty: a backup is restored into an empty folder only"
        )
    target.replace(RESTORING, b"")
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


class _ProgressCounter:
    """Counts copied bytes and reports the progress."""

    def __init__(self, report_progress: ReportProgress, total_bytes: int) -> None:
        self._report_progress, self._done_bytes, self._total_bytes = report_progress, 0, total_bytes

    def add(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        self._report_progress(min(self._done_bytes, self._total_bytes), self._total_bytes)


def _copy(
    name: str, buffer: pa.Buffer, used_bytes: int, target: Files, counter: _ProgressCounter
) -> CopiedFile:
    """Copy the first `used_bytes` bytes to a new file, durably."""
    folder = name.rpartition("/")[0] or "."
    target.make_dir(folder)
    file = target.create(name)
    try:
        for begin in range(0, used_bytes, mf.CHUNK_BYTES):
            chunk = buffer[begin : min(begin + mf.CHUNK_BYTES, used_bytes)]
            file.write_at(begin, chunk)
            counter.add(chunk.size)
        file.sync()
    finally:
        file.close()
    target.sync_dir(folder)
    # The checksum is computed from the written file, so it also detects faulty memory or a faulty path to the disk.
    return CopiedFile(name, buffer.size, used_bytes, mf.crc32c(target.map_readonly(name), used_bytes))


def _is_copied(files: Files, file: CopiedFile) -> bool:
    """Check whether a file exists with the content that was copied, by its checksum."""
    try:
        buffer = files.map_readonly(file.name)
    except NotFound:
        return False
    return buffer.size >= file.used_bytes and mf.crc32c(buffer, file.used_bytes) == file.crc32c


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
    """Extend a file with zeros. With `sparse` they use no disk blocks."""
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
