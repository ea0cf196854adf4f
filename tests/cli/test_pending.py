"""`timeball pending`: what waits, counted where it waits."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.in_process import run_here
from tests.node_fixture import running_node
from tests.written_again import fill_segment, let_go, write_again

from timeball import Timeball
from timeball.cli.pending import BARS_MAX, PendingCounts, Unit, count_waiting
from timeball.io.clock import ManualClock
from timeball.model.config import MIB

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


def _pending(endpoint: str, *options: str) -> dict[str, Any]:
    ended = run_here("pending", "--json", *options, "--endpoint", endpoint)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_tail_and_table_are_counted_and_the_cancelled_left_out(tmp_path: Path) -> None:
    """Before and after compaction the same scheduled messages wait."""
    with running_node(tmp_path / "d") as node, Timeball(endpoint := node.endpoint) as ball:
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
        shown = run_here("pending", "--endpoint", endpoint)
        assert "98 waiting" in shown.stdout and "█" in shown.stdout


def test_a_scheduled_message_that_was_written_again_is_counted_once_wherever_it_lies(tmp_path: Path) -> None:
    """In two rows, in three, and in the last alone when retention has let the others go."""
    with running_node(tmp_path / "d", segment_bytes=MIB) as node, Timeball(node.endpoint) as ball:
        ball.send_many([{"topic": "t", "body": b"x", "delay_ms": DAY_MS} for _ in range(10)])
        places = write_again(node, 2, 3, 4)
        write_again(node, places[2])
        assert [v.verdict for v in node.run(node.broker.cancel(seqs=[3, 10]))] == ["cancelled"] * 2
        assert (count_waiting(node.endpoint).tail_rows, count_waiting(node.endpoint).table_rows) == (8, 0)
        fill_segment(node)
        write_again(node, 2, 4, 5, 6, 7, 8)
        assert let_go(node) > 10
        # The control: the eighth and the tenth were not written again.
        found = count_waiting(node.endpoint)
        assert (found.tail_rows, sum(found.hours.values())) == (6, 6)


def test_what_moved_a_scheduled_message_says_nothing_once_it_lies_in_the_table(tmp_path: Path) -> None:
    with running_node(tmp_path / "d") as node, Timeball(node.endpoint) as ball:
        ball.send_many([{"topic": "t", "body": b"x", "delay_ms": DAY_MS} for _ in range(4)])
        write_again(node, 2, 3)
        ball.compact()
        assert (count_waiting(node.endpoint).tail_rows, count_waiting(node.endpoint).table_rows) == (0, 4)


def test_a_scheduled_message_due_now_no_longer_waits(tmp_path: Path) -> None:
    """Only what is due after the broker's now is counted, in the tail as in the table."""
    clock = ManualClock()
    with running_node(tmp_path / "d", clock, compact_rows=0) as node, Timeball(node.endpoint) as ball:
        due = [clock.wall + delay_ms for delay_ms in (999, 1_000, 1_001)]
        ball.send_many([{"topic": "t", "body": b"x", "due_ms": due_ms} for due_ms in due])
        assert sum(count_waiting(node.endpoint).hours.values()) == 3
        ball.compact()
        assert count_waiting(node.endpoint).table_rows == 3
        clock.advance(1_000)
        found = count_waiting(node.endpoint)
        assert (found.table_rows, found.now_ms) == (1, clock.wall)


@pytest.mark.parametrize(
    ("span_hours", "unit"), [(10, Unit.HOUR), (47 * 24, Unit.DAY), (400 * 24, Unit.MONTH), (10**5, Unit.YEAR)]
)
def test_auto_takes_the_finest_unit_that_fits(span_hours: int, unit: Unit) -> None:
    """Never more bars than a screen has lines."""
    found = PendingCounts(now_ms=0, hours=dict.fromkeys(range(1, span_hours), 1))
    chosen = found.by(Unit.AUTO)
    assert chosen == found.by(unit)
    assert len(chosen) <= BARS_MAX
    assert sum(chosen.values()) == span_hours - 1
