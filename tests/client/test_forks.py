"""A client used on both sides of a fork: over HTTP it works, over Flight it raises an error that names the remedy."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from tests.cli.processes import environment
from tests.docs_pages import ROOT
from tests.node_fixture import RunningNode, running_node
from tests.rounds import rounds

from timeball.client.calls import FORKED


def lines_of(script: str, *arguments: str, timeout_s: float = 110) -> list[str]:
    """Run a script of this folder. Returns the lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-m", f"tests.client.{script}", *arguments],
        env=environment(), capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def forked(endpoint: str, case: str, kind: str = "blocking") -> dict[str, str]:
    """The end of each call of the child, the end of the child, and whether the parent continues."""
    return dict(line.split(": ", 1) for line in lines_of("forked", endpoint, case, kind))


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
@pytest.mark.parametrize("client", ["blocking", "asyncio"])
def test_over_http_every_call_works_behind_a_fork(node: RunningNode, case: str, client: str) -> None:
    outcomes = forked(node.http_endpoint, case, client)
    assert (outcomes.pop("ended"), outcomes.pop("parent")) == ("0", "True")
    assert set(outcomes.values()) == {"done"}, outcomes


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
@pytest.mark.parametrize(
    ("how", "processes"),
    [
        ("fork", 10),
        pytest.param(
            "fork", rounds(300, 1_000), marks=[pytest.mark.slow, pytest.mark.siege, pytest.mark.timeout(900)]
        ),
        pytest.param("mp-fork", 100, marks=pytest.mark.slow),
        pytest.param("spawn", 10, marks=pytest.mark.slow),
        pytest.param("forkserver", 20, marks=pytest.mark.slow),
    ],
)
def test_processes_that_begin_under_load_lose_nothing_and_double_nothing(
    tmp_path: Path, kind: str, how: str, processes: int
) -> None:
    """The parent and its children send and consume meanwhile. Each message is handed out once."""
    with running_node(tmp_path / "data") as node:
        lines = lines_of("forks_under_load", node.http_endpoint, kind, how, str(processes), timeout_s=800)
    of: dict[str, Counter[str]] = {"sent": Counter(), "got": Counter()}
    for line in lines:
        word, message_id = line.split(" ", 1)
        of[word][message_id] += 1
    assert of["sent"].total() >= 3 * processes
    assert of["got"] == of["sent"] and set(of["sent"].values()) == {1}, "each once, and no other"
