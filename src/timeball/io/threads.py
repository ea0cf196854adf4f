"""Threads of a broker for blocking calls, slices of long work, the lag of the event loop, and signals to stop."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

from timeball.io.clock import Clock, Durations
from timeball.model.errors import Unavailable

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

# Rows that a request may handle in one turn of the event loop: at 2 to 6 us each, 1 to 3 ms.
SLICE_ROWS = 512
LAG_INTERVAL_S = 0.25  # between two measurements of the loop's lag


@dataclass(frozen=True, slots=True)
class Threads:
    """One thread for each kind of blocking work, so that slow work delays no other kind."""

    reader: Executor  # reads log and files for releases and consumers
    lookup: Executor  # finds scheduled messages in log and files
    background: Executor  # compaction and rewriting, which may take seconds
    table: Executor  # changes the Delta log; the same as `reader`, except for an object store
    # Reads data files that a request needs. For an object store it is `lookup`, because releases must not wait for the
    # store, else `reader`.
    files: Executor


def in_thread(thread: Executor, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
    """Run a blocking call in one of the broker's threads. Raises Unavailable after the thread's shutdown."""
    try:
        return asyncio.get_running_loop().run_in_executor(thread, partial(call, *args, **kwargs))
    except RuntimeError as error:  # of `submit`, after a shutdown
        raise Unavailable("the broker stops; send the request again") from error


async def in_slices(rows: Sequence[T]) -> AsyncIterator[Sequence[T]]:
    """Yield the rows in slices of SLICE_ROWS. Between two slices all other tasks of the event loop have their turn.

    A request that names one key may concern a million messages. No other request may wait for more than a slice.
    """
    for begin in range(0, len(rows), SLICE_ROWS):
        if begin:
            await asyncio.sleep(0)
        yield rows[begin : begin + SLICE_ROWS]


# ---- stop signals --------------------------------------------------------------------------------------------
# With SIGTERM and SIGINT, supervisors, systemd and terminals ask a process to end.


def watch_stop_signals() -> asyncio.Future[None]:
    """Install handlers for SIGTERM and SIGINT. The returned future is done when the next of them arrives."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()

    def on_signal() -> None:
        if not stop.done():
            stop.set_result(None)

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, on_signal)
    return stop


class LoopLag:
    """Measures the lag of the event loop behind its timers, the first sign of an overloaded broker.

    It sleeps again and again, and records how much longer than planned each sleep took.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.durations = Durations(clock)

    async def run(self) -> None:
        """Measure until cancelled."""
        while True:
            began_ns = self._clock.monotonic_ns()
            await asyncio.sleep(LAG_INTERVAL_S)
            self.durations.add(max(0, self._clock.monotonic_ns() - began_ns - int(LAG_INTERVAL_S * 1e9)))
