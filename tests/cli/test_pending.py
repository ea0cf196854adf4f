"""`timeball pending`: what waits, counted where it waits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.cli.processes import serving, timeball

from timeball import Timeball
from timeball.cli.pending import BARS_MAX, Unit, Waiting

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def _pending(endpoint: str, *options: str) -> dict[str, Any]:
    ended = timeball("pending", "--json", *options, "--endpoint", endpoint)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_tail_and_table_are_counted_and_the_cancelled_left_out(tmp_path: Path) -> None:
    """Before and after compaction the same promises wait."""
    with serving(tmp_path / "d") as endpoint, Timeball(endpoint) as ball:
        assert _pending(endpoint)["waiting"] == 0
        now_ms = ball.status()["now_ms"]
        # In the middle of hours, so that none of them ends while this runs.
        begin_ms = now_ms // DAY_MS * DAY_MS + 2 * DAY_MS + HOUR_MS // 2
        rows = [
            {"topic": "t", "body": b"x", "unique_key": f"m{i}", "due_ms": begin_ms + i % 4 * HOUR_MS}
            for i in range(100)
        ]
        ball.send_many(rows)
        ball.cancel(ids=["m0", "m4"])
        found = _pending(endpoint, "--by", "hour")
        assert (found["waiting"], found["tail_rows"], found["table_rows"]) == (98, 98, 0)
        assert list(found["due"].values()) == [23, 25, 25, 25]
        ball.compact()
        ball.cancel(ids=["m1"])
        ball.send_many([{"topic": "t", "body": b"y", "due_ms": begin_ms}])
        found = _pending(endpoint, "--by", "hour")
        assert (found["waiting"], found["tail_rows"]) == (98, 1)
        assert list(found["due"].values()) == [24, 24, 25, 25]
        shown = timeball("pending", "--endpoint", endpoint)
        assert "98 waiting" in shown.stdout and "█" in shown.stdout


def test_a_promise_due_now_no_longer_waits() -> None:
    """Only what is due after the broker's now is counted."""
    found = Waiting(now_ms=1_000)
    assert found.add(np.array([999, 1_000, 1_001])) == 1


@pytest.mark.parametrize(
    ("span_hours", "unit"), [(10, Unit.HOUR), (47 * 24, Unit.DAY), (400 * 24, Unit.MONTH), (10**5, Unit.YEAR)]
)
def test_auto_takes_the_finest_unit_that_fits(span_hours: int, unit: Unit) -> None:
    """Never more bars than a screen has lines."""
    found = Waiting(now_ms=0, hours=dict.fromkeys(range(1, span_hours), 1))
    chosen = found.by(Unit.AUTO)
    assert chosen == found.by(unit)
    assert len(chosen) <= BARS_MAX
    assert sum(chosen.values()) == span_hours - 1
