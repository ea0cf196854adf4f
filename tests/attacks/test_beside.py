"""The harness of attacks: it counts correctly, and finds faults that are made on purpose."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.attacks.beside import Figures, attacked_broker, steady_stream


def figures_of(*released: tuple[str, int, int]) -> Figures:
    """Return the figures of two sent messages and these releases."""
    figures = Figures(sent={"a", "b"}, peak_mib=100)
    figures.judge(released)
    return figures


def test_messages_that_come_once_and_in_time_are_all_right() -> None:
    figures = figures_of(("a", 1_000, 1_000), ("b", 1_000, 1_004))
    figures.check(peak_mib_max=200)
    assert figures.late_ms.tolist() == [0, 4]


@pytest.mark.parametrize(
    "released",
    [
        [("a", 1_000, 1_000)],
        [("a", 1_000, 1_000), ("b", 1_000, 1_001), ("b", 1_000, 1_002)],
        [("a", 1_000, 999), ("b", 1_000, 1_001)],
    ],
    ids=["lost", "doubled", "early"],
)
def test_a_lost_doubled_or_early_message_is_noticed(released: list[tuple[str, int, int]]) -> None:
    with pytest.raises(AssertionError):
        figures_of(*released).check(peak_mib_max=200)


@pytest.mark.parametrize("fault", [{"failed": ["http: 500"]}, {"exit_code": 1}, {"peak_mib": 200}])
def test_a_failed_call_an_end_and_too_much_memory_are_noticed(fault: dict[str, object]) -> None:
    figures = figures_of(("a", 1_000, 1_000), ("b", 1_000, 1_004))
    for name, value in fault.items():
        setattr(figures, name, value)
    with pytest.raises(AssertionError):
        figures.check(peak_mib_max=200)


@pytest.mark.slow
def test_without_an_attack_no_call_fails(tmp_path: Path) -> None:
    with attacked_broker(tmp_path) as broker:
        with steady_stream(broker) as figures:
            figures.wait_rounds(50)
        print(figures)
        figures.check(peak_mib_max=600)
        assert figures.calls.keys() == {"flight", "http", "grpc"}


@pytest.mark.slow
def test_a_broker_that_is_killed_is_noticed(tmp_path: Path) -> None:
    with attacked_broker(tmp_path) as broker:
        with steady_stream(broker) as figures:
            broker.process.end()
        with pytest.raises(AssertionError, match="the broker ended"):
            figures.check(peak_mib_max=600)
