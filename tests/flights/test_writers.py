"""How the demo writes, calls a campaign off and compares the counts: with the client, and with Spark."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from examples.flights.questions import ask
from examples.flights.writers import CAMPAIGN, Books, CalledOff, Client, Spark, cancel_campaign
from tests.cli.unreachable import NO_FLIGHT
from tests.node_fixture import running_node
from tests.spark.campaigning import attach, campaign_of

from timeball.model.errors import Unavailable
from timeball.model.limits import HOUR_MS


def test_a_campaign_ends_as_one_object(tmp_path: Path) -> None:
    with running_node(tmp_path / "d", compact_rows=0) as node:
        attach(campaign_of(node, CAMPAIGN), 30, after_ms=HOUR_MS)
        assert cancel_campaign(node.endpoint) == CalledOff(rows=30, cancelled=30, released=0)
        assert cancel_campaign(node.endpoint) == CalledOff(rows=30, cancelled=30, released=0)


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


def test_the_client_ends_its_campaign_and_counts_what_it_sent(tmp_path: Path) -> None:
    """Also in a folder that has messages of an earlier demo, some of them cancelled."""
    with running_node(tmp_path / "d", compact_rows=0) as node, node.client() as ball:
        for before in (0, 140):
            writer, now_ms = Client(ball, node.endpoint), ball.status()["now_ms"]
            assert writer.schedule(_messages(now_ms, 100), "departures") is None
            assert writer.schedule(_messages(now_ms, 40), CAMPAIGN) is None
            assert writer.call_off() == CalledOff(rows=40, cancelled=40, released=0)
            rows = ask(node.endpoint)
            counts = {"accepted": before + 140, "waiting": before // 140 * 100 + 100}
            counts["cancelled"] = before // 140 * 40 + 40
            assert writer.audit(140, rows) == Books("balances", counts, True)
        unbalanced = writer.audit(141, rows)
    assert not unbalanced.balanced
    assert unbalanced.summary == "DOES NOT BALANCE: 281 accepted, 280 found"


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
        written = spark.schedule(_messages(ball.status()["now_ms"], 1_000), CAMPAIGN)
        assert written is not None and written > 0
        schedule = ball.status()["schedule"]
        assert (schedule["table_rows"], schedule["tail_rows"]) == (1_000, 1)
        assert ball.cancel(id="f500").verdict == "cancelled"
        books = spark.audit(1_001, [])
        assert (books.summary, books.balanced) == ("balances", True)
        counted = {name: books.counts[name] for name in ("accepted", "released", "cancelled", "pending")}
        assert counted == {"accepted": 1_001, "released": 0, "cancelled": 1, "pending": 1_000}
        assert spark.call_off() == CalledOff(rows=1_000, cancelled=1_000, released=0)
        with pytest.raises(Unavailable, match="no broker answers"):
            Spark(NO_FLIGHT, tmp_path / "spark.log").audit(0, [])
    assert (tmp_path / "spark.log").exists()  # what Java says goes there, not over the demo's lines
