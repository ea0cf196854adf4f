"""The contract of coordinators: the same tests run in memory and with real etcd."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.bounds import BOUND_S
from tests.cluster.memory_store import MemoryStore
from tests.cluster.worlds import LONG_TTL_MS, RECORD, TTL_MS, World, led, make_group, next_record, world_of

from timeball.cluster.coordination.coordinator import Coordinator, Node, OperatorRequest
from timeball.cluster.coordination.store import Delete, Outcome, Put
from timeball.model.errors import LeaseLost, SetupError
from timeball.monitoring.figures import PeerFigures, ReplicaFigures

Scenario = Callable[[World], Awaitable[None]]

# One process of those that share the tests starts etcd.
pytestmark = pytest.mark.xdist_group("etcd")


@pytest.fixture(params=["memory", "etcd"])
def run(request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    endpoints = request.getfixturevalue("etcd").endpoints if request.param == "etcd" else None

    async def within(scenario: Scenario) -> None:
        async with world_of(endpoints) as world:
            await scenario(world)

    return lambda scenario: asyncio.run(within(scenario))


Run = Callable[[Scenario], None]


def test_one_of_several_first_records_wins(run: Run) -> None:
    async def scenario(world: World) -> None:
        nodes = [world.coordinator(name) for name in "abcd"]
        before = await nodes[0].read("g1")
        assert (before.record, before.revision, before.holder) == (None, 0, None)
        records = [replace(RECORD, leader=f"{name}/1") for name in "abcd"]
        swaps = await asyncio.gather(*(node.change("g1", 0, record) for node, record in zip(nodes, records)))
        (winner,) = (swap.view for swap in swaps if swap.won)
        assert all(swap.view.record == winner.record for swap in swaps)
        assert (await nodes[3].read("g1")).record == winner.record

    run(scenario)


def test_one_of_many_candidates_leads_an_epoch(run: Run) -> None:
    async def scenario(world: World) -> None:
        await make_group(world.coordinator("maker"))
        names = [f"n{number}" for number in range(8)]
        nodes = [world.coordinator(name) for name in names]
        leases = await asyncio.gather(*(node.grant(LONG_TTL_MS) for node in nodes))
        for epoch in range(4, 10):
            views = await asyncio.gather(*(node.read("g1") for node in nodes))
            swaps = await asyncio.gather(*(
                node.lead("g1", view.revision, next_record(view, name), lease)
                for node, name, view, lease in zip(nodes, names, views, leases)
            ))  # fmt: skip
            (won,) = (number for number, swap in enumerate(swaps) if swap.won)
            holder = swaps[won].view.holder
            assert holder == (names[won], leases[won].id, swaps[won].view.revision), "put at one instant"
            for swap in swaps:
                assert swap.view.record == replace(RECORD, epoch=epoch, leader=f"{names[won]}/1")
                assert swap.view.holder == holder
            await nodes[won].resign("g1", leases[won])

    run(scenario)


def test_a_swap_of_an_old_revision_fails(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = world.coordinator("a"), world.coordinator("b")
        old = await make_group(a)
        lease = await b.grant(LONG_TTL_MS)
        current = (await b.change("g1", old.revision, replace(RECORD, generation=2))).view
        swap = await b.lead("g1", old.revision, next_record(old, "b"), lease)
        assert not swap.won and swap.view.record == current.record and swap.view.holder is None
        assert not (await b.change("g1", old.revision, replace(RECORD, generation=9))).won
        assert not (await b.change("g1", 0, replace(RECORD, generation=9))).won
        assert (await b.lead("g1", current.revision, next_record(current, "b"), lease)).won

    run(scenario)


def test_a_swap_of_a_held_group_fails(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = world.coordinator("a"), world.coordinator("b")
        held, _ = await led(a, "a")
        lease = await b.grant(LONG_TTL_MS)
        for displaces in ("", "c"):
            swap = await b.lead("g1", held.revision, next_record(held, "b"), lease, displaces=displaces)
            assert not swap.won
            assert (swap.view.record, swap.view.holder) == (held.record, held.holder)
        assert not await b.hold("g1", lease)

    run(scenario)


def test_one_of_two_swaps_that_displace_the_same_holder_wins(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b, c = (world.coordinator(name) for name in "abc")
        held, _ = await led(a, "a")
        lease_b, lease_c = await b.grant(LONG_TTL_MS), await c.grant(LONG_TTL_MS)
        calls = (
            b.lead("g1", held.revision, next_record(held, "b"), lease_b, displaces="a"),
            c.lead("g1", held.revision, next_record(held, "c"), lease_c, displaces="a"),
        )
        swap_b, swap_c = await asyncio.gather(*calls)
        assert swap_b.won != swap_c.won
        assert swap_b.view.holder == swap_c.view.holder
        # The loser tries again with the newest revision, but still names a holder that is displaced already.
        view = swap_b.view
        loser, name, lease = (c, "c", lease_c) if swap_b.won else (b, "b", lease_b)
        assert not (await loser.lead("g1", view.revision, next_record(view, name), lease, displaces="a")).won

    run(scenario)


def test_one_of_two_leases_holds_a_group_without_a_holder(run: Run) -> None:
    """A group is in this state after a hand-over: the record names a successor that holds no key yet."""

    async def scenario(world: World) -> None:
        a, b = world.coordinator("a"), world.coordinator("b")
        await make_group(a)
        lease_a, lease_b = await a.grant(LONG_TTL_MS), await b.grant(LONG_TTL_MS)
        held = await asyncio.gather(a.hold("g1", lease_a), b.hold("g1", lease_b))
        assert sorted(held) == [False, True]
        holder = (await a.read("g1")).holder
        assert holder is not None and holder.node == ("a" if held[0] else "b")
        winner, lease = (a, lease_a) if held[0] else (b, lease_b)
        assert await winner.hold("g1", lease), "a second time, too"

    run(scenario)


def test_keys_bound_to_a_lease_end_with_it(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = world.coordinator("a"), world.coordinator("b")
        view, lease = await led(a, "a", TTL_MS)
        await a.register(Node("a"), lease)

        async def is_gone() -> bool:
            return (await b.read("g1")).holder is None and "a" not in await b.nodes()

        await world.pass_time(lease.ttl_ms, is_gone)
        after = await b.read("g1")
        assert (after.record, after.revision) == (view.record, view.revision)
        for call in (
            a.renew(lease),
            a.lead("g1", view.revision, next_record(view, "a"), lease),
            a.hold("g1", lease),
            a.register(Node("a"), lease),
        ):
            with pytest.raises(LeaseLost):
                await call
        assert (await a.read("g1")).record == view.record
        lease_b = await b.grant(LONG_TTL_MS)
        assert (await b.lead("g1", view.revision, next_record(view, "b"), lease_b)).won

    run(scenario)


def test_a_renewed_lease_keeps_its_id_and_has_a_later_end(run: Run) -> None:
    async def scenario(world: World) -> None:
        a = world.coordinator("a")
        lease = await a.grant(LONG_TTL_MS)
        assert lease.ttl_ms >= LONG_TTL_MS
        assert lease.sent_ms <= world.clock.boot_ms() < lease.ends_ms < lease.sent_ms + lease.ttl_ms
        if world.endpoints is None:
            world.clock.advance(30_000)  # type: ignore[attr-defined]
        renewed = await a.renew(lease)
        assert renewed.id == lease.id and renewed.ttl_ms == lease.ttl_ms and renewed.sent_ms >= lease.sent_ms

    run(scenario)


def test_a_revoked_lease_deletes_its_keys_at_once(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = world.coordinator("a"), world.coordinator("b")
        _, lease = await led(a, "a")
        await a.register(Node("a"), lease)
        await a.revoke(lease)
        assert (await b.read("g1")).holder is None and not await b.nodes()
        await a.revoke(lease)  # a second time, as after a lost answer
        with pytest.raises(LeaseLost):
            await a.renew(lease)

    run(scenario)


def test_resign_releases_a_group_only_for_the_lease_that_holds_it(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = world.coordinator("a"), world.coordinator("b")
        view, lease = await led(a, "a")
        await b.resign("g1", await b.grant(LONG_TTL_MS))
        assert (await b.read("g1")).holder == view.holder
        await a.resign("g1", lease)
        assert (await b.read("g1")).holder is None
        assert (await a.renew(lease)).id == lease.id

    run(scenario)


def test_a_hand_over_swaps_the_record_and_releases_the_group(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b, c = (world.coordinator(name) for name in "abc")
        view, lease = await led(a, "a")
        record = next_record(view, "b")
        assert not (await c.hand_over("g1", view.revision, record, await c.grant(LONG_TTL_MS))).won
        swap = await a.hand_over("g1", view.revision, record, lease)
        assert swap.won and swap.view.record == record and swap.view.holder is None
        assert await b.hold("g1", await b.grant(LONG_TTL_MS))
        assert not (await a.hand_over("g1", view.revision, next_record(view, "c"), lease)).won

    run(scenario)


def test_a_change_of_the_replicas_keeps_the_holder(run: Run) -> None:
    async def scenario(world: World) -> None:
        a = world.coordinator("a")
        view, _ = await led(a, "a")
        assert view.record is not None
        fewer = replace(view.record, replicas=RECORD.replicas[:2], generation=2)
        swap = await a.change("g1", view.revision, fewer)
        assert swap.won and swap.view.record == fewer and swap.view.holder == view.holder
        assert not (await a.change("g1", view.revision, replace(view.record, generation=3))).won
        assert (await a.read("g1")).record == fewer

    run(scenario)


def test_a_repeated_swap_after_a_lost_answer_succeeds_only_for_its_node(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = world.coordinator("a", repeating=True), world.coordinator("b", repeating=True)
        view, lease = await led(a, "a")  # makes a record, then leads: both twice
        assert view.record is not None and view.record.epoch == RECORD.epoch + 1
        changed = await a.change("g1", view.revision, replace(view.record, generation=2))
        assert changed.won
        # The loser does not take the winner's key for its own success.
        lease_b = await b.grant(LONG_TTL_MS)
        assert not (await b.lead("g1", view.revision, next_record(view, "b"), lease_b, displaces="a")).won
        handed = await a.hand_over("g1", changed.view.revision, next_record(changed.view, "b"), lease)
        assert handed.won and handed.view.record == next_record(changed.view, "b")
        assert await b.hold("g1", lease_b)

    run(scenario)


def test_one_of_two_processes_with_the_same_name_wins(run: Run) -> None:
    """Each of the two processes has its own lease."""

    async def scenario(world: World) -> None:
        processes = world.coordinator("a"), world.coordinator("a")
        free = await make_group(processes[0])
        swaps = await asyncio.gather(*[
            process.lead("g1", free.revision, next_record(free, "a"), await process.grant(LONG_TTL_MS))
            for process in processes
        ])  # fmt: skip
        assert sorted(swap.won for swap in swaps) == [False, True]

    run(scenario)


def test_all_groups_of_one_cluster_are_read_in_one_request(run: Run) -> None:
    async def scenario(world: World) -> None:
        a = world.coordinator("a")
        view, _ = await led(a, "a")
        await make_group(a, "g2")
        views, as_of = await a.read_all()
        assert as_of == (await a.read("g1")).as_of
        assert sorted(views) == ["g1", "g2"]
        for name, view_of_all in views.items():
            assert view_of_all == dataclasses.replace(await a.read(name), as_of=view_of_all.as_of)
        assert views["g1"].holder == view.holder and views["g2"].holder is None
        other = Coordinator(world.store(), world.clock, cluster=world.cluster + "x", node="a")
        assert (await other.read_all()).views == {}

    run(scenario)


def test_an_address_that_cannot_be_parsed_is_left_out_and_logged_once(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(world: World) -> None:
        a, b = world.coordinator("a"), world.coordinator("b")
        bad = {"replication": "10.0.0.9", "flight": "10.0.0.9:70000", "http": ":80", "grpc": "10.0.0.9:8o81"}
        good = {"remoting": "10.0.0.9:10911"}
        await b.register(Node("b", {**bad, **good}), await b.grant(LONG_TTL_MS))
        for _ in range(2):
            assert (await a.nodes())["b"].addresses == good
        assert len(caplog.messages) == len(bad) and all("node=b" in line for line in caplog.messages)

    run(scenario)


def test_a_change_ends_a_wait(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = world.coordinator("a"), world.coordinator("b")
        await make_group(a)
        seen_by_b = await b.read("g1")

        async def wait_while_the_holder_changes() -> None:
            await b.wait_for_change(seen_by_b.as_of, 0.05)  # opens the watch, and nothing happens
            waiting = asyncio.create_task(b.wait_for_change(seen_by_b.as_of, 60))
            assert await a.hold("g1", await a.grant(LONG_TTL_MS))
            await waiting

        async with asyncio.timeout(30):
            await wait_while_the_holder_changes()
            await b.wait_for_change(seen_by_b.as_of, 60)  # a past change is not waited for
        assert (await b.read("g1")).holder is not None

    run(scenario)


def test_a_wait_in_a_cluster_without_groups_ends_with_the_first_record(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, b = world.coordinator("a"), world.coordinator("b")
        await a.register(Node("a"), await a.grant(LONG_TTL_MS))
        await b.wait_for_change((await b.read_all()).as_of, 0.05)  # opens the watch, and nothing happens
        views, as_of = await b.read_all()
        waiting = asyncio.create_task(b.wait_for_change(as_of, LONG_TTL_MS / 1_000))
        await b.read_all()  # takes longer than a wait that ends at once
        assert views == {} and not waiting.done()
        await make_group(a)
        async with asyncio.timeout(BOUND_S):
            await waiting

    run(scenario)


def test_a_record_that_cannot_be_read_names_its_key(run: Run) -> None:
    async def scenario(world: World) -> None:
        a, store = world.coordinator("a"), world.store()
        key = f"tb/{world.cluster}/state/g1"
        for text in (b"", b"{}", b'{"epoch":"1","leader":"a","replicas":[]}', b"\xff",
                     msgspec.json.encode({**msgspec.to_builtins(RECORD), "witness": 1})):  # fmt: skip
            await store.transact((), [Put(key, text)])
            with pytest.raises(SetupError, match=key):
                await a.read("g1")
        await store.transact((), [Delete(key)])
        assert (await a.read("g1")).record is None

    run(scenario)


@pytest.mark.parametrize("name", ["", "a/b", "-a", "x" * 65, "a b", "ä"])
def test_a_name_that_is_not_one_part_of_a_key_is_refused(name: str) -> None:
    async def scenario() -> None:
        async with world_of(None) as world:
            with pytest.raises(SetupError, match="name"):
                await world.coordinator("a").read(name)
            with pytest.raises(SetupError, match="name"):
                world.coordinator(name)

    asyncio.run(scenario())


# ---- a control: the tests above notice a store whose comparison and write are two steps ------------------------


class ComparesThenWrites(MemoryStore):
    """A faulty store: other transactions come between the comparison and the write."""

    async def transact(self, when: Any, then: Any, otherwise: Any = ()) -> Outcome:
        compared = await super().transact(when, [], [])
        return await super().transact([], then if compared.succeeded else otherwise)


def test_a_store_that_compares_before_it_writes_is_noticed() -> None:
    async def scenario() -> None:
        async with world_of(None) as world:
            view = await make_group(world.coordinator("maker"))
            swaps = []
            for name in "abcd":
                store = ComparesThenWrites(world.memory)
                node = Coordinator(store, world.clock, cluster=world.cluster, node=name)
                lease = await node.grant(LONG_TTL_MS)
                swaps.append(node.lead("g1", view.revision, next_record(view, name), lease))
            assert sum(swap.won for swap in await asyncio.gather(*swaps)) > 1

    asyncio.run(scenario())


def test_a_second_operator_request_is_refused_until_the_first_is_gone(run: Run) -> None:
    async def scenario(world: World) -> None:
        leader, first, second = (world.coordinator(name) for name in ("a", "operator", "another"))
        view, _ = await led(leader, "a")
        leases = [await command.grant(LONG_TTL_MS) for command in (first, second)]
        request, other = OperatorRequest(hand_over_to="b"), OperatorRequest(("a/1", "b/1"))
        swap = await first.put_request("g1", view.revision, request, leases[0])
        pending = swap.view.pending_request
        assert swap.won and pending is not None
        assert (pending.request, pending.lease_id) == (
            request,
            leases[0].id,
        ) and swap.view.record == view.record
        refused = await second.put_request("g1", view.revision, other, leases[1])
        assert not refused.won and refused.view.pending_request == pending
        assert (await leader.read_all()).views["g1"].pending_request == pending
        await first.revoke(leases[0])
        assert (await leader.read("g1")).pending_request is None
        of_other_revision = await second.put_request("g1", view.revision + 1, other, leases[1])
        assert not of_other_revision.won
        assert (await second.put_request("g1", view.revision, other, leases[1])).won

    run(scenario)


def test_only_the_named_operator_request_is_removed(run: Run) -> None:
    async def scenario(world: World) -> None:
        leader, operator = world.coordinator("a"), world.coordinator("operator")
        view, _ = await led(leader, "a")
        request = OperatorRequest(hand_over_to="b")
        swap = await operator.put_request("g1", view.revision, request, await operator.grant(LONG_TTL_MS))
        pending = swap.view.pending_request
        assert pending is not None
        await leader.remove_request("g1", pending._replace(revision=pending.revision - 1))
        assert (await leader.read("g1")).pending_request == pending
        await leader.remove_request("g1", pending)
        assert (await leader.read("g1")).pending_request is None

    run(scenario)


def test_a_record_is_forced_only_while_no_node_holds_the_group(run: Run) -> None:
    async def scenario(world: World) -> None:
        leader, operator = world.coordinator("a"), world.coordinator("operator")
        view, lease = await led(leader, "a")
        alone = replace(RECORD, replicas=("b/1",), leader="")
        assert not (await operator.force("g1", view.revision, alone)).won
        await leader.resign("g1", lease)
        swap = await operator.force("g1", view.revision, alone)
        assert swap.won and swap.view.record == alone

    run(scenario)


def test_a_report_ends_with_its_lease_and_ends_no_wait(run: Run) -> None:
    async def scenario(world: World) -> None:
        node, other = world.coordinator("a"), world.coordinator("b")
        view, lease = await make_group(node), await node.grant(LONG_TTL_MS)
        figures = ReplicaFigures("g1", "a/1", "leader", "a", peers={"b": PeerFigures("b/1", 7, -0.5)})
        await node.report(figures, lease)
        assert await other.reports() == {"a": figures}
        await other.wait_for_change(view.as_of - 1, LONG_TTL_MS / 1_000)  # opens the watch
        as_of = (await other.read("g1")).as_of
        waiting = asyncio.create_task(other.wait_for_change(as_of, LONG_TTL_MS / 1_000))
        await node.report(replace(figures, log_seq=9), lease)
        assert (await other.reports())["a"].log_seq == 9 and not waiting.done()
        await node.change("g1", view.revision, replace(RECORD, generation=2))
        await waiting
        await node.revoke(lease)
        assert await other.reports() == {}

    run(scenario)


def test_unknown_fields_of_a_registered_node_are_ignored() -> None:
    node = msgspec.json.decode(b'{"name":"a","addresses":{"flight":"h:1"},"racks":3}', type=Node)
    assert node == Node("a", {"flight": "h:1"})
