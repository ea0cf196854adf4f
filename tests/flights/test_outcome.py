"""The outcome of a day with each kind of fault, its table, and its pictures."""

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
    """A day of four flights, with `verdict` for the cancel of "d".

    `received` has the id of each received message, and its lateness in milliseconds.
    """
    texts = pa.array(IDS)
    flights = Flights(
        id=texts,
        carrier=texts,
        origin=texts,
        body=texts,
        minutes=np.arange(4),
        departs_ms=np.array(DUE),
        cancelled=np.array([False, False, False, True]),
    )
    due = dict(zip(IDS, DUE))
    arrivals = Arrivals(
        ids=[id_ for id_, _ in received],
        due_ms=[due[id_] for id_, _ in received],
        store_ms=[due[id_] + late_ms for id_, late_ms in received],
        seen_ms=[due[id_] + late_ms + 1 for id_, late_ms in received],
    )
    day = CompressedDay(0, 86_400)
    return DayRun(flights, np.array(DUE), day, arrivals, {"d": verdict})


def test_a_day_on_which_each_flight_arrives_once_and_late_by_milliseconds_is_faultless() -> None:
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
        (
            [("a", 0), ("b", -3), ("c", 0)],
            "early",
            2,
        ),  # early by its store time and by its arrival: counted twice
        ([("a", 0), ("b", 0), ("c", 0), ("d", 0)], "released_though_cancelled", 1),
    ],
)
def test_each_fault_is_counted(received: list[tuple[str, int]], fault: str, count: int) -> None:
    """The negative controls of the verdict of the demo."""
    outcome = judge(_run(received))
    assert getattr(outcome, fault) == count
    assert not outcome.faultless


def test_a_cancel_that_came_too_late_is_counted_and_is_no_fault() -> None:
    """Its verdict is "released", so the message must have arrived. Without it, the message is lost."""
    outcome = judge(_run([("a", 0), ("b", 0), ("c", 0), ("d", 0)], "released"))
    assert outcome.faultless
    assert (outcome.cancelled, outcome.released, outcome.too_late) == (0, 4, 1)
    assert judge(_run([("a", 0), ("b", 0), ("c", 0)], "released")).lost == 1


def test_the_table_has_a_line_for_each_figure_and_faults_in_red() -> None:
    console = Console(record=True, width=80, force_terminal=True, file=io.StringIO())
    console.print(outcome_table(judge(_run([("a", 0), ("b", 2)])), 1_000, 0.4, "count in SQL", "balances"))
    text = console.export_text(clear=False)
    for line in ("scheduled", "cancelled", "released", "early", "lost", "duplicates", "p50 / p99 / max"):
        assert line in text
    assert "less than 1 byte" in text and "1,000" in text and "count in SQL" in text and "balances" in text
    assert "color: #800000" in console.export_html()


def _day_run(late_ms: list[int]) -> DayRun:
    """A day of one minute with forty flights. One arrives for each lateness, and the other flights are cancelled."""
    count = 40
    texts = pa.array([f"f{number}" for number in range(count)])
    minutes = np.arange(count) * 1_440 // count
    day = CompressedDay(1_000_000, 60_000)
    due = day.due_ms(minutes)
    arrived = len(late_ms)
    flights = Flights(
        id=texts,
        carrier=texts,
        origin=texts,
        body=texts,
        minutes=minutes,
        departs_ms=due,
        cancelled=np.arange(count) >= arrived,
    )
    stored = (due[:arrived] + np.array(late_ms, dtype=np.int64)).tolist()
    arrivals = Arrivals(
        ids=texts.to_pylist()[:arrived], due_ms=due[:arrived].tolist(), store_ms=stored, seen_ms=stored
    )
    verdicts = dict.fromkeys(texts.to_pylist()[arrived:], "cancelled")
    return DayRun(flights, due, day, arrivals, verdicts)


@pytest.mark.parametrize(
    "late_ms",
    [[0, 1, 2, 3] * 5, [], [0] * 40, [1, 2, 40_000], [-5, 0, 3]],
    ids=["usual", "none", "all", "far", "early"],
)
def test_two_png_pictures_of_1500_by_750_pixels_are_drawn(late_ms: list[int], tmp_path: Path) -> None:
    """Also with no message, and with one that is later than all others by far. Each has less than 150 kB."""
    run = _day_run(late_ms)
    day_name = f"{date(2013, 2, 8):%A}"
    files = draw(run, judge(run), day_name, tmp_path / "new" / "folder")
    assert [file.name for file in files] == ["due-load.png", "lateness.png"]
    for file in files:
        data = file.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert struct.unpack(">II", data[16:24]) == (1_500, 750)
        assert len(data) < 150_000
