"""send, schedule, cancel, pull, pending, status: against a real broker."""

import json
from pathlib import Path

import pytest
from tests.cli.in_process import run_here

from timeball.cli.units import show_wait
from timeball.model.limits import HOUR_MS


def _json(*arguments: str, text: str = "") -> list[dict[str, object]]:
    ended = run_here(*arguments, "--json", text=text)
    assert ended.stderr == ""
    return [json.loads(line) for line in ended.stdout.splitlines()]


def _pull_until(endpoint: str, topic: str, count: int) -> list[dict[str, object]]:
    """Pull until so many have come; each pull waits for its first message, so this ends."""
    found: list[dict[str, object]] = []
    for _ in range(count):
        found += _json("pull", topic, "--wait", "20s", "--max", "100", "--endpoint", endpoint)
        if len(found) >= count:
            break
    return found


def test_a_message_comes_out_as_it_went_in(endpoint: str) -> None:
    """Body, tag, keys and properties; a second pull of the group has nothing new."""
    options = ["--tag", "paid", "--keys", "order-17", "--keys", "anna", "--property", "region=eu"]
    sent = run_here("send", "whole", "order 17 was paid", *options, "--endpoint", endpoint)
    assert sent.returncode == 0
    [message] = _json("pull", "whole", "--endpoint", endpoint)
    assert message["id"] == sent.stdout.strip()
    assert (message["body"], message["tag"]) == ("order 17 was paid", "paid")
    assert message["keys"] == ["order-17", "anna"]
    assert message["properties"] == {"region": "eu"}
    assert message["due_ms"] is None
    assert _json("pull", "whole", "--endpoint", endpoint) == []


def test_peeking_leaves_the_group_where_it_was(endpoint: str) -> None:
    """Twice the same message, and then once more for real."""
    run_here("send", "peeked", "x", "--endpoint", endpoint)
    for more in (["--peek"], ["--peek"], []):
        assert [m["body"] for m in _json("pull", "peeked", *more, "--endpoint", endpoint)] == ["x"]


def test_a_body_from_stdin_need_not_be_text(endpoint: str) -> None:
    """In JSON it is then base64; people see Python's notation."""
    assert (
        run_here("send", "piped", "--id", "piped-1", "--endpoint", endpoint, text="from a pipe").returncode
        == 0
    )
    [message] = _json("pull", "piped", "--endpoint", endpoint)
    assert (message["body"], message["id"]) == ("from a pipe", "piped-1")


def test_every_line_of_a_file_is_a_message(endpoint: str, tmp_path: Path) -> None:
    """With the same options for each, and none for the missing newline at the end."""
    file = tmp_path / "lines.txt"
    file.write_text("one\ntwo\nthree")
    assert _json("send", "lines", "--lines", str(file), "--tag", "t", "--endpoint", endpoint) == [{"sent": 3}]
    found = _pull_until(endpoint, "lines", 3)
    assert sorted((m["body"], m["tag"]) for m in found) == [("one", "t"), ("three", "t"), ("two", "t")]


def test_a_scheduled_message_comes_when_it_is_due_and_not_before(endpoint: str) -> None:
    """The lateness that pull shows is that of the release record."""
    [receipt] = _json("schedule", "later", "x", "--after", "300ms", "--endpoint", endpoint)
    assert receipt["due_ms"] == receipt["store_ms"] + 300  # type: ignore[operator]
    [message] = _pull_until(endpoint, "later", 1)
    assert message["due_ms"] == receipt["due_ms"]
    assert message["id"] == receipt["id"]
    assert message["lateness_ms"] >= 0  # type: ignore[operator]


def test_a_due_time_in_the_past_is_due_now(endpoint: str) -> None:
    """What --at names is absolute."""
    [receipt] = _json("schedule", "past", "x", "--at", "2020-01-01T00:00:00Z", "--endpoint", endpoint)
    assert receipt["due_ms"] == 1_577_836_800_000
    assert receipt["past_ms"] == receipt["store_ms"] - receipt["due_ms"]  # type: ignore[operator]
    ended = run_here("schedule", "past", "x", "--at", "2020-01-01T00:00:00Z", "--endpoint", endpoint)
    assert "the due time was in the past: 2020-01-01T00:00:00" in ended.stderr
    messages = _pull_until(endpoint, "past", 2)
    assert len(messages) == 2 and all(one["lateness_ms"] < HOUR_MS for one in messages)  # type: ignore[operator]


def test_the_due_time_is_on_stderr_and_only_the_id_on_stdout(endpoint: str) -> None:
    """So that `timeball schedule … | xargs timeball cancel` works."""
    ended = run_here("schedule", "told", "x", "--after", "1h", "--endpoint", endpoint)
    assert len(ended.stdout.split()) == 1
    assert "due " in ended.stderr and "1 h 0 min" in ended.stderr


def test_a_cancel_has_a_verdict_for_each_and_a_code_for_all(endpoint: str) -> None:
    """0 when none of them will be delivered, 1 when one was released or is not known."""
    ids = [
        run_here(
            "schedule", "off", "x", "--after", "1h", "--keys", "k", "--endpoint", endpoint
        ).stdout.strip()
        for _ in range(3)
    ]
    first = run_here("cancel", ids[0], "--json", "--endpoint", endpoint)
    assert first.returncode == 0
    assert json.loads(first.stdout)["verdict"] == "cancelled"
    by_key = run_here("cancel", "--key", "k", "--json", "--endpoint", endpoint)
    verdicts = [json.loads(line)["verdict"] for line in by_key.stdout.splitlines()]
    assert sorted(verdicts) == ["already_cancelled", "cancelled", "cancelled"]
    assert by_key.returncode == 0
    unknown = run_here("cancel", ids[1], "nobody-knows-this", "--endpoint", endpoint)
    assert unknown.returncode == 1
    assert "no such scheduled message" in unknown.stdout


def test_a_cancel_that_comes_too_late_says_when_it_was_released(endpoint: str) -> None:
    """An instant, and exit code 1."""
    [receipt] = _json("schedule", "gone", "x", "--after", "1ms", "--endpoint", endpoint)
    [message] = _pull_until(endpoint, "gone", 1)
    ended = run_here("cancel", str(receipt["id"]), "--json", "--endpoint", endpoint)
    verdict = json.loads(ended.stdout)
    assert (verdict["verdict"], verdict["at_ms"]) == ("released", message["store_ms"])
    assert ended.returncode == 1


@pytest.mark.parametrize("after", ["4000d", "-1s"])
def test_a_delay_that_no_broker_takes_is_refused(endpoint: str, after: str) -> None:
    """Never quietly "now"."""
    ended = run_here("schedule", "never", "x", f"--after={after}", "--endpoint", endpoint)
    assert ended.returncode == 2
    assert run_here("pull", "never", "--json", "--endpoint", endpoint).stdout == ""


def test_status_shows_what_the_broker_says(endpoint: str) -> None:
    """As a table for people, as it is for machines."""
    [found] = _json("status", "--endpoint", endpoint)
    assert found["pid"] and found["version"]
    shown = run_here("status", "--endpoint", endpoint)
    assert shown.returncode == 0
    assert f"pid {found['pid']}" in shown.stdout


@pytest.mark.parametrize(
    ("wait_ms", "shown"),
    [
        (0, "0.000 s"),
        (59_999, "59.999 s"),
        (90_000, "1 min 30 s"),
        (5_400_000, "1 h 30 min"),
        (100_799_629_124, "1,166 d 15 h"),
    ],
)
def test_a_wait_is_shown_in_two_units(wait_ms: int, shown: str) -> None:
    """Nobody reads a hundred million seconds."""
    assert show_wait(wait_ms) == shown
