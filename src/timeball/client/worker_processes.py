"""Processes that each run a worker. They are spawned, replaced when they die, and ended in order by SIGTERM.

They are spawned and not forked, because gRPC does not survive a fork (dialing.py). So the worker is pickled, and its
handler must be importable in the process. Messages that a process had leased when it died are delivered again, to any
member, when their leases end. A process whose parent has died stops by itself.
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

from timeball.model.errors import RequestError

logger = logging.getLogger(__name__)

PAUSE_S = 1.0  # before a dead process is replaced: one that cannot start must not keep a core busy
_LOOK_S = 0.5


class Runs(Protocol):
    """The methods of a worker that its process calls."""

    def run(self) -> None:
        """Work until stopped by `stop` or by a signal."""

    def stop(self) -> None:
        """Ask the worker to end in order."""


class Processes:
    """`count` processes, each of which runs the worker that `make` returns."""

    def __init__(self, count: int, make: Callable[[], Runs]) -> None:
        try:
            ForkingPickler.dumps(
                make
            )  # a trial of the pickling by spawn, where an error would end only the keeper thread
        except Exception as error:  # of any kind: pickling a handler's parts may raise any error
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
        """The process ids of the live processes."""
        with self._changing:
            return [one.pid for one in self._processes if one.pid is not None and one.is_alive()]

    def start(self) -> None:
        """Spawn the processes, and replace each one that dies."""
        if self._keeper is not None:
            raise RequestError("this Worker was started before; make another one")
        for _ in range(self._count):
            self._add()
        self._keeper = threading.Thread(target=self._keep, name="timeball-worker-processes", daemon=True)
        self._keeper.start()

    def stop(self) -> None:
        """Ask each process to end in order."""
        with self._changing:  # no process is added after this
            self._stopping.set()
            for one in self._processes:
                one.terminate()

    def join(self) -> None:
        """Wait until all processes have ended."""
        while self._keeper is not None and self._keeper.is_alive():
            # with a time limit, because the main thread runs signal handlers between two calls
            self._keeper.join(1.0)

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
    """Run a worker in this process until it is stopped or the parent process has died."""
    worker, parent = make(), multiprocessing.parent_process()

    def follow() -> None:
        assert parent is not None
        wait([parent.sentinel])
        worker.stop()

    threading.Thread(target=follow, name="timeball-worker-parent", daemon=True).start()
    worker.run()
