"""What the demo shows besides the day: a campaign, the busiest minute, SQL, and the books of Spark."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from examples.flights.pipeline import CAMPAIGN, CalledOff, Spark, answer_table, ask, call_off, look_ahead
from rich.console import Console
from tests.cli.unreachable import NO_FLIGHT
from tests.node_fixture import running_node
from tests.spark.campaigning import attach, campaign_of

from timeball.model.errors import Unavailable
from timeball.model.limits import DAY_MS, HOUR_MS


def test_printed_due_times_are_the_accepted_ones(tmp_path: Path) -> None:
    with running_node(tmp_path / "d", compact_rows=0) as node, node.client() as ball:
        campaign = campaign_of(node, CAMPAIGN)
        attach(campaign, 30, after_ms=HOUR_MS)
        assert call_off(node.endpoint) == CalledOff(rows=30, cancelled=30, released=0)
        assert call_off(node.endpoint) == CalledOff(rows=30, cancelled=30, released=0)
        busy_ms = (ball.status()["now_ms"] + 2 * DAY_MS) // 60_000 * 60_000
        ball.send_many([{"body": "x", "at": busy_ms + n} for n in range(7)], topic="busy")
        ball.send_many([{"body": "x", "after": f"{86_400 + 300 * n}s"} for n in range(5)], topic="quiet")
        found = look_ahead(node.endpoint)
        assert (found.rows, [rows for _, rows in found.busiest]) == (12, [7, 1, 1])
        assert (
            found.sentence()
            == f"12 scheduled messages ahead; the busiest minute is {found.busiest[0][0]} with 7"
        )
        rows = ask(node.endpoint)
    counts = {(row["topic"], row["state"]): row["messages"] for row in rows}
    topic = next(topic for topic, state in counts if state == "cancelled")
    assert counts == {("busy", "waiting"): 7, ("quiet", "waiting"): 5, (topic, "cancelled"): 30}
    console = Console(width=100, record=True)
    console.print(answer_table(rows))
    assert "busy" in (shown := console.export_text()) and "waiting" in shown


def _messages(now_ms: int, rows: int) -> pa.RecordBatch:
    """Due in a day and later, a second apart, not in order of time."""
    due_ms = [now_ms + 86_400_000 + 1_000 * (n * 7 % rows) for n in range(rows)]
    return pa.RecordBatch.from_pydict(
        {
            "topic": ["flights"] * rows,
            "body": [b"x"] * rows,
            "keys": ["f"] * rows,
            "tag": ["JFK"] * rows,
            "unique_key": [f"f{n}" for n in range(rows)],
            "due_ms": due_ms,
        }
    )


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_a_batch_is_promised_as_one_and_the_books_balance(tmp_path: Path) -> None:
    """Past the log, straight into the table; the books are as they would be for the client's own messages."""
    with (
        running_node(tmp_path / "data", compact_rows=0) as node,
        node.client() as ball,
        Spark(node.endpoint, tmp_path / "spark.log") as spark,
    ):
        ball.send("flights", b"y", after="1h")
        written = spark.schedule(_messages(ball.status()["now_ms"], 1_000), "flights")
        assert (written.rows, written.rejected, written.campaign) == (1_000, 0, "flights")
        schedule = ball.status()["schedule"]
        assert (schedule["table_rows"], schedule["tail_rows"]) == (1_000, 1)
        assert ball.cancel(id="f500").verdict == "cancelled"
        books = spark.audit()
        assert (books.summary, books.balanced) == ("balances", True)
        counted = {name: books.counts[name] for name in ("accepted", "released", "cancelled", "pending")}
        assert counted == {"accepted": 1_001, "released": 0, "cancelled": 1, "pending": 1_000}
        with pytest.raises(Unavailable, match="no broker answers"):
            Spark(NO_FLIGHT, tmp_path / "spark.log").audit()
    assert (tmp_path / "spark.log").exists()  # what Java says goes there, not over the demo's lines
