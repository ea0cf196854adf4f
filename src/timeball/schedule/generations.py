"""Folders of a strategy's files, one a *generation*: a state saved in a checkpoint belongs to one of them.

    timer_wheel/00000003/…        cascade/00000001/…

A start that cannot use a state begins a new generation. So a state saved before never meets records that others have
written since under the same names: after a power cut it finds its files gone, and not changed.
"""

from __future__ import annotations

from timeball.files import Files


def begin(files: Files, folder: str, saved: int | None) -> int:
    """Return the saved generation, or without one a new one; remove the logs of all others."""
    present = [int(name) for name in files.list_dir(folder) if name.isdigit()]
    generation = max(present, default=0) + 1 if saved is None else saved
    for other in present:
        if other != generation:
            _remove_logs(files, folder_of(folder, other))
    files.make_dir(folder_of(folder, generation))
    return generation


def folder_of(folder: str, generation: int) -> str:
    """Return where the files of a generation are."""
    return f"{folder}/{generation:08d}"


def _remove_logs(files: Files, folder: str) -> None:
    for log in files.list_dir(folder):
        for name in files.list_dir(f"{folder}/{log}"):
            files.remove(f"{folder}/{log}/{name}")
