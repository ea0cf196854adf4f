"""A client used on both sides of a fork: it works, or says in one sentence why not; no call outlives its time."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.processes import environment
from tests.node_fixture import RunningNode

from timeball.client.dialing import FORKED

SCRIPT = Path(__file__).with_name("forked.py")


def forked(node: RunningNode, case: str) -> dict[str, str]:
    """How each call of the child ended, how the child, and whether the parent goes on."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", str(SCRIPT), node.endpoint, case],
        env=environment(), capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


def test_a_client_made_before_the_fork_and_used_behind_it_works(node: RunningNode) -> None:
    outcomes = forked(node, "made")
    assert (outcomes.pop("ended"), outcomes.pop("parent")) == ("0", "True")
    assert set(outcomes.values()) == {"done"}, outcomes


@pytest.mark.parametrize(
    "case", ["used", *(pytest.param(case, marks=pytest.mark.slow) for case in ("pool", "polling"))]
)
def test_behind_a_fork_of_one_that_was_used_every_call_says_what_to_do(node: RunningNode, case: str) -> None:
    outcomes = forked(node, case)
    assert (outcomes.pop("ended"), outcomes.pop("parent")) == ("0", "True")
    assert outcomes.pop("close") == "done"
    # A send of many rows adds how many of them were accepted.
    said = {outcome.removesuffix(" (no row of this call was accepted)") for outcome in outcomes.values()}
    assert said == {f"RequestError: {FORKED}"}, outcomes
