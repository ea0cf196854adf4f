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


def test_a_selection_from_its_dry_run_to_its_undo(http_endpoint: str) -> None:
    def said(*arguments: str) -> str:
        ended = run_here("selections", *arguments, "--endpoint", http_endpoint)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    def document(*arguments: str) -> Any:
        return json.loads(said(*arguments, "--json"))

    with Timeball(http_endpoint) as ball:
        sent = ball.send("orders", "x", after="1h", tag="red")
        lines = said("cancel", "--topic", "orders", "--where", "tag = 'red'", "--dry-run").splitlines()
        assert lines[0].startswith("1 message, due from ") and lines[1].endswith(f"  orders  {sent.id}")
        assert said("cancel", "--topic", "others", "--dry-run") == "0 messages"
        made = said("cancel", "--topic", "orders", "--where", "tag = 'red'")
        name, _, rest = made.partition(": ")
        assert rest.startswith("cancel, active, ") and rest.endswith(", topics orders, where tag = 'red'")
        assert ball.get(sent.id).state == "cancelled"
        assert document("show", name)["state"] == "active"
        assert [line.split(":")[0] for line in said("list").splitlines()] == [name]
        assert document("undo", name)["state"] == "undone"
        assert ball.get(sent.id).state == "waiting"
    window = ["--from", "2030-01-01T00:00:00Z", "--to", "2030-01-02T00:00:00Z"]
    assert document("cancel", *window)["from"] == "2030-01-01T00:00:00.000Z"


def test_each_operation_is_made_by_its_command(http_endpoint: str) -> None:
    def said(*arguments: str) -> str:
        ended = run_here("selections", *arguments, "--topic", "changed", "--endpoint", http_endpoint)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    with Timeball(http_endpoint) as ball:
        sent = ball.send("changed", "x", after="1h")
        assert said("shift", "-30m", "--dry-run").startswith("1 message, due from ")
        assert json.loads(said("shift", "-30m", "--json"))["shift_ms"] == -1_800_000
        assert sent.due_ms is not None and ball.get(sent.id).due_ms == sent.due_ms - 1_800_000
        assert ": shift by 2h, active, " in said("shift", "2h")
        assert ": pause, active, " in said("pause") and ": resume, active, " in said("resume")
        assert ": move elsewhere, active, " in said("move", "elsewhere")
        assert ": release, active, " in said("release")


def test_a_refusal_is_explained(http_endpoint: str) -> None:
    ended = run_here("selections", "cancel", "--where", "tag =", "--endpoint", http_endpoint)
    assert ended.returncode == 2 and "expected" in ended.stderr
