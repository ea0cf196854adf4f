"""A small day, lived for real: scheduled, cancelled in part, received."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
from examples.flights.data import CompressedDay, Flights
from examples.flights.day import live_through
from examples.flights.outcome import judge
from tests.node_fixture import running_node

from timeball.io.clock import SystemClock


def _flights(count: int) -> Flights:
    """Evenly over the second half of a day, every third of them cancelled."""
    text = pa.array([f"f{number}" for number in range(count)])
    minutes = 720 + np.arange(count) * 700 // count
    return Flights(
        id=text,
        carrier=text,
        origin=text,
        body=text,
        minutes=minutes,
        departs_ms=minutes * 60_000,
        cancelled=np.arange(count) % 3 == 0,
    )


def test_a_day_is_scheduled_cancelled_and_received(tmp_path: Path) -> None:
    """Whatever the machine's speed, each flight is either received or was cancelled in time, and never both."""
    shown: list[tuple[int, int]] = []
    clock, flights = SystemClock(), _flights(90)
    with running_node(tmp_path / "d") as node:
        day = CompressedDay(clock.wall_ms() + 500, 4_000)
        run = live_through(
            node.client,
            flights,
            day,
            clock,
            lambda received, cancelled: shown.append((received, cancelled)),
        )
    outcome = judge(run)
    assert outcome.faultless
    assert outcome.scheduled == 90 == outcome.cancelled + outcome.released
    assert outcome.cancelled + outcome.too_late == 30
    assert run.verdicts.keys() == set(flights.select(flights.cancelled).id.to_pylist())
    assert shown[-1] == (outcome.released, outcome.cancelled)
