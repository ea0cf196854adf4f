"""The lines of `timeball cluster status`."""

from __future__ import annotations

from timeball.cli.cluster import lines
from timeball.monitoring.figures import ReplicaGroup, ReplicaState

LEADER = ReplicaState("a", "a/1", "leader", True, 1_200, 1_200, 1_200, 0, 0.0, "0.1.0", 1_000)
GONE = ReplicaState("b", "b/1", "gone", True)


def test_a_group_is_a_table_and_its_problems() -> None:
    group = ReplicaGroup("g1", "a", 7, 2, [LEADER, GONE], "a hand-over to b", ["replica b is missing"])
    first, headings, leader, gone, asked, problem = lines(group, 3_500)
    assert first == "group g1: leader a, epoch 7"
    assert headings.split()[:3] == ["node", "role", "log"]
    assert leader.split() == [
        "a",
        "leader",
        "1,200",
        "1,200",
        "1,200",
        "0",
        "+0.0",
        "ms",
        "0.1.0",
        "2.500",
        "s",
    ]
    assert gone.split() == ["b", "gone"]
    assert (asked.strip(), problem.strip()) == ("asked for: a hand-over to b", "! replica b is missing")


def test_a_group_without_a_leader_says_so() -> None:
    assert next(lines(ReplicaGroup("g1", "", 7, 2, [], "", []), 0)) == "group g1: no leader"
