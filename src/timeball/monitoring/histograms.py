"""Prometheus histograms from counts per bucket."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.core import HistogramMetricFamily

from timeball.io.clock import BOUNDS_NS, Durations


def durations(name: str, text: str, measured: Durations) -> HistogramMetricFamily:
    """Build a histogram of durations, in seconds. `text` is the help text of the metric."""
    return histogram(name, text, [bound / 1e9 for bound in BOUNDS_NS], measured.counts, measured.sum_ns / 1e9)


def histogram(
    name: str, text: str, bounds_s: Sequence[float], counts: Sequence[int], sum_s: float
) -> HistogramMetricFamily:
    """Build a histogram without labels. `counts` has the number of values in each bucket, not cumulated."""
    return HistogramMetricFamily(name, text, buckets=buckets(bounds_s, counts), sum_value=sum_s)


def buckets(bounds_s: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Cumulate the counts: Prometheus expects the number of values at or below each bound.

    The last count is of values above all bounds.

    >>> buckets([0.5, 1.0], [1, 2, 3])
    [('0.5', 1), ('1.0', 3), ('+Inf', 6)]
    """
    total, totals = 0, list[tuple[str, float]]()
    for bound, count in zip([*map(str, bounds_s), "+Inf"], counts, strict=True):
        total += count
        totals.append((bound, total))
    return totals
