"""Access to the disk, passed as an argument, and the limit of file descriptors.

Only this module opens, maps, syncs, renames and removes files. Every store receives a `Files` and names files relative
to its root. So the same code runs on a real folder (`RealFiles`) and on the crash model of the tests, which forgets
bytes that were not synced, tears writes in flight and loses directory entries that were not synced. A caller may rely
on exactly these guarantees:

    * bytes written are on disk after `File.sync()` has returned, and not before;
    * a created, renamed or removed name is on disk after `sync_dir()` of its folder, and not before;
    * `replace()` leaves either the old or the new content, whole, and has synced both file and name;
    * bytes written through the same Files object are visible in a mapping at once.

Errors of the operating system become typed errors. ENOSPC, EDQUOT, EMFILE and ENFILE become OverLimit: after freeing
space or descriptors the caller may go on. A missing name becomes NotFound, everything else DiskFailed. A byte that the
disk cannot read becomes Corrupt: see `load`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import shutil
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from timeball.model.errors import Corrupt, DiskFailed, NotFound, OverLimit, SetupError

WARM_STEP = 8 * 1024 * 1024
LOADED_BYTES_MAX = (
    64 * 1024
)  # a smaller file is read when it is mapped; the system reads more than this ahead
_CLOSED_FD = (1 << 31) - 1  # a descriptor number that no process has: every call on it fails with EBADF


class File(Protocol):
    """One open file. Offsets are absolute. There is no file position."""

    def write_at(self, offset: int, data: bytes | memoryview | pa.Buffer) -> None:
        """Write all of `data`. Not durable before `sync`."""

    def allocate(self, size_bytes: int, *, reserved: bool = True) -> None:
        """Set the file's length. A new part reads as zeros. If `reserved`, its disk space is reserved."""

    def reserve(self, begin: int, end: int) -> None:
        """Reserve disk space for the bytes [begin, end), so that no write there can fail for lack of it."""

    def map(self, *, at_random: bool = False) -> memoryview:
        """Map the whole file, writable and shared. Valid until the file is closed and all views are gone.

        `at_random`: accesses are scattered, so reading ahead would only fill memory.
        """

    def sync(self) -> None:
        """Make content and size durable. A failure is final: never retry on this file."""

    def close(self) -> None:
        """Close the descriptor. Views stay valid."""


class Files(Protocol):
    """A folder. Names use '/' and are relative to the root."""

    has_links: bool  # whether files can have a second name (hard links)

    def free_bytes(self) -> int:
        """Measure the free disk space, in bytes."""

    def make_dir(self, name: str) -> None:
        """Create a folder and its parents. The new names are durable on return."""

    def list_dir(self, name: str) -> list[str]:
        """List the sorted names in a folder, or empty when it does not exist."""

    def exists(self, name: str) -> bool:
        """Check whether a file or folder has this name."""

    def size(self, name: str) -> int:
        """Measure the length of a file in bytes."""

    def create(self, name: str) -> File:
        """Create an empty file, or truncate it, and open it for writing. The name is not durable before `sync_dir`."""

    def open(self, name: str) -> File:
        """Open an existing file for writing."""

    def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer:
        """Map a whole file. Valid after removal of the name. Raises Corrupt for a small one that cannot be read.

        `at_random`: accesses are scattered, so no reading ahead.
        """

    def unload(self, mapped: pa.Buffer) -> None:
        """Release this process's memory of a mapping from `map_readonly`. The system's page cache keeps the bytes."""

    def warm(self, name: str, begin: int, end: int) -> None:
        """Load this part of an allocated file into the page cache, so that writing it costs no more than a copy."""

    def replace(self, name: str, data: bytes) -> None:
        """Make `data` the content of `name`, atomically and durably."""

    def rename(self, name: str, to: str) -> None:
        """Rename a file within its folder, replacing a file of the new name. Not durable before `sync_dir`."""

    def link(self, name: str, to: str) -> None:
        """Give a file a second name, if the file system supports it. Not durable before `sync_dir`."""

    def remove(self, name: str) -> None:
        """Remove a file's name. Not durable before `sync_dir`."""

    def sync_file(self, name: str) -> None:
        """Make the content of a file durable that other code has written."""

    def sync_dir(self, name: str) -> None:
        """Make the names in a folder durable."""

    def external(self, name: str) -> str:
        """Convert to a path of the operating system, for libraries that do their own I/O in this folder."""

    def absorb(self, name: str) -> None:
        """Register files that a library has written below `external(name)`. They are not durable yet."""


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# Errors of file systems without hard links, or of files with the most links allowed.
_LINK_UNSUPPORTED = {errno.EPERM, errno.EACCES, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap = _libc.mmap, _libc.munmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip
_madvise = _libc.madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
# A handle that holds the GIL, as a page fault does: to take it again could cost more than the call.
_populate = ctypes.PyDLL(None, use_errno=True).madvise
_populate.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_MADV_POPULATE_READ = 22  # Linux 5.14; Python's mmap has no name for it
_EHWPOISON = 133  # a page of faulty memory; Python's errno has no name for it
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FAILED = ctypes.c_void_p(-1).value


def disk_full(action: str) -> OverLimit:
    """Build the error for a full disk or an exhausted quota. `action` is a participle, such as "writing x"."""
    return OverLimit(f"disk full while {action}: free some space on this file system, then go on")


@contextmanager
def full_disk_as_over_limit(action: str) -> Iterator[None]:
    """Convert a sync error for lack of space to OverLimit. Only for new files, which the caller removes and rewrites.

    For other files a failed sync stays DiskFailed: the written bytes are lost, so freeing space does not help.
    """
    try:
        yield
    except DiskFailed as error:
        if getattr(error.__cause__, "errno", None) in DISK_FULL:
            raise disk_full(action) from error
        raise


@contextmanager
def _typed_errors(action: str) -> Iterator[None]:
    """Convert the operating system's errors to the typed errors of the module docstring."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"{action} failed: there is no such file or folder") from error
    except OSError as error:
        if error.errno in DISK_FULL:
            raise disk_full(action) from error
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise OverLimit(f"too many open files while {action}: raise the limit (ulimit -n)") from error
        raise DiskFailed(f"{action} failed: {error.strerror} (errno {error.errno})") from error


def _open(path: Path, flags: int) -> int:
    """Open a descriptor. Borrows from the reserve if connections have taken all other descriptors.

    Each try lends one descriptor more of the reserve. The descriptors lent before are in use, so a connection takes at
    most one meanwhile.
    """
    for borrowed in range(RESERVE + 1):
        try:
            with lent(borrowed) if borrowed else nullcontext():
                return os.open(path, flags, 0o640)
        except OSError as error:
            if error.errno != errno.EMFILE or borrowed == RESERVE:
                raise
    raise AssertionError("the last step returns or raises")


class RealFile:
    """A file of the operating system."""

    def __init__(self, path: Path, *, create: bool, syncs: bool = True) -> None:
        """Open the file. With `create`, it is made or emptied. Without `syncs`, `sync` does nothing."""
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT | os.O_TRUNC if create else 0)
        self.path, self._syncs = path, syncs
        with _typed_errors(f"opening {path.name}"):
            self._fd = _open(path, flags)

    def write_at(self, offset: int, data: bytes | memoryview | pa.Buffer) -> None:
        """See File."""
        view = memoryview(data).cast("B")
        with _typed_errors(f"writing {self.path.name}"):
            while view:
                written_bytes = os.pwrite(self._fd, view, offset)
                view, offset = view[written_bytes:], offset + written_bytes

    def allocate(self, size_bytes: int, *, reserved: bool = True) -> None:
        """See File. Reserves the blocks of a growing file, so that a full disk is noticed here and not at a commit."""
        with _typed_errors(f"allocating {size_bytes} bytes for {self.path.name}"):
            if size_bytes < os.fstat(self._fd).st_size or not reserved:
                os.ftruncate(self._fd, size_bytes)
            elif size_bytes > 0:  # posix_fallocate rejects an empty range
                os.posix_fallocate(self._fd, 0, size_bytes)

    def reserve(self, begin: int, end: int) -> None:
        """See File. Blocks that the file already has cost nothing, even on a full disk."""
        with _typed_errors(f"allocating {end - begin} bytes for {self.path.name}"):
            os.posix_fallocate(self._fd, begin, end - begin)

    def map(self, *, at_random: bool = False) -> memoryview:
        """See File."""
        with _typed_errors(f"mapping {self.path.name}"):
            if os.fstat(self._fd).st_size == 0:  # mmap rejects an empty range
                return memoryview(bytearray())
            mapped = mmap.mmap(self._fd, 0, mmap.MAP_SHARED)
            if at_random:
                mapped.madvise(mmap.MADV_RANDOM)
            return memoryview(mapped)

    def sync(self) -> None:
        """See File. ENOSPC is not an OverLimit here: the written bytes are lost, so freeing space does not help."""
        if not self._syncs:
            return
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise DiskFailed(f"fdatasync of {self.path.name} failed: {error.strerror}") from error

    def close(self) -> None:
        """See File. A second close does nothing, because another file may have the descriptor's number by then."""
        fd, self._fd = self._fd, _CLOSED_FD
        if fd != _CLOSED_FD:
            os.close(fd)


class _Mapping:
    """A file mapped for reading without a descriptor: Python's mmap keeps one for each mapping (until 3.13).

    Thousands of files are mapped at once, including files of the pending table, and the descriptors are needed for
    connections.
    """

    def __init__(self, fd: int, size_bytes: int, offset: int = 0, *, populate: bool = False) -> None:
        """Map `size_bytes` bytes of the open file `fd` from `offset` on. `populate` loads them. Raises OSError."""
        # Set first, because __del__ also runs after a failure here.
        self._address, self._size_bytes = _MAP_FAILED, size_bytes
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
        self._address = _mmap(None, size_bytes, mmap.PROT_READ, flags, fd, offset)
        if self._address == _MAP_FAILED:
            error_number = ctypes.get_errno()
            raise OSError(error_number, os.strerror(error_number))

    def buffer(self) -> pa.Buffer:
        """The bytes. The mapping lasts as long as any part of them is referenced."""
        return pa.foreign_buffer(self._address, self._size_bytes, self)

    def __del__(self) -> None:
        if self._address != _MAP_FAILED:
            _munmap(self._address, self._size_bytes)


def load(mapped: pa.Buffer, begin: int, end: int) -> int | None:
    """Load the bytes [begin, end) of a mapping. Returns the first one that the disk cannot read, or None.

    A read of such a byte ends the process with SIGBUS. So bytes are loaded before they are read for the first time.
    """
    if _is_loaded(mapped, begin, end):
        return None
    for page in range(begin - (mapped.address + begin) % mmap.PAGESIZE, end, mmap.PAGESIZE):
        if not _is_loaded(mapped, max(page, begin), min(page + mmap.PAGESIZE, end)):
            return max(page, begin)
    return None  # it can be read now


class Unreadable(Corrupt):
    """Bytes that the disk cannot read. They are damaged, and never the rest of a torn commit."""


def check_readable(mapped: pa.Buffer, begin: int, end: int) -> None:
    """Load the bytes [begin, end) of a mapped file, as far as it has them. Raises Unreadable."""
    position = load(mapped, begin, min(end, mapped.size))
    if position is not None:
        raise Unreadable(f"the disk cannot read byte {position}")


def _is_loaded(mapped: pa.Buffer, begin: int, end: int) -> bool:
    """Load the pages of these bytes. Returns False if the disk, or faulty memory, cannot supply one of them."""
    address = mapped.address + begin
    offset = address % mmap.PAGESIZE
    if end <= begin or _populate(address - offset, end - begin + offset, _MADV_POPULATE_READ) == 0:
        return True
    # All other errors, such as EINVAL of an old kernel, say nothing about the disk.
    return ctypes.get_errno() not in (errno.EFAULT, _EHWPOISON)


class RealFiles:
    """A folder of the operating system, used by one process at a time."""

    has_links = True

    def __init__(self, root: Path, *, syncs: bool = True) -> None:
        """Use the folder `root`. Without `syncs` nothing is synced: for a folder that is removed at the end."""
        self._syncs = syncs
        # Absolute, because `external` paths go to other processes, which have other working folders.
        self.root = root.absolute()
        self._lock_fd: int | None = None

    def lock(self) -> None:
        """Lock the folder for this process. Raises SetupError if another process has it."""
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
        """Release the lock of the folder."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def free_bytes(self) -> int:
        """Measure the space left for this process on the folder's file system, in bytes, as `df` shows it."""
        return shutil.disk_usage(self.root).free

    def make_dir(self, name: str) -> None:
        """See Files."""
        path = self.root / name
        with _typed_errors(f"making folder {path if name == '.' else name}"):
            new_folders = {folder for folder in (path, *path.parents) if not folder.exists()}
            path.mkdir(parents=True, exist_ok=True)
        # Below the root every name is synced, even an existing one. A run killed between making a folder and syncing it
        # leaves a folder that processes see, but that a power cut removes with all its content.
        for folder in (path, *path.parents):
            if folder in new_folders or (folder != self.root and folder.is_relative_to(self.root)):
                self._sync_directory(folder.parent)

    def list_dir(self, name: str) -> list[str]:
        """See Files."""
        path = self.root / name
        return sorted(os.listdir(path)) if path.is_dir() else []

    def exists(self, name: str) -> bool:
        """See Files."""
        return (self.root / name).exists()

    def size(self, name: str) -> int:
        """See Files."""
        with _typed_errors(f"reading the size of {name}"):
            return (self.root / name).stat().st_size

    def create(self, name: str) -> RealFile:
        """See Files."""
        return RealFile(self.root / name, create=True, syncs=self._syncs)

    def open(self, name: str) -> RealFile:
        """See Files."""
        return RealFile(self.root / name, create=False, syncs=self._syncs)

    def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer:
        """See Files."""
        with _typed_errors(f"mapping {name}"):
            fd = _open(self.root / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                size_bytes = os.fstat(fd).st_size  # mmap rejects an empty range
                mapped = _Mapping(fd, size_bytes).buffer() if size_bytes else pa.py_buffer(b"")
            finally:
                os.close(fd)
        if size_bytes <= LOADED_BYTES_MAX and not at_random:
            try:
                check_readable(mapped, 0, size_bytes)
            except Unreadable as error:
                raise Corrupt(f"{name}: {error}; restore this file from a copy") from error
        if at_random and size_bytes:
            _madvise(mapped.address, size_bytes, mmap.MADV_RANDOM)
        return mapped

    def unload(self, mapped: pa.Buffer) -> None:
        """See Files. For a shared mapping this only drops page table entries: the next read finds the same bytes."""
        if mapped.size:
            _madvise(mapped.address, mapped.size, mmap.MADV_DONTNEED)

    def warm(self, name: str, begin: int, end: int) -> None:
        """See Files.

        Maps the pages for a moment, because no system call for reading ahead loads more than some 100 KB.
        """
        # Errors are ignored: a part that is not warmed can still be written, at the usual speed.
        with suppress(OSError):
            fd = _open(self.root / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                end = min(end, os.fstat(fd).st_size)
                for offset in range(begin - begin % WARM_STEP, end, WARM_STEP):
                    # One step at a time, because unmapping delays the page faults of all other threads.
                    _Mapping(fd, min(WARM_STEP, end - offset), offset, populate=True)
            finally:
                os.close(fd)

    def replace(self, name: str, data: bytes) -> None:
        """See Files."""
        new_name = f"{name}.new"
        file = self.create(new_name)
        try:
            file.write_at(0, data)
            with full_disk_as_over_limit(f"writing {new_name}"):
                file.sync()
        finally:
            file.close()
        self.rename(new_name, name)
        self._sync_directory((self.root / name).parent)

    def rename(self, name: str, to: str) -> None:
        """See Files."""
        assert name.rpartition("/")[0] == to.rpartition("/")[0], "a rename stays in its folder"
        with _typed_errors(f"renaming {name}"):
            os.replace(self.root / name, self.root / to)

    def link(self, name: str, to: str) -> None:
        """See Files. If the second name exists, it is left unchanged."""
        with _typed_errors(f"linking {name}"):
            try:
                os.link(self.root / name, self.root / to)
            except FileExistsError:
                return
            except OSError as error:
                if error.errno not in _LINK_UNSUPPORTED:
                    raise

    def remove(self, name: str) -> None:
        """See Files."""
        with _typed_errors(f"removing {name}"):
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
        self._sync_directory(self.root / name)

    def external(self, name: str) -> str:
        """See Files."""
        return str(self.root / name)

    def absorb(self, name: str) -> None:
        """See Files. Nothing to do: the operating system sees every write."""

    def _sync_directory(self, path: Path) -> None:
        """Make the names in a folder durable. Raises DiskFailed."""
        if not self._syncs:
            return
        with _typed_errors(f"opening folder {path.name}"):
            fd = _open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        except OSError as error:
            raise DiskFailed(f"fsync of folder {path} failed: {error.strerror}") from error
        finally:
            os.close(fd)


def read_secret(path: str, option: str, *, forbidden_mode: int) -> bytes:
    """Read an operator's secret file, which is outside the data folder and must not be readable by other users.

    Raises SetupError, naming `option`, if it cannot be read or its mode has one of the bits of `forbidden_mode`.
    """
    try:
        with Path(path).open("rb") as file:
            # Mode of the open file, because the name could be changed to another file in between.
            mode = os.fstat(file.fileno()).st_mode & 0o777
            if mode & forbidden_mode:
                raise SetupError(f"{option} {path}: others may read it (mode {mode:04o}); chmod 600 it")
            return file.read()
    except OSError as error:
        raise SetupError(f"{option} {path}: {error.strerror or error}") from error


# ---- the limit of file descriptors, with a reserve for the broker's own files --------------------------------
# Libraries accept connections without a limit of their own, so clients could use up all descriptors. If the log then
# gets no descriptor for its next segment, it stops for good. Therefore the process's soft limit, at which accepting
# fails, is `RESERVE` below the hard limit. It is raised only for the moment in which the broker opens a file.

# Some systems allow a billion, but some programs close every possible number when they start as a child process.
OPEN_FILES_MAX = 1 << 20
OPEN_FILES_MIN = 256  # about 50 for the broker itself, the reserve, and connections
RESERVE = 64
# The part of the reserve for library calls that open files. Such a call lasts longer than one open, so connections may
# take descriptors of this part meanwhile.
RESERVE_OF_LIBRARIES = 16

_lock = threading.Lock()  # guards the limit, `_loans` and `_base_limit`
_loans: list[int] = []  # the sizes of all current loans
_base_limit = 0  # the soft limit without loans


def raise_open_files_limit() -> None:
    """Raise the soft limit of open files to the system's maximum minus the reserve.

    The usual 1,024 are fewer than the connections that an edge accepts. Raises SetupError if the system allows too few
    for a broker.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    soft_limit = OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_MAX)
    soft_limit = max(soft_limit, soft)
    if soft_limit < OPEN_FILES_MIN:
        raise SetupError(
            f"this process may open {soft_limit} files and a broker needs {OPEN_FILES_MIN}: raise the limit "
            "(ulimit -n, or LimitNOFILE= of the service)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit - RESERVE, hard))


def open_files_max() -> int:
    """Read the current soft limit: the number of descriptors without the reserve."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_FILES_MAX if soft == resource.RLIM_INFINITY else soft


def in_use() -> Iterable[int]:
    """List the descriptors in use. If no descriptor is free for listing them, returns all numbers up to the limit."""
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return range(open_files_max() + RESERVE)


@contextmanager
def lent(count: int = RESERVE) -> Iterator[None]:
    """Lend `count` descriptors of the reserve: raise the soft limit while the body runs.

    Concurrent loans share the reserve: the largest one counts.
    """
    _change_loans([count], [])
    try:
        yield
    finally:
        _change_loans([], [count])


def _change_loans(added: list[int], ended: list[int]) -> None:
    """Add and end loans (numbers of descriptors), and set the soft limit to that without loans plus the largest."""
    global _base_limit
    with _lock:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if not _loans:
            _base_limit = soft
        _loans.extend(added)
        for count in ended:
            _loans.remove(count)
        new_limit = _base_limit + max(_loans, default=0)
        if soft != resource.RLIM_INFINITY:
            capped_limit = new_limit if hard == resource.RLIM_INFINITY else min(new_limit, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (capped_limit, hard))
