"""`timeball get`: each state of a message."""

import json

from tests.cli.in_process import run_here

from timeball import Timeball


def test_each_state_of_a_message_has_a_line(endpoint: str) -> None:
    with Timeball(endpoint) as ball:
        waiting = ball.send("got", "x", after="1h").id
        visible = ball.send("got", "y").id
        told = run_here("get", waiting, "--endpoint", endpoint)
        assert (told.returncode, told.stdout.startswith("waiting, topic got, due 20")) == (0, True)
        ball.cancel(waiting)
    assert run_here("get", waiting, "--endpoint", endpoint).stdout.startswith("cancelled, since 20")
    shown = run_here("get", visible, "--topic", "got", "--endpoint", endpoint).stdout
    assert shown.startswith("visible, topic got, queue ") and " at 0, since 20" in shown
    with Timeball(endpoint) as ball:
        ball.pull("got", "readers-of-got", wait=0)
    told = run_here("get", visible, "--endpoint", endpoint).stdout
    assert "\n  group readers-of-got: leased, until 20" in told and told.rstrip().endswith("attempt 1")
    found = json.loads(run_here("get", visible, "--json", "--endpoint", endpoint).stdout)
    assert (found["id"], found["state"], found["topic"]) == (visible, "visible", "got")


def test_an_unknown_id_is_a_fault_of_usage(endpoint: str) -> None:
    missing = run_here("get", "nobody", "--endpoint", endpoint)
    assert missing.returncode == 2 and "nobody" in missing.stderr
