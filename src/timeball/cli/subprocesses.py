"""Processes that a command starts: the pipeline beside the broker, and none that outlives an interrupted start.

Spark is never in the way of a promise. So the pipeline runs in a process of its own, is started once the broker serves,
is started again with a growing pause when it ends, and is never a reason for the broker to end. Only what a new start
cannot mend (no Java, no pyspark: exit code 4) is said once, and the broker goes on alone. The child holds the read end
of a pipe whose other end is ours: should this process be killed, it ends as well.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil

from timeball.cli.exit_codes import ExitCode
from timeball.clock import Clock, SystemClock

PAUSE_S_MIN = 1.0
PAUSE_S_MAX = 60.0
STEADY_S = 60.0  # a child that has lived this long starts with the shortest pause again
STOP_S = 20.0  # Spark's own shutdown takes about a second; beyond this it is killed

# (state, sentence); states: started, ended, given_up, stopped
Say = Callable[[str, str], None]


class Supervisor:
    """Keeps one child process running. `alone`: what the broker does when there is none."""

    def __init__(
        self, command: list[str], say: Say, clock: Clock | None = None, *, alone: str = "goes on"
    ) -> None:
        self._command = command
        self._alone = alone
        self._say = say
        self._clock = clock or SystemClock()
        self._child: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Start the child and start it again, until `stop` or until a new start could not help."""
        pause_s = PAUSE_S_MIN
        while not self._stopping.is_set():
            begun_ns = self._clock.monotonic_ns()
            code = await self._run_once()
            if self._stopping.is_set():
                break
            if code == ExitCode.SETUP:
                self._say("given_up", f"the pipeline cannot run here; the broker {self._alone}")
                return
            if self._clock.monotonic_ns() - begun_ns >= STEADY_S * 1e9:
                pause_s = PAUSE_S_MIN
            self._say(
                "ended", f"the pipeline {_how(code)}; the broker goes on, next start in {pause_s:.0f} s"
            )
            await self._pause(pause_s)
            pause_s = min(2 * pause_s, PAUSE_S_MAX)
        self._say("stopped", "the pipeline has stopped")

    async def stop(self) -> None:
        """End the child, gently at first; `run` returns after it."""
        self._stopping.set()
        child = self._child
        if child is None or child.returncode is not None:
            return
        _signal(child, signal.SIGTERM)
        try:
            await asyncio.wait_for(child.wait(), STOP_S)
        except TimeoutError:
            _signal(child, signal.SIGKILL)

    async def _run_once(self) -> int:
        # A session of its own: Ctrl-C reaches us alone, and we end the child before the broker.
        self._child = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, stdout=sys.stderr, start_new_session=True
        )
        self._say("started", f"the pipeline starts (pid {self._child.pid})")
        return await self._child.wait()

    async def _pause(self, pause_s: float) -> None:
        try:
            await asyncio.wait_for(self._stopping.wait(), pause_s)
        except TimeoutError:
            pass


def _signal(child: asyncio.subprocess.Process, number: signal.Signals) -> None:
    try:
        child.send_signal(number)
    except ProcessLookupError:
        pass  # it ended by itself in between


def _how(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


@contextmanager
def no_child_left_behind() -> Iterator[None]:
    """Ctrl-C or a failure in this block ends the processes that it has started.

    For the start of a process: a JVM that is interrupted in the middle of its start may wait for ever, and its caller
    has no handle yet that could end it.
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
    """Return none of a process that has ended meanwhile."""
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
