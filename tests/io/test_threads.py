"""Calls in other threads reach their callers, a blocked event loop is measured, and a stop signal ends a wait."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from timeball.io import threads
from timeball.io.clock import BOUNDS_NS, SystemClock
from timeball.io.threads import LoopLag, in_thread, watch_stop_signals
from timeball.model.errors import DiskFailed, Unavailable


def test_a_call_runs_in_the_given_thread_with_its_arguments() -> None:
    def thread_name_and_sum(one: int, *, two: int) -> tuple[str, int]:
        return threading.current_thread().name, one + two

    async def main() -> tuple[str, int]:
        with ThreadPoolExecutor(1, thread_name_prefix="reader") as thread:
            return await in_thread(thread, thread_name_and_sum, 40, two=2)

    name, total = asyncio.run(main())
    assert name.startswith("reader")
    assert total == 42


def test_a_call_after_the_shutdown_gets_a_typed_error() -> None:
    """A request may reach a thread that the stop of its broker has shut down."""

    async def main() -> None:
        thread = ThreadPoolExecutor(1)
        thread.shutdown()
        await in_thread(thread, int)

    with pytest.raises(Unavailable, match="the broker stops"):
        asyncio.run(main())


def test_errors_reach_the_caller() -> None:
    def fail() -> None:
        raise DiskFailed("the disk is gone")

    async def main() -> None:
        with ThreadPoolExecutor(1) as thread:
            await in_thread(thread, fail)

    with pytest.raises(DiskFailed, match="gone"):
        asyncio.run(main())


def test_the_event_loop_runs_during_a_call_in_a_thread() -> None:
    gate = threading.Event()

    async def main() -> bool:
        with ThreadPoolExecutor(1) as thread:
            waiting = asyncio.ensure_future(in_thread(thread, gate.wait, 60))
            await asyncio.sleep(0)
            assert not waiting.done()
            gate.set()  # reached only if the call does not block the loop
            return await waiting

    assert asyncio.run(main())


BLOCKED_NS = 20_000_000  # time for which the test blocks the event loop


def test_a_blocked_event_loop_is_measured_as_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "LAG_INTERVAL_S", 0.001)
    clock = SystemClock()

    async def main() -> LoopLag:
        lag = LoopLag(clock)
        task = asyncio.create_task(lag.run())
        while not sum(lag.durations.counts):
            await asyncio.sleep(0)
        until_ns = clock.monotonic_ns() + BLOCKED_NS
        while clock.monotonic_ns() < until_ns:  # blocks the loop
            pass
        measured_before = sum(lag.durations.counts)
        while sum(lag.durations.counts) == measured_before:
            await asyncio.sleep(0)
        task.cancel()
        return lag

    lag = asyncio.run(main())
    assert lag.durations.sum_ns >= BLOCKED_NS // 2
    long_lags = sum(
        count for bound, count in zip((*BOUNDS_NS, 1 << 62), lag.durations.counts) if bound >= BLOCKED_NS // 2
    )
    assert long_lags >= 1


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_future_is_done_at_the_first_signal_and_ignores_a_second(signal_number: signal.Signals) -> None:
    async def check() -> bool:
        stop_signal = watch_stop_signals()
        was_done = stop_signal.done()
        for _ in range(2):
            os.kill(os.getpid(), signal_number)
        await stop_signal
        return was_done

    assert asyncio.run(check()) is False
