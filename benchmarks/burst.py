"""A million messages of 128 bytes due in the same second: when are all of them in their queues?

Twice: due at random milliseconds of that second, waiting in the log's tail; and all due in its first
millisecond, waiting in the pending table (compacted before). The time runs from the second's beginning to the
stamp of the last release, and to the moment when the broker reports all of them as on disk. Every promise is
counted and must have been released once, not early.

Not measured: consumers (none is pulling), a second such second right behind, a cold page cache.
"""

from __future__ import annotations

import numpy as np

from benchmarks.harness import Server, now_ms, releases, send_promises, serving, wait_until
from benchmarks.report import Report
from timeball import Timeball

BAR_S = 1.5


def run(small: bool = False) -> Report:
    """Measure; seconds after the due second began."""
    report = Report("burst", small)
    rows = 5_000 if small else 1_000_000
    ahead_s = 3 if small else 30
    for label, spread_ms, compacted in (
        ("spread, in the tail", 1_000, False),
        ("one instant, compacted", 1, True),
    ):
        with serving("--no-compact-self") as (server, ball):
            _case(report, server, ball, label, rows, ahead_s, spread_ms, compacted)
    return report


def _case(
    report: Report,
    server: Server,
    ball: Timeball,
    label: str,
    rows: int,
    ahead_s: int,
    spread_ms: int,
    compacted: bool,
) -> None:
    second_ms = (now_ms() // 1_000 + ahead_s) * 1_000
    due = second_ms + np.random.default_rng(3).integers(0, spread_ms, rows)
    send_promises(ball, due)
    if compacted:
        ball.compact()
    first = ball.status()["log"]["durable_seq"]
    assert now_ms() < second_ms - 500, (
        "sending took longer than the time ahead: the figures would mean nothing"
    )
    wait_until(lambda: now_ms() >= second_ms - 100, ahead_s + 5, "the second to begin")
    with server.spending(label) as spent:
        wait_until(
            lambda: ball.status()["log"]["durable_seq"] >= first + rows, 120, f"{rows} releases on disk"
        )
        durable_s = (now_ms() - second_ms) / 1_000
    found = releases(ball, first)
    late = found["store_ms"] - found["due_ms"]
    report.add(f"{label}: released once", len(np.unique(found["source_seq"])), "messages")
    report.add(f"{label}: missing or doubled", abs(rows - len(late)), "messages", bar=0, better="lower")
    report.add(f"{label}: early", int((late < 0).sum()), "messages", bar=0, better="lower")
    report.add(f"{label}: last release", (found["store_ms"].max() - second_ms) / 1_000, "s", BAR_S, "lower")
    report.add(f"{label}: all on disk, as seen", durable_s, "s", BAR_S, "lower")
    report.add_cost(spent, rows)
