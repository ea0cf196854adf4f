"""The writers of the demo, with the client and with Spark: they schedule, cancel a campaign and compare counts."""

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


def test_a_second_cancel_of_a_campaign_has_the_same_result(tmp_path: Path) -> None:
    with running_node(tmp_path / "d", compact_rows=0) as node:
        attach(campaign_of(node, CAMPAIGN), 30, after_ms=HOUR_MS)
        assert cancel_campaign(node.endpoint) == CalledOff(rows=30, cancelled=30, released=0)
        assert cancel_campaign(node.endpoint) == CalledOff(rows=30, cancelled=30, released=0)


def _messages(now_ms: int, rows: int) -> pa.RecordBatch:
    """Messages due a second apart from tomorrow on, and not in order of their due times."""
    due_ms = [now_ms + 86_400_000 + 1_000 * (number * 7 % rows) for number in range(rows)]
    return pa.RecordBatch.from_pydict(
        {
            "topic": ["flights"] * rows,
            "body": [b"x"] * rows,
            "keys": ["f"] * rows,
            "tag": ["JFK"] * rows,
            "unique_key": [f"f{number}" for number in range(rows)],
            "due_ms": due_ms,
        }
    )


def test_the_client_cancels_its_campaign_and_its_counts_balance(tmp_path: Path) -> None:
    """The second demo finds the messages of the first one, some of them cancelled."""
    with running_node(tmp_path / "d", compact_rows=0) as node, node.client() as ball:
        for demos_before in (0, 1):
            writer, now_ms = Client(ball, node.endpoint), ball.status()["now_ms"]
            assert writer.schedule(_messages(now_ms, 100), "departures") is None
            assert writer.schedule(_messages(now_ms, 40), CAMPAIGN) is None
            assert writer.call_off() == CalledOff(rows=40, cancelled=40, released=0)
            rows = ask(node.endpoint)
            demos = demos_before + 1
            counts = {"accepted": 140 * demos, "waiting": 100 * demos, "cancelled": 40 * demos}
            assert writer.audit(140, rows) == Books("balances", counts, True)
        unbalanced = writer.audit(141, rows)
    assert not unbalanced.balanced
    assert unbalanced.summary == "DOES NOT BALANCE: 281 accepted, 280 found"


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(600)
def test_spark_schedules_into_the_table_and_its_counts_balance(tmp_path: Path) -> None:
    with (
        running_node(tmp_path / "data", compact_rows=0) as node,
        node.client() as ball,
        Spark(node.endpoint, tmp_path / "spark.log") as spark,
    ):
        ball.send("flights", b"y", after="1h")
        amplification = spark.schedule(_messages(ball.status()["now_ms"], 1_000), CAMPAIGN)
        assert amplification is not None and amplification > 0
        schedule = ball.status()["schedule"]
        assert (schedule["table_rows"], schedule["tail_rows"]) == (1_000, 1)
        assert ball.cancel(id="f500").verdict == "cancelled"
        books = spark.audit(1_001, [])
        assert (books.summary, books.balanced) == ("balances", True)
        counts = {name: books.counts[name] for name in ("accepted", "released", "cancelled", "pending")}
        assert counts == {"accepted": 1_001, "released": 0, "cancelled": 1, "pending": 1_000}
        assert spark.call_off() == CalledOff(rows=1_000, cancelled=1_000, released=0)
        with pytest.raises(Unavailable, match="no broker answers"):
            Spark(NO_FLIGHT, tmp_path / "spark.log").audit(0, [])
    assert (tmp_path / "spark.log").exists(), "the output of Java goes there"
