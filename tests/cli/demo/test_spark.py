"""The demo's own Spark against a broker: a batch into the pending table, and the books afterwards."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from tests.cli.unreachable import NOWHERE
from tests.node_fixture import running_node

from timeball import Timeball
from timeball.cli.demo.spark import Spark
from timeball.errors import Unavailable

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(600)]


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


def test_a_batch_is_promised_as_one_and_the_books_balance(tmp_path: Path) -> None:
    """Past the log, straight into the table; the books are as they would be for the client's own messages."""
    with (
        running_node(tmp_path / "data", compact_self=False) as node,
        Timeball(node.endpoint) as ball,
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
            Spark(NOWHERE, tmp_path / "spark.log").audit()
    assert (tmp_path / "spark.log").exists()  # what Java says goes there, not over the demo's lines
