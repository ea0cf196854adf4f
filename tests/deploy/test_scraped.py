"""The picture in docs/metrics.md: a real Prometheus scrapes a broker, and the picture is drawn from it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from benchmarks import scraped
from tests.deploy.test_prometheus import KNOWN, unknown

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no prometheus here (Debian: prometheus)"
)


def test_each_query_of_a_drawn_curve_names_only_metrics_that_exist() -> None:
    for _, _, _, curves in scraped.PANELS:
        for query in curves.values():
            assert not unknown(query) and any(name in query for name in KNOWN)


@pytest.mark.slow
@needs_prometheus
def test_a_small_run_is_scraped_and_drawn(tmp_path: Path) -> None:
    scrapes = scraped.run(seconds=6, rows_per_s=20, burst_rows=50)
    curves = scrapes["curves"]
    assert set(curves) == {title for title, *_ in scraped.PANELS}
    assert max(curves["Messages"]["released"][1]) > 0
    assert max(curves["What waits"]["near, in memory"][1]) > 0
    scraped.draw(scrapes, tmp_path / "picture.png", "a small run")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
