"""`timeball cluster drain` without a cluster. tests/cluster/test_drain.py has two groups."""

from __future__ import annotations

from tests.cli.in_process import run_here

from timeball.cli.cluster import _drain_sentence
from timeball.model.answers import Drained


def test_a_broker_that_is_in_no_cluster_is_not_drained(flight: str) -> None:
    result = run_here("cluster", "drain", "--group", "g2", "--to", "g1", "--endpoint", flight)
    assert result.returncode == 2 and "belongs to no cluster" in result.stderr
    assert run_here("cluster", "drain", "--group", "g2", "--endpoint", flight).returncode == 2, (
        "--to is missing"
    )


def test_the_outcome_and_the_plan_of_a_drain_are_sentences() -> None:
    result = Drained(group="g2", heir="g1", since_ms=1, moved=12_000, moving=0, waiting=3, is_done=True)
    assert _drain_sentence(result, dry_run=False) == (
        "group g2 is drained to g1: 12,000 messages handed over; 3 stay, due within a minute or for its consumers"
    )
    assert _drain_sentence(result, dry_run=True) == "group g2 would hand over to g1: 3 messages wait"
