"""The disk as an argument: the only module that opens, maps, syncs, renames and removes.

Every store receives a `Files` and names things relative to its root, so that the same code runs on a real
folder (`RealFiles`) and on the crash model of the tests, which forgets bytes that were not synced, tears writes in
flight and loses directory entries that were not synced. A caller may rely on exactly this:

    * bytes written are on disk after `File.sync()` has returned, and not before;
    * a created, renamed or removed name is on disk after `sync_dir()` of its folder, and not before;
    * `replace()` leaves either the old or the new content, whole, and has synced both file and name;
    * a mapping shows what was written through the same Files object at once.

Errors of the operating system become typed ones here: ENOSPC, EDQUOT, EMFILE and ENFILE are OverLimit (the caller may
free space or descriptors and go on), a missing name is NotFound, everything else is DiskFailed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from timeball import descriptors
from timeball.errors import DiskFailed, NotFound, OverLimit, SetupError

WARM_STEP = 8 * 1024 * 1024
_CLOSED = (1 << 31) - 1  # a descriptor that no process has: every call on it is EBADF


class File(Protocol):
    """One open file; offsets are absolute, there is no file position."""

    def write_at(self, offset: int, data: bytes | memoryview | pa.Buffer) -> None:
        """Write all of `data`; not durable before `sync`."""

    def allocate(self, size_bytes: int, *, reserved: bool = True) -> None:
        """Make the file `size_bytes` long, the new part reading as zeros; with its room on the disk, if `reserved`."""

    def reserve(self, begin: int, end: int) -> None:
        """Reserve the room of this part on the disk, so that no write there can fail for lack of it."""

    def map(self, *, at_random: bool = False) -> memoryview:
        """The whole file, writable and shared; valid until the file is closed and all views are gone.

        `at_random`: it is touched here and there, so that reading ahead would only fill memory.
        """

    def sync(self) -> None:
        """Content and size are durable once this returns. A failure is final: never retry on this file."""

    def close(self) -> None:
        """Let go of the descriptor; views stay valid."""


class Files(Protocol):
    """A folder. Names use '/' and are relative to the root."""

    has_links: bool  # whether a file may have a second name

    def free_bytes(self) -> int:
        """Return the room left on the disk."""

    def make_dir(self, name: str) -> None:
        """Create a folder and its parents; the new names are durable on return."""

    def list_dir(self, name: str) -> list[str]:
        """Sorted names in a folder; empty when it does not exist."""

    def exists(self, name: str) -> bool:
        """Return whether a file or folder has this name."""

    def size(self, name: str) -> int:
        """Length of a file in bytes."""

    def create(self, name: str) -> File:
        """Open for writing, empty; the name is not durable before `sync_dir`."""

    def open(self, name: str) -> File:
        """Open an existing file for writing."""

    def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer:
        """The whole file, valid after removal of the name. `at_random`: a page here and there, none read ahead."""

    def unload(self, mapped: pa.Buffer) -> None:
        """Let this process's memory go of what it has read of a `map_readonly`; the system's cache keeps it."""

    def warm(self, name: str, begin: int, end: int) -> None:
        """Bring this part of an allocated file into memory, so that writing it costs no more than a copy."""

    def replace(self, name: str, data: bytes) -> None:
        """Make `data` the content of `name`, atomically and durably."""

    def rename(self, name: str, to: str) -> None:
        """Give a file another name in its folder, a present file's too; not durable before `sync_dir`."""

    def link(self, name: str, to: str) -> None:
        """Give a file a second name, if the file system can; not durable before `sync_dir`."""

    def remove(self, name: str) -> None:
        """Remove a file's name; not durable before `sync_dir`."""

    def sync_file(self, name: str) -> None:
        """Make durable the content of a file that something else has written."""

    def sync_dir(self, name: str) -> None:
        """Make durable the names in a folder."""

    def external(self, name: str) -> str:
        """A path of the operating system for libraries that do their own I/O in this folder."""

    def absorb(self, name: str) -> None:
        """Take note of what a library has written below `external(name)`; it is not durable yet."""


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# Of a file system without hard links, or a file that has as many as it may have.
_NO_LINKS = {errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap = _libc.mmap, _libc.munmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


def disk_full(doing: str) -> OverLimit:
    """Return the error that a disk, or its user's share, is full."""
    return OverLimit(f"disk full while {doing}: free some space on this file system, then go on")


@contextmanager
def no_room_to_sync(doing: str) -> Iterator[None]:
    """Raise OverLimit when a sync fails for want of room; for a new file, which is then removed and written again."""
    try:
        yield
    except DiskFailed as error:
        if getattr(error.__cause__, "errno", None) in DISK_FULL:
            raise disk_full(doing) from error
        raise


@contextmanager
def _typed(doing: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"{doing} failed: there is no such file or folder") from error
    except OSError as error:
        if error.errno in DISK_FULL:
            raise disk_full(doing) from error
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise OverLimit(f"too many open files while {doing}: raise the limit (ulimit -n)") from error
        raise DiskFailed(f"{doing} failed: {error.strerror} (errno {error.errno})") from error


def _open(path: Path, flags: int) -> int:
    """A descriptor, from the reserve when strangers have all others."""
    for count in (0, *descriptors.RESERVE_STEPS):
        try:
            with descriptors.lent(count) if count else nullcontext():
                return os.open(path, flags, 0o640)
        except OSError as error:
            if error.errno != errno.EMFILE or count == descriptors.RESERVE:
                raise
    raise AssertionError("the last step returns or raises")


class RealFile:
    """A file of the operating system."""

    def __init__(self, path: Path, *, create: bool) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if create else 0)
        self.path = path
        with _typed(f"opening {path.name}"):
            self._fd = _open(path, flags)

    def write_at(self, offset: int, data: bytes | memoryview | pa.Buffer) -> None:
        """See File."""
        view = memoryview(data).cast("B")
        with _typed(f"writing {self.path.name}"):
            while view:
                written = os.pwrite(self._fd, view, offset)
                view, offset = view[written:], offset + written

    def allocate(self, size_bytes: int, *, reserved: bool = True) -> None:
        """See File. Reserves the blocks, so that a full disk shows here and not at a commit."""
        with _typed(f"allocating {size_bytes} bytes for {self.path.name}"):
            if size_bytes < os.fstat(self._fd).st_size or not reserved:
                os.ftruncate(self._fd, size_bytes)
            elif size_bytes > 0:  # posix_fallocate takes no empty range
                os.posix_fallocate(self._fd, 0, size_bytes)

    def reserve(self, begin: int, end: int) -> None:
        """See File. Blocks that the file has already cost nothing, also on a full disk."""
        with _typed(f"allocating {end - begin} bytes for {self.path.name}"):
            os.posix_fallocate(self._fd, begin, end - begin)

    def map(self, *, at_random: bool = False) -> memoryview:
        """See File."""
        with _typed(f"mapping {self.path.name}"):
            if os.fstat(self._fd).st_size == 0:  # mmap takes no empty range
                return memoryview(bytearray())
            mapped = mmap.mmap(self._fd, 0, mmap.MAP_SHARED)
            if at_random:
                mapped.madvise(mmap.MADV_RANDOM)
            return memoryview(mapped)

    def sync(self) -> None:
        """See File. ENOSPC is no OverLimit here: what was written is lost, freeing space does not help."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise DiskFailed(f"fdatasync of {self.path.name} failed: {error.strerror}") from error

    def close(self) -> None:
        """See File. A second close does nothing: the number may be another file's by then."""
        fd, self._fd = self._fd, _CLOSED
        if fd != _CLOSED:
            os.close(fd)


class _Mapping:
    """A file mapped for reading, without a descriptor: Python's mmap keeps one for each mapping (until 3.13).

    Thousands of files are mapped at once, files of the pending table among them, and the
    descriptors are needed for connections.
    """

    def __init__(self, fd: int, size_bytes: int, offset: int = 0, *, populate: bool = False) -> None:
        # Set first: __del__ runs after a failure here, too.
        self._address, self._size_bytes = _MAP_FAILED, size_bytes
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        self._address = _mmap(None, size_bytes, mmap.PROT_READ, flags, fd, offset)
        if self._address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))

    def buffer(self) -> pa.Buffer:
        """The bytes; the mapping lasts as long as any part of them is held."""
        return pa.foreign_buffer(self._address, self._size_bytes, self)

    def __del__(self) -> None:
        if self._address != _MAP_FAILED:
            _munmap(self._address, self._size_bytes)


class RealFiles:
    """A folder of the operating system, held by one process at a time."""

    has_links = True

    def __init__(self, root: Path) -> None:
        # Absolute: `external` is told to other processes, whose working folder is another.
        self.root = root.absolute()
        self._lock_fd: int | None = None

    def lock(self) -> None:
        """Claim the folder for this process, or raise SetupError."""
        self.make_dir(".")
        fd = _open(self.root / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            raise SetupError(
                f"data folder {self.root} is in use by another Timeball; stop it first"
            ) from error
        self._lock_fd = fd

    def unlock(self) -> None:
        """Give the folder back."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def free_bytes(self) -> int:
        """Return the room left for this process on the folder's file system, as `df` shows it."""
        return shutil.disk_usage(self.root).free

    def make_dir(self, name: str) -> None:
        """See Files."""
        path = self.root / name
        with _typed(f"making folder {path if name == '.' else name}"):
            missing = {p for p in (path, *path.parents) if not p.exists()}
            path.mkdir(parents=True, exist_ok=True)
        # Below the root every name is synced even when it was there: a run killed between making it and
        # syncing it leaves a folder that all processes see and a power cut takes away with all it holds.
        for made in (path, *path.parents):
            if made in missing or (made != self.root and made.is_relative_to(self.root)):
                _sync_directory(made.parent)

    def list_dir(self, name: str) -> list[str]:
        """See Files."""
        path = self.root / name
        return sorted(os.listdir(path)) if path.is_dir() else []

    def exists(self, name: str) -> bool:
        """See Files."""
        return (self.root / name).exists()

    def size(self, name: str) -> int:
        """See Files."""
        with _typed(f"reading the size of {name}"):
            return (self.root / name).stat().st_size

    def create(self, name: str) -> RealFile:
        """See Files."""
        return RealFile(self.root / name, create=True)

    def open(self, name: str) -> RealFile:
        """See Files."""
        return RealFile(self.root / name, create=False)

    def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer:
        """See Files."""
        with _typed(f"mapping {name}"):
            fd = _open(self.root / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                size_bytes = os.fstat(fd).st_size  # mmap takes no empty range
                mapped = _Mapping(fd, size_bytes).buffer() if size_bytes else pa.py_buffer(b"")
            finally:
                os.close(fd)
        if at_random and size_bytes:
            _madvise(mapped.address, size_bytes, mmap.MADV_RANDOM)
        return mapped

    def unload(self, mapped: pa.Buffer) -> None:
        """See Files. Of a shared mapping this drops page tables alone: the next read finds the same bytes."""
        if mapped.size:
            _madvise(mapped.address, mapped.size, mmap.MADV_DONTNEED)

    def warm(self, name: str, begin: int, end: int) -> None:
        """See Files. Mapped with its pages for a moment: no call for reading ahead takes more than some 100 KB."""
        # What cannot be warmed is written all the same, and no slower than without.
        with suppress(OSError):
            fd = _open(self.root / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                end = min(end, os.fstat(fd).st_size)
                for at in range(begin - begin % WARM_STEP, end, WARM_STEP):
                    # A step at a time: unmapping holds up the page faults of all other threads.
                    _Mapping(fd, min(WARM_STEP, end - at), at, populate=True)
            finally:
                os.close(fd)

    def replace(self, name: str, data: bytes) -> None:
        """See Files."""
        fresh = f"{name}.new"
        file = self.create(fresh)
        try:
            file.write_at(0, data)
            with no_room_to_sync(f"writing {fresh}"):
                file.sync()
        finally:
            file.close()
        self.rename(fresh, name)
        _sync_directory((self.root / name).parent)

    def rename(self, name: str, to: str) -> None:
        """See Files."""
        assert name.rpartition("/")[0] == to.rpartition("/")[0], "a rename stays in its folder"
        with _typed(f"renaming {name}"):
            os.replace(self.root / name, self.root / to)

    def link(self, name: str, to: str) -> None:
        """See Files. A name that is taken keeps its file."""
        with _typed(f"linking {name}"):
            try:
                os.link(self.root / name, self.root / to)
            except FileExistsError:
                return
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise

    def remove(self, name: str) -> None:
        """See Files."""
        with _typed(f"removing {name}"):
            (self.root / name).unlink(missing_ok=True)

    def sync_file(self, name: str) -> None:
        """See Files."""
        file = self.open(name)
        try:
            file.sync()
        finally:
            file.close()

    def sync_dir(self, name: str) -> None:
        """See Files."""
        _sync_directory(self.root / name)

    def external(self, name: str) -> str:
        """See Files."""
        return str(self.root / name)

    def absorb(self, name: str) -> None:
        """See Files. The operating system has seen every write already."""


def _sync_directory(path: Path) -> None:
    with _typed(f"opening folder {path.name}"):
        fd = _open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        raise DiskFailed(f"fsync of folder {path} failed: {error.strerror}") from error
    finally:
        os.close(fd)


def read_secret(path: str, option: str, *, forbidden_mode: int) -> bytes:
    """Return the bytes of an operator's file outside the data folder that other users must not read.

    Raises SetupError naming the option: when it cannot be read, and when its mode has one of these bits.
    """
    try:
        with Path(path).open("rb") as file:
            mode = (
                os.fstat(file.fileno()).st_mode & 0o777
            )  # of the file that is read: the name may mean another one next
            if mode & forbidden_mode:
                raise SetupError(f"{option} {path}: others may read it (mode {mode:04o}); chmod 600 it")
            return file.read()
    except OSError as error:
        raise SetupError(f"{option} {path}: {error.strerror or error}") from error
