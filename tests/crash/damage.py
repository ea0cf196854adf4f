"""Damage to one file of a data folder, and its effect.

The ways to damage it (WAYS): a bit or a byte is changed, a block of 512 bytes is set to zero, the end is cut off, the
file is removed, or all files of its folder are removed. The outcomes:

same       no visible change: the file was a cache, or nothing needs these bytes
refused    the start, or a later step, ended with a storage error that names the file and the remedy
silent     the folder shows another content, without an error: this must never happen
fault      another error, or one that names no file or no remedy
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from tests.crash.folder import Kept, Look, look
from tests.crash_disk import Folder
from tests.crash_files import CrashFiles

from timeball.log import format as fmt
from timeball.model.errors import StorageError
from timeball.node.inspect_folder import FolderDump, InspectedFrame

# Kind of a file -> the pattern of its name. The folders of the tests together must have files of all kinds.
KINDS = {
    "checkpoint": r"checkpoint",
    "segment": r"log/\d+\.log",
    "keys of a segment": r"log/\d+\.keys",
    "frames of a segment": r"log/\d+\.frames",
    "queue": r"queues/.*",
    "data file": r"pending/bucket=.*",
    "keys of a data file": r"pending/_keys/.*",
    "delta entry": r"pending/_delta_log/\d+\.json",
    "delta checkpoint": r"pending/_delta_log/(.*\.parquet|_last_checkpoint)",
    "wheel": r"timer_wheel/.*",
    "cascade": r"cascade/.*",
}
WAYS = ("bit", "byte", "block", "end", "file", "folder")
# Folders that are never emptied: a data folder without a log is a new one, and its loss cannot be noticed.
NEVER_EMPTIED = {"log"}


@dataclass(frozen=True)
class Damage:
    """One way to damage one file."""

    name: str
    way: str  # one of WAYS
    at: int  # the byte that is changed, or where the block or the cut begins
    bit: int  # of this byte

    def do(self, files: CrashFiles) -> None:
        """Damage the file, or the folder, in `files`."""
        if self.way == "file":
            files.remove(self.name)
        elif self.way == "folder":
            folder = self.name.rpartition("/")[0]
            for name in files.list_dir(folder):
                if not is_folder(files, f"{folder}/{name}"):
                    files.remove(f"{folder}/{name}")
        elif self.way == "end":
            files.open(self.name).allocate(self.at)
        else:
            data = bytearray(
                files.content(self.name)[self.at : self.at + (512 if self.way == "block" else 1)]
            )
            data[0] ^= 1 << self.bit if self.way == "bit" else 0x5A
            files.open(self.name).write_at(self.at, bytes(len(data)) if self.way == "block" else bytes(data))


@dataclass(frozen=True)
class Result:
    """The outcome of a damage."""

    damage: Damage
    outcome: str  # same, refused, silent or fault
    text: str  # the error, or the differences


def is_folder(files: CrashFiles, name: str) -> bool:
    """Check whether a name is that of a folder."""
    return isinstance(files._find(name), Folder)


def names(files: CrashFiles, folder: str = ".") -> Iterator[str]:
    """Yield the paths of all files below a folder."""
    for name in files.list_dir(folder):
        path = name if folder == "." else f"{folder}/{name}"
        if is_folder(files, path):
            yield from names(files, path)
        else:
            yield path


def kind_of(name: str) -> str | None:
    """Return the kind of a file (KINDS), or None."""
    return next((kind for kind, pattern in KINDS.items() if re.fullmatch(pattern, name)), None)


def drawn(kept: Kept, count: int, seed: int) -> list[Damage]:
    """Draw `count` damages, equally many for each kind of file."""
    rng = np.random.default_rng(seed)
    by_kind: dict[str, list[str]] = {}
    for name in names(kept.files):
        kind = kind_of(name)
        if kind is not None and written(kept.files, name):
            by_kind.setdefault(kind, []).append(name)
    damages = []
    for number in range(count):
        of_kind = by_kind[sorted(by_kind)[number % len(by_kind)]]
        name = str(rng.choice(of_kind))
        ways = [
            way for way in WAYS if way != "folder" or name.partition("/")[0] not in {name, *NEVER_EMPTIED}
        ]
        at = int(rng.integers(written(kept.files, name)))
        damages.append(Damage(name, str(rng.choice(ways)), at, int(rng.integers(8))))
    return damages


def written(files: CrashFiles, name: str) -> int:
    """Return the bytes up to the last one that is not zero."""
    return len(files.content(name).rstrip(b"\0"))


def change_value(files: CrashFiles, key: str) -> None:
    """Set the numbers of the last META row of `key` to 0, and write its frame with a valid checksum."""
    folder = FolderDump(files)
    frames = [
        item
        for segment in folder.segments
        for item in folder.walk(segment)
        if isinstance(item, InspectedFrame)
    ]
    last = next(frame for frame in reversed(frames) if key in frame.rows.column("unique_key").to_pylist())
    index = last.rows.column("unique_key").to_pylist().index(key)
    bodies = last.rows.column("body").to_pylist()
    bodies[index] = re.sub(rb":\d+", lambda number: b":" + b"0".rjust(len(number[0]) - 1), bodies[index])
    column = last.rows.schema.get_field_index("body")
    rows = last.rows.set_column(column, last.rows.schema.field(column), pa.array(bodies, pa.binary()))
    frame, parts = fmt.encode_frame(
        rows, first_seq=last.frame.first_seq, span=last.frame.span, append_ms=last.frame.append_ms,
        epoch=last.frame.epoch, position=last.frame.position, synced_to=last.frame.synced_to,
    )  # fmt: skip
    assert frame == last.frame
    with contextlib.closing(files.open(last.segment.name)) as file:
        file.write_at(frame.position, b"".join(bytes(part) for part in parts))
        file.sync()


def difference(expected: object, actual: object) -> str:
    """Describe a difference: for lists the first missing and new elements, otherwise both values."""
    if not isinstance(expected, list) or not isinstance(actual, list):
        return f"{expected} became {actual}"[:600]
    pairs = (expected, actual), (actual, expected)
    missing, added = (
        [str(element)[:100] for element in elements if element not in others] for elements, others in pairs
    )
    return f"{missing[:3]} are missing, {added[:3]} are new"


def result(kept: Kept, expected: Look, damage: Damage) -> Result:
    """Damage a copy of the folder, and compare the look at it with the look at the undamaged folder."""
    files = kept.copy()
    damage.do(files)
    try:
        actual = look(kept, files)
    except StorageError as error:
        short, folder = damage.name.rpartition("/")[2], damage.name.rpartition("/")[0]
        # When all files of a folder are removed, an error can only name the folder.
        names_file = (
            short in str(error)
            or f"{folder}/ " in str(error)
            or (damage.way == "folder" and folder in str(error))
        )
        names_remedy = "restore" in str(error) or "start the broker again" in str(error)
        return Result(damage, "refused" if names_file and names_remedy else "fault", str(error))
    except BaseException as error:  # of any kind: it would be reported to a user as a fault in Timeball
        return Result(damage, "fault", repr(error))
    wrong = [key for key in expected if actual[key] != expected[key]]
    text = ", ".join(f"{key}: {difference(expected[key], actual[key])}" for key in wrong)
    return Result(damage, "silent" if wrong else "same", text)
