"""Generations of a strategy's files. Each generation is a folder, and a saved state belongs to one generation.

    timer_wheel/00000003/…        cascade/00000001/…

A start that cannot use the saved state begins a new generation. So the files of an older state never change: after a
power cut its files may be missing, but they never contain records that were written later under the same names.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from timeball.io.files import File, Files
from timeball.schedule import mapped_log
from timeball.schedule.backlog import Backlog, Opened
from timeball.schedule.locations import Waiting
from timeball.schedule.mapped_log import MappedLog, RecordType

LogBounds = tuple[str, RecordType, int, int]  # the name of a log, its record type, and its `begin` and `end`


class StateOfGeneration(Protocol):
    """The saved state of a backlog with files."""

    @property
    def generation(self) -> int:
        """The number of the generation, which names the folder of its files."""


class BacklogInFiles(Backlog):
    """A backlog that stores its messages in mapped logs. All of them belong to one generation."""

    logs: list[MappedLog]
    _generation: int

    def _begin_generation(self, files: Files, folder: str, state: StateOfGeneration | None) -> str:
        """Continue the generation of a state, or begin a new one if there is no state. Return its folder."""
        self._generation = begin_generation(files, folder, None if state is None else state.generation)
        return folder_of(folder, self._generation)

    def _add_in_log_order(self, waiting: Waiting, now_ms: int) -> Opened:
        """Add messages in the order of their rows, so that files and log rows can be dropped together.

        Returns those that count as opened.
        """
        waiting = waiting.part(np.argsort(waiting.row_seq, kind="stable"))
        near = waiting.part(self.add(waiting, now_ms))
        return Opened.near(near.due_ms, near.seq, near.row_seq)

    def files_to_sync(self) -> list[tuple[str, list[File]]]:
        """List the files of all logs that were written since the last call."""
        return [(log.folder, log.files_to_sync()) for log in self.logs]

    def sync_failed(self) -> None:
        """Undo the last `files_to_sync`, whose files were not synced."""
        for log in self.logs:
            log.sync_failed()

    def close(self) -> None:
        """Close the files."""
        for log in self.logs:
            log.close()


def begin_generation(files: Files, folder: str, saved: int | None) -> int:
    """Choose the saved generation, or a new one if there is none. Remove the logs of all others."""
    present = [int(name) for name in files.list_dir(folder) if name.isdigit()]
    generation = max(present, default=0) + 1 if saved is None else saved
    for other in present:
        if other != generation:
            # The empty folders stay: from their numbers the next generation learns that it must take another number.
            _remove_logs(files, folder_of(folder, other))
    # The folder is made at once, so that the next start without a state cannot take the same number.
    files.make_dir(folder_of(folder, generation))
    return generation


def folder_of(folder: str, generation: int) -> str:
    """Build the name of a generation's folder."""
    return f"{folder}/{generation:08d}"


def open_logs(files: Files, folder: str, logs: Iterable[LogBounds]) -> list[MappedLog]:
    """Open the logs of a generation, within the bounds of a saved state."""
    return [
        MappedLog(files, f"{folder}/{name}", record_type, begin=begin, end=end)
        for name, record_type, begin, end in logs
    ]


def check(files: Files, folder: str, logs: Iterable[LogBounds]) -> None:
    """Raise Corrupt with the file's name if a record within the bounds of a saved state is missing or damaged."""
    for name, record_type, begin, end in logs:
        mapped_log.check(files, f"{folder}/{name}", record_type, begin=begin, end=end)


def _remove_logs(files: Files, folder: str) -> None:
    """Remove the files of all logs of a generation."""
    for log_name in files.list_dir(folder):
        for file_name in files.list_dir(f"{folder}/{log_name}"):
            files.remove(f"{folder}/{log_name}/{file_name}")
