"""Operations of operators, with a coordinator in memory. The nodes are its entries, the leader a task of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace
from tests.cluster.fake_nodes import group_of_three, join
from tests.cluster.worlds import RECORD, World, make_group, next_record, world_of

from timeball.cluster.coordination.coordinator import (
    AllGroups,
    Coordinator,
    GroupView,
    Lease,
    OperatorRequest,
)
from timeball.cluster.operations import Operations, survey
from timeball.cluster.protocol.replica import Record
from timeball.model.errors import Conflict, NotFound, RequestError, TimeballError, Unavailable
from timeball.monitoring.figures import PeerFigures, ReplicaFigures, ReplicaGroup

Scenario = Callable[[World, Operations], Awaitable[None]]
WAIT_S = 60.0  # longer than any operation of these tests takes


def run(scenario: Scenario) -> None:
    """Run a scenario with a new cluster in memory."""

    async def within() -> None:
        async with world_of(None) as world:
            await scenario(world, Operations(world.coordinator("operator"), "g1"))

    asyncio.run(within())


async def carry_out_next_request(node: tuple[Coordinator, Lease]) -> None:
    """Carry out the next request, as the leader of the group does."""
    coordinator, lease = node
    while (view := await coordinator.read("g1")).pending_request is None:
        await coordinator.wait_for_change(view.as_of, WAIT_S)
    assert view.record is not None
    request, record = view.pending_request.request, view.record
    if request.replicas:
        await coordinator.change("g1", view.revision, replace(record, replicas=request.replicas))
    else:
        successor = replace(record, epoch=record.epoch + 1, leader=f"{request.hand_over_to}/1")
        await coordinator.hand_over("g1", view.revision, successor, lease)
    await coordinator.remove_request("g1", view.pending_request)


# ---- the first record ---------------------------------------------------------------------------------------------


def test_a_new_group_begins_in_the_greatest_epoch_that_its_replicas_have_promised_and_only_once() -> None:
    async def scenario(world: World, operations: Operations) -> None:
        for replica, promised in (("a/1", 0), ("b/2", 7), ("c/1", 3)):
            await join(world, replica, promised=promised, log_seq=5)
        revision, record = await operations.plan_first(["a", "b", "c"], WAIT_S)
        assert record == Record(7, "", ("a/1", "b/2", "c/1"))
        await operations.begin(revision, record)
        with pytest.raises(Conflict, match="has a record already"):
            await operations.plan_first(["a"], WAIT_S)
        with pytest.raises(Conflict, match="meanwhile"):
            await operations.begin(revision, replace(record, replicas=("a/1",)))

    run(scenario)


def test_a_repeated_init_with_the_same_nodes_keeps_the_record() -> None:
    """A deployment repeats its commands. The record stays, also with another leader."""

    async def scenario(world: World, operations: Operations) -> None:
        for replica in ("a/1", "b/1", "c/1"):
            await join(world, replica)
        revision, record = await operations.plan_first(["a", "b", "c"], WAIT_S)
        await operations.begin(revision, record)
        await operations.begin(revision, record)
        led = replace(record, epoch=1, leader="b/1")
        view = await world.coordinator("b").read("g1")
        await world.coordinator("b").change("g1", view.revision, led)
        revision, repeated = await operations.plan_first(["c", "b", "a"], WAIT_S)
        await operations.begin(revision, repeated)
        assert repeated == led == (await operations._group_record())[1]

    run(scenario)


def test_a_record_of_a_restored_etcd_is_renewed() -> None:
    """It is older than a promise, so no replica can lead by it."""

    async def scenario(world: World, operations: Operations) -> None:
        view = await make_group(world.coordinator("maker"))
        assert view.record is not None
        for replica, promised in (("a/1", 7), ("b/1", 9), ("c/1", 9)):
            await join(world, replica, promised=promised, log_seq=5)
        (group,) = await survey(world.coordinator("operator"))
        assert group.leader == "" and group.problems[0] == (
            "etcd has an old record of group g1 (epoch 3, but a replica has promised 9), as after a restore of etcd "
            "from a copy. If its replicas were a,b,c: 'timeball cluster init --group g1 --nodes a,b,c' renews it"
        )
        revision, record = await operations.plan_first(["a", "b", "c"], WAIT_S)
        assert record == Record(9, "", ("a/1", "b/1", "c/1"), view.record.generation + 1)
        await operations.begin(revision, record)
        assert (await operations._group_record())[1] == record
        assert await operations.plan_first(["a", "b", "c"], WAIT_S) == (0, record), "it is renewed once"

    run(scenario)


def test_a_record_with_an_older_set_is_renewed_with_the_last_one() -> None:
    """etcd was restored from a copy that is older than the last change of the set, in the same epoch."""

    async def scenario(world: World, operations: Operations) -> None:
        view = await make_group(world.coordinator("maker"))
        assert view.record is not None
        epoch, last = view.record.epoch, ("a/1", "b/1", "d/1")
        for replica in last:
            await join(world, replica, promised=epoch, log_seq=5, generation=7, members=last)
        await join(world, "c/1", promised=epoch, log_seq=5, generation=1, members=view.record.replicas)
        (group,) = await survey(world.coordinator("operator"))
        assert group.problems[0] == (
            "etcd has an old record of group g1 (set 1 of its replicas, but one of them knows set 7), as after a "
            "restore of etcd from a copy. If its replicas were a,b,d: 'timeball cluster init --group g1 --nodes "
            "a,b,d' renews it"
        )
        revision, record = await operations.plan_first(["a", "b", "d"], WAIT_S)
        assert record == Record(epoch, "", last, 8), "all replicas accept it"
        await operations.begin(revision, record)
        assert await operations.plan_first(["a", "b", "d"], WAIT_S) == (0, record), "it is renewed once"
        assert (await operations.force("a"))[1].generation == 9

    run(scenario)


def test_the_problem_of_a_lost_record_names_the_last_set() -> None:
    async def scenario(world: World) -> None:
        for replica in ("a/1", "b/1", "d/1", "e/1"):
            await join(world, replica, generation=7, members=("a/1", "b/1", "d/1"))

    (group,) = groups(scenario)
    assert "'timeball cluster init --group g1 --nodes a,b,d' makes it" in group.problems[0]


def test_a_change_of_the_set_that_has_not_ended_is_a_problem() -> None:
    async def scenario(world: World) -> None:
        nodes = await group_of_three(world)
        coordinator, _ = nodes["a"]
        view = await coordinator.read("g1")
        assert view.record is not None
        changed = replace(view.record, replicas=("a/1", "b/1"), generation=2, former=view.record.replicas)
        assert (await coordinator.change("g1", view.revision, changed)).won

    (group,) = groups(scenario)
    assert "the change of the replicas waits for a majority of a, b, c to store it" in group.problems


class ElectionMeanwhile(Coordinator):
    """A coordinator before whose second request the node b is elected in epoch 5."""

    node: tuple[Coordinator, Lease]  # b
    requests = 0

    async def count(self) -> None:
        """Count a request, and elect b before the second one."""
        self.requests += 1
        if self.requests != 2:
            return
        coordinator, lease = self.node
        view = await coordinator.read("g1")
        assert (await coordinator.lead("g1", view.revision, next_record(view, "b"), lease)).won
        await coordinator.report(ReplicaFigures("g1", "b/1", "sealing", "", promised=5), lease)

    async def read(self, group: str) -> GroupView:
        await self.count()
        return await super().read(group)

    async def read_all(self) -> AllGroups:
        await self.count()
        return await super().read_all()

    async def reports(self) -> dict[str, ReplicaFigures]:
        await self.count()
        return await super().reports()


def test_an_election_during_a_plan_is_not_taken_for_a_restored_etcd() -> None:
    async def scenario(world: World, operations: Operations) -> None:
        nodes = await group_of_three(world)
        leader, lease = nodes["a"]
        await leader.resign("g1", lease)
        coordinator = ElectionMeanwhile(world.store(), world.clock, cluster=world.cluster, node="operator")
        coordinator.node = nodes["b"]
        revision, record = await Operations(coordinator, "g1").plan_first(["a", "b", "c"], WAIT_S)
        assert (revision, record.epoch, record.leader) == (0, 5, "b/1")

    run(scenario)


def test_an_election_during_a_survey_is_not_taken_for_a_restored_etcd() -> None:
    async def scenario(world: World, operations: Operations) -> None:
        nodes = await group_of_three(world)
        leader, lease = nodes["a"]
        await leader.resign("g1", lease)
        coordinator = ElectionMeanwhile(world.store(), world.clock, cluster=world.cluster, node="operator")
        coordinator.node = nodes["b"]
        [group] = await survey(coordinator)
        assert not [problem for problem in group.problems if "etcd" in problem]

    run(scenario)


def test_a_node_that_registers_later_is_waited_for() -> None:
    async def scenario(world: World, operations: Operations) -> None:
        await join(world, "a/1")
        plan = asyncio.create_task(operations.plan_first(["a", "b"], WAIT_S))
        await asyncio.sleep(0)
        await join(world, "b/1")
        assert (await plan)[1].replicas == ("a/1", "b/1")

    run(scenario)


def test_an_etcd_that_is_being_started_is_waited_for() -> None:
    async def scenario(world: World, operations: Operations) -> None:
        await join(world, "a/1")
        memory = world.memory
        memory.is_down = True
        with pytest.raises(Unavailable):
            await operations.plan_first(["a"], 0.0)
        plan = asyncio.create_task(operations.plan_first(["a"], WAIT_S))
        for _ in range(100):  # far more turns of the loop than a failure needs
            await asyncio.sleep(0)
        assert not plan.done()
        memory.is_down = False
        assert (await plan)[1].replicas == ("a/1",)

    run(scenario)


def test_a_node_that_does_not_register_is_named() -> None:
    async def scenario(world: World, operations: Operations) -> None:
        await join(world, "a/1")
        with pytest.raises(Unavailable, match="not registered with etcd: b; start"):
            await operations.plan_first(["a", "b"], 0.0)

    run(scenario)


def test_a_group_of_nodes_that_do_not_fit_together_is_refused() -> None:
    async def scenario(world: World, operations: Operations) -> None:
        await join(world, "a/1", log_seq=100)
        await join(world, "b/1")
        await join(world, "x/1", group="g2")
        with pytest.raises(Conflict, match="a has data, b has none"):
            await operations.plan_first(["a", "b"], WAIT_S)
        with pytest.raises(Conflict, match="node x keeps group g2"):
            await operations.plan_first(["b", "x"], WAIT_S)
        with pytest.raises(RequestError, match="once"):
            await operations.plan_first(["b", "b"], WAIT_S)

    run(scenario)


# ---- changes ------------------------------------------------------------------------------------------------------


def test_a_replica_is_added_and_removed_by_the_leader() -> None:
    async def scenario(world: World, operations: Operations) -> None:
        nodes = await group_of_three(world)
        await join(world, "d/1")
        for plan, replicas in (
            (operations.plan_add, ("a/1", "b/1", "c/1", "d/1")),
            (operations.plan_remove, ("a/1", "b/1", "c/1")),
        ):
            view, request = await plan("d")
            assert request == OperatorRequest(replicas)
            _, view = await asyncio.gather(
                carry_out_next_request(nodes["a"]), operations.carry_out(view, request, WAIT_S)
            )
            assert view.record is not None and view.record.replicas == replicas
            assert (await nodes["a"][0].read("g1")).pending_request is None

    run(scenario)


def test_a_new_incarnation_takes_the_place_of_the_old_one() -> None:
    async def scenario(world: World, operations: Operations) -> None:
        await group_of_three(world)
        await join(world, "b/2")
        assert (await operations.plan_add("b"))[1] == OperatorRequest(("a/1", "c/1", "b/2"))

    run(scenario)


def test_a_hand_over_without_a_name_goes_to_the_follower_with_the_longest_log() -> None:
    async def scenario(world: World, operations: Operations) -> None:
        nodes = await group_of_three(world)
        view, request = await operations.plan_hand_over("")
        assert request == OperatorRequest(hand_over_to="b")
        operation = asyncio.create_task(operations.carry_out(view, request, WAIT_S))
        await carry_out_next_request(nodes["a"])
        assert not operation.done(), "the successor does not hold the group yet"
        coordinator, lease = nodes["b"]
        assert await coordinator.hold("g1", lease)
        assert (await operation).leader == "b"

    run(scenario)


@pytest.mark.parametrize(
    ("plan", "name", "error", "message"),
    [
        ("plan_add", "d", NotFound, "node d is not registered"),
        ("plan_add", "x", Conflict, "node x keeps group g2"),
        ("plan_remove", "a", Conflict, "hand-over --to b' first"),
        ("plan_hand_over", "d", NotFound, "these are: a, b, c"),
    ],
)
def test_an_impossible_change_is_refused(
    plan: str, name: str, error: type[TimeballError], message: str
) -> None:
    async def scenario(world: World, operations: Operations) -> None:
        await group_of_three(world)
        await join(world, "x/1", group="g2")
        with pytest.raises(error, match=message):
            await getattr(operations, plan)(name)

    run(scenario)


@pytest.mark.parametrize(("plan", "name"), [("plan_add", "c"), ("plan_remove", "d"), ("plan_hand_over", "a")])
def test_a_change_that_the_group_has_already_needs_no_request(plan: str, name: str) -> None:
    async def scenario(world: World, operations: Operations) -> None:
        await group_of_three(world)
        assert (await getattr(operations, plan)(name))[1] is None

    run(scenario)


def test_a_request_that_takes_too_long_is_withdrawn_with_the_reason() -> None:
    async def scenario(world: World, operations: Operations) -> None:
        nodes = await group_of_three(world)
        await join(world, "d/1")
        view, request = await operations.plan_add("d")
        assert request is not None
        with pytest.raises(Unavailable, match="taken back: node d is a learner"):
            await operations.carry_out(view, request, 0.0)
        assert (await nodes["a"][0].read("g1")).pending_request is None

    run(scenario)


def test_an_interrupted_command_withdraws_its_request() -> None:
    async def scenario(world: World, operations: Operations) -> None:
        nodes = await group_of_three(world)
        view, request = await operations.plan_hand_over("b")
        assert request is not None
        operation = asyncio.create_task(operations.carry_out(view, request, WAIT_S))
        coordinator, _ = nodes["a"]
        while (await coordinator.read("g1")).pending_request is None:
            await asyncio.sleep(0)
        with pytest.raises(Conflict, match="a hand-over to b is asked for already"):
            await operations.plan_remove("c")
        operation.cancel()
        await asyncio.gather(operation, return_exceptions=True)
        assert (await coordinator.read("g1")).pending_request is None

    run(scenario)


def test_a_change_is_refused_without_a_record_or_a_leader() -> None:
    async def scenario(world: World, operations: Operations) -> None:
        await join(world, "d/1")
        with pytest.raises(NotFound, match="no record yet"):
            await operations.plan_add("d")
        await make_group(world.coordinator("maker"))
        with pytest.raises(Unavailable, match="no leader"):
            await operations.plan_add("d")

    run(scenario)


def test_a_request_is_described_by_its_nodes() -> None:
    assert OperatorRequest(("a/1", "b/7")).describe() == "the set a, b"


# ---- force --------------------------------------------------------------------------------------------------------


def test_force_makes_one_replica_the_group_when_no_node_holds_it() -> None:
    async def scenario(world: World, operations: Operations) -> None:
        await make_group(world.coordinator("maker"))
        await join(world, "b/1", promised=9)
        before, record = await operations.force("b")
        assert (before, record) == (RECORD, Record(9, "", ("b/1",), 2))
        assert (await world.coordinator("x").read("g1")).record == record

    run(scenario)


def test_force_is_refused_for_a_replica_outside_the_record_and_for_a_missing_node() -> None:
    async def scenario(world: World, operations: Operations) -> None:
        await make_group(world.coordinator("maker"))
        await join(world, "b/2")
        with pytest.raises(Conflict, match="replica b/2 is not in the record"):
            await operations.force("b")
        with pytest.raises(NotFound, match="node c does not run"):
            await operations.force("c")

    run(scenario)


def test_force_waits_until_no_node_holds_the_group() -> None:
    async def scenario(world: World, operations: Operations) -> None:
        nodes = await group_of_three(world)
        coordinator, lease = nodes["a"]
        view = await coordinator.read("g1")
        assert not (await coordinator.force("g1", view.revision, replace(RECORD, replicas=("b/1",)))).won
        forcing = asyncio.create_task(operations.force("b"))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not forcing.done()
        await coordinator.resign("g1", lease)
        assert (await forcing)[1].replicas == ("b/1",)

    run(scenario)


# ---- the survey ---------------------------------------------------------------------------------------------------


def groups(scenario: Callable[[World], Awaitable[object]]) -> list[ReplicaGroup]:
    """Run a scenario with a new cluster in memory. Returns the survey after it."""

    async def within() -> list[ReplicaGroup]:
        async with world_of(None) as world:
            await scenario(world)
            return await survey(world.coordinator("operator"))

    return asyncio.run(within())


def test_a_healthy_group_has_no_problems() -> None:
    (group,) = groups(group_of_three)
    assert (group.leader, group.epoch, group.problems) == ("a", 4, [])
    assert [(replica.node, replica.role, replica.lag_rows, replica.clock_offset_ms) for replica in group.replicas] == [
        ("a", "leader", 0, 0.0), ("b", "follower", 0, 0.2), ("c", "follower", 1, -0.4),
    ]  # fmt: skip


def test_the_problem_of_a_node_without_a_record_names_the_command() -> None:
    (group,) = groups(lambda world: join(world, "a/1", group="g7"))
    assert (group.group, group.leader) == ("g7", "")
    assert group.problems == [
        "group g7 has no record yet: 'timeball cluster init --group g7 --nodes a' makes it"
    ]


def test_missing_replicas_are_problems() -> None:
    async def scenario(world: World) -> None:
        await make_group(world.coordinator("maker"))
        await join(world, "a/1")

    (group,) = groups(scenario)
    assert group.leader == "" and [replica.role for replica in group.replicas] == ["follower", "gone", "gone"]
    problems = " | ".join(group.problems)
    assert "no leader" in problems and "1 of 3 replicas run, and 2 are needed" in problems
    assert "replica b (b/1) is missing" in problems


def test_a_learner_a_lag_a_wrong_clock_and_another_version_are_problems() -> None:
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


def test_a_replica_that_has_stepped_down_is_a_problem_with_its_reason() -> None:
    async def scenario(world: World) -> None:
        nodes = await group_of_three(world)
        coordinator, lease = nodes["c"]
        report = (await coordinator.reports())["c"]
        problem = "its disk has not answered for 4.1 s"
        await coordinator.report(replace(report, role="stopped", problem=problem), lease)

    (group,) = groups(scenario)
    assert group.replicas[-1].role == "stopped"
    assert group.problems == ["replica c has stepped down: its disk has not answered for 4.1 s"]


def test_a_sealing_candidate_is_not_shown_as_leader() -> None:
    (group,) = groups(lambda world: group_of_three(world, role="sealing"))
    assert group.leader == "" and "no leader" in group.problems[0]
