"""The figures of a subscription: each request counts once, by how it ended."""

from __future__ import annotations

from timeball.io.clock import ManualClock
from timeball.monitoring.push_figures import PushFigures


def test_each_request_counts_once() -> None:
    figures = PushFigures(ManualClock())
    for outcome in ("delivered", "timeout", "delivered"):
        figures.add(outcome, 3_000_000)  # type: ignore[arg-type]
    assert figures.outcomes == {"delivered": 2, "timeout": 1}
    assert (figures.delivered, figures.failed) == (2, 1)
    assert sum(figures.durations.counts) == 3 and figures.durations.sum_ns == 9_000_000
