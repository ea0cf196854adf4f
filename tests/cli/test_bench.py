"""`timeball bench`: finding the benchmarks of a checkout. tests/test_benchmarks_run.py runs them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from benchmarks.report import Report
from tests.cli.in_process import run_here

import timeball as package
from timeball.cli import bench
from timeball.model.errors import SetupError


def test_the_list_has_a_line_for_each_benchmark() -> None:
    result = run_here("bench", "--list")
    assert result.returncode == 0
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [
        "append",
        "remoting",
        "pop",
        "grpc",
        "flight",
        "http",
        "beside",
        "punctual",
        "burst",
        "memory",
        "schedules",
        "restart",
        "keys",
        "compact",
        "pipeline",
        "up",
        "designs",
        "cluster",
        "add_replica",
        "kafka",
        "soak",
    ]
    assert all(len(line) > 30 for line in lines)


def test_a_benchmark_that_runs_only_by_name_is_left_out_without_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Benchmarks with ONLY_BY_NAME take long, or need other programs."""
    names_run: list[str] = []

    def fake(name: str, **more: object) -> ModuleType:
        """Build a benchmark module that only notes its run."""
        module = ModuleType(name, "A benchmark.")
        module.run = lambda small: names_run.append(name) or Report(name, small)  # type: ignore[attr-defined,func-returns-value]
        module.__dict__.update(more)
        return module

    monkeypatch.setattr(
        bench, "_import_benchmarks", lambda: {"short": fake("short"), "long": fake("long", ONLY_BY_NAME=True)}
    )
    bench.bench(None, bench.Size.SMALL, listing=False, as_json=False)
    bench.bench(["long"], bench.Size.SMALL, listing=False, as_json=False)
    assert names_run == ["short", "long"]


def test_an_unknown_benchmark_is_refused_with_the_list_of_all() -> None:
    """It is refused before any benchmark runs."""
    result = run_here("bench", "append", "speed")
    assert result.returncode == 2
    assert "speed" in result.stderr and "punctual" in result.stderr
    assert result.stdout == ""


def test_without_a_checkout_benchmarks_are_a_set_up_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The installed package contains no benchmarks."""
    monkeypatch.setattr(package, "__file__", str(tmp_path / "site-packages" / "timeball" / "__init__.py"))
    with pytest.raises(SetupError, match="checkout"):
        bench._import_benchmarks()


def test_the_limits_of_a_benchmark_are_one_line() -> None:
    limits = {name: bench._limits(module) for name, module in bench._import_benchmarks().items()}
    burst = limits["burst"]
    assert burst.startswith("consumers (none is pulling)") and "\n" not in burst
