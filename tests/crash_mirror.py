"""A real folder in which a library works, and a folder of the crash model, kept equal in both directions.

A copy carries the stamp (inode number, modification time, size) it had when both sides were equal; only files
whose stamp differs are read again. A time stamp younger than a clock tick of the kernel proves nothing, so such
files are compared by content.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
from tests.crash_disk import Folder, Inode, Stamp

_RACY_NS = 50_000_000


def mirror_folder(folder: Folder, path: Path) -> None:
    """Make the real folder equal to the folder of the model. Equal files are not written."""
    path.mkdir(parents=True, exist_ok=True)
    folder.mirror = path
    for name, node in folder.current.items():
        if isinstance(node, Folder):
            mirror_folder(node, path / name)
        elif node.mirror is None or node.mapped_bytes:
            mirror_content(node, path / name)


def mirror_content(inode: Inode, path: Path) -> None:
    """Make the real file equal to the file of the model."""
    with path.open("r+b" if path.exists() else "wb") as file:
        file.write(inode.view())
        file.truncate(inode.size)
    inode.mirror = path
    inode.stamp = _stamp(path.stat())


def absorb_folder(folder: Folder, path: Path) -> None:
    """Take over the changes of a library in the real folder, in the order of the files' times."""
    folder.mirror = path
    entries = sorted((entry.stat().st_mtime_ns, entry.name, entry.is_dir()) for entry in os.scandir(path))
    for _, name, is_dir in entries:
        child = folder.current.get(name)
        if is_dir:
            if not isinstance(child, Folder):
                child = Folder()
                folder.link(name, child)
            absorb_folder(child, path / name)
        else:
            _absorb_file(folder, name, child if isinstance(child, Inode) else None, path / name)
    for name in folder.current.keys() - {name for _, name, _ in entries}:
        folder.unlink(name)


def _absorb_file(folder: Folder, name: str, inode: Inode | None, path: Path) -> None:
    """Take over a file, unless its stamp shows that it has not changed."""
    status = path.stat()
    stamp = _stamp(status)
    if inode is not None and inode.stamp == stamp:
        racy = time.time_ns() - stamp[1] < _RACY_NS
        if not racy or inode.mapped_bytes:
            return
    data = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    if inode is None or inode.stamp is None or inode.stamp[0] != stamp[0]:
        inode = Inode()
        folder.link(name, inode)
    if len(data) != inode.size or not np.array_equal(data, inode.bytes[: inode.size]):
        inode.allocate(len(data))
        changed = np.flatnonzero(data != inode.bytes[: len(data)])
        if len(changed):
            first, last = int(changed[0]), int(changed[-1]) + 1
            inode.write(first, data[first:last])
    inode.mirror, inode.stamp = path, stamp


def _stamp(status: os.stat_result) -> Stamp:
    """Return the stamp of a file."""
    return status.st_ino, status.st_mtime_ns, status.st_size
