"""`timeball groups`: lag, leases and dead letters, for people and as JSON."""

import json

from tests.cli.in_process import run_here

from timeball import Timeball


def test_groups_are_listed_with_their_lag(endpoint: str) -> None:
    with Timeball(endpoint) as ball:
        ball.create_topic("behind", 1)
        ball.send_many([{"body": "x"}] * 5, topic="behind")
        held = ball.pull("behind", "laggards", max_messages=2)
        assert held[0].ack()
        found = run_here("groups", "laggards", "--json", "--endpoint", endpoint)
        (state,) = [json.loads(line) for line in found.stdout.splitlines()]
        assert (state["group"], state["dead_letters"]) == ("laggards", 0)
        assert [topic["topic"] for topic in state["topics"]] == ["behind"]
        assert state["lag"] >= 3
        shown = run_here("groups", "--endpoint", endpoint).stdout.splitlines()
        assert "dead letters" in shown[0]
        (line,) = [line for line in shown if line.startswith("laggards ")]
        assert line.split()[1:3] == ["behind", str(state["lag"])]
        held[1].ack()


def test_a_group_of_several_topics_is_shown_topic_by_topic(endpoint: str) -> None:
    with Timeball(endpoint) as ball:
        for topic in ("behind-a", "behind-b"):
            ball.send(topic, "x")
            ball.ack(ball.pull(topic, "both"))
    shown = run_here("groups", "both", "--endpoint", endpoint).stdout
    assert "both " in shown and "behind-a" in shown and "behind-b" in shown and " all " in shown


def test_a_group_that_is_not_there_is_a_fault_of_usage(endpoint: str) -> None:
    missing = run_here("groups", "no-such-group", "--endpoint", endpoint)
    assert missing.returncode == 2 and "no-such-group" in missing.stderr
