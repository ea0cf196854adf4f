"""Processes that each run a worker: spawned, replaced when one dies, ended in order by SIGTERM.

Spawned and not forked: gRPC does not survive a fork (dialing.py). So what a process runs is pickled, and must be
importable there. What a process held when it died comes again, to any member, when its leases end. A process whose
parent is gone stops by itself.
"""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from typing import Protocol

from timeball.errors import RequestError

logger = logging.getLogger(__name__)

PAUSE_S = 1.0  # before a process that died is replaced: one that cannot start must not keep a core busy
_LOOK_S = 0.5


class Runs(Protocol):
    """A worker as its process sees it."""

    def run(self) -> None:
        """Work until stopped, by `stop` or by a signal."""

    def stop(self) -> None:
        """End in order."""


class Processes:
    """So many processes, each running what `make` returns."""

    def __init__(self, count: int, make: Callable[[], Runs]) -> None:
        try:
            ForkingPickler.dumps(
                make
            )  # as it is done to spawn them, where an error would end the keeper alone
        except Exception as error:  # of any kind: parts of a handler raise what they like
            raise RequestError(
                f"this handler cannot be sent to another process ({error}): name a function at the top of a module"
            ) from error
        self._count, self._make = count, make
        self._spawn = multiprocessing.get_context("spawn")
        self._stopping = threading.Event()
        self._processes: list[SpawnProcess] = []
        self._changing = threading.Lock()
        self._keeper: threading.Thread | None = None

    @property
    def pids(self) -> list[int]:
        """Return the process ids of those that live."""
        with self._changing:
            return [one.pid for one in self._processes if one.pid is not None and one.is_alive()]

    def start(self) -> None:
        """Spawn them, and replace each that dies."""
        if self._keeper is not None:
            raise RequestError("this Worker was started before; make another one")
        for _ in range(self._count):
            self._add()
        self._keeper = threading.Thread(target=self._keep, name="timeball-worker-processes", daemon=True)
        self._keeper.start()

    def stop(self) -> None:
        """Have each end in order."""
        with self._changing:  # none is added behind this
            self._stopping.set()
            for one in self._processes:
                one.terminate()

    def join(self) -> None:
        """Wait until all have ended."""
        while self._keeper is not None and self._keeper.is_alive():
            self._keeper.join(1.0)  # in turns: the main thread runs signal handlers in between

    def _add(self) -> None:
        with self._changing:
            if not self._stopping.is_set():
                one = self._spawn.Process(target=_run, args=(self._make,), name="timeball-worker")
                one.start()
                self._processes.append(one)

    def _keep(self) -> None:
        while self._processes:
            wait([one.sentinel for one in self._processes], _LOOK_S)
            ended = [one for one in self._processes if not one.is_alive()]
            with self._changing:
                self._processes = [one for one in self._processes if one not in ended]
            for one in ended:
                one.join()
                if not self._stopping.is_set():
                    logger.error(
                        "worker process ended, starting another pid=%s exit=%s", one.pid, one.exitcode
                    )
            if ended and not self._stopping.wait(PAUSE_S):
                for _ in ended:
                    self._add()


def _run(make: Callable[[], Runs]) -> None:
    """Run a worker in this process until it is stopped, or its parent is gone."""
    worker, parent = make(), multiprocessing.parent_process()

    def follow() -> None:
        assert parent is not None
        wait([parent.sentinel])
        worker.stop()

    threading.Thread(target=follow, name="timeball-worker-parent", daemon=True).start()
    worker.run()
