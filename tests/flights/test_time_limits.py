"""Time limits follow the measured start, and are never shorter than on an idle machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from examples import time_limits
from timeball.io.clock import ManualClock


class _SlowClock(ManualClock):
    """A clock on which `step_s` seconds pass between two readings."""

    step_s = 0.0

    def monotonic_ns(self) -> int:
        self.advance(int(self.step_s * 1_000))
        return super().monotonic_ns()


@pytest.fixture(autouse=True)
def measured_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the test measure the slowness itself, with a program that starts at once, and forget the result."""
    monkeypatch.setattr(time_limits, "START", [sys.executable, "-c", "pass"])
    time_limits.slowness.cache_clear()
    yield
    time_limits.slowness.cache_clear()


@pytest.mark.parametrize(("start_s", "factor"), [(0.5, 1.0), (1.0, 1.0), (20.0, 20.0)])
def test_a_slow_start_makes_the_limits_longer(start_s: float, factor: float) -> None:
    clock = _SlowClock()
    clock.step_s = start_s
    assert time_limits.measure(clock) == pytest.approx(factor)


def test_a_time_limit_is_multiplied_by_the_slowness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limits, "QUIET_START_S", 1e-9)
    assert time_limits.limit_s(2.0) == 2.0 * time_limits.slowness() > 1_000


def test_the_start_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    first = time_limits.slowness()
    monkeypatch.setattr(time_limits, "START", ["no such program"])
    assert time_limits.slowness() == first
