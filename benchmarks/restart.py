"""kill -9 with a million messages in the log's tail: how long until a scheduled message is kept on time again?

Besides the million, scheduled messages are due on every millisecond around the restart; the first release whose
lateness is within the bar for steady load ends the time, which began when the new process was started. What fell due
while the broker was dead is released late, and counted: none may be missing or doubled.

Not measured: detecting the death and starting the process (a supervisor's work), a cold page cache, power
loss (the tests cut that, at every I/O call).
"""

from __future__ import annotations

import numpy as np

from benchmarks.harness import now_ms, releases, send_scheduled, serving, wait_until
from benchmarks.report import Report

BAR_S = 2.0
ON_TIME_MS = 20


def run(small: bool = False) -> Report:
    """Measure; seconds."""
    report, hour_ms = Report("restart", small), 3_600_000
    tail_rows = 2_000 if small else 1_000_000
    window_ms = 4_000 if small else 12_000
    # A toy's figure means nothing, and a busy machine may need all of its window for the start.
    on_time_ms = hour_ms if small else ON_TIME_MS
    with serving("--compact-rows", "0") as (server, ball):
        far = np.random.default_rng(5).integers(2 * hour_ms, 48 * hour_ms, tail_rows)
        send_scheduled(ball, now_ms() + far)
        near = now_ms() + 1_000 + np.arange(window_ms)
        send_scheduled(ball, near)
        wait_until(lambda: now_ms() > near[0] + 200, 10, "the first scheduled messages to fall due")
        server.kill()
        server.start()
        with server.client() as fresh:
            bound_s = window_ms / 1_000 + 30
            wait_until(lambda: len(releases(fresh)["due_ms"]) >= window_ms, bound_s, "all that were due")
            found = releases(fresh)
            recovered_rows = fresh.status()["schedule"]["tail_rows"]
        late = found["store_ms"] - found["due_ms"]
        on_time = (found["store_ms"] > server.started_ms) & (late <= on_time_ms)
        first_ms = found["store_ms"][on_time].min() - server.started_ms
        report.add("process start to first on-time release", first_ms / 1_000, "s", BAR_S, "lower")
        report.add("in the tail after the restart", recovered_rows, "scheduled")
        report.add("released once", len(np.unique(found["source_seq"])), "messages")
        report.add("missing or doubled", abs(window_ms - len(late)), "messages", bar=0, better="lower")
        report.add("early", int((late < 0).sum()), "messages", bar=0, better="lower")
        report.add("latest of those due while it was dead", late.max(), "ms")
        report.add("server CPU since its start", server.cpu_s() / (tail_rows + window_ms) * 1e6, "us/message")
    return report
