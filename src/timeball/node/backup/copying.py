"""Copying in both directions: in steps, synced, checked, and continued after an interruption."""

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

Told = Callable[[int, int], None]  # called with the bytes done, and the bytes of the whole copy


def backup(source: Files, target: Files, clock: Clock, told: Told = lambda _done, _of: None) -> Manifest:
    """Copy a data folder, which may be in use, into an empty folder, or into the folder of an interrupted backup.

    Raises SetupError for another target, Corrupt for damage, and NotFound for a source without a log.
    """
    made_ms, found = clock.wall_ms(), plan(source)
    target.make_dir(".")
    progress = Progress(target, source.external("."))
    counter = _Counter(told, sum(part.used_bytes for part in found.parts))
    copied: list[CopiedFile] = []
    for part in found.parts:
        known = progress.copied.get(part.name)
        if known is None or not (part.is_fixed and _is_there(target, known)):
            known = _copy(part.name, part.buffer, part.used_bytes, target, counter)
            progress.add(known)
        else:
            counter.add(part.used_bytes)
        copied.append(known)
    _remove_others(target, progress, found)
    if source.exists(FORMAT_NAME):
        data = source.map_readonly(FORMAT_NAME)
        copied.append(_copy(FORMAT_NAME, data, data.size, target, counter))
    manifest = Manifest(
        row=found.row, first_row=found.first_row, made_ms=made_ms, source=source.external("."), files=copied
    )
    mf.save(target, manifest)
    return manifest


def restore(source: Files, target: Files, told: Told = lambda _done, _of: None) -> Manifest:
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
    counter = _Counter(told, manifest.used_bytes)
    segments = [file.name for file in manifest.files if file.name.endswith(SUFFIX)]
    for file in manifest.files:
        if _is_there(target, file):
            counter.add(file.used_bytes)
            continue
        copied = _copy(file.name, _of_backup(source, file), file.used_bytes, target, counter)
        if copied.crc32c != file.crc32c:
            raise Corrupt(f"{file.name} in this backup does not match its checksum: use another backup")
        # The broker goes on writing the last segment, and must not run out of space. So disk blocks are allocated for
        # its zeros.
        _set_size(target, file.name, file.size_bytes, sparse=file.name != max(segments, default=""))
    target.remove(RESTORING)
    target.sync_dir(".")
    return manifest


class _Counter:
    def __init__(self, told: Told, all_bytes: int) -> None:
        self._told, self._done, self._all = told, 0, all_bytes

    def add(self, size_bytes: int) -> None:
        self._done += size_bytes
        self._told(min(self._done, self._all), self._all)


def _copy(name: str, buffer: pa.Buffer, used_bytes: int, target: Files, counter: _Counter) -> CopiedFile:
    folder = name.rpartition("/")[0] or "."
    target.make_dir(folder)
    file = target.create(name)
    try:
        for begin in range(0, used_bytes, mf.STEP_BYTES):
            step = buffer[begin : min(begin + mf.STEP_BYTES, used_bytes)]
            file.write_at(begin, step)
            counter.add(step.size)
        file.sync()
    finally:
        file.close()
    target.sync_dir(folder)
    # The checksum is that of the written file. It differs from the source's if the memory or the path to the disk is
    # faulty.
    return CopiedFile(name, buffer.size, used_bytes, mf.crc32c(target.map_readonly(name), used_bytes))


def _is_there(files: Files, file: CopiedFile) -> bool:
    try:
        found = files.map_readonly(file.name)
    except NotFound:
        return False
    return found.size >= file.used_bytes and mf.crc32c(found, file.used_bytes) == file.crc32c


def _of_backup(source: Files, file: CopiedFile) -> pa.Buffer:
    try:
        found = source.map_readonly(file.name)
    except NotFound:
        raise Corrupt(f"{file.name} is missing in this backup: use another backup") from None
    if found.size < file.used_bytes:
        raise Corrupt(
            f"{file.name} in this backup has {found.size} bytes, not {file.used_bytes}: use another backup"
        )
    return found


def _set_size(files: Files, name: str, size_bytes: int, *, sparse: bool) -> None:
    file = files.open(name)
    try:
        if sparse:
            file.write_at(size_bytes - 1, b"\0") if files.size(name) < size_bytes else None
        else:
            file.allocate(size_bytes)
        file.sync()
    finally:
        file.close()


def _remove_others(target: Files, progress: Progress, found: Plan) -> None:
    """Remove files that an earlier run copied and that are no longer part of the plan."""
    wanted = {part.name for part in found.parts}
    for name in progress.copied.keys() - wanted:
        target.remove(name)
