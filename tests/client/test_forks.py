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


def run_script(script: str, *arguments: str, timeout_s: float = 110) -> list[str]:
    """Run a script of this folder in a new process. Returns the lines that it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-m", f"tests.client.{script}", *arguments],
        env=environment(), capture_output=True, text=True, timeout=timeout_s, check=False, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def run_forked(endpoint: str, case: str, kind: str = "blocking") -> dict[str, str]:
    """Run tests/client/forked.py. Returns the outcome of each call of the child by its name.

    Two entries are not calls: "ended" is the exit code of the child, "parent" whether the client works in the parent.
    """
    return dict(line.split(": ", 1) for line in run_script("forked", endpoint, case, kind))


@pytest.mark.parametrize("protocol", ["flight", "http"])
def test_a_client_that_is_first_used_in_a_child_after_a_fork_works(node: RunningNode, protocol: str) -> None:
    outcomes = run_forked(node.endpoint if protocol == "flight" else node.http_endpoint, "made")
    assert (outcomes.pop("ended"), outcomes.pop("parent")) == ("0", "True")
    assert set(outcomes.values()) == {"done"}, outcomes


@pytest.mark.parametrize(
    "case", ["used", *(pytest.param(case, marks=pytest.mark.slow) for case in ("pool", "polling"))]
)
def test_in_a_child_of_a_process_that_has_used_flight_each_call_is_refused_with_the_remedy(
    node: RunningNode, case: str
) -> None:
    outcomes = run_forked(node.endpoint, case)
    assert (outcomes.pop("ended"), outcomes.pop("parent")) == ("0", "True")
    assert outcomes.pop("close") == "done"
    # The error of a send of many rows also says how many of them were accepted.
    errors = {outcome.removesuffix(" (no row of this call was accepted)") for outcome in outcomes.values()}
    assert errors == {f"RequestError: {FORKED}"}, outcomes


@pytest.mark.parametrize("case", ["used", "pool", "polling"])
@pytest.mark.parametrize("client", ["blocking", "asyncio"])
def test_over_http_each_call_works_in_a_forked_child(node: RunningNode, case: str, client: str) -> None:
    outcomes = run_forked(node.http_endpoint, case, client)
    assert (outcomes.pop("ended"), outcomes.pop("parent")) == ("0", "True")
    assert set(outcomes.values()) == {"done"}, outcomes


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
@pytest.mark.parametrize(
    ("start_method", "processes"),
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
def test_each_message_is_handed_out_once_while_processes_are_started_under_load(
    tmp_path: Path, kind: str, start_method: str, processes: int
) -> None:
    """The parent and its children send and consume at the same time."""
    with running_node(tmp_path / "data") as node:
        lines = run_script(
            "forks_under_load", node.http_endpoint, kind, start_method, str(processes), timeout_s=800
        )
    ids: dict[str, Counter[str]] = {"sent": Counter(), "got": Counter()}
    for line in lines:
        event, message_id = line.split(" ", 1)
        ids[event][message_id] += 1
    assert ids["sent"].total() >= 3 * processes
    assert ids["got"] == ids["sent"] and set(ids["sent"].values()) == {1}, (
        "each is handed out once, and no other message is"
    )
