"""The lines of `timeball cluster status`."""

from __future__ import annotations

from timeball.cli.cluster import lines
from timeball.monitoring.figures import ReplicaGroup, ReplicaState

LEADER = ReplicaState(
    node="a", replica="a/1", role="leader", is_in_record=True, log_seq=1_200, committed_seq=1_200, applied_seq=1_200,
    lag_rows=0, clock_offset_ms=0.0, version="0.1.0", since_ms=1_000,
)  # fmt: skip
GONE = ReplicaState("b", "b/1", "gone", True)


def test_a_group_is_shown_as_a_table_with_its_problems() -> None:
    group = ReplicaGroup("g1", "a", 7, 2, [LEADER, GONE], "a hand-over to b", ["replica b is missing"])
    first, headings, leader, gone, request, problem = lines(group, 3_500)
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
    assert (request.strip(), problem.strip()) == ("asked for: a hand-over to b", "! replica b is missing")


def test_a_group_without_a_leader_has_a_line_that_says_so() -> None:
    assert next(lines(ReplicaGroup("g1", "", 7, 2, [], "", []), 0)) == "group g1: no leader"
