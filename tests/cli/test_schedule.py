"""`timeball schedule`: when, said in one of two ways, and the id by which it can be taken back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.cli.in_process import run_here
from tests.cli.unreachable import NOWHERE, assert_says_how_to_reach_one

from timeball import Timeball
from timeball.cli.messages import parse_due
from timeball.model.errors import RequestError

DAY_MS = 86_400_000


def test_a_receipt_has_the_due_time(endpoint: str) -> None:
    ended = run_here("schedule", "agreed", "x", "--after", "1h30m", "--json", "--endpoint", endpoint)
    assert (ended.returncode, ended.stderr) == (0, "")
    receipt = json.loads(ended.stdout)
    assert receipt.keys() == {"id", "seq", "due_ms", "past_ms", "store_ms", "outcome", "state"}
    assert receipt["due_ms"] - receipt["store_ms"] == 5_400_000


@pytest.mark.parametrize(
    "at", ["2035-01-31T09:00:00+01:00", "2035-01-31T08:00:00Z", "2035-01-31 08:00:00.000Z", "2053843200000"]
)
def test_one_due_time_can_be_written_in_many_forms(endpoint: str, at: str) -> None:
    ended = run_here("schedule", "instants", "x", "--at", at, "--json", "--endpoint", endpoint)
    assert json.loads(ended.stdout)["due_ms"] == 2_053_843_200_000


def test_a_scheduled_message_is_released_with_all_its_fields(endpoint: str) -> None:
    """The body from stdin, byte for byte."""
    carried = [
        "--tag",
        "t",
        "--keys",
        "order-17",
        "--keys",
        "anna",
        "--property",
        "a=1",
        "--property",
        "b=x=y",
    ]
    body = b"\xff\x00 not text\n"
    options = ["--after", "0ms", "--id", "carried-1", *carried, "--endpoint", endpoint]
    assert run_here("schedule", "carried", "-", *options, text=body).stdout == "carried-1\n"
    with Timeball(endpoint) as ball:
        [message] = ball.pull("carried", "g", wait="30s")
    assert (message.body, message.id, message.tag) == (body, "carried-1", "t")
    assert (message.keys, message.properties) == (["order-17", "anna"], {"a": "1", "b": "x=y"})


def test_every_line_of_a_file_is_scheduled(endpoint: str, tmp_path: Path) -> None:
    """With the same due time and key, by which all of them are taken back."""
    file = tmp_path / "lines.txt"
    file.write_text("one\ntwo\nthree")
    options = ["--after", "7d", "--keys", "lines-7d", "--endpoint", endpoint]
    assert run_here("schedule", "waiting", "--lines", str(file), *options).stdout == "3 messages sent\n"
    piped = run_here("schedule", "waiting", "--lines", "-", "--json", *options, text="four\r\n\n")
    assert json.loads(piped.stdout) == {"sent": 2}  # an empty line is an empty message
    with Timeball(endpoint) as ball:
        assert [verdict.verdict for verdict in ball.cancel(key="lines-7d")] == ["cancelled"] * 5


def test_lines_that_were_due_in_the_past_are_said_to_be(endpoint: str, tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_text("one\ntwo")
    options = ["--lines", str(file), "--at", "2020-01-31T09:00:00Z", "--endpoint", endpoint]
    told = run_here("schedule", "past-lines", *options)
    assert told.stdout == "2 messages sent\n"
    assert "the due time was in the past" in told.stderr and "delivered now" in told.stderr
    document = json.loads(run_here("schedule", "past-lines", "--json", *options).stdout)
    assert (document["sent"], document["past_rows"]) == (2, 2) and document["past_ms"] > DAY_MS


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ([], "--after"),
        (["--after", "1s", "--at", "2035-01-01T00:00:00Z"], "exactly one of --after"),
        (["--after", "30"], "--after 30: add a unit"),
        (["--after", "soon"], "--after 'soon'"),
        (["--after", "tomorrow"], "or a time with --at"),
        (["--at", "soon"], "--at 'soon'"),
        (["--at", "2035-01-01T00:00:00"], "time zone"),
        (["--after", "1s", "--property", "eu"], "--property 'eu'"),
        (["--after", "1s", "--lines", "no-such-file"], "--lines no-such-file"),
        (["--after", "1s", "--lines", "."], "--lines ."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_impossible_option_is_refused_and_named(endpoint: str, options: list[str], named: str) -> None:
    """In one sentence, and nothing is scheduled."""
    refused = run_here("schedule", "refused", *options, "--endpoint", endpoint)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert named in refused.stderr and len(refused.stderr.splitlines()) == 1
    with Timeball(endpoint) as ball:
        assert "refused" not in ball.topics()


def test_the_advised_forms_of_a_duration_are_accepted() -> None:
    """`--after tomorrow` was told to write 500, and `--after 500` to add a unit."""
    with pytest.raises(RequestError) as refused:
        parse_due("tomorrow", None)
    advised = re.findall(r"\b\d\w*", str(refused.value))
    assert len(advised) == 4
    assert all(parse_due(each, None)["delay_ms"] for each in advised)


@pytest.mark.parametrize("command", ["schedule", "send"])
@pytest.mark.parametrize("left_out", [["a body"], ["--id", "mine"]], ids=["body", "id"])
def test_what_lines_have_no_use_for_is_refused(command: str, left_out: list[str], tmp_path: Path) -> None:
    """A body or an id beside --lines would be lost without a word."""
    (tmp_path / "lines").write_text("one\n")
    timing = ["--after", "1h"] if command == "schedule" else []
    options = ["--lines", str(tmp_path / "lines"), *timing, "--endpoint", NOWHERE]
    refused = run_here(command, "orders", *left_out, *options)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--lines and " in refused.stderr


@pytest.mark.parametrize("by", [["one"], ["--lines", "lines"]], ids=["message", "lines"])
def test_a_delay_that_the_broker_does_not_take_is_refused(
    endpoint: str, by: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its longest is ten years, by default."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines").write_text("one\n")
    refused = run_here("schedule", "too-far", *by, "--after", "4000d", "--endpoint", endpoint)
    assert (refused.returncode, refused.stdout) == (2, "")
    own = str(4000 * DAY_MS)[:9] if "--lines" in by else "after='4000d'"
    assert own in refused.stderr and "Traceback" not in refused.stderr


def test_no_broker_is_one_sentence() -> None:
    assert_says_how_to_reach_one(run_here("schedule", "t", "x", "--after", "1s", "--endpoint", NOWHERE))


def test_the_endpoint_can_come_from_the_environment(endpoint: str) -> None:
    options = ["schedule", "from-environment", "x", "--after", "1h"]
    assert run_here(*options, TIMEBALL_ENDPOINT=endpoint).returncode == 0
    assert run_here(*options, TIMEBALL_ENDPOINT=NOWHERE).returncode == 3


def test_help_shows_both_ways_to_say_when() -> None:
    shown = run_here("schedule", "--help")
    assert shown.returncode == 0
    _, _, examples = shown.stdout.partition("Examples:")
    assert "--after 30m" in examples and "--at 2030-" in examples and "--lines" in examples
