"""The crash model: `Files` in memory, with a power switch and faults on call.

`CrashFiles` guarantees no more than files.py does: data that was not synced may be lost after `crash()`,
whole or in 512-byte pieces, and names that were not synced may be missing, old or back again. It must lose as much
as ext4 and XFS can (lost create, lost rename, empty renamed file, zombie after unlink, torn write). Otherwise tests
with it prove nothing.

Every call that changes something is counted (`calls`, `trace`); `replace` and `make_dir` count their inner
steps. A test runs its scenario once to learn n, then once for each cut point 1..n:

    files = CrashFiles(crash_at=k)
    try: scenario(files)
    except PowerCut: pass
    for seed in range(20): recover(files.crash(seed))

At the cut, writes and name changes have reached memory but no disk; a sync has not happened. From then on every
call but `File.close` raises PowerCut, in every thread. `crash()` leaves its object as it was, so one cut gives
many images.

`forget_sync=True` and `forget_sync_dir=True` are the negative controls: a harness that passes with them tests
nothing.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path

import numpy as np
import pyarrow as pa
from tests.crash_disk import Bytes, Folder, Inode, Survival
from tests.crash_mirror import absorb_folder, mirror_content, mirror_folder
from tests.crash_power import Power, PowerCut

from timeball.model.errors import DiskFailed, NotFound, TimeballError

__all__ = ["CrashFile", "CrashFiles", "PowerCut", "Survival"]


class CrashFile:
    """One open file of a CrashFiles."""

    def __init__(self, files: CrashFiles, inode: Inode, name: str) -> None:
        self._files = files
        self._inode = inode
        self._closed = False
        self.name = name

    def write_at(self, offset: int, data: bytes | memoryview | pa.Buffer) -> None:
        """See File."""
        with self._files.running():
            self._files.write(self._open(), self.name, offset, np.frombuffer(data, dtype=np.uint8))

    def allocate(self, size_bytes: int, *, reserved: bool = True) -> None:
        """See File."""
        with self._files.running():
            self._files.allocate(self._open(), self.name, size_bytes, reserved)

    def reserve(self, begin: int, end: int) -> None:
        """See File. No byte changes. The call is counted, and may fail like calls that take space."""
        with self._files.running():
            self._files.reserve(self._open(), self.name, begin, end)

    def map(self, *, at_random: bool = False) -> memoryview:
        """See File. Stores through it are not counted and may reach the disk at any time."""
        with self._files.running():
            return self._open().map()

    def sync(self) -> None:
        """See File."""
        with self._files.running():
            self._files.sync_inode(self._open(), "sync", self.name)

    def close(self) -> None:
        """See File. It also works after a cut, because it touches no disk."""
        self._closed = True

    def _open(self) -> Inode:
        """Return the inode. Raises DiskFailed after `close`."""
        if self._closed:
            raise DiskFailed(f"using {self.name} failed: it is closed")
        return self._inode


class CrashFiles(Power):
    """A folder in memory whose power can be cut. The module describes its use."""

    has_links = False

    def __init__(
        self, *, crash_at: int | None = None, forget_sync: bool = False, forget_sync_dir: bool = False
    ) -> None:
        super().__init__(crash_at)
        self.forget_sync = forget_sync
        self.forget_sync_dir = forget_sync_dir
        self.syncs_after_failure: list[str] = []
        self._root = Folder()
        self._outside: Path | None = None
        self._exported: list[str] = []

    def free_bytes(self) -> int:
        """See Files: `fail_at` makes it full."""
        return 1 << 40

    # -- for tests -----------------------------------------------------------------------------------------

    def crash(
        self, seed: int = 0, survival: Survival = "random", *, crash_at: int | None = None
    ) -> CrashFiles:
        """Return the disk after a power cut now, with the parts of unsynced data that survive."""
        with self.lock:
            if not self.cut:
                self.about_to_cut()
            after = CrashFiles(
                crash_at=crash_at, forget_sync=self.forget_sync, forget_sync_dir=self.forget_sync_dir
            )
            after._root = self._root.after_cut(np.random.default_rng(seed), survival)
            return after

    def content(self, name: str) -> bytes:
        """Return the bytes that a program would read now."""
        return bytes(self.map_readonly(name).to_pybytes())

    def close(self) -> None:
        """Remove the folder of `external`. This also happens when the object dies."""
        with self.lock:
            if self._outside is not None:
                shutil.rmtree(self._outside, ignore_errors=True)

    # -- Files ---------------------------------------------------------------------------------------------

    def make_dir(self, name: str) -> None:
        """See Files. As on a real folder each ancestor's name is made and then synced."""
        with self.running():
            folder = self._root
            parts = _parts(name)
            for depth, part in enumerate(parts):
                path = "/".join(parts[: depth + 1])
                child = folder.current.get(part)
                if child is None:
                    child = Folder()
                    self.begin("mkdir", path, takes_space=True)
                    folder.link(part, child)
                    if folder.mirror is not None:
                        mirror_folder(child, folder.mirror / part)
                    self.end()
                if not isinstance(child, Folder):
                    raise DiskFailed(f"making folder {path} failed: a file has this name")
                self._sync_folder(folder, "/".join(parts[:depth]))
                folder = child

    def list_dir(self, name: str) -> list[str]:
        """See Files."""
        with self.running():
            node = self._find(name)
            return sorted(node.current) if isinstance(node, Folder) else []

    def exists(self, name: str) -> bool:
        """See Files."""
        with self.running():
            return self._find(name) is not None

    def size(self, name: str) -> int:
        """See Files."""
        with self.running():
            return self._inode(name).size

    def create(self, name: str) -> CrashFile:
        """See Files."""
        with self.running():
            folder, last = self._parent(name)
            node = folder.current.get(last)
            if isinstance(node, Folder):
                raise DiskFailed(f"creating {name} failed: it is a folder")
            self.begin("create", name, takes_space=True)
            if node is None:
                node = Inode()
                folder.link(last, node)
                if folder.mirror is not None:
                    mirror_content(node, folder.mirror / last)
            else:
                node.allocate(0)
                self._mirror(node)
            self.end()
            return CrashFile(self, node, name)

    def open(self, name: str) -> CrashFile:
        """See Files."""
        with self.running():
            return CrashFile(self, self._inode(name), name)

    def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer:
        """See Files."""
        with self.running():
            return pa.py_buffer(self._inode(name).view())

    def unload(self, mapped: pa.Buffer) -> None:
        """See Files. Mappings are memory."""

    def warm(self, name: str, begin: int, end: int) -> None:
        """See Files. This has no effect that a power cut could find."""

    def replace(self, name: str, data: bytes) -> None:
        """See Files. Five cut points: create, write, sync, rename, sync_dir."""
        fresh = f"{name}.new"
        with self.running():
            file = self.create(fresh)
            file.write_at(0, data)
            file.sync()
            self.rename(fresh, name)
            folder, _ = self._parent(name)
            self._sync_folder(folder, "/".join(_parts(name)[:-1]))

    def rename(self, name: str, to: str) -> None:
        """See Files."""
        with self.running():
            assert _parts(name)[:-1] == _parts(to)[:-1], "a rename stays in its folder"
            folder, last = self._parent(to)
            before = _parts(name)[-1]
            if isinstance(folder.current.get(last), Folder):
                raise DiskFailed(f"replacing {to} failed: it is a folder")
            if before not in folder.current:
                raise NotFound(f"renaming {name} failed: there is no such file or folder")
            self.begin("rename", to, takes_space=True)
            folder.rename(before, last)
            node = folder.current[last]
            if folder.mirror is not None and isinstance(node, Inode):
                os.replace(folder.mirror / before, folder.mirror / last)
                node.mirror = folder.mirror / last
            self.end()

    def link(self, name: str, to: str) -> None:
        """See Files. This file system has no second names."""

    def remove(self, name: str) -> None:
        """See Files."""
        with self.running():
            folder, last = self._parent(name, missing_ok=True)
            node = folder.current.get(last)
            if isinstance(node, Folder):
                raise DiskFailed(f"removing {name} failed: it is a folder")
            self.begin("remove", name)
            if node is not None:
                if node.mirror is not None:
                    node.mirror.unlink(missing_ok=True)
                folder.unlink(last)
            self.end()

    def sync_file(self, name: str) -> None:
        """See Files."""
        with self.running():
            self.sync_inode(self._inode(name), "sync_file", name)

    def sync_dir(self, name: str) -> None:
        """See Files."""
        with self.running():
            folder = self._find(name)
            if not isinstance(folder, Folder):
                raise NotFound(f"syncing folder {name} failed: there is no such folder")
            self._sync_folder(folder, name)

    def external(self, name: str) -> str:
        """See Files. The same path each time; stores through a mapping show in it at the next call."""
        with self.running():
            path = self._outside_path(name)
            folder = self._find(name)
            if isinstance(folder, Folder):
                mirror_folder(folder, path)
            path.parent.mkdir(parents=True, exist_ok=True)
            if name not in self._exported:
                self._exported.append(name)
            return str(path)

    def absorb(self, name: str) -> None:
        """See Files. One call, however much has changed."""
        with self.running():
            self.begin("absorb", name)
            self._absorb(name)
            self.end()

    # -- for CrashFile: with the lock held ------------------------------------------------------------------

    def write(self, inode: Inode, name: str, offset: int, data: Bytes) -> None:
        """Write, as one counted call."""
        if offset < 0:
            raise DiskFailed(f"writing {name} failed: negative offset {offset}")
        try:
            self.begin("write_at", name, takes_space=offset + len(data) > inode.size)
        except TimeballError:
            inode.write(offset, data[: len(data) // 2])
            self._mirror(inode)
            raise
        inode.write(offset, data)
        self._mirror(inode)
        self.end()

    def allocate(self, inode: Inode, name: str, size_bytes: int, reserved: bool) -> None:
        """Change the size, as one counted call."""
        self.begin("allocate", name, takes_space=reserved and size_bytes > inode.size)
        inode.allocate(size_bytes)
        self._mirror(inode)
        self.end()

    def reserve(self, inode: Inode, name: str, begin: int, end: int) -> None:
        """Reserve a part of the file, as one counted call."""
        if not 0 <= begin < end:
            raise DiskFailed(f"allocating {end - begin} bytes for {name} failed: no such part")
        self.begin("reserve", name, takes_space=True)
        self.end()

    def sync_inode(self, inode: Inode, call: str, name: str) -> None:
        """Sync, as one counted call. A cut comes before its effect."""
        try:
            self.begin(call, name)
        except TimeballError:
            inode.sync_failed = True
            raise
        self.end()
        if inode.sync_failed:
            self.syncs_after_failure.append(name)
        elif not self.forget_sync:
            inode.sync()

    # -- inside --------------------------------------------------------------------------------------------

    def about_to_cut(self) -> None:
        """See Power. All data that a library has written by now is in flight."""
        for name in self._exported:
            self._absorb(name)

    def _sync_folder(self, folder: Folder, name: str) -> None:
        """Sync a folder, as one counted call."""
        self.begin("sync_dir", name)
        self.end()
        if not self.forget_sync_dir:
            folder.sync()

    def _find(self, name: str) -> Inode | Folder | None:
        """Return a file or folder, or None."""
        node: Inode | Folder | None = self._root
        for part in _parts(name):
            node = node.current.get(part) if isinstance(node, Folder) else None
        return node

    def _inode(self, name: str) -> Inode:
        """Return a file. Raises NotFound and DiskFailed."""
        node = self._find(name)
        if node is None:
            raise NotFound(f"opening {name} failed: there is no such file")
        if isinstance(node, Folder):
            raise DiskFailed(f"opening {name} failed: it is a folder")
        return node

    def _parent(self, name: str, *, missing_ok: bool = False) -> tuple[Folder, str]:
        """Return the folder of a name, and the last part of the name."""
        *above, last = _parts(name)
        folder = self._find("/".join(above))
        if isinstance(folder, Folder):
            return folder, last
        if missing_ok:
            return Folder(), last
        raise NotFound(f"opening {name} failed: its folder does not exist")

    def _mirror(self, inode: Inode) -> None:
        """Copy a file to its place in the external folder, if it has one."""
        if inode.mirror is not None:
            mirror_content(inode, inode.mirror)

    def _outside_path(self, name: str) -> Path:
        """Return the external path of a name. The first call makes the external folder."""
        if self._outside is None:
            memory = Path("/dev/shm")
            parent = memory if memory.is_dir() else None
            self._outside = Path(tempfile.mkdtemp(prefix="crash_files_", dir=parent))
            weakref.finalize(self, shutil.rmtree, self._outside, ignore_errors=True)
        return self._outside.joinpath("root", *_parts(name))

    def _absorb(self, name: str) -> None:
        """Take over the changes of a library below a name."""
        path = self._outside_path(name)
        if not path.is_dir():
            return
        folder, here = self._root, path.parents[len(_parts(name)) - 1] if _parts(name) else path
        for part in _parts(name):
            here = here / part
            child = folder.current.get(part)
            if not isinstance(child, Folder):
                child = Folder(mirror=here)
                folder.link(part, child)
            folder = child
        absorb_folder(folder, path)


def _parts(name: str) -> list[str]:
    """Split a name at its slashes."""
    return [part for part in name.split("/") if part not in ("", ".")]
