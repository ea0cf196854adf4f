"""The guarantees of `Files`, for a real folder and for the crash model, then those of a real folder alone."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tests.bad_disk import make_unreadable
from tests.crash_files import CrashFiles

from timeball.io import files as module
from timeball.io.files import Files, RealFiles, read_secret
from timeball.model.errors import DiskFailed, NotFound, OverLimit, SetupError, TimeballError


@pytest.fixture(params=["real", "crash"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Files]:
    """A real folder, and the crash model."""
    if request.param == "real":
        yield RealFiles(tmp_path)
    else:
        model = CrashFiles()
        yield model
        model.close()


def content(files: Files, name: str) -> bytes:
    return bytes(files.map_readonly(name).to_pybytes())


# ---- the contract ---------------------------------------------------------------------------------------


def test_written_bytes_are_read_back_at_their_offsets(files: Files) -> None:
    file = files.create("a")
    file.write_at(0, b"hello world")
    file.write_at(6, b"there")
    file.write_at(700, b"!")
    file.sync()
    file.close()
    assert content(files, "a") == b"hello there" + bytes(689) + b"!"
    assert files.size("a") == 701


@pytest.mark.parametrize(
    "data",
    [
        b"abc",
        memoryview(b"xabcx")[1:4],
        pa.py_buffer(b"abc"),
        memoryview(bytearray(b"abc")),
    ],
)
def test_all_buffers_can_be_written(files: Files, data: bytes) -> None:
    files.create("a").write_at(2, data)
    assert content(files, "a") == b"\0\0abc"


def test_an_array_of_wide_items_is_written_as_bytes(files: Files) -> None:
    files.create("a").write_at(0, np.arange(3, dtype=np.int64).data)
    assert np.frombuffer(content(files, "a"), dtype=np.int64).tolist() == [0, 1, 2]


@pytest.mark.parametrize("empty", [b"", memoryview(b""), pa.py_buffer(b"")])
def test_writing_nothing_changes_nothing(files: Files, empty: bytes) -> None:
    files.create("a").write_at(10, empty)
    assert files.size("a") == 0


def test_an_empty_file_has_empty_mappings(files: Files) -> None:
    file = files.create("a")
    assert len(file.map()) == 0
    assert files.map_readonly("a").size == 0


def test_allocate_sets_the_size_and_reads_as_zeros(files: Files) -> None:
    file = files.create("a")
    file.allocate(0)
    assert files.size("a") == 0
    file.allocate(5000)
    assert content(files, "a") == bytes(5000)
    file.write_at(0, b"x" * 5000)
    file.allocate(600)
    file.allocate(5000)
    assert content(files, "a") == b"x" * 600 + bytes(4400)
    file.allocate(5000)
    assert files.size("a") == 5000


def test_reserve_does_not_change_the_bytes(files: Files) -> None:
    file = files.create("a")
    file.allocate(50_000, reserved=False)
    file.write_at(10_000, b"there")
    expected = bytes(10_000) + b"there" + bytes(39_995)
    file.reserve(8_192, 40_960)
    file.reserve(8_192, 40_960)
    assert content(files, "a") == expected
    with pytest.raises(DiskFailed):
        file.reserve(4_096, 4_096)


def test_only_reserved_parts_take_disk_space(tmp_path: Path) -> None:
    files, mib = RealFiles(tmp_path), 1 << 20
    file = files.create("a")
    file.allocate(64 * mib, reserved=False)
    assert (tmp_path / "a").stat().st_blocks == 0
    file.reserve(mib, 3 * mib)
    assert 2 * mib <= (tmp_path / "a").stat().st_blocks * 512 < 3 * mib
    assert files.size("a") == 64 * mib and files.free_bytes() > 0


@pytest.mark.parametrize("at_random", [False, True])
def test_bytes_written_by_a_call_or_a_mapping_are_visible_in_each_mapping(
    files: Files, at_random: bool
) -> None:
    file = files.create("a")
    file.allocate(4096)
    writable = file.map(at_random=at_random)
    readable = files.map_readonly("a")
    file.write_at(100, b"by write")
    assert bytes(writable[100:108]) == b"by write"
    assert readable.slice(100, 8).to_pybytes() == b"by write"
    writable[200:206] = b"by map"
    assert readable.slice(200, 6).to_pybytes() == b"by map"
    assert content(files, "a")[200:206] == b"by map"
    file.close()
    writable[300:302] = b"ok"
    assert content(files, "a")[300:302] == b"ok"


def test_a_read_only_mapping_cannot_be_written(files: Files) -> None:
    files.create("a").write_at(0, b"abc")
    buffer = files.map_readonly("a")
    assert not buffer.is_mutable
    assert memoryview(buffer).readonly


def test_mappings_stay_valid_when_the_file_grows_or_is_removed(files: Files) -> None:
    file = files.create("a")
    file.write_at(0, b"first")
    early = files.map_readonly("a")
    file.allocate(1 << 20)
    file.write_at(0, b"later")
    files.remove("a")
    assert not files.exists("a")
    assert early.to_pybytes() == b"later"
    file.write_at(0, b"after")
    assert early.to_pybytes() == b"after"


def test_warming_changes_nothing_and_cannot_fail(files: Files) -> None:
    file = files.create("log")
    file.allocate(3 * mmap.PAGESIZE)
    file.write_at(0, b"first")
    for begin, end in ((0, 5), (100, 2 * mmap.PAGESIZE), (0, 1 << 30), (1 << 30, 1 << 31)):
        files.warm("log", begin, end)
    files.warm("another", 0, 100)
    assert content(files, "log") == b"first" + bytes(3 * mmap.PAGESIZE - 5)
    file.write_at(mmap.PAGESIZE, b"second")
    assert content(files, "log")[mmap.PAGESIZE :].startswith(b"second")
    file.close()


def test_warmed_pages_are_in_the_page_cache(tmp_path: Path) -> None:
    """mincore shows which pages of a mapping are in memory."""
    files, size_bytes = RealFiles(tmp_path), 20 * 1024 * 1024
    file = files.create("log")
    file.allocate(size_bytes)
    file.sync()
    mapped = files.map_readonly("log")
    pages = (ctypes.c_ubyte * (size_bytes // mmap.PAGESIZE))()

    def in_memory() -> list[bool]:
        """Read for each page whether it is in memory."""
        address = ctypes.c_void_p(mapped.address)
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size_bytes), pages) == 0
        return [bool(page & 1) for page in pages]

    if any(in_memory()):
        pytest.skip("this file system makes the pages of an allocated file at once")
    files.warm("log", 0, size_bytes)
    assert all(in_memory())
    file.close()


def test_random_mapping_reads_the_same_bytes_without_read_ahead(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)
    files.replace("a", b"0123456789")
    maps = [files.map_readonly("a", at_random=at_random) for at_random in (False, True)]
    flags = dict[int, list[str]]()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            address = int(line.partition("-")[0], 16)
        elif line.startswith("VmFlags:"):
            flags[address] = line.split()
    assert ["rr" in flags[mapped.address] for mapped in maps] == [False, True]
    assert bytes(maps[0]) == bytes(maps[1]) == b"0123456789"
    files.replace("none", b"")
    assert files.map_readonly("none", at_random=True).size == 0


def test_unloaded_mapping_reads_the_same_and_frees_memory(tmp_path: Path) -> None:
    files, size_bytes = RealFiles(tmp_path), 4 * 1024 * 1024
    file, data = files.create("log"), os.urandom(size_bytes)
    file.write_at(0, data)
    mapped = files.map_readonly("log")

    def resident_kb() -> int:
        """Read the memory of the mapping in this process, in kB."""
        first_line = f"{mapped.address:x}-"  # the line in smaps that begins the mapping
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
        next(line for line in lines if line.startswith(first_line))
        return int(next(line for line in lines if line.startswith("Rss:")).split()[1])

    assert bytes(mapped) == data and resident_kb() == size_bytes // 1024
    files.unload(mapped)
    assert resident_kb() == 0
    assert bytes(mapped) == data
    file.write_at(5, b"seen")
    assert bytes(mapped[5:9]) == b"seen"
    files.unload(pa.py_buffer(b""))
    file.close()


def test_create_truncates_an_existing_file(files: Files) -> None:
    files.create("a").write_at(0, b"old")
    files.create("a")
    assert files.size("a") == 0


def test_open_keeps_the_content(files: Files) -> None:
    files.create("a").write_at(0, b"old")
    files.open("a").write_at(1, b"xx")
    assert content(files, "a") == b"oxx"


def test_replace_changes_the_content_but_not_earlier_mappings(files: Files) -> None:
    files.replace("state", b"one")
    before = files.map_readonly("state")
    files.replace("state", b"two!")
    assert content(files, "state") == b"two!"
    assert before.to_pybytes() == b"one"
    assert files.list_dir(".") == ["state"]


def test_rename_replaces_another_file(files: Files) -> None:
    files.make_dir("x")
    files.create("x/new").write_at(0, b"new")
    files.create("x/old").write_at(0, b"old")
    files.rename("x/new", "x/old")
    assert content(files, "x/old") == b"new"
    assert files.list_dir("x") == ["old"]
    with pytest.raises(AssertionError, match="folder"):
        files.rename("x/old", "old")


def test_folders_are_made_listed_and_synced(files: Files) -> None:
    files.make_dir("x/y/z")
    files.make_dir("x/y/z")
    files.create("x/y/b").close()
    files.create("x/y/a").close()
    assert files.list_dir("x/y") == ["a", "b", "z"]
    assert files.list_dir("nowhere") == []
    assert files.exists("x/y") and files.exists("x/y/a") and not files.exists("x/a")
    files.sync_dir("x/y")
    files.sync_dir(".")
    files.sync_file("x/y/a")


def test_removing_a_missing_file_does_nothing(files: Files) -> None:
    files.remove("a")
    files.remove("no/a")
    assert files.list_dir(".") == []


@pytest.mark.parametrize(
    "call",
    [
        lambda files: files.size("a"),
        lambda files: files.open("a"),
        lambda files: files.map_readonly("a"),
        lambda files: files.sync_file("a"),
        lambda files: files.sync_dir("a"),
        lambda files: files.create("no/a"),
        lambda files: files.replace("no/a", b""),
        lambda files: files.rename("a", "b"),
    ],
)
def test_missing_name_raises_not_found(files: Files, call: Callable[[Files], object]) -> None:
    with pytest.raises(NotFound, match="failed: "):
        call(files)


@pytest.mark.parametrize(
    "call",
    [
        lambda files: files.create("folder"),
        lambda files: files.open("folder"),
        lambda files: files.map_readonly("folder"),
        lambda files: files.remove("folder"),
        lambda files: files.replace("folder", b""),
        lambda files: files.make_dir("file"),
    ],
)
def test_folder_or_file_of_the_wrong_kind_raises_a_typed_error(
    files: Files, call: Callable[[Files], object]
) -> None:
    files.make_dir("folder")
    files.create("file").close()
    with pytest.raises(DiskFailed):
        call(files)


def test_closed_file_refuses_calls_and_a_second_close_does_nothing(files: Files) -> None:
    closed = files.create("a")
    closed.close()
    other = files.create("b")  # in a real folder it gets the descriptor number of the first one
    closed.close()
    other.write_at(0, b"fine")
    for call in (lambda: closed.write_at(0, b"x"), lambda: closed.allocate(9), closed.sync, closed.map):
        with pytest.raises(DiskFailed):
            call()
    with pytest.raises(DiskFailed):
        other.write_at(-1, b"x")
    assert content(files, "b") == b"fine"


def test_library_can_write_below_the_external_path(files: Files) -> None:
    files.make_dir("table")
    files.replace("table/ours", b"from us")
    path = Path(files.external("table"))
    assert (path / "ours").read_bytes() == b"from us"
    (path / "part=1").mkdir()
    (path / "part=1" / "theirs").write_bytes(b"from them")
    files.absorb("table")
    assert files.list_dir("table") == ["ours", "part=1"]
    assert content(files, "table/part=1/theirs") == b"from them"
    files.sync_file("table/part=1/theirs")
    files.sync_dir("table/part=1")
    files.remove("table/part=1/theirs")
    assert list((path / "part=1").iterdir()) == []
    files.create("table/part=1/more").write_at(0, b"more")
    assert (path / "part=1" / "more").read_bytes() == b"more"
    assert files.external("table") == str(path)


# ---- only a real folder ----------------------------------------------------------------------------------


def test_second_process_cannot_lock_the_folder(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "data"
    first, second = RealFiles(root), RealFiles(root)
    first.lock()
    with pytest.raises(SetupError, match="in use"):
        second.lock()
    first.unlock()
    second.lock()
    second.unlock()
    second.unlock()


def test_lock_ends_with_its_process(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib; from timeball.io.files import RealFiles\n"
        "RealFiles(pathlib.Path(sys.argv[1])).lock(); print('held', flush=True); sys.stdin.read()"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(SetupError):
            RealFiles(tmp_path).lock()
        holder.kill()
        holder.wait()
    reopened = RealFiles(tmp_path)
    reopened.lock()
    reopened.unlock()


def test_a_full_disk_is_over_limit(tmp_path: Path) -> None:
    (tmp_path / "full").symlink_to("/dev/full")
    file = RealFiles(tmp_path).open("full")
    with pytest.raises(OverLimit, match="free some space"):
        file.write_at(0, b"x")
    file.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_file_system_refuses_the_allocation_and_goes_on_after_a_removal(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this machine allows no mount of a tmpfs")
    try:
        files = RealFiles(tmp_path)
        file = files.create("a")
        file.allocate(600_000)
        other = files.create("b")
        with pytest.raises(OverLimit):
            other.allocate(600_000)
        with pytest.raises(OverLimit):
            files.replace("c", bytes(600_000))
        file.close()
        files.remove("a")
        files.remove("c.new")
        other.allocate(600_000)
        other.close()
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_file_size_limit_raises_a_typed_error_and_keeps_the_content(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)
    file = files.create("a")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(TimeballError):
            file.write_at(0, b"x" * 10_000)
        with pytest.raises(TimeballError):
            file.allocate(10_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    file.close()
    assert content(files, "a") == b"x" * 4096


def watch_fsync(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the inode numbers of fsync calls."""
    inodes: list[int] = []
    fsync = os.fsync

    def record_and_sync(fd: int) -> None:
        inodes.append(os.fstat(fd).st_ino)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", record_and_sync)
    return inodes


def test_a_folder_left_unsynced_by_a_killed_run_is_synced_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name `log` exists, but its parent has not been synced. make_dir must do so."""
    (tmp_path / "log").mkdir()
    synced = watch_fsync(monkeypatch)
    RealFiles(tmp_path).make_dir("log")
    assert tmp_path.stat().st_ino in synced


def test_a_new_root_is_synced_into_its_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = watch_fsync(monkeypatch)
    files = RealFiles(tmp_path / "a" / "data")
    files.lock()
    files.unlock()
    assert {tmp_path.stat().st_ino, (tmp_path / "a").stat().st_ino} <= set(synced)


def test_a_folder_without_syncs_is_not_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = watch_fsync(monkeypatch)
    monkeypatch.setattr(os, "fdatasync", synced.append)
    for syncs in (False, True):
        files = RealFiles(tmp_path / str(syncs), syncs=syncs)
        files.make_dir("log")
        files.replace("log/a", b"x")
        file = files.open("log/a")
        file.sync()
        file.close()
        files.sync_file("log/a")
        files.sync_dir("log")
        assert content(files, "log/a") == b"x" and bool(synced) == syncs


# ---- secret files -------------------------------------------------------------------------------------------


def test_secret_that_others_cannot_read_is_read(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"s" * 100_000)
    path.chmod(0o600)
    assert read_secret(str(path), "--secret", forbidden_mode=0o077) == b"s" * 100_000
    path.chmod(0o640)
    assert read_secret(str(path), "--secret", forbidden_mode=0o007)
    for mode in (0o640, 0o604, 0o620, 0o601):
        path.chmod(mode)
        with pytest.raises(SetupError, match=f"--secret .*others may read it \\(mode {mode:04o}\\)"):
            read_secret(str(path), "--secret", forbidden_mode=0o077)


def test_a_secret_that_cannot_be_read_names_the_option(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"--secret .*No such file"):
        read_secret(str(tmp_path / "gone"), "--secret", forbidden_mode=0)
    with pytest.raises(SetupError, match=r"--secret .*directory"):
        read_secret(str(tmp_path), "--secret", forbidden_mode=0)


def test_mapped_file_needs_no_descriptor_and_lasts_with_its_slices(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)
    files.replace("a", b"0123456789")
    before = set(os.listdir("/proc/self/fd"))
    parts = [files.map_readonly("a").slice(3, 4) for _ in range(20)]
    assert set(os.listdir("/proc/self/fd")) <= before
    gc.collect()
    assert {bytes(part) for part in parts} == {b"3456"}
    mapped = _maps_of(tmp_path / "a")
    assert mapped >= 1
    parts.clear()
    gc.collect()
    assert _maps_of(tmp_path / "a") == 0


def test_failed_mapping_raises_disk_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = RealFiles(tmp_path)
    files.replace("a", b"0123456789")

    def fail(*_: object) -> int | None:
        ctypes.set_errno(errno.ENOMEM)
        return module._MAP_FAILED

    monkeypatch.setattr(module, "_mmap", fail)
    with pytest.raises(DiskFailed, match="mapping a failed: Cannot allocate memory"):
        files.map_readonly("a")


def _maps_of(path: Path) -> int:
    return sum(line.endswith(str(path)) for line in Path("/proc/self/maps").read_text().splitlines())


def test_uncreatable_data_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    root = tmp_path / "file" / "data"
    with pytest.raises(TimeballError, match=re.escape(str(root))):
        RealFiles(root).make_dir(".")


def test_free_bytes_equals_the_free_space_of_the_file_system(tmp_path: Path) -> None:
    assert 0 < RealFiles(tmp_path).free_bytes() <= shutil.disk_usage(tmp_path).total


def test_bytes_are_loaded_or_the_first_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    size_bytes = 6 * mmap.PAGESIZE
    (tmp_path / "a").write_bytes(bytes(size_bytes))
    mapped = RealFiles(tmp_path).map_readonly("a")
    make_unreadable(mapped, 3 * mmap.PAGESIZE + 5)
    part = mapped.slice(100)
    assert module.load(mapped, 0, 3 * mmap.PAGESIZE) is None
    assert module.load(mapped, 4 * mmap.PAGESIZE, size_bytes) is None
    assert module.load(mapped, 10, size_bytes) == 3 * mmap.PAGESIZE
    assert module.load(mapped, 3 * mmap.PAGESIZE + 7, size_bytes) == 3 * mmap.PAGESIZE + 7
    assert module.load(part, 0, part.size) == 3 * mmap.PAGESIZE - 100
    assert module.load(mapped, size_bytes, size_bytes) is None
    assert module.load(pa.py_buffer(b"in memory"), 0, 9) is None
    assert module.load(pa.py_buffer(b""), 0, 0) is None
