"""The metrics of a replica."""

from __future__ import annotations

import re
from pathlib import Path

from timeball.monitoring.replica_figures import PeerFigures, ReplicaFigures
from timeball.monitoring.replica_metrics import ROLES, collect


def samples(figures: ReplicaFigures) -> dict[tuple[str, str], float]:
    found = {}
    for metric in collect(figures):
        for sample in metric.samples:
            about = sample.labels.get("node", sample.labels.get("role", ""))
            found[sample.name.removeprefix("timeball_cluster_"), about] = sample.value
    return found


def test_a_leader_shows_its_replicas() -> None:
    peers = {"b": PeerFigures("b/1", 90, 250.0), "c": PeerFigures("c/1", 100)}
    found = samples(
        ReplicaFigures(
            "g1", "a/1", "leader", "a", epoch=4, promised=4, log_seq=100, committed_seq=95, peers=peers
        )
    )
    assert found["role", "leader"] == 1 and sum(found["role", role] for role in ROLES) == 1
    assert (found["epoch", ""], found["has_leader", ""], found["commit_lag_rows", ""]) == (4, 1, 5)
    assert (found["replica_lag_rows", "b"], found["replica_lag_rows", "c"]) == (10, 0)
    assert found["clock_offset_seconds", "b"] == 0.25 and ("clock_offset_seconds", "c") not in found


def test_a_follower_shows_how_far_it_has_applied() -> None:
    found = samples(
        ReplicaFigures(
            "g1", "b/1", "follower", "", promised=4, log_seq=100, committed_seq=120, applied_seq=70
        )
    )
    assert (found["apply_lag_rows", ""], found["commit_lag_rows", ""], found["has_leader", ""]) == (30, 0, 0)
    assert not any(name == "replica_lag_rows" for name, _ in found)


def test_the_page_names_every_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    peers = {"b": PeerFigures("b/1", 90, 250.0)}
    metrics = {metric.name for metric in collect(ReplicaFigures("g1", "a/1", "leader", "a", peers=peers))}
    assert set(re.findall(r"^\| `(timeball_cluster_\w+)", page, re.M)) == metrics
