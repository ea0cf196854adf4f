"""`timeball pull`: as a group, waiting, following, and before there is anything."""

from __future__ import annotations

import json
import signal

from tests.cli.in_process import run_here
from tests.cli.processes import running


def test_what_was_pulled_is_acknowledged_for_its_group_alone(endpoint: str) -> None:
    """The next pull of the group finds nothing new, and says so on stderr; another group finds it."""
    run_here("send", "pulled", "x", "--endpoint", endpoint)
    first = run_here("pull", "pulled", "--endpoint", endpoint)
    assert first.stdout.endswith("  x\n") and first.stderr == "1 message\n"
    second = run_here("pull", "pulled", "--endpoint", endpoint)
    assert (second.returncode, second.stdout) == (0, "")
    assert "nothing new for group cli" in second.stderr
    assert run_here("pull", "pulled", "--group", "other", "--endpoint", endpoint).stdout.endswith("  x\n")


def test_a_delayed_message_shows_how_late_it_was(endpoint: str) -> None:
    """In milliseconds, with a sign, between the id and the body."""
    run_here("schedule", "punctual", "x", "--after", "100ms", "--id", "p-1", "--endpoint", endpoint)
    shown = run_here("pull", "punctual", "--wait", "30s", "--endpoint", endpoint).stdout
    _, message_id, late, unit, body = shown.split()
    assert (message_id, unit, body) == ("p-1", "ms", "x")
    assert late.startswith("+") and int(late) >= 0


def test_a_body_that_is_no_text_is_shown_all_the_same(endpoint: str) -> None:
    """In JSON as base64."""
    from timeball import Timeball

    with Timeball(endpoint) as ball:
        ball.send("binary", b"\xff\x00")
    shown = run_here("pull", "binary", "--peek", "--json", "--endpoint", endpoint)
    assert json.loads(shown.stdout)["body_base64"] == "/wA="
    assert r"b'\xff\x00'" in run_here("pull", "binary", "--endpoint", endpoint).stdout


def test_a_topic_that_is_not_there_is_named_unless_it_is_waited_for(endpoint: str) -> None:
    """A slip of the pen should not look like an empty topic; who waits may come first."""
    ended = run_here("pull", "no-such-topic", "--endpoint", endpoint)
    assert ended.returncode == 2
    assert "no-such-topic" in ended.stderr and "--wait" in ended.stderr
    waited = run_here("pull", "not-yet", "--wait", "10ms", "--endpoint", endpoint)
    assert waited.returncode == 0
    assert "0 messages: there is no topic 'not-yet' yet" in waited.stderr
    again = run_here("pull", "not-yet", "--endpoint", endpoint)
    assert again.returncode == 2, "reading makes no topic"


def test_following_goes_on_until_told_to_stop(endpoint: str) -> None:
    """It may begin before the topic exists; what it showed is acknowledged when it ends."""
    with running("pull", "followed", "--follow", "--json", "--endpoint", endpoint) as follower:
        for body in ("one", "two"):
            run_here("send", "followed", body, "--endpoint", endpoint)
            assert follower.wait_line(body=body)["topic"] == "followed"
        assert follower.end(signal.SIGINT) == 0
    again = run_here("pull", "followed", "--json", "--endpoint", endpoint)
    assert again.stdout == ""
