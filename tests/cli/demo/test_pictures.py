"""The pictures: files that a browser shows, also of a day on which nothing came."""

from __future__ import annotations

import struct
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from timeball.cli.demo.clocks import CompressedDay
from timeball.cli.demo.day import Arrivals, DayRun
from timeball.cli.demo.flights import Flights
from timeball.cli.demo.outcome import judge
from timeball.cli.demo.pictures import draw

pytest.importorskip("matplotlib", reason="the extra `demo` is not installed")


def _run(late_ms: list[int]) -> DayRun:
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
    run = _run(late_ms)
    day_name = f"{date(2013, 2, 8):%A}"
    files = draw(run, judge(run), day_name, tmp_path / "new" / "folder")
    assert [file.name for file in files] == ["due-load.png", "lateness.png"]
    for file in files:
        data = file.read_bytes()
        assert data.startswith(b"\x89PNG")
        assert struct.unpack(">II", data[16:24]) == (1_500, 750)
        assert len(data) < 150_000
