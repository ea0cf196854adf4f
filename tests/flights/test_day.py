"""A small compressed day at a real broker: flights are scheduled, some are cancelled, and the others received."""

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
    """Flights spread evenly over the second half of a day. Every third flight is cancelled."""
    texts = pa.array([f"f{number}" for number in range(count)])
    minutes = 720 + np.arange(count) * 700 // count
    return Flights(
        id=texts,
        carrier=texts,
        origin=texts,
        body=texts,
        minutes=minutes,
        departs_ms=minutes * 60_000,
        cancelled=np.arange(count) % 3 == 0,
    )


def test_each_flight_of_a_day_is_either_received_or_cancelled_in_time(tmp_path: Path) -> None:
    """Also on a slow machine, where more cancels come too late."""
    progress: list[tuple[int, int]] = []  # numbers of received and of cancelled flights
    clock, flights = SystemClock(), _flights(90)
    with running_node(tmp_path / "d") as node:
        day = CompressedDay(clock.wall_ms() + 500, 4_000)
        run = live_through(
            node.client,
            flights,
            day,
            clock,
            lambda received, cancelled: progress.append((received, cancelled)),
        )
    outcome = judge(run)
    assert outcome.faultless
    assert outcome.scheduled == 90 == outcome.cancelled + outcome.released
    assert outcome.cancelled + outcome.too_late == 30
    assert run.verdicts.keys() == set(flights.select(flights.cancelled).id.to_pylist())
    assert progress[-1] == (outcome.released, outcome.cancelled)
