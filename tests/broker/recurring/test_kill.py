"""kill -9 of the real broker while schedules are due every second: each second has its message, once."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from tests.crash.siege import BUSY, BrokerProcess
from tests.node_fixture import eventually, running_node
from tests.ports import free_ports
from tests.rounds import rounds

from timeball import Timeball
from timeball.model.http_api import Schedule
from timeball.model.message import Kind

SEED = int(os.environ.get("KILL_SEED", "1"))
KILLS, SCHEDULES = rounds(4, 30), 5


def runs_of(endpoint: str) -> int:
    """Count the runs of all schedules so far."""
    with Timeball(endpoint) as ball:
        return sum(each.runs for each in ball.schedules.all())


@pytest.mark.slow
@pytest.mark.siege
@pytest.mark.timeout(0)
def test_kills_neither_lose_nor_double_an_occurrence(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    endpoint, rng = f"http://127.0.0.1:{port}", np.random.default_rng(SEED)
    broker = BrokerProcess(tmp_path / "data", {**BUSY, "http-port": str(port)})
    try:
        assert broker.start()
        with Timeball(endpoint) as ball:
            for number in range(SCHEDULES):
                ball.schedules.put(f"s{number}", {"every": "1s"}, topic="ticks", body="tick", catch_up="all")
        for _ in range(KILLS):
            # The next kill comes shortly after a release, a catch-up after the last kill, or a compaction.
            runs_min = runs_of(endpoint) + int(rng.integers(1, 3 * SCHEDULES))
            eventually(lambda: runs_of(endpoint) >= runs_min, "enough releases")  # noqa: B023  # called at once
            broker.kill()
            assert broker.start()
        with Timeball(endpoint) as ball:
            schedules: dict[str, Schedule] = {each.name: each for each in ball.schedules.all()}
            for name in schedules:
                schedules[name] = ball.schedules.pause(name)
        broker.kill()
    finally:
        broker.clear()
    due_ms: defaultdict[str, list[int]] = defaultdict(list)
    with running_node(tmp_path / "data") as node, node.client() as ball:
        state = ball.status()
        for rows in ball.read_log(state["log"]["first_seq"], state["log"]["next_seq"], kinds=[Kind.RELEASE]):
            for key in rows.column("unique_key").to_pylist():
                name, _, time = key.partition(".")
                due_ms[name].append(int(time))
        assert state["waiting_messages"] == 0, "all schedules are paused, so no occurrence is pending"
    for name, schedule in schedules.items():
        times = due_ms[name]
        assert times == list(range(times[0], times[0] + 1_000 * len(times), 1_000)), name
        assert len(times) == schedule.runs >= KILLS
