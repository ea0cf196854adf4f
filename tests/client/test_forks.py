"""A client used on both sides of a fork: over HTTP it works, over Flight it raises an error that names the remedy."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.cli.processes import environment
from tests.node_fixture import RunningNode

from timeball import Timeball
from timeball.client.dialing import FORKED

SCRIPT = Path(__file__).with_name("forked.py")


def forked(endpoint: str, case: str) -> dict[str, str]:
    """The end of each call of the child, the end of the child, and whether the parent continues."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", str(SCRIPT), endpoint, case],
        env=environment(), capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize("protocol", ["flight", "http"])
def test_a_client_made_before_the_fork_and_used_behind_it_works(node: RunningNode, protocol: str) -> None:
    outcomes = forked(node.endpoint if protocol == "flight" else node.http_endpoint, "made")
    assert (outcomes.pop("ended"), outcomes.pop("parent")) == ("0", "True")
    assert set(outcomes.values()) == {"done"}, outcomes


@pytest.mark.parametrize(
    "case", ["used", *(pytest.param(case, marks=pytest.mark.slow) for case in ("pool", "polling"))]
)
def test_behind_a_fork_of_one_that_has_used_columns_every_call_says_what_to_do(
    node: RunningNode, case: str
) -> None:
    outcomes = forked(node.endpoint, case)
    assert (outcomes.pop("ended"), outcomes.pop("parent")) == ("0", "True")
    assert outcomes.pop("close") == "done"
    # A send of many rows adds how many of them were accepted.
    said = {outcome.removesuffix(" (no row of this call was accepted)") for outcome in outcomes.values()}
    assert said == {f"RequestError: {FORKED}"}, outcomes


@pytest.mark.parametrize("case", ["used", "pool", "polling"])
def test_over_http_every_call_works_behind_a_fork(node: RunningNode, case: str) -> None:
    outcomes = forked(node.http_endpoint, case)
    assert (outcomes.pop("ended"), outcomes.pop("parent")) == ("0", "True")
    assert set(outcomes.values()) == {"done"}, outcomes


def test_children_forked_under_load_lose_nothing_and_double_nothing(node: RunningNode) -> None:
    """Threads of the parent send and receive while it forks, and its children use the same client."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", str(SCRIPT), node.http_endpoint, "load"],
        env=environment(), capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    sent = [line.removeprefix("sent: ") for line in done.stdout.splitlines() if line.startswith("sent: ")]
    assert len(sent) == len(set(sent)) >= 4 * 25
    with Timeball(node.http_endpoint) as ball:
        there = Counter(message.id for message in ball.consume("forked-load", "g", until_idle="500ms"))
    assert there == Counter(sent), "each once, and no other"
