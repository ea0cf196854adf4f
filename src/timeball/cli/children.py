"""Processes that a command has started, and that must not outlive it when it is interrupted at a bad moment.

A JVM that is interrupted in the middle of its start may wait for ever, and Spark has lost its handle by then. A
broker would even serve on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psutil


@contextmanager
def no_child_left_behind() -> Iterator[None]:
    """Ctrl-C or a failure in this block ends the processes that it has started.

    For the start of a process: whoever is interrupted in the middle of it has no handle yet that could end it.
    """
    here = psutil.Process()
    before = set(here.children())
    try:
        yield
    except BaseException:  # Ctrl-C above all, and it goes on below
        for child in set(here.children()) - before:
            for process in (*_descendants(child), child):
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    pass  # it has ended by itself
        raise


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    """None of a process that has ended meanwhile."""
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
