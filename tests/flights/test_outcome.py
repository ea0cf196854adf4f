"""The day is counted, and each fault is; the pictures are files that a browser shows."""

from __future__ import annotations

import io
import struct
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from examples.flights.data import CompressedDay, Flights
from examples.flights.day import Arrivals, DayRun
from examples.flights.outcome import draw, judge, outcome_table
from rich.console import Console

IDS = ["a", "b", "c", "d"]
DUE = [1_000, 2_000, 3_000, 4_000]


def _run(received: list[tuple[str, int]], verdict: str = "cancelled") -> DayRun:
    """Four flights of which "d" was cancelled; `received` gives ids and how late they were stored."""
    text = pa.array(IDS)
    flights = Flights(
        id=text,
        carrier=text,
        origin=text,
        body=text,
        minutes=np.arange(4),
        departs_ms=np.array(DUE),
        cancelled=np.array([False, False, False, True]),
    )
    due = dict(zip(IDS, DUE))
    arrivals = Arrivals(
        ids=[name for name, _ in received],
        due_ms=[due[name] for name, _ in received],
        store_ms=[due[name] + late for name, late in received],
        seen_ms=[due[name] + late + 1 for name, late in received],
    )
    day = CompressedDay(0, 86_400)
    return DayRun(flights, np.array(DUE), day, arrivals, {"d": verdict})


def test_a_day_as_it_should_be() -> None:
    """Nothing early, lost or doubled."""
    outcome = judge(_run([("a", 0), ("b", 2), ("c", 4)]))
    assert outcome.faultless
    assert (outcome.scheduled, outcome.cancelled, outcome.released) == (4, 1, 3)
    assert (outcome.lateness_p50_ms, outcome.lateness_max_ms) == (2.0, 4.0)


@pytest.mark.parametrize(
    ("received", "fault", "count"),
    [
        ([("a", 0), ("b", 0)], "lost", 1),
        ([], "lost", 3),
        ([("a", 0), ("b", 0), ("c", 0), ("a", 5)], "duplicates", 1),
        ([("a", 0), ("b", -3), ("c", 0)], "early", 2),  # stored early and seen early
        ([("a", 0), ("b", 0), ("c", 0), ("d", 0)], "released_though_cancelled", 1),
    ],
)
def test_each_fault_is_counted(received: list[tuple[str, int]], fault: str, count: int) -> None:
    """The negative controls of the demo's verdict."""
    outcome = judge(_run(received))
    assert getattr(outcome, fault) == count
    assert not outcome.faultless


def test_a_cancel_that_came_too_late_is_shown_and_no_fault() -> None:
    """The broker said so, and delivered; had it not delivered, the message would be lost."""
    late = judge(_run([("a", 0), ("b", 0), ("c", 0), ("d", 0)], "released"))
    assert late.faultless
    assert (late.cancelled, late.released, late.too_late) == (0, 4, 1)
    assert judge(_run([("a", 0), ("b", 0), ("c", 0)], "released")).lost == 1


def test_the_table_has_a_line_for_each_figure_and_faults_in_red() -> None:
    """Red is what a person sees first."""
    console = Console(record=True, width=80, force_terminal=True, file=io.StringIO())
    console.print(outcome_table(judge(_run([("a", 0), ("b", 2)])), 1_000, 0.4, "count in SQL", "balances"))
    shown = console.export_text(clear=False)
    for line in ("scheduled", "cancelled", "released", "early", "lost", "duplicates", "p50 / p99 / max"):
        assert line in shown
    assert (
        "less than 1 byte" in shown and "1,000" in shown and "count in SQL" in shown and "balances" in shown
    )
    assert "color: #800000" in console.export_html()


def _lived(late_ms: list[int]) -> DayRun:
    """Forty flights over a day of a minute; as many as there are latenesses came, the others were cancelled."""
    count = 40
    text = pa.array([f"f{number}" for number in range(count)])
    minutes = np.arange(count) * 1_440 // count
    day = CompressedDay(1_000_000, 60_000)
    due = day.due_ms(minutes)
    came = len(late_ms)
    flights = Flights(
        id=text,
        carrier=text,
        origin=text,
        body=text,
        minutes=minutes,
        departs_ms=due,
        cancelled=np.arange(count) >= came,
    )
    stored = (due[:came] + np.array(late_ms, dtype=np.int64)).tolist()
    arrivals = Arrivals(
        ids=text.to_pylist()[:came], due_ms=due[:came].tolist(), store_ms=stored, seen_ms=stored
    )
    verdicts = dict.fromkeys(text.to_pylist()[came:], "cancelled")
    return DayRun(flights, due, day, arrivals, verdicts)


@pytest.mark.parametrize(
    "late_ms",
    [[0, 1, 2, 3] * 5, [], [0] * 40, [1, 2, 40_000], [-5, 0, 3]],
    ids=["usual", "none", "all", "far", "early"],
)
def test_two_png_pictures_small_enough_for_a_page(late_ms: list[int], tmp_path: Path) -> None:
    """1500 × 750 each; a single late message does not stretch them to nothing."""
    run = _lived(late_ms)
    day_name = f"{date(2013, 2, 8):%A}"
    files = draw(run, judge(run), day_name, tmp_path / "new" / "folder")
    assert [file.name for file in files] == ["due-load.png", "lateness.png"]
    for file in files:
        data = file.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert struct.unpack(">II", data[16:24]) == (1_500, 750)
        assert len(data) < 150_000
