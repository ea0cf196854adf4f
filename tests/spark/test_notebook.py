"""The notebook in examples/ runs from its first cell to its last, without a display and without Jupyter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession
from tests.node_fixture import RunningNode
from tests.spark.traffic import send_due_now

from timeball.spark.run import session

NOTEBOOK = Path(__file__).resolve().parents[2] / "examples" / "pipeline.ipynb"


@pytest.mark.spark
def test_every_cell_of_the_notebook_runs(
    spark: SparkSession,
    node: RunningNode,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    send_due_now(node.endpoint, 5)
    with node.client() as ball:
        ball.schedules.put("hourly", {"every": "1h"}, topic="reminders-hourly", body="x")
    monkeypatch.setenv("TIMEBALL_FLIGHT", node.endpoint)
    # The session of all tests in the place of one of its own, which would be stopped at the end.
    monkeypatch.setattr(session, "build_session", lambda **_: spark)
    monkeypatch.setattr(SparkSession, "stop", lambda _: None)
    names: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.read_text("utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
            assert not cell["outputs"] and cell["execution_count"] is None, (
                "what it showed stays out of the tree"
            )
    said = capsys.readouterr().out
    assert (
        "reminders-letter" in said and "accepted 10,006 = released 5 + cancelled 0 + pending 10,001" in said
    )
    pending, recurring = names["picture"].axes[0].lines
    # One occurrence of the next 36 hours is a message already.
    assert (pending.get_ydata().sum(), recurring.get_ydata().sum()) == (10_001, 35)
    assert "hourly" in said
