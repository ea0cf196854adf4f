"""Shortcuts for tests of the crash model itself."""

from __future__ import annotations

from tests.crash_files import CrashFile, CrashFiles

SEEDS = range(60)


def images(files: CrashFiles, name: str) -> set[bytes | None]:
    """Return the states of the file that are possible after a cut now. None: it does not exist."""
    states: set[bytes | None] = set()
    for seed in SEEDS:
        after = files.crash(seed)
        states.add(after.content(name) if after.exists(name) else None)
    return states


def synced_file(files: CrashFiles, name: str, data: bytes) -> CrashFile:
    """Create a file that is synced with its name."""
    file = files.create(name)
    file.write_at(0, data)
    file.sync()
    files.sync_dir(".")
    return file
