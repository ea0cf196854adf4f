"""JSON files of the data folder with a checksum in their first line: small state that the log does not repeat.

    {"document": 1, "crc32c": "c6852935", "bytes": 25}
    {"orders": {"queues": 8}}

Two lines of JSON, so that `jq` and a person read it. The first line follows from the second: a file whose first line is
not exactly the one that its content gives has changed since it was written, and is Corrupt. A changed offset or
queue count would otherwise be taken for the truth.
"""

from __future__ import annotations

from typing import TypeVar

import google_crc32c
import msgspec

from timeball.errors import Corrupt
from timeball.files import Files

T = TypeVar("T")


def encode(value: object) -> bytes:
    """Return the file's content for `value`."""
    content = msgspec.json.encode(value)
    return _first_line(content) + content


def decode(name: str, data: bytes, kind: type[T]) -> T:
    """Return what `encode` was given; raise Corrupt with the file's name."""
    first, newline, content = data.partition(b"\n")
    if first + newline != _first_line(content):
        raise Corrupt(
            f"{name} does not match its checksum: restore it from a copy of the same moment as the log"
        )
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise Corrupt(f"{name}: {error}; restore it from a copy of the same moment as the log") from error


def load(files: Files, name: str, kind: type[T]) -> T | None:
    """Return a document of the data folder, None when there is no such file; raise Corrupt with its name."""
    return decode(name, bytes(files.map_readonly(name)), kind) if files.exists(name) else None


def _first_line(content: bytes) -> bytes:
    return b'{"document": 1, "crc32c": "%08x", "bytes": %d}\n' % (google_crc32c.value(content), len(content))
