"""Count the files of src/timeball that a running node passes through while it serves one request.

`Walks` is installed before the node starts, since `threading.setprofile` reaches only threads that start later. It
counts what the node's threads do and not what the test's own thread does, because a client is no part of the walk.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import timeball

PACKAGE = str(Path(timeball.__file__).parent) + "/"


@dataclass(frozen=True)
class Walk:
    """The files of the calls that one request caused, in their order, a list for each thread."""

    paths: tuple[tuple[str, ...], ...]

    @property
    def files(self) -> Counter[str]:
        """Return the files and how often the walk enters each."""
        return Counter(name for path in self.paths for name in entered(path))

    @property
    def changes(self) -> int:
        """Return how often a call is in another file than the one before in its thread."""
        return sum(max(0, len(list(entered(path))) - 1) for path in self.paths)

    def __str__(self) -> str:
        lines = [f"{len(self.files)} files, {self.changes} changes of file; entered how often:"]
        return "\n".join(lines + [f"  {count:4} {name}" for name, count in self.files.most_common()])


def entered(path: tuple[str, ...]) -> Iterator[str]:
    """Yield each file of a path where it differs from the one before."""
    last = ""
    for name in path:
        if name != last:
            yield name
        last = name


class Walks:
    """Records the calls into src/timeball of the threads that start while it is installed."""

    def __init__(self) -> None:
        self._on = False
        self._paths: dict[int, list[str]] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Profile the threads that start during a block."""
        threading.setprofile(self._profile)
        try:
            yield
        finally:
            threading.setprofile(None)

    def of(self, request: Callable[[], object]) -> Walk:
        """Return the walk of one request. The callable returns when the node has answered and is idle."""
        self._paths = {}
        self._on = True
        try:
            request()
        finally:
            self._on = False
        return Walk(tuple(tuple(path) for path in self._paths.values()))

    def _profile(self, frame: FrameType, event: str, _: object) -> None:
        if not self._on:
            return
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE) and "/_generated/" not in name:
            self._paths.setdefault(threading.get_ident(), []).append(sys.intern(name[len(PACKAGE) :]))
