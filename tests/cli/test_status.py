"""The output of `timeball status`, `topics`, `groups` and `dead-letters`, for people and as JSON."""

from __future__ import annotations

import json
import signal
import subprocess
from typing import Any

import pytest
from tests.bounds import BOUND_S
from tests.cli.in_process import run_here
from tests.cli.processes import COMMAND, environment

from timeball import Timeball, __version__
from timeball.cli.status import _labelled_lines, _punctuality


def test_status_with_json_prints_the_answer_of_the_broker(endpoint: str) -> None:
    """docs/flight.md describes the fields."""
    document = json.loads(run_here("status", "--json", "--endpoint", endpoint).stdout)
    assert document["version"] == __version__
    assert document["log"]["durable_seq"] <= document["log"]["next_seq"]
    assert document["schedule"].keys() >= {"tail_rows", "wheel_rows", "table_rows", "cancelled_rows"}


def test_status_for_people_has_a_labelled_line_for_each_figure(endpoint: str) -> None:
    """A narrow terminal folds lines and does not cut them."""
    result = run_here("status", "--endpoint", endpoint, COLUMNS="60")
    assert result.returncode == 0
    labels = [label for line in result.stdout.splitlines() if (label := line[:13].strip())]
    expected = [
        "broker",
        "log",
        "on disk up to",
        "disk",
        "schedule",
        "waiting",
        "redeliveries",
        "kept",
        "pending table",
        "released",
        "codec",
        "time zones",
        "memory",
    ]
    assert labels == expected
    assert endpoint in result.stdout


def test_watch_prints_the_status_again_until_ctrl_c(endpoint: str) -> None:
    """The command runs as a process, because a signal ends it."""
    with subprocess.Popen(
        [*COMMAND, "status", "--watch", "--every", "1ms", "--json", "--endpoint", endpoint],
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as watching:  # fmt: skip
        assert watching.stdout is not None
        statuses = [json.loads(watching.stdout.readline()) for _ in range(3)]
        watching.send_signal(signal.SIGINT)
        _, errors = watching.communicate(timeout=BOUND_S)
    assert [status["version"] for status in statuses] == [__version__] * 3
    assert (watching.returncode, errors) == (0, "")


def test_punctuality_shows_the_bound_of_99_percent_and_the_latest_message() -> None:
    """The latest message may be far beyond the bound."""
    no_releases = {"released": 0, "max_ms": 0, "buckets": {}}
    assert _punctuality(no_releases) == "nothing since the broker started"
    lateness = {"released": 1_000, "max_ms": 80, "buckets": {"<=1 ms": 900, "<=5 ms": 95, "more": 5}}
    assert _punctuality(lateness).endswith("99 % of them late by <=5 ms, the latest 80 ms")


@pytest.mark.parametrize("uri", ["ftp://127.0.0.1:7400", "7400"])
def test_a_malformed_endpoint_is_a_usage_error(uri: str) -> None:
    """The forms are a wrong scheme, and an address without a scheme."""
    assert run_here("status", "--endpoint", uri).returncode == 2


@pytest.fixture
def status() -> dict[str, Any]:
    """The status of a broker with 20 messages in the tail, three of which are near."""
    return {
        "version": "1", "pid": 1, "waiting_messages": 23, "redelivery_messages": 4,
        "anon_bytes": 1, "rss_bytes": 2, "tzdata": "2026.6", "levels": {"waiting_rows": 0},
        "log": {"first_seq": 1, "next_seq": 2, "durable_seq": 2, "bytes": 3}, "table": {"version": 1},
        "strategy": "hour_log", "disk": {"free_bytes": 5 << 20, "no_room": ""},
        "schedule": {"near_rows": 3, "tail_rows": 20, "table_rows": 0, "cancelled_rows": 0, "table_files": 0},
        "lateness": {"released": 0, "max_ms": 0, "buckets": {}},
    }  # fmt: skip


def test_the_line_kept_counts_the_pending_rows_as_the_strategy_stores_them(status: dict[str, Any]) -> None:
    lines = dict(_labelled_lines("e", status))
    assert lines["schedule"] == "hour_log"
    assert (lines["waiting"], lines["redeliveries"]) == ("23", "4")
    assert lines["kept"] == "20 in the log's tail, 0 in the pending table, 3 near their instant"
    status["strategy"], status["schedule"]["tail_rows"] = "timer_wheel", 0
    status["schedule"] |= {"waiting_rows": 4_321, "wheel_rows": 2}
    lines = dict(_labelled_lines("e", status))
    assert lines["schedule"] == "timer_wheel"
    assert lines["kept"] == "4,321 in the log, 0 in the pending table, 3 near their instant"


def test_a_full_disk_is_shown_in_capitals(status: dict[str, Any]) -> None:
    assert dict(_labelled_lines("e", status))["disk"] == "5 MiB free"
    status["disk"]["no_room"] = "disk full"
    assert dict(_labelled_lines("e", status))["disk"] == "5 MiB free: NEW MESSAGES ARE REFUSED, disk full"


def test_an_object_store_that_does_not_answer_is_shown_in_capitals(status: dict[str, Any]) -> None:
    assert "object store" not in dict(_labelled_lines("e", status))
    store = {"uri": "s3://b/t", "cached_bytes": 5 << 20, "problem": "", "missing_files": 0}
    status["table"] |= store
    assert dict(_labelled_lines("e", status))["object store"] == "s3://b/t, 5 MiB here"
    status["table"] |= {"problem": "slow down", "missing_files": 2}
    line = dict(_labelled_lines("e", status))["object store"]
    assert line == "s3://b/t, 5 MiB here, 2 FILES DUE SOON ARE MISSING; DOES NOT ANSWER: slow down"


def test_delay_levels_have_a_line_if_they_have_messages(status: dict[str, Any]) -> None:
    assert "for delay levels" not in dict(_labelled_lines("e", status))
    status["levels"] = {"waiting_rows": 1_234}
    assert dict(_labelled_lines("e", status))["for delay levels"] == "1,234"


def test_the_shown_bound_is_never_above_the_latest_message() -> None:
    lateness = {"released": 100, "max_ms": 14_000, "buckets": {"<=1ms": 50, "<=60000ms": 50}}
    assert _punctuality(lateness).endswith("99 % of them late by <=14000ms, the latest 14000 ms")


def test_topics_are_listed_with_their_queues_and_messages(endpoint: str) -> None:
    with Timeball(endpoint) as ball:
        ball.create_topic("listed", 3)
        ball.send_many([{"body": "x"}] * 5, topic="listed")
        ball.send("listed", "later", after="1h")
    rows = [
        json.loads(line) for line in run_here("topics", "--json", "--endpoint", endpoint).stdout.splitlines()
    ]
    assert {"topic": "listed", "queues": 3, "messages": 5} in rows
    result = run_here("topics", "--endpoint", endpoint)
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("listed ")]
    assert line.split() == ["listed", "3", "5"]


def test_one_topic_is_shown_queue_by_queue(endpoint: str) -> None:
    with Timeball(endpoint) as ball:
        ball.create_topic("one-listed", 2)
        ball.send("one-listed", "x")
    result = run_here("topics", "one-listed", "--json", "--endpoint", endpoint)
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert [row["queue"] for row in rows] == [0, 1] and sum(row["max"] for row in rows) == 1
    assert "queue" in run_here("topics", "one-listed", "--endpoint", endpoint).stdout


def test_an_unknown_topic_is_a_usage_error(endpoint: str) -> None:
    missing = run_here("topics", "no-such-topic", "--endpoint", endpoint)
    assert missing.returncode == 2 and "no-such-topic" in missing.stderr


def test_groups_are_listed_with_their_lag(endpoint: str) -> None:
    with Timeball(endpoint) as ball:
        ball.create_topic("behind", 1)
        ball.send_many([{"body": "x"}] * 5, topic="behind")
        held = ball.pull("behind", "laggards", max_messages=2)
        assert held[0].ack()
        result = run_here("groups", "laggards", "--json", "--endpoint", endpoint)
        (state,) = [json.loads(line) for line in result.stdout.splitlines()]
        assert (state["group"], state["dead_letters"]) == ("laggards", 0)
        assert [topic["topic"] for topic in state["topics"]] == ["behind"]
        assert state["lag"] >= 3
        output = run_here("groups", "--endpoint", endpoint).stdout.splitlines()
        assert "dead letters" in output[0]
        (line,) = [line for line in output if line.startswith("laggards ")]
        assert line.split()[1:3] == ["behind", str(state["lag"])]
        held[1].ack()


def test_a_group_of_several_topics_is_shown_topic_by_topic(endpoint: str) -> None:
    with Timeball(endpoint) as ball:
        for topic in ("behind-a", "behind-b"):
            ball.send(topic, "x")
            ball.ack(ball.pull(topic, "both"))
    output = run_here("groups", "both", "--endpoint", endpoint).stdout
    assert "both " in output and "behind-a" in output and "behind-b" in output and " all " in output


def test_an_unknown_group_is_a_usage_error(endpoint: str) -> None:
    missing = run_here("groups", "no-such-group", "--endpoint", endpoint)
    assert missing.returncode == 2 and "no-such-group" in missing.stderr


def give_up(ball: Timeball, group: str, bodies: list[bytes]) -> None:
    """Make a dead letter of a group from each of these bodies. The topic is `of-<group>`."""
    topic = f"of-{group}"
    ball.create_topic(topic, 1)
    ball.send_many([{"body": body} for body in bodies], topic=topic)
    count = 0
    while count < len(bodies):
        for message in ball.pull(topic, group):
            count += message.dead_letter()


def list_dead_letters(endpoint: str, group: str, *more: str) -> list[dict[str, object]]:
    """List the dead letters of a group, with the options `more`."""
    result = run_here("dead-letters", "list", group, "--json", *more, "--endpoint", endpoint)
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_dead_letters_are_listed_page_by_page(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timeball.cli.status.PAGE_ROWS", 2)
    with Timeball(endpoint) as ball:
        give_up(ball, "listers", [b"a", b"b", b"\xff", b"d", b"x" * 200])
    rows = list_dead_letters(endpoint, "listers")
    assert sorted(str(row.get("body", row.get("body_base64"))) for row in rows) == sorted(
        ["a", "b", "/w==", "d", "x" * 200]
    )
    assert {row["topic"] for row in rows} == {"of-listers"}
    assert len(list_dead_letters(endpoint, "listers", "--max", "3")) == 3
    result = run_here("dead-letters", "list", "listers", "--max", "4", "--endpoint", endpoint)
    assert len(result.stdout.splitlines()) == 4 and "there are more" in result.stderr


def test_a_named_dead_letter_is_sent_again_and_all_others_are_deleted(endpoint: str) -> None:
    with Timeball(endpoint) as ball:
        give_up(ball, "again", [b"1", b"2", b"3"])
        name = next(
            str(row["dead_letter"]) for row in list_dead_letters(endpoint, "again") if row["body"] == "2"
        )
        sent = run_here("dead-letters", "resend", "again", name, "--endpoint", endpoint)
        assert (sent.returncode, sent.stdout) == (0, "1 sent again\n")
        (message,) = ball.pull("of-again", "again", wait="30s")
        assert message.body == b"2" and message.ack()
        late = run_here("dead-letters", "delete", "again", name, "--endpoint", endpoint)
        assert late.returncode == 1 and "1 not there any more" in late.stdout
        gone = run_here("dead-letters", "delete", "again", "--all", "--json", "--endpoint", endpoint)
        assert json.loads(gone.stdout)["rows"] == 2
        assert list_dead_letters(endpoint, "again") == []


@pytest.mark.parametrize(
    "arguments", [pytest.param([], id="neither"), pytest.param(["0-1", "--all"], id="both")]
)
def test_a_resend_needs_either_names_of_dead_letters_or_the_option_all(
    endpoint: str, arguments: list[str]
) -> None:
    result = run_here("dead-letters", "resend", "any-group", *arguments, "--endpoint", endpoint)
    assert result.returncode == 2 and "--all" in result.stderr


def test_limits_of_a_topic_and_of_a_group_are_set(endpoint: str) -> None:
    with Timeball(endpoint) as ball:
        ball.create_topic("limited-here", 3)
        result = run_here(
            "topics", "limited-here", "--max-per-second", "50", "--json", "--endpoint", endpoint
        )
        assert [json.loads(line)["queue"] for line in result.stdout.splitlines()] == [0, 1, 2]
        result = run_here("groups", "limited-here", "--max-per-key", "2", "--json", "--endpoint", endpoint)
        assert json.loads(result.stdout)["max_per_key"] == 2
        assert ball.groups("limited-here")[0].max_per_key == 2
        note = run_here("groups", "limited-here", "--endpoint", endpoint).stderr
        assert "group limited-here: its members hold at most 2 of the messages with one key" in note
        for limit, text in (("50", "at most 50"), ("0", "any number of")):
            note = run_here(
                "topics", "limited-here", "--max-per-second", limit, "--endpoint", endpoint
            ).stderr
            assert f"topic limited-here: {text} messages a second" in note
    for command in (("topics", "--max-per-second", "5"), ("groups", "--max-per-key", "5")):
        assert "name it" in run_here(*command, "--endpoint", endpoint).stderr
