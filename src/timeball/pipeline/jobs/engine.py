"""Who runs the tasks of a job: Spark (run/on_spark.py), or this process.

A job cuts rows of the log into pieces, and has one function that does the work of a piece. An engine runs it for each
piece and returns what it returned, in order; so the job does not know where its tasks run, and files and marks are the
same. An epoch whose task fails is planned anew from the sink's mark: what its other tasks have written belongs to no
version of any table, and is swept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

Piece = tuple[int, int]  # rows from <= seq < to of the log
Result = TypeVar("Result")


class Engine(Protocol):
    """What a job asks of it."""

    def run(
        self, job: str, work: str, task: Callable[[Piece], Result], pieces: Sequence[Piece]
    ) -> list[Result]:
        """Do the task of each piece; `work` says to people what is done."""

    def lives(self) -> bool:
        """Return whether tasks can still be run."""

    def cancel(self, job: str) -> None:
        """End the tasks of a job that are at work, if that can be done."""


class InProcess:
    """Runs tasks here, one after the other: no Java, and no process more."""

    def run(
        self, job: str, work: str, task: Callable[[Piece], Result], pieces: Sequence[Piece]
    ) -> list[Result]:
        """Do the task of each piece."""
        return [task(piece) for piece in pieces]

    def lives(self) -> bool:
        """Return True."""
        return True

    def cancel(self, job: str) -> None:
        """Let the task at work come to its end, which is seconds away."""
