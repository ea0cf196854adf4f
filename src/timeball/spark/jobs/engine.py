"""Engines run the tasks of a job: Spark (run/on_spark.py), or this process.

A job cuts rows of the log into pieces, and has one function that processes a piece: its task. An engine runs the task
for each piece and returns the results in order. So a job does not depend on where its tasks run, and it writes the same
files and marks with every engine. If a task fails, the job plans the epoch again from the mark of its sink
(jobs/marked.py). The files that other tasks of the failed epoch have written are not in any version of a table, and are
deleted later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

Piece = tuple[int, int]  # (begin, end): the rows begin <= seq < end of the log
Result = TypeVar("Result")


class Engine(Protocol):
    """The interface between a job and the engine that runs its tasks."""

    def run(
        self, job: str, work: str, task: Callable[[Piece], Result], pieces: Sequence[Piece]
    ) -> list[Result]:
        """Run the task for each piece. Returns the results in order. `work`: a description for people."""

    def lives(self) -> bool:
        """Check whether the engine can run tasks."""

    def cancel(self, job: str) -> None:
        """Cancel the running tasks of a job, if the engine can."""


class InProcess:
    """Runs tasks in this process, one after the other, without Java or other processes."""

    def run(
        self, job: str, work: str, task: Callable[[Piece], Result], pieces: Sequence[Piece]
    ) -> list[Result]:
        """Run the task for each piece."""
        return [task(piece) for piece in pieces]

    def lives(self) -> bool:
        """This process can always run tasks."""
        return True

    def cancel(self, job: str) -> None:
        """Do nothing: the running task ends by itself within seconds."""
