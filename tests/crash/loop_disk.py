"""A disk with a real file system, whose power can be cut: a file behind a loop device, and the shutdown ioctl.

After the ioctl no block reaches the device, and everything that the file system had not written is lost: data that was
not synced, and names, sizes and blocks that the journal does not have. The next mount replays the journal. The cache of
the file behind the device survives, as the bytes survive that a disk with a battery has accepted.

Needs root. `LoopDisk` skips the test where loop devices or mounts are not allowed.
"""

from __future__ import annotations

import fcntl
import gc
import os
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.bounds import BOUND_S

GOING_DOWN = 0x8004587D  # XFS_IOC_GOINGDOWN and EXT4_IOC_SHUTDOWN: _IOR('X', 125, __u32)
NO_LOG_FLUSH = struct.pack("I", 2)  # also drops data that waits for the journal
SIZE_BYTES = 320 << 20  # an XFS has at least 300 MB; the file has holes
MAKE = {
    "ext4": ["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0"],
    "xfs": ["mkfs.xfs", "-q", "-f"],
}


class LoopDisk:
    """One disk, mounted at `folder`."""

    def __init__(self, file_system: str, folder: Path) -> None:
        self.folder = folder
        self._image = folder.with_name(f"{folder.name}.image")
        self._make = [*MAKE[file_system], str(self._image)]
        self._device, self._is_shared, self._is_mounted = "", False, False

    def make(self) -> None:
        """Make the file system and mount it. Skips the test where that is not allowed."""
        self.folder.mkdir(parents=True)
        with self._image.open("wb") as file:
            file.truncate(SIZE_BYTES)
        try:
            # A process that gets a mount namespace of its own meanwhile (`ip netns exec`) would keep the disk mounted,
            # and a second mount would find it without power. Changes of a shared mount reach such copies.
            _run("mount", "--bind", str(self.folder), str(self.folder))
            self._is_shared = True
            _run("mount", "--make-shared", str(self.folder))
            _run(*self._make)
            self._device = _run("losetup", "--find", "--show", str(self._image))
            self._mount()
        except (OSError, subprocess.CalledProcessError) as error:
            self.remove()
            reason = getattr(error, "stderr", None) or str(error)
            pytest.skip(f"loop disks: {reason.strip().splitlines()[-1]}")
        for folder in self.folder.glob("lost+found"):
            folder.rmdir()  # no data folder of Timeball has such a name
        _run("sync", str(self.folder))

    def cut(self) -> None:
        """Cut the power. Processes that use the disk get errors from now on."""
        fd = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, GOING_DOWN, NO_LOG_FLUSH)
        finally:
            os.close(fd)

    def restore(self) -> None:
        """Mount the disk again. No other process may use it. A mapping of this one may wait for its collection."""
        pause = threading.Event()
        for _ in range(BOUND_S * 20):
            if self._unmount() and self._is_free():
                return self._mount()
            gc.collect()
            pause.wait(0.05)
        raise AssertionError(f"{self.folder} is in use {BOUND_S} s after its power was cut")

    def remove(self) -> None:
        """Unmount and detach, in any state of the disk."""
        if not self._unmount():
            self._unmount("--lazy")
        if self._is_shared:
            subprocess.run(["umount", self.folder], check=False)
            self._is_shared = False
        if self._device:
            subprocess.run(["losetup", "--detach", self._device], check=False)
            self._device = ""
        self._image.unlink(missing_ok=True)

    def _mount(self) -> None:
        """Mount the device, and check that the folder is on it."""
        _run("mount", self._device, str(self.folder))
        self._is_mounted = True
        if os.stat(self.folder).st_dev != os.stat(self._device).st_rdev:
            # Seen rarely beside other tests that mount, and not explained: name the mount that covers the folder.
            lines = Path("/proc/self/mountinfo").read_text().splitlines()
            mounts = [line for line in lines if str(self.folder) in line or self._device in line]
            raise AssertionError(f"{self.folder} is not on {self._device} after the mount: {mounts}")

    def _is_free(self) -> bool:
        """Check whether no mount uses the device, in any namespace."""
        try:
            os.close(os.open(self._device, os.O_RDONLY | os.O_EXCL))
        except OSError:
            return False
        return True

    def _unmount(self, *options: str) -> bool:
        """Unmount by the device: a path on an XFS without power is an error. Returns whether it is unmounted now."""
        if self._is_mounted:
            result = subprocess.run(["umount", *options, self._device], capture_output=True, check=False)
            self._is_mounted = result.returncode != 0
        return not self._is_mounted


@contextmanager
def loop_disk(file_system: str, folder: Path) -> Iterator[LoopDisk]:
    """Provide a disk, and remove it at the end."""
    disk = LoopDisk(file_system, folder)
    try:
        disk.make()
        yield disk
    finally:
        disk.remove()


def _run(*command: str) -> str:
    """Run a command. Returns its output. Raises CalledProcessError."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
