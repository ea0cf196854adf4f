"""A cluster as operators see it, and the sentences about what is wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tests.cluster.fake_nodes import group_of_three, join
from tests.cluster.worlds import World, made, world_of

from timeball.cluster.operations import survey
from timeball.monitoring.figures import PeerFigures, ReplicaGroup


def groups(scenario: Callable[[World], Awaitable[object]]) -> list[ReplicaGroup]:
    async def within() -> list[ReplicaGroup]:
        async with world_of(None) as world:
            await scenario(world)
            return await survey(world.coordinator("operator"))

    return asyncio.run(within())


def test_a_healthy_group_has_no_problems() -> None:
    (group,) = groups(group_of_three)
    assert (group.leader, group.epoch, group.problems) == ("a", 4, [])
    assert [(each.node, each.role, each.lag_rows, each.clock_offset_ms) for each in group.replicas] == [
        ("a", "leader", 0, 0.0), ("b", "follower", 0, 0.2), ("c", "follower", 1, -0.4),
    ]  # fmt: skip


def test_a_node_without_a_record_is_told_how_to_begin() -> None:
    (group,) = groups(lambda world: join(world, "a/1", group="g7"))
    assert (group.group, group.leader) == ("g7", "")
    assert group.problems == [
        "group g7 has no record yet: 'timeball cluster init --group g7 --nodes a' makes it"
    ]


def test_a_group_of_dead_nodes_says_what_is_missing() -> None:
    async def scenario(world: World) -> None:
        await made(world.coordinator("maker"))
        await join(world, "a/1")

    (group,) = groups(scenario)
    assert group.leader == "" and [each.role for each in group.replicas] == ["follower", "gone", "gone"]
    said = " | ".join(group.problems)
    assert "no leader" in said and "1 of 3 replicas run, and 2 are needed" in said
    assert "replica b (b/1) is missing" in said


def test_a_learner_a_lag_a_clock_and_a_version_are_told() -> None:
    async def scenario(world: World) -> None:
        peers = {"b": PeerFigures("b/1", 5, 1_900.0), "d": PeerFigures("d/1", 4, 0.0)}
        await group_of_three(world, peers=peers, log_seq=2_000_005)
        await join(world, "d/1", version="2")

    (group,) = groups(scenario)
    assert group.replicas[-1].role == "follower" and not group.replicas[-1].is_in_record
    assert group.problems == [
        "replica b is 2,000,000 rows behind",
        "the clock of b is +1.9 s off the leader's: look at its NTP",
        "replica c is not connected with the leader: look at its --replication-port",
        "node d is a learner and counts for nothing yet: 'timeball cluster add-replica d' makes it a replica",
        "replicas run versions 1, 2: finish the upgrade",
    ]


def test_a_sealing_candidate_is_not_shown_as_leader() -> None:
    (group,) = groups(lambda world: group_of_three(world, role="sealing"))
    assert group.leader == "" and "no leader" in group.problems[0]
