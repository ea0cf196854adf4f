"""A real folder on a disk that cannot read some pages: a read of them through a mapping ends the process by SIGBUS."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from pathlib import Path

import pyarrow as pa

from timeball.io.files import RealFiles

PAGE = mmap.PAGESIZE
_MAP_FIXED = 0x10  # Python's mmap has no name for it
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long,
)  # fmt: skip


class BadDisk(RealFiles):
    """Pages of `bad` (file name -> positions of bytes) cannot be read in mappings that are made from then on."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.bad: dict[str, list[int]] = {}

    def map_readonly(self, name: str, *, at_random: bool = False) -> pa.Buffer:
        """See Files."""
        mapped = super().map_readonly(name, at_random=at_random)
        for position in self.bad.get(name, ()):
            make_unreadable(mapped, position)
        return mapped


def make_unreadable(mapped: pa.Buffer, position: int) -> None:
    """Replace the page of a byte by one beyond the end of an empty file, which no disk can read either."""
    with tempfile.TemporaryFile() as empty:
        address = mapped.address + position - position % PAGE
        flags = mmap.MAP_SHARED | _MAP_FIXED
        assert _libc.mmap(address, PAGE, mmap.PROT_READ, flags, empty.fileno(), 0) == address, os.strerror(
            ctypes.get_errno()
        )
