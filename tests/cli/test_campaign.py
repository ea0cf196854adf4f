"""`timeball campaign`: what each command says. What they do: tests/spark/jobs/test_campaign.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.in_process import run_here
from tests.cli.unreachable import NOWHERE, assert_says_how_to_reach_one
from tests.node_fixture import running_node
from tests.spark.campaigning import attach, campaign_of
from tests.spark.two_groups import two_groups

COMMANDS = ("status", "pause", "resume", "cancel")


def test_a_campaign_through_all_commands(tmp_path: Path) -> None:
    """Without Java: nothing of Spark is asked for."""
    with running_node(tmp_path / "data", compact_rows=0) as node:

        def say(*arguments: str) -> str:
            done = run_here("campaign", *arguments, "--endpoint", node.endpoint)
            assert done.returncode == 0, done.stderr
            return done.stdout

        assert say("list") == "no campaigns yet: create one with timeball bulk\n"
        assert say("list", "--json") == ""
        attach(campaign_of(node), 20)
        assert say("list").startswith("spring  running  20 messages, of ")
        shown = say("status", "spring").splitlines()
        assert shown[:2] == [
            "spring: running, 0 % of 20 messages",
            "released 0 + cancelled 0 + waiting 20 + held 0",
        ]
        assert shown[2].startswith("next at ")
        assert say("pause", "spring") == "spring: paused, 20 messages are held\n"
        assert say("pause", "spring") == "spring: was already paused, 20 messages are held\n"
        forecast = run_here("forecast", "--endpoint", node.endpoint).stdout
        assert "20 more are held by paused campaigns, and are not counted: spring" in forecast
        assert json.loads(say("list", "--json"))["state"] == "paused"
        assert "20 messages wait again, each " in say("resume", "spring", "--shift")
        assert say("resume", "spring") == "spring: nothing is held\n"
        progress = json.loads(say("status", "spring", "--json"))
        assert (progress["rows"], progress["waiting"], progress["held"]) == (20, 20, 0)
        ended = "spring: 20 of 20 messages are cancelled, {} of them now; 0 were released\n"
        assert say("cancel", "spring") == ended.format(20)
        assert say("cancel", "spring") == ended.format(0)
        assert json.loads(say("cancel", "spring", "--json")) == {
            "campaign": "spring",
            "rows": 20,
            "newly": 0,
            "cancelled": 20,
            "released": 0,
        }


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_campaign_is_a_usage_error(tmp_path: Path, command: str) -> None:
    with running_node(tmp_path / "data") as node:
        refused = run_here("campaign", command, "summer", "--endpoint", node.endpoint)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "no campaign 'summer'" in refused.stderr
        wrong = run_here("campaign", command, "a/b", "--endpoint", node.endpoint)
        assert wrong.returncode == 2 and "campaign 'a/b'" in wrong.stderr


@pytest.mark.parametrize("command", ["list", *COMMANDS])
def test_no_broker_is_told(command: str) -> None:
    arguments = [] if command == "list" else ["spring"]
    assert_says_how_to_reach_one(run_here("campaign", command, *arguments, "--endpoint", NOWHERE))
    assert f"timeball campaign {command}" in run_here("campaign", command, "--help").stdout


def test_a_list_names_the_groups(tmp_path: Path) -> None:
    with two_groups(tmp_path) as groups:
        groups.add()
        for node in (groups.one, groups.other):
            attach(campaign_of(node), 20)
        shown = run_here("campaign", "list", "--endpoint", groups.endpoint).stdout.splitlines()
        assert [line.rpartition(", ")[2] for line in shown] == ["in group g1", "in group g2"]
        listed = run_here("campaign", "list", "--json", "--endpoint", f"{groups.endpoint}#g2").stdout
        assert json.loads(listed)["rows"] == 20
        paused = run_here("campaign", "pause", "spring", "--endpoint", groups.endpoint).stdout
        assert paused == "spring: paused, 40 messages are held\n"
