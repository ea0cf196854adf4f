"""`timeball cancel`: each verdict as a sentence, as JSON, and as an exit code."""

from __future__ import annotations

import json

from tests.cli.in_process import run_here


def _schedule(endpoint: str, *arguments: str) -> str:
    return run_here("schedule", "cancelled", "x", *arguments, "--endpoint", endpoint).stdout.strip()


def test_a_waiting_message_is_cancelled_once(endpoint: str) -> None:
    """The second time it says so, and that is no failure."""
    message_id = _schedule(endpoint, "--after", "1h")
    first = run_here("cancel", message_id, "--endpoint", endpoint)
    assert (first.returncode, first.stdout) == (0, f"{message_id}: cancelled\n")
    second = run_here("cancel", message_id, "--endpoint", endpoint)
    assert (second.returncode, second.stdout) == (0, f"{message_id}: was cancelled before\n")


def test_a_key_cancels_all_that_carry_it(endpoint: str) -> None:
    """One verdict for each."""
    for _ in range(3):
        _schedule(endpoint, "--after", "1h", "--keys", "order-31", "--keys", "anna")
    ended = run_here("cancel", "--key", "order-31", "--json", "--endpoint", endpoint)
    verdicts = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [verdict["verdict"] for verdict in verdicts] == ["cancelled"] * 3
    assert len({verdict["seq"] for verdict in verdicts}) == 3


def test_too_late_and_unknown_are_exit_code_1(endpoint: str) -> None:
    """With the instant of the release; the other verdicts of the same call are given as well."""
    late = _schedule(endpoint, "--after", "0ms")
    pulled = run_here("pull", "cancelled", "--wait", "30s", "--group", "late", "--endpoint", endpoint)
    assert late in pulled.stdout
    waiting = _schedule(endpoint, "--after", "1h")
    ended = run_here("cancel", late, "nobody", waiting, "--endpoint", endpoint)
    assert ended.returncode == 1
    lines = ended.stdout.splitlines()
    assert lines[0].startswith(f"{late}: too late, released at 20")
    assert lines[1:] == ["nobody: no such scheduled message", f"{waiting}: cancelled"]


def test_ids_and_key_exclude_each_other() -> None:
    """Before any broker is asked."""
    ended = run_here("cancel", "an-id", "--key", "a-key")
    assert ended.returncode == 2
    assert "--key" in ended.stderr
