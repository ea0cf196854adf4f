"""RAM for each scheduled message that waits, at 1 million and at 5 million, after compaction.

Scheduled messages of 128 bytes due over the next year, but none within the hour, are sent and compacted; then the
memory that the server's process itself holds is read (resident, less mapped files). The figure per scheduled message
contains the process's fixed growth (buffers, libraries touched for the first time); the slope between the two
sizes does not, and is the one that says what a hundred million would need. Pages of mapped files, the log above
all, are shown beside: they are page cache, which the system takes back when it needs the room.

The server runs with MALLOC_ARENA_MAX=1: otherwise malloc keeps freed memory for each thread, tens of megabytes at
random, which is no cost of a scheduled message but would drown it.

Not measured: page cache that is not mapped; memory of clients and of Spark; memory near the instant, where
bodies are gathered.
"""

from __future__ import annotations

import time

import numpy as np

from benchmarks.harness import Server, now_ms, send_scheduled, serving
from benchmarks.report import Report
from timeball import Timeball

BAR_BYTES = 1.0
HOUR_MS = 3_600_000
STEP_ROWS = 1_000_000
REST_S = 5.0


def run(small: bool = False) -> Report:
    """Measure; bytes of resident memory a scheduled message."""
    report = Report("memory", small)
    sizes = (2_000, 10_000) if small else (1_000_000, 5_000_000)
    with serving("--compact-rows", "0", MALLOC_ARENA_MAX="1") as (server, ball):
        _add(ball, 1_000, seed=0)  # every path once, so that the base contains its code and buffers
        base, base_mapped = _at_rest(server, ball)
        waiting, used = [0], [base]
        for size in sizes:
            _grow(ball, waiting[-1], size)
            waiting.append(size)
            held, mapped = _at_rest(server, ball)
            used.append(held)
            report.add(f"at {size:,}", (used[-1] - base) / size, "bytes/message", BAR_BYTES, "lower")
        slope = (used[2] - used[1]) / (waiting[2] - waiting[1])
        report.add("slope between them", slope, "bytes/message", BAR_BYTES, "lower")
        report.add("held, empty", base / 1e6, "MB")
        report.add(f"held, {sizes[-1]:,} waiting", used[-1] / 1e6, "MB")
        report.add("mapped files, empty", base_mapped / 1e6, "MB")
        report.add(f"mapped files, {sizes[-1]:,} waiting", mapped / 1e6, "MB")
        report.add("in the pending table", ball.status()["schedule"]["table_rows"], "scheduled")
        report.add("files of the table", ball.status()["schedule"]["table_files"], "files")
        report.add("server CPU (schedule, compact)", server.cpu_s() / sizes[-1] * 1e6, "us/msg")
    return report


def _grow(ball: Timeball, have: int, want: int) -> None:
    """Compact after every million, as a broker under load would."""
    for number, begin in enumerate(range(have, want, STEP_ROWS)):
        _add(ball, min(STEP_ROWS, want - begin), seed=1 + begin + number)


def _add(ball: Timeball, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    send_scheduled(ball, now_ms() + rng.integers(HOUR_MS, 365 * 24 * HOUR_MS, rows))
    ball.compact()


def _at_rest(server: Server, ball: Timeball) -> tuple[int, int]:
    """Held and mapped bytes once nothing is left in the tail and the process has come to rest."""
    assert ball.status()["schedule"]["tail_rows"] == 0, "something is still in the tail"
    lowest, seen = server.memory_bytes(), time.monotonic()
    # The keys of new files are indexed behind a compaction, and their memory given back only then.
    while time.monotonic() - seen < REST_S:
        time.sleep(0.2)
        now = server.memory_bytes()
        if now < lowest:
            lowest, seen = now, time.monotonic()
    return lowest
