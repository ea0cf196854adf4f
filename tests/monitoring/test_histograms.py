"""Histograms: cumulative counts, the sum beside them."""

from __future__ import annotations

from timeball.io.clock import BOUNDS_NS, Durations, ManualClock
from timeball.monitoring.metrics import durations, histogram


def test_each_bucket_counts_all_below_its_bound() -> None:
    (family,) = [histogram("h", "text", [0.1, 1.0], [2, 0, 1], 7.5)]
    samples = {(s.name, *s.labels.values()): s.value for s in family.samples}
    assert samples == {
        ("h_bucket", "0.1"): 2, ("h_bucket", "1.0"): 2, ("h_bucket", "+Inf"): 3, ("h_count",): 3, ("h_sum",): 7.5,
    }  # fmt: skip


def test_durations_are_in_seconds() -> None:
    found = Durations(ManualClock())
    found.add(BOUNDS_NS[0])
    samples = {(s.name, *s.labels.values()): s.value for s in durations("d", "text", found).samples}
    assert samples["d_bucket", str(BOUNDS_NS[0] / 1e9)] == 1
    assert samples["d_sum",] == BOUNDS_NS[0] / 1e9
