"""`timeball topics`: what is there, for people and as JSON."""

import json

from tests.cli.in_process import run_here

from timeball import Timeball


def test_topics_are_listed_with_their_queues_and_messages(endpoint: str) -> None:
    with Timeball(endpoint) as ball:
        ball.create_topic("listed", 3)
        ball.send_many([{"body": "x"}] * 5, topic="listed")
        ball.send("listed", "later", after="1h")
    rows = [
        json.loads(line) for line in run_here("topics", "--json", "--endpoint", endpoint).stdout.splitlines()
    ]
    assert {"topic": "listed", "queues": 3, "messages": 5} in rows
    shown = run_here("topics", "--endpoint", endpoint)
    (line,) = [line for line in shown.stdout.splitlines() if line.startswith("listed ")]
    assert line.split() == ["listed", "3", "5"]


def test_one_topic_is_shown_queue_by_queue(endpoint: str) -> None:
    with Timeball(endpoint) as ball:
        ball.create_topic("one-listed", 2)
        ball.send("one-listed", "x")
    found = run_here("topics", "one-listed", "--json", "--endpoint", endpoint)
    rows = [json.loads(line) for line in found.stdout.splitlines()]
    assert [row["queue"] for row in rows] == [0, 1] and sum(row["max"] for row in rows) == 1
    assert "queue" in run_here("topics", "one-listed", "--endpoint", endpoint).stdout


def test_a_topic_that_is_not_there_is_a_fault_of_usage(endpoint: str) -> None:
    missing = run_here("topics", "no-such-topic", "--endpoint", endpoint)
    assert missing.returncode == 2 and "no-such-topic" in missing.stderr
