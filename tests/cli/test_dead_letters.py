"""`timeball dead-letters`: list, resend and delete, by name and all."""

import json

import pytest
from tests.cli.in_process import run_here

from timeball import Timeball


def give_up(ball: Timeball, group: str, bodies: list[bytes]) -> None:
    topic = f"of-{group}"
    ball.create_topic(topic, 1)
    ball.send_many([{"body": body} for body in bodies], topic=topic)
    done = 0
    while done < len(bodies):
        for message in ball.pull(topic, group):
            done += message.dead_letter()


def listed(endpoint: str, group: str, *more: str) -> list[dict[str, object]]:
    ran = run_here("dead-letters", "list", group, "--json", *more, "--endpoint", endpoint)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_dead_letters_are_listed_page_by_page(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("timeball.cli.dead_letters.PAGE_ROWS", 2)
    with Timeball(endpoint) as ball:
        give_up(ball, "listers", [b"a", b"b", b"\xff", b"d", b"x" * 200])
    rows = listed(endpoint, "listers")
    assert sorted(str(row.get("body", row.get("body_base64"))) for row in rows) == sorted(
        ["a", "b", "/w==", "d", "x" * 200]
    )
    assert {row["topic"] for row in rows} == {"of-listers"}
    assert len(listed(endpoint, "listers", "--max", "3")) == 3
    shown = run_here("dead-letters", "list", "listers", "--max", "4", "--endpoint", endpoint)
    assert len(shown.stdout.splitlines()) == 4 and "there are more" in shown.stderr


def test_those_named_are_sent_again_and_the_others_deleted(endpoint: str) -> None:
    with Timeball(endpoint) as ball:
        give_up(ball, "again", [b"1", b"2", b"3"])
        name = next(str(row["dead_letter"]) for row in listed(endpoint, "again") if row["body"] == "2")
        sent = run_here("dead-letters", "resend", "again", name, "--endpoint", endpoint)
        assert (sent.returncode, sent.stdout) == (0, "1 sent again\n")
        (message,) = ball.pull("of-again", "again", wait="30s")
        assert message.body == b"2" and message.ack()
        late = run_here("dead-letters", "delete", "again", name, "--endpoint", endpoint)
        assert late.returncode == 1 and "1 not there any more" in late.stdout
        gone = run_here("dead-letters", "delete", "again", "--all", "--json", "--endpoint", endpoint)
        assert json.loads(gone.stdout)["rows"] == 2
        assert listed(endpoint, "again") == []


@pytest.mark.parametrize("which", [[], ["0.1", "--all"]])
def test_resend_without_exactly_one_of_names_and_all_is_refused(endpoint: str, which: list[str]) -> None:
    refused = run_here("dead-letters", "resend", "again", *which, "--endpoint", endpoint)
    assert refused.returncode == 2 and "--all" in refused.stderr
