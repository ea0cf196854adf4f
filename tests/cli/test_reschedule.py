"""`timeball reschedule`: a message comes at its new instant, and each verdict is a sentence, JSON and an exit code."""

from __future__ import annotations

import json

import pytest
from tests.cli.in_process import run_here


def _schedule(endpoint: str, *arguments: str) -> str:
    return run_here("schedule", "moved", "x", *arguments, "--endpoint", endpoint).stdout.strip()


def test_a_message_comes_sooner_and_then_it_is_too_late(endpoint: str) -> None:
    message_id = _schedule(endpoint, "--after", "1h")
    moved = run_here("reschedule", message_id, "--after", "50ms", "--endpoint", endpoint)
    assert moved.returncode == 0
    assert moved.stdout.startswith(f"{message_id}: rescheduled, due 20")
    pulled = run_here("pull", "moved", "--wait", "30s", "--group", "movers", "--endpoint", endpoint)
    assert message_id in pulled.stdout
    late = run_here("reschedule", message_id, "--after", "1h", "--endpoint", endpoint)
    assert (late.returncode, late.stdout[: len(message_id) + 10]) == (1, f"{message_id}: too late")


def test_a_key_moves_all_messages_with_it_to_a_due_time(endpoint: str) -> None:
    for _ in range(3):
        _schedule(endpoint, "--after", "1h", "--keys", "order-77", "--keys", "anna")
    at = "2030-01-31T09:00:00+01:00"
    ended = run_here("reschedule", "--key", "order-77", "--at", at, "--json", "--endpoint", endpoint)
    verdicts = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [(v["verdict"], v["due_ms"]) for v in verdicts] == [("rescheduled", 1_896_076_800_000)] * 3
    assert run_here("cancel", "--key", "order-77", "--endpoint", endpoint).returncode == 0
    again = run_here("reschedule", "--key", "order-77", "--at", at, "--endpoint", endpoint)
    assert again.returncode == 1 and again.stdout.count("was cancelled before") == 3


@pytest.mark.parametrize("when", [[], ["--after", "1m", "--at", "5"], ["--after", "30"], ["--at", "noon"]])
def test_when_is_said_in_one_way(when: list[str]) -> None:
    """Before any broker is asked."""
    ended = run_here("reschedule", "an-id", *when)
    assert ended.returncode == 2
    assert "--a" in ended.stderr
