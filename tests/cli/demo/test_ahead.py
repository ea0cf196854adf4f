"""What the demo shows besides the day: a campaign's end, the busiest minute, an answer in SQL; without Spark."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from tests.node_fixture import running_node
from tests.pipeline.campaigning import attach, campaign_of

from timeball import Timeball
from timeball.cli.demo.ahead import CAMPAIGN, CalledOff, answer_table, ask, call_off, look_ahead
from timeball.limits import DAY_MS, HOUR_MS


def test_what_is_shown_is_what_was_promised(tmp_path: Path) -> None:
    with running_node(tmp_path / "d", compact_self=False) as node, Timeball(node.endpoint) as ball:
        campaign = campaign_of(node, CAMPAIGN)
        attach(campaign, 30, after_ms=HOUR_MS)
        assert call_off(node.endpoint) == CalledOff(rows=30, cancelled=30, released=0)
        assert call_off(node.endpoint) == CalledOff(rows=30, cancelled=30, released=0)
        busy_ms = (ball.status()["now_ms"] + 2 * DAY_MS) // 60_000 * 60_000
        ball.send_many([{"body": "x", "at": busy_ms + n} for n in range(7)], topic="busy")
        ball.send_many([{"body": "x", "after": 86_400 + 300 * n} for n in range(5)], topic="quiet")
        found = look_ahead(node.endpoint)
        assert (found.rows, [rows for _, rows in found.busiest]) == (12, [7, 1, 1])
        assert found.sentence() == f"12 promises ahead; the busiest minute is {found.busiest[0][0]} with 7"
        rows = ask(node.endpoint)
    counts = {(row["topic"], row["state"]): row["promises"] for row in rows}
    topic = next(topic for topic, state in counts if state == "cancelled")
    assert counts == {("busy", "waiting"): 7, ("quiet", "waiting"): 5, (topic, "cancelled"): 30}
    console = Console(width=100, record=True)
    console.print(answer_table(rows))
    assert "busy" in (shown := console.export_text()) and "waiting" in shown
