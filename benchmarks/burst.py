"""A million messages due in the same second: when are all of them in their queues?

Bodies of 128 bytes, due at random milliseconds of that second, waiting in the log's tail; and all due in its first
millisecond, waiting in the pending table (compacted before). The latter also with bodies of 1 KiB, which are more than
the broker may load ahead of the instant. The time runs from the second's beginning to the stamp of the last release,
and to the moment when the broker reports all of them as on disk. Every scheduled message is counted and must have been
released once, not early.

Not measured: consumers (none is pulling), a second such second right behind, a cold page cache, delay levels (they
fall due as fast as they were sent).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.harness import (
    BODY_BYTES,
    Server,
    now_ms,
    releases,
    send_scheduled,
    serving,
    wait_until,
)
from benchmarks.report import Report
from timeball import Timeball

BAR_S = 0.5  # behind the instant at which the last may be due
CHUNK_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True)
class Case:
    """What waits for one second, and how long before it the sending begins."""

    label: str
    spread_ms: int
    compacted: bool
    ahead_s: int = 30
    body_bytes: int = BODY_BYTES


CASES = (
    Case("spread, in the tail", spread_ms=1_000, compacted=False),
    Case("one instant, compacted", spread_ms=1, compacted=True),
    Case("one instant, bodies of 1 KiB", spread_ms=1, compacted=True, ahead_s=60, body_bytes=1_024),
)


def run(small: bool = False) -> Report:
    """Measure; seconds after the due second began."""
    report = Report("burst", small)
    rows = 5_000 if small else 1_000_000
    for case in CASES:
        with serving("--compact-rows", "0") as (server, ball):
            _run_case(report, server, ball, case, rows, 3 if small else case.ahead_s)
    return report


def _run_case(report: Report, server: Server, ball: Timeball, case: Case, rows: int, ahead_s: int) -> None:
    label, bar_s = case.label, BAR_S + case.spread_ms / 1_000
    second_ms = (now_ms() // 1_000 + ahead_s) * 1_000
    due = second_ms + np.random.default_rng(3).integers(0, case.spread_ms, rows)
    send_scheduled(ball, due, min(100_000, CHUNK_BYTES // case.body_bytes), body_bytes=case.body_bytes)
    if case.compacted:
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
    report.add(f"{label}: last release", (found["store_ms"].max() - second_ms) / 1_000, "s", bar_s, "lower")
    report.add(f"{label}: all on disk, as seen", durable_s, "s", bar_s, "lower")
    report.add_cost(spent, rows)
