"""The state of a disk: files as blocks with an undo list, folders as entries with pending operations.

A file keeps its current bytes once, in a lazily filled anonymous mapping of fixed reach, so that views of it
never move. Beside it lies an undo list: for each 512-byte block written since the last sync, the bytes that are
still on disk. Syncing drops the undo list; cutting the power puts back, block by block, what had not reached the
disk. Both cost what was written since the last sync, not what the file holds.

    current   |  A  |  B' |  C  |  D' |          undo: [(1, B), (3, D)]
    durable   |  A  |  B  |  C  |  D  |

Stores through a writable mapping cannot be seen, so once a file has been mapped every block of it counts as
written.

A folder keeps the entries on disk, the entries as the programs see them, and the operations between the two.
After a cut an operation is lost only together with every later operation on the same names (directories are
journalled), but operations on different names are lost independently, in any order.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

BLOCK_BYTES = 512
MAX_FILE_BYTES = 256 << 20
_MAP_NORESERVE = 0x4000  # the constant is missing from the mmap module of Python 3.11

Survival = Literal["nothing", "everything", "random"]
Bytes = NDArray[np.uint8]
Stamp = tuple[int, int, int]  # inode number, modification time in ns, size of the external copy


class Inode:
    """The content of one file, as programs see it and as the disk has it."""

    def __init__(self) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self.memory = mmap.mmap(-1, MAX_FILE_BYTES, flags=flags)
        self.bytes: Bytes = np.frombuffer(self.memory, dtype=np.uint8)
        self.blocks = self.bytes.reshape(-1, BLOCK_BYTES)
        self.size = 0
        self.durable_size = 0
        self.sync_failed = False
        self.mirror: Path | None = None
        self.stamp: Stamp | None = None
        self.mapped_bytes = 0
        self._extent = 0  # nothing but zeros from here on, unless mapped
        self._sizes: list[int] = []
        self._undo: list[tuple[int, Bytes]] = []
        self._saved: NDArray[np.bool_] = np.zeros(64, dtype=np.bool_)

    def write(self, offset: int, data: Bytes) -> None:
        """Put bytes into the current content. The file grows if they end beyond it."""
        end = offset + len(data)
        if end > MAX_FILE_BYTES:
            raise ValueError(f"the crash model holds files up to {MAX_FILE_BYTES} bytes, not {end}")
        if len(data) == 0:
            return
        self._save(offset, end)
        self.bytes[offset:end] = data
        self._extent = max(self._extent, end)
        if end > self.size:
            self._resize(end)

    def allocate(self, size: int) -> None:
        """Set the size. Bytes that are cut off read as zeros when the file grows again."""
        if size > MAX_FILE_BYTES:
            raise ValueError(f"the crash model holds files up to {MAX_FILE_BYTES} bytes, not {size}")
        tail = max(self._extent, self.mapped_bytes)
        if size < tail:
            self._save(size, tail)
            self.bytes[size:tail] = 0
            self._extent = min(self._extent, size)
        if size != self.size:
            self._resize(size)

    def map(self) -> memoryview:
        """Return a writable view of the whole file. From now on any of its blocks may change unseen."""
        self._save(0, self.size)
        self.mapped_bytes = max(self.mapped_bytes, self.size)
        return memoryview(self.memory)[: self.size]

    def view(self) -> memoryview:
        """Return a read-only view of the whole file."""
        return memoryview(self.memory)[: self.size].toreadonly()

    def sync(self) -> None:
        """Let the disk have the current state."""
        for first, old in self._undo:
            self._saved[first : first + len(old)] = False
        self._undo.clear()
        self._sizes.clear()
        self.durable_size = self.size
        self._save(0, self.mapped_bytes)

    def after_cut(self, rng: np.random.Generator, survival: Survival) -> Inode:
        """Return the file as one cut may leave it."""
        left = Inode()
        size = self.durable_size
        if survival == "everything":
            size = self.size
        elif survival == "random" and self._sizes:
            size = int(rng.choice([self.durable_size, *self._sizes]))
        extent = max(self._extent, self.mapped_bytes)
        left.bytes[:extent] = self.bytes[:extent]
        if survival != "everything":
            for first, old in self._undo:
                extent = max(extent, (first + len(old)) * BLOCK_BYTES)
                lost = _lost_blocks(len(old), rng, survival)
                left.blocks[first : first + len(old)][lost] = old[lost]
        if size < extent:
            left.bytes[size:extent] = 0
        left.size = left.durable_size = size
        left._extent = min(extent, size)
        return left

    def _resize(self, size: int) -> None:
        """Set the size, which may survive a cut."""
        self.size = size
        self._sizes.append(size)

    def _save(self, start: int, end: int) -> None:
        """Keep the durable bytes of these blocks, unless they are kept already."""
        first, last = start // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        if last > len(self._saved):
            grown = np.zeros(2 * last, dtype=np.bool_)
            grown[: len(self._saved)] = self._saved
            self._saved = grown
        kept = self._saved[first:last]
        if not kept.any():
            runs = [(first, last)] if first < last else []
        else:
            edges = np.flatnonzero(np.diff(kept, prepend=True, append=True)) + first
            runs = [(int(begin), int(stop)) for begin, stop in edges.reshape(-1, 2)]
        for begin, stop in runs:
            self._undo.append((begin, self.blocks[begin:stop].copy()))
            self._saved[begin:stop] = True


def _lost_blocks(count: int, rng: np.random.Generator, survival: Survival) -> slice | NDArray[np.bool_]:
    """Draw which of `count` blocks written together did not reach the disk: none, all, a tail, or any."""
    if survival == "nothing":
        return slice(0, count)
    shape = int(rng.integers(6))
    if shape == 0:
        return slice(0, 0)
    if shape == 1:
        return slice(0, count)
    if shape == 2:
        return slice(int(rng.integers(count + 1)), count)
    share = (0.1, 0.5, 0.9)[shape - 3]
    return rng.random(count) < share


@dataclass(slots=True)
class Change:
    """One operation on a folder: it removes names, then sets a name to a node."""

    gone: tuple[str, ...]
    name: str | None = None
    node: Inode | Folder | None = None


@dataclass(slots=True)
class Folder:
    """Entries on disk, entries as programs see them, and the changes between both."""

    current: dict[str, Inode | Folder] = field(default_factory=dict)
    durable: dict[str, Inode | Folder] = field(default_factory=dict)
    pending: list[Change] = field(default_factory=list)
    mirror: Path | None = None

    def link(self, name: str, node: Inode | Folder) -> None:
        """Add a name, or give an existing name to another node."""
        self._apply(Change((), name, node))

    def unlink(self, name: str) -> None:
        """Remove a name."""
        self._apply(Change((name,)))

    def rename(self, old: str, new: str) -> None:
        """Remove a name and give its node to another one, in one step."""
        self._apply(Change((old,), new, self.current[old]))

    def sync(self) -> None:
        """Let the disk have the current state."""
        self.durable = dict(self.current)
        self.pending.clear()

    def after_cut(self, rng: np.random.Generator, survival: Survival) -> Folder:
        """Return the folder and all below it as one cut may leave it."""
        entries = dict(self.durable)
        lost_names: set[str] = set()
        share = float(rng.choice([0.1, 0.5, 0.9])) if survival == "random" and self.pending else 0.0
        for change in self.pending:
            names = {*change.gone, change.name} - {None}
            lost = survival == "nothing" or (survival == "random" and float(rng.random()) < share)
            if lost or names & lost_names:
                lost_names |= {name for name in names if name is not None}
            else:
                _change(entries, change)
        left = {name: node.after_cut(rng, survival) for name, node in entries.items()}
        return Folder(current=left, durable=dict(left))

    def _apply(self, change: Change) -> None:
        """Apply an operation, which is pending until the next sync."""
        for name in (*change.gone, change.name):
            node = self.current.get(name) if name is not None else None
            if node is not None and node is not change.node:
                node.mirror = None  # it no longer has a name, so no external copy follows it
        _change(self.current, change)
        self.pending.append(change)


def _change(entries: dict[str, Inode | Folder], change: Change) -> None:
    """Apply an operation to entries."""
    for name in change.gone:
        entries.pop(name, None)
    if change.name is not None and change.node is not None:
        entries[change.name] = change.node
