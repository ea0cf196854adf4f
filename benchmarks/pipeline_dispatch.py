"""What `benchmarks.pipeline` measures of `dispatch`: releases by Spark local[2] beside the broker, on the same cores.

The job is started first, as a process of its own. Then come three loads, one after the other: some seconds that only
warm the JVM up, a steady one, and a burst of a million scheduled messages due within one second. All are in the table
long before they are due, since what comes near in the log's tail the broker releases by itself; "left to Spark" counts
the others.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Server, now_ms, quantiles, releases, send_scheduled, serving, wait_until
from benchmarks.report import Report
from timeball import Timeball
from timeball.spark.run.runner import read_statuses

START_S = 120.0
LATE_S = 60.0
GATHER_AHEAD_MS = 10_000  # what is due within this time is in the broker's memory already

Int64s = npt.NDArray[np.int64]


def measure(report: Report, small: bool) -> None:
    """Add the figures of a steady load and of a burst."""
    rate, seconds, warm_s, burst = (200, 3, 2, 2_000) if small else (10_000, 30, 10, 1_000_000)
    ahead_ms = 15_000 if small else 40_000
    with serving("--compact-rows", "0") as (server, ball), _dispatching(server):
        load = _Load(Report("warm up", small), ball, ahead_ms)
        load.run("warm up", rate * warm_s, warm_s)
        load.report = report
        lateness = load.run("steady", rate * seconds, seconds)
        p50, p99, most = quantiles(lateness)
        report.add("dispatch, steady: lateness p50", p50, "ms", 150, "lower")
        report.add("dispatch, steady: lateness p99", p99, "ms")
        report.add("dispatch, steady: lateness max", most, "ms")
        load.run("burst", burst, 1)
        report.add("dispatch, burst: last release after it began", load.last_ms / 1000, "s", 1.6, "lower")


@contextmanager
def _dispatching(server: Server) -> Iterator[None]:
    """The job at work, with its lease, until the block ends."""
    command = [sys.executable, "-m", "timeball", "pipeline", "run", "dispatch", "--log-level=warning"]
    job = subprocess.Popen([*command, "--endpoint", server.endpoint, "--master", "local[2]"])
    folder = str(server.data / "pipeline")
    try:
        wait_until(
            lambda: job.poll() is not None or any(each.state == "running" for each in read_statuses(folder)),
            *(START_S, "dispatch is at work"),
        )
        yield
        if job.poll() is not None:
            raise RuntimeError(f"the job dispatch ended with code {job.returncode}")
    finally:
        job.terminate()
        job.wait(60)


class _Load:
    """Scheduled messages due one after the other, evenly, beginning `ahead_ms` from now: scheduled, and waited for."""

    def __init__(self, report: Report, ball: Timeball, ahead_ms: int) -> None:
        self.report, self._ball, self._ahead_ms = report, ball, ahead_ms
        self.last_ms = 0  # the last release, counted from the first instant

    def run(self, name: str, rows: int, seconds: int) -> Int64s:
        """The lateness of each; what is missing, doubled, early or was not brought by Spark is added to the report."""
        begin_ms = now_ms() + self._ahead_ms
        due_ms = begin_ms + np.arange(rows, dtype=np.int64) * (seconds * 1000) // rows
        before = self._ball.status()
        left = self._wait_for(due_ms, before["log"]["durable_seq"])
        found = releases(self._ball, before["log"]["durable_seq"])
        lateness = found["store_ms"] - found["due_ms"]
        self.last_ms = int(found["store_ms"].max()) - begin_ms
        wrong = abs(rows - len(lateness)) + len(lateness) - len(np.unique(found["source_seq"]))
        fetched = self._ball.status()["schedule"]["fetched_rows"] - before["schedule"]["fetched_rows"]
        add = self.report.add
        add(f"dispatch, {name}: left to Spark, most at once", left, "messages")
        add(f"dispatch, {name}: not brought by it in time", fetched, "messages", 0, "lower")
        add(f"dispatch, {name}: missing or doubled", wrong, "messages", 0, "lower")
        add(f"dispatch, {name}: early", int(np.count_nonzero(lateness < 0)), "messages", 0, "lower")
        return lateness

    def _wait_for(self, due_ms: Int64s, from_seq: int) -> int:
        """Send, compact, and wait until all are released; the most that was left to Spark at a time."""
        send_scheduled(self._ball, due_ms)
        self._ball.compact()
        if now_ms() + GATHER_AHEAD_MS >= int(due_ms[0]):
            raise RuntimeError("the first scheduled message came near before all of them were in the table")
        left: list[int] = []

        def released() -> bool:
            status = self._ball.status()
            left.append(status["schedule"]["dispatched_rows"])
            return int(status["log"]["durable_seq"]) > from_seq + 2 * len(
                due_ms
            )  # scheduled messages and releases

        wait_until(released, (int(due_ms[-1]) - now_ms()) / 1000 + LATE_S, "all are released")
        return max(left)
