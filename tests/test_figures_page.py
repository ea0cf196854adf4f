"""docs/figures.md is written from one run: benchmarks/figures.py names figures that its benchmarks have."""

from __future__ import annotations

import pytest
from benchmarks.figures import SHOWN, figures_of, markdown
from tests.docs_pages import page
from tests.test_benchmarks_run import WANTED


def document(
    benchmark: str, *figures: tuple[str, float, str, float | None, float | None]
) -> dict[str, object]:
    """Return the document of a benchmark with these figures."""
    keys = ("name", "value", "unit", "bar", "ratio")
    return {
        "benchmark": benchmark,
        "small": False,
        "figures": [dict(zip(keys, values)) for values in figures],
    }


# A small run has one attach, so it lacks this figure.
ONLY_FULL = ("compact", "spark: rate after the first attach")


def test_each_figure_is_one_that_its_benchmark_reports() -> None:
    """The runs of test_benchmarks_run.py check the names in WANTED."""
    named = {(row.benchmark, name) for row in SHOWN for name in row.figures}
    assert {(benchmark, name) for benchmark, name in named if name not in WANTED[benchmark]} == {ONLY_FULL}


def test_the_table_has_the_rows_of_one_run() -> None:
    figures = figures_of(
        [
            document("punctual", ("lateness p99", 24, "ms", 20, 0.83), ("lateness p50", 1, "ms", None, None)),
            document("burst", ("spread, in the tail: last release", 1.04, "s", 1.5, 1.4)),
        ]
    )
    text = markdown(figures, {"CPU": "A CPU", "cores": "2"}, "2026-11-29")
    assert text.splitlines() == [
        "Measured 2026-11-29. CPU: A CPU; cores: 2.",
        "",
        "| figure | bar | measured |",
        "|---|---|---|",
        "| 10,000 msg/s due at random milliseconds: lateness p99, p50, max | 20 ms | **24 ms**; 1 ms |",
        "| 1 M messages due in one second: all in their queues after | 1.50 s | 1.04 s |",
    ]


def test_figures_of_a_small_run_are_refused() -> None:
    with pytest.raises(ValueError, match="mean nothing"):
        figures_of([document("burst") | {"small": True}])


def test_the_page_names_the_command() -> None:
    command = page("docs/figures.md").partition("```bash\n")[2].split("\n")[0]
    assert command.split()[2:-3] == list(dict.fromkeys(row.benchmark for row in SHOWN))
