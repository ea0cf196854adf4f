"""`timeball selections`: what its commands print, for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.cli.in_process import run_here
from tests.node_fixture import running_node

from timeball import Timeball


@pytest.fixture(scope="module")
def http_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_node(tmp_path_factory.mktemp("selections") / "data") as node:
        yield node.http_endpoint


def test_a_selection_is_counted_made_listed_and_undone(http_endpoint: str) -> None:
    def run_selections(*arguments: str) -> str:
        result = run_here("selections", *arguments, "--endpoint", http_endpoint)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    def run_json(*arguments: str) -> Any:
        return json.loads(run_selections(*arguments, "--json"))

    with Timeball(http_endpoint) as ball:
        sent = ball.send("orders", "x", after="1h", tag="red")
        lines = run_selections(
            "cancel", "--topic", "orders", "--where", "tag = 'red'", "--dry-run"
        ).splitlines()
        assert lines[0].startswith("1 message, due from ") and lines[1].endswith(f"  orders  {sent.id}")
        assert run_selections("cancel", "--topic", "others", "--dry-run") == "0 messages"
        printed = run_selections("cancel", "--topic", "orders", "--where", "tag = 'red'")
        selection_id, _, description = printed.partition(": ")
        assert description.startswith("cancel, active, ") and description.endswith(
            ", topics orders, where tag = 'red'"
        )
        assert ball.get(sent.id).state == "cancelled"
        assert run_json("show", selection_id)["state"] == "active"
        assert [line.split(":")[0] for line in run_selections("list").splitlines()] == [selection_id]
        assert run_json("undo", selection_id)["state"] == "undone"
        assert ball.get(sent.id).state == "waiting"
    window = ["--from", "2030-01-01T00:00:00Z", "--to", "2030-01-02T00:00:00Z"]
    assert run_json("cancel", *window)["from"] == "2030-01-01T00:00:00.000Z"


def test_each_command_makes_a_selection_with_its_action(http_endpoint: str) -> None:
    def run_selections(*arguments: str) -> str:
        result = run_here("selections", *arguments, "--topic", "changed", "--endpoint", http_endpoint)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    with Timeball(http_endpoint) as ball:
        sent = ball.send("changed", "x", after="1h")
        assert run_selections("shift", "-30m", "--dry-run").startswith("1 message, due from ")
        assert json.loads(run_selections("shift", "-30m", "--json"))["shift_ms"] == -1_800_000
        assert sent.due_ms is not None and ball.get(sent.id).due_ms == sent.due_ms - 1_800_000
        assert ": shift by 2h, active, " in run_selections("shift", "2h")
        assert ": pause, active, " in run_selections("pause") and ": resume, active, " in run_selections(
            "resume"
        )
        assert ": move elsewhere, active, " in run_selections("move", "elsewhere")
        assert ": release, active, " in run_selections("release")


def test_a_condition_that_cannot_be_parsed_is_a_usage_error(http_endpoint: str) -> None:
    result = run_here("selections", "cancel", "--where", "tag =", "--endpoint", http_endpoint)
    assert result.returncode == 2 and "expected" in result.stderr
