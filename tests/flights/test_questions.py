"""The questions of the demo in SQL: the busiest minutes, and the number of messages in each state."""

from __future__ import annotations

from pathlib import Path

from examples.flights.questions import answer_table, ask, look_ahead
from rich.console import Console
from tests.node_fixture import running_node

from timeball.model.limits import DAY_MS


def test_the_busiest_minutes_and_the_states_are_counted(tmp_path: Path) -> None:
    with running_node(tmp_path / "d", compact_rows=0) as node, node.client() as ball:
        busy_ms = (ball.status()["now_ms"] + 2 * DAY_MS) // 60_000 * 60_000
        ball.send_many([{"body": "x", "at": busy_ms + number} for number in range(7)], topic="busy")
        ball.send_many(
            [{"body": "x", "after": f"{86_400 + 300 * number}s"} for number in range(5)], topic="quiet"
        )
        ball.cancel(ball.send("gone", "x", after="1h").id)
        forecast = look_ahead(node.endpoint)
        assert (forecast.rows, [rows for _, rows in forecast.busiest]) == (12, [7, 1, 1])
        assert (
            forecast.sentence()
            == f"12 scheduled messages ahead; the busiest minute is {forecast.busiest[0][0]} with 7"
        )
        rows = ask(node.endpoint)
    counts = {(row["topic"], row["state"]): row["messages"] for row in rows}
    assert counts == {("busy", "waiting"): 7, ("quiet", "waiting"): 5, ("gone", "cancelled"): 1}
    console = Console(width=100, record=True)
    console.print(answer_table(rows))
    text = console.export_text()
    assert "busy" in text and "waiting" in text
