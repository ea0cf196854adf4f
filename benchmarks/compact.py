"""How fast messages move from the log's tail to the pending table: by the broker itself, and by Spark local[2].

For each, scheduled messages of 128 bytes due over the next year stand in the tail; then the broker is asked to compact,
or the job `timeball pipeline run compact --once` is started. The broker's rate is over all of them. Spark's is
over all but the first attach, from that attach to the last one, so that starting Java (which `up` does once)
is not in it; the time of the whole job, with its start, is given as well.

Not measured: a cluster, an object store, senders at work meanwhile.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import psutil

from benchmarks.harness import Server, now_ms, send_scheduled, serving
from benchmarks.report import Report
from timeball import Timeball

BAR = 300_000.0
HOUR_MS = 3_600_000
STEP_ROWS = 1_000_000
LOOK_S = 0.02


def run(small: bool = False) -> Report:
    """Measure; rows a second."""
    report = Report("compact", small)
    with serving("--compact-rows", "0") as (server, ball):
        _by_broker(report, server, ball, 5_000 if small else STEP_ROWS)
    with serving("--compact-rows", "0") as (server, ball):
        _by_spark(report, server, ball, 1_000 if small else STEP_ROWS)
    return report


def _by_broker(report: Report, server: Server, ball: Timeball, rows: int) -> None:
    _fill(ball, rows)
    cpu_s, begun = server.cpu_s(), time.perf_counter()
    ball.compact()
    took_s = time.perf_counter() - begun
    report.add("broker: moved", ball.status()["schedule"]["table_rows"], "scheduled")
    report.add("broker: rate", rows / took_s, "msg/s")
    report.add("broker: CPU", (server.cpu_s() - cpu_s) / rows * 1e6, "us/msg")


def _by_spark(report: Report, server: Server, ball: Timeball, step_rows: int) -> None:
    """`step_rows`: the rows of one micro-batch; there are several, for a rate between attaches."""
    rows = 5 * step_rows
    _fill(ball, rows)
    cpu_s, begun = server.cpu_s(), time.perf_counter()
    command = [
        sys.executable,
        "-m",
        "timeball",
        "pipeline",
        "run",
        "compact",
        "--once",
        "--log-level=warning",
    ]
    command += ["--endpoint", server.endpoint, "--master", "local[2]"]
    command += ["--option", f"compact.max_rows_per_batch={step_rows}"]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    family = Family(job.pid)
    moves = _watch(ball, job)
    took_s = time.perf_counter() - begun
    if job.returncode != 0:
        raise RuntimeError(f"the job ended with code {job.returncode}")
    report.add("spark: moved", ball.status()["schedule"]["table_rows"], "scheduled")
    report.add("spark: the whole job, Java's start included", took_s, "s")
    if len(moves) > 1:
        (first_s, first_rows), (last_s, last_rows) = moves[0], moves[-1]
        report.add(
            "spark: rate after the first attach", (last_rows - first_rows) / (last_s - first_s), "msg/s", BAR
        )
    report.add("spark: attaches seen", len(moves), "attaches")
    report.add("spark: CPU of the job, start included", family.cpu_s() / rows * 1e6, "us/msg")
    report.add("spark: CPU of the broker", (server.cpu_s() - cpu_s) / rows * 1e6, "us/msg")


def _fill(ball: Timeball, rows: int) -> None:
    due = np.random.default_rng(2).integers(HOUR_MS, 365 * 24 * HOUR_MS, rows)
    send_scheduled(ball, now_ms() + due)


def _watch(ball: Timeball, job: subprocess.Popen[bytes]) -> list[tuple[float, int]]:
    """(instant in seconds, rows in the table) after each attach, until the job has ended."""
    moves: list[tuple[float, int]] = []
    pause, ended, rows = threading.Event(), False, 0
    while not ended:
        ended = job.poll() is not None  # looked at before the rows, so that the last attach is not missed
        before, rows = rows, int(ball.status()["schedule"]["table_rows"])
        if rows != before:
            moves.append((time.perf_counter(), rows))
        pause.wait(LOOK_S)
    return moves


class Family:
    """CPU of a process and of all its children, sampled until they are gone."""

    def __init__(self, pid: int) -> None:
        self._used: dict[int, float] = {}
        self._root = psutil.Process(pid)
        threading.Thread(target=self._sample, daemon=True).start()

    def cpu_s(self) -> float:
        """User and system time of all of them, as last seen."""
        return sum(self._used.values())

    def _sample(self) -> None:
        pause = threading.Event()
        while True:
            try:
                for process in [self._root, *self._root.children(recursive=True)]:
                    times = process.cpu_times()
                    self._used[process.pid] = times.user + times.system
            except psutil.NoSuchProcess:
                if not self._root.is_running():
                    return
            pause.wait(0.1)
