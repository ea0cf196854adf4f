"""Folders of a strategy's files, one a *generation*: a state saved in a checkpoint belongs to one of them.

    timer_wheel/00000003/…        cascade/00000001/…

A start that cannot use a state begins a new generation. So a state saved before never meets records that others have
written since under the same names: after a power cut it finds its files gone, and not changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np

from timeball.files import File, Files
from timeball.schedule import mapped_log
from timeball.schedule.backlog import Backlog, Opened
from timeball.schedule.locations import Waiting
from timeball.schedule.mapped_log import MappedLog, RecordType

LogBounds = tuple[str, RecordType, int, int]  # the name of a log, its records, and how far it goes


class StateOfGeneration(Protocol):
    """The state of a backlog in files."""

    @property
    def generation(self) -> int:
        """Return the number of the folder that its files are in."""


class BacklogInFiles(Backlog):
    """A backlog whose promises wait in mapped logs, which all belong to one generation."""

    logs: list[MappedLog]
    _generation: int

    def _begin_generation(self, files: Files, folder: str, state: StateOfGeneration | None) -> str:
        """Return the folder of the generation that a state belongs to, or without one of a new generation."""
        self._generation = begin_generation(files, folder, None if state is None else state.generation)
        return folder_of(folder, self._generation)

    def _add_in_log_order(self, waiting: Waiting, now_ms: int) -> Opened:
        """Add what came since the state, sorted by row, so that files and log are let go of together."""
        waiting = waiting.part(np.argsort(waiting.row_seq, kind="stable"))
        near = waiting.part(self.add(waiting, now_ms))
        return Opened.near(near.due_ms, near.seq, near.row_seq)

    def files_to_sync(self) -> list[tuple[str, list[File]]]:
        """Return those of all logs that have been written since the last call."""
        return [(log.folder, log.files_to_sync()) for log in self.logs]

    def sync_failed(self) -> None:
        """Count what `files_to_sync` gave out as not synced."""
        for log in self.logs:
            log.sync_failed()

    def close(self) -> None:
        """Close the files."""
        for log in self.logs:
            log.close()


def begin_generation(files: Files, folder: str, saved: int | None) -> int:
    """Return the saved generation, or without one a new one; remove the logs of all others."""
    present = [int(name) for name in files.list_dir(folder) if name.isdigit()]
    generation = max(present, default=0) + 1 if saved is None else saved
    for other in present:
        if other != generation:
            # The folders stay, empty: their numbers are how the next generation knows that it must take another one.
            _remove_logs(files, folder_of(folder, other))
    # Made at once: its name is what keeps the next start without a state from taking the same number.
    files.make_dir(folder_of(folder, generation))
    return generation


def folder_of(folder: str, generation: int) -> str:
    """Return where the files of a generation are."""
    return f"{folder}/{generation:08d}"


def open_logs(files: Files, folder: str, logs: Iterable[LogBounds]) -> list[MappedLog]:
    """Open what a state vouches for of the logs of a generation."""
    return [
        MappedLog(files, f"{folder}/{name}", record_type, begin=begin, end=end)
        for name, record_type, begin, end in logs
    ]


def check(files: Files, folder: str, logs: Iterable[LogBounds]) -> None:
    """Raise Corrupt with the file's name when a record that a state vouches for is missing or damaged."""
    for name, record_type, begin, end in logs:
        mapped_log.check(files, f"{folder}/{name}", record_type, begin=begin, end=end)


def _remove_logs(files: Files, folder: str) -> None:
    for log in files.list_dir(folder):
        for name in files.list_dir(f"{folder}/{log}"):
            files.remove(f"{folder}/{log}/{name}")
