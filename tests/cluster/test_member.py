"""A replica and its coordinator: one that is down, one that loses answers, one that names another leader."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.bounds import BOUND_S
from tests.cluster.trio import CLOCK, GROUP, TTL_MS, Replica, Trio, running_trio
from tests.ports import free_ports

from timeball.cluster.coordination.coordinator import Coordinator, GroupView, Node
from timeball.cluster.member import REPLICATION, was_etcd_restored
from timeball.cluster.protocol.replica import Record, Role

LED = Record(5, "a/1", ("a/1", "b/1", "c/1"), 2)


def run(folder: Path, scenario: Callable[[Trio], Awaitable[None]], *, quorum_ms: int = 60_000) -> None:
    """Run a scenario with three replicas."""

    async def within() -> None:
        async with running_trio(folder, quorum_ms=quorum_ms) as trio:
            await scenario(trio)

    asyncio.run(asyncio.wait_for(within(), 4 * BOUND_S))


@contextmanager
def hanging_syncs(disk: Path) -> Iterator[None]:
    """Let no fdatasync of a file below this folder return before the end of the block."""
    sync, answers = os.fdatasync, threading.Event()

    def wait_and_sync(fd: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{fd}")).is_relative_to(disk):
            answers.wait()
        sync(fd)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fdatasync", wait_and_sync)
        try:
            yield
        finally:
            answers.set()


def test_followers_know_the_leader_and_its_addresses(tmp_path: Path) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        address = ("127.0.0.1", leader.port + 1)
        for follower in trio.others(leader):
            await trio.wait_until(lambda f=follower: f.member.leader() == leader.name, "the leader is known")
            assert follower.member.address("flight") == address
            assert follower.member.address("grpc") is None, "an edge that it does not have"
        await trio.wait_until(lambda: leader.member.leader() == leader.name, "it knows itself")
        assert leader.member.address("flight") is None, "nothing is forwarded to itself"

    run(tmp_path, scenario)


def test_one_of_three_replicas_alone_does_not_become_the_leader(tmp_path: Path) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        follower, third = trio.others(leader)
        await trio.wait_until(lambda: follower.member.leader() == leader.name, "the leader is known")
        await third.close()
        await leader.close()
        await trio.wait_until(lambda: follower.member.leader() != leader.name, "it leads no more")
        assert follower.role is not Role.LEADER

    run(tmp_path, scenario)


def test_after_an_orderly_end_of_the_leader_its_lease_is_over_at_once(tmp_path: Path) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        await leader.close()
        assert not [key for key, kv in trio.memory.keys.items() if key.endswith(f"nodes/{leader.name}")]
        await trio.leader(leader.epochs[-1])

    run(tmp_path, scenario)


def test_a_leader_without_a_coordinator_leads_only_while_all_others_answer(tmp_path: Path) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        await leader.append(1)
        trio.memory.is_down = True
        lease_ends_ms = leader.thread.state.lease_until_ms
        await trio.wait_until(lambda: leader.thread.state.now_ms > lease_ends_ms + 100, "the lease is over")
        await leader.append(4)
        absent = trio.others(leader)[0]
        await absent.crash()
        # The replica that does not answer may follow another leader, so the lease counts now.
        await trio.wait_until(lambda: leader.ended, "the leader stops")
        await leader.crash()  # otherwise its member would continue to renew the lease
        trio.memory.is_down = False
        await absent.start()
        successor = await trio.leader(leader.epochs[-1])
        assert successor is not leader
        await successor.append(7)

    run(tmp_path, scenario, quorum_ms=3_000)


def test_an_election_whose_answers_are_lost_ends_with_one_leader(tmp_path: Path) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        seqs = [await leader.append(number) for number in (1, 4, 7)]
        trio.memory.loses_answers = True
        await leader.crash()
        before = trio.memory.revision
        await trio.wait_until(lambda: trio.memory.revision > before, "the record was swapped")
        trio.memory.loses_answers = False
        successor = await trio.leader(leader.epochs[-1])
        assert await successor.append(10) > seqs[-1]
        assert (await trio.record()).leader == successor.replica

    run(tmp_path, scenario)


def test_a_node_that_registers_another_port_is_dialed_there(tmp_path: Path) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        follower = trio.others(leader)[0]
        await follower.close()
        before, (follower.port,) = follower.port, free_ports(1)
        await leader.append(1)
        await follower.start()
        assert follower.port != before
        await trio.wait_for_equal_logs()

    run(tmp_path, scenario)


def test_a_registration_with_an_unusable_address_does_not_disturb_the_replicas(tmp_path: Path) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        stranger = trio.coordinator
        node = Node("tests", {REPLICATION: "10.0.0.9"}, group=GROUP)
        await stranger.register(node, await stranger.grant(60_000))
        members = [replica.member for replica in trio.replicas.values()]
        await trio.wait_until(lambda: all("tests" in member.nodes for member in members), "all know it")
        await leader.append(1)
        await trio.wait_for_equal_logs()
        assert not any(replica.ended for replica in trio.replicas.values())

    run(tmp_path, scenario)


def view(record: Record | None, *, revision: int, as_of: int) -> GroupView:
    """Return a view of the group at a revision of etcd."""
    return GroupView(GROUP, record, revision, None, as_of)


BEFORE = view(LED, revision=9, as_of=12)
BUMPED = 1_000_000  # revision of etcd after a restore with `--bump-revision`


@pytest.mark.parametrize(
    "now",
    [
        pytest.param(BEFORE, id="nothing has changed"),
        pytest.param(view(replace(LED, epoch=6), revision=13, as_of=13), id="a new leader"),
        pytest.param(view(None, revision=0, as_of=13), id="an operator has removed the record"),
    ],
)
def test_a_normal_change_is_no_restore_of_etcd(now: GroupView) -> None:
    assert not was_etcd_restored(BEFORE, now)


@pytest.mark.parametrize(
    "now",
    [
        pytest.param(view(LED, revision=9, as_of=11), id="etcd's revision went back"),
        pytest.param(view(LED, revision=7, as_of=BUMPED), id="the record's revision went back"),
        pytest.param(view(replace(LED, epoch=4), revision=BUMPED, as_of=BUMPED), id="the epoch went back"),
        pytest.param(
            view(replace(LED, epoch=6, generation=1), revision=BUMPED, as_of=BUMPED), id="the set went back"
        ),
    ],
)
def test_a_restore_of_etcd_is_recognized(now: GroupView) -> None:
    assert was_etcd_restored(BEFORE, now)


def test_an_error_in_a_duty_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()

        async def fail(self: Coordinator) -> dict[str, object]:
            raise ZeroDivisionError

        monkeypatch.setattr(Coordinator, "nodes", fail)
        await trio.wait_until(
            lambda: all(has_ended(replica) for replica in trio.replicas.values()), "all end"
        )
        assert isinstance(leader.ended[0], ZeroDivisionError)

    def has_ended(replica: Replica) -> bool:
        return bool(replica.ended)

    run(tmp_path, scenario)


def test_a_candidate_whose_disk_hangs_releases_the_group(tmp_path: Path) -> None:
    """Its swap of the record has made it the holder, before it has to store its promise."""

    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        candidate, third = trio.others(leader)
        await trio.wait_for_equal_logs()
        await third.close()
        with hanging_syncs(tmp_path / candidate.name):
            await leader.close()
            await trio.wait_until(lambda: candidate.role is Role.SEALING, "it is a candidate")
            await third.start()
            await leader.start()
            successor = await trio.leader(leader.epochs[-1])
            assert successor is not candidate and candidate.stepped_down

    run(tmp_path, scenario)


def test_a_leader_that_has_stepped_down_releases_the_group_when_its_lease_comes_back(tmp_path: Path) -> None:
    """etcd restarts all leases with their whole TTL when it elects a leader of its own."""

    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        with hanging_syncs(tmp_path / leader.name):
            leader.append(1)
            trio.memory.is_down = True
            await trio.wait_until(lambda: leader.stepped_down, "it steps down")
            for lease in trio.memory.leases.values():
                lease.ends_ms = CLOCK.boot_ms() + TTL_MS
            trio.memory.is_down = False
            successor = await trio.leader(leader.epochs[-1])
            assert successor is not leader

    run(tmp_path, scenario)
