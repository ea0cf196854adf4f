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

from timeball.cluster.coordination.coordinator import GroupView, Node
from timeball.cluster.coordination.keys import KeyCoordinator
from timeball.cluster.member import REPLICATION, is_restored
from timeball.cluster.protocol.replica import Record, Role

LED = Record(5, "a/1", ("a/1", "b/1", "c/1"), 2)


def run(folder: Path, scenario: Callable[[Trio], Awaitable[None]], *, quorum_ms: int = 60_000) -> None:
    async def within() -> None:
        async with running_trio(folder, quorum_ms=quorum_ms) as trio:
            await scenario(trio)

    asyncio.run(asyncio.wait_for(within(), 4 * BOUND_S))


@contextmanager
def hanging(disk: Path) -> Iterator[None]:
    """Let no fdatasync on this disk return."""
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


def test_all_know_who_leads_and_where(tmp_path: Path) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        address = ("127.0.0.1", leader.port + 1)
        for follower in trio.others(leader):
            await trio.seen(lambda f=follower: f.member.leader() == leader.name, "the leader is known")
            assert follower.member.address("flight") == address
            assert follower.member.address("grpc") is None, "an edge that it does not have"
        await trio.seen(lambda: leader.member.leader() == leader.name, "it knows itself")
        assert leader.member.address("flight") is None, "nothing is forwarded to itself"

    run(tmp_path, scenario)


def test_no_node_leads_after_the_leader_has_left(tmp_path: Path) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        follower, third = trio.others(leader)
        await trio.seen(lambda: follower.member.leader() == leader.name, "the leader is known")
        await third.close()
        await leader.close()
        await trio.seen(lambda: follower.member.leader() != leader.name, "it leads no more")
        assert follower.role is not Role.LEADER

    run(tmp_path, scenario)


def test_an_orderly_end_is_not_waited_for(tmp_path: Path) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        await leader.close()
        assert not [key for key, kv in trio.memory.keys.items() if key.endswith(f"nodes/{leader.name}")]
        await trio.leader(leader.epochs[-1])

    run(tmp_path, scenario)


def test_a_leader_goes_on_without_a_coordinator_while_all_others_answer(tmp_path: Path) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        await leader.append(1)
        trio.memory.is_down = True
        lease_ends_ms = leader.thread.state.lease_until_ms
        await trio.seen(lambda: leader.thread.state.now_ms > lease_ends_ms + 100, "the lease is over")
        await leader.append(4)
        gone = trio.others(leader)[0]
        await gone.crash()
        # One that does not answer might be led by another: now the lease counts.
        await trio.seen(lambda: leader.ended, "it stops")
        await leader.crash()  # else its member would go on to renew the lease
        trio.memory.is_down = False
        await gone.start()
        successor = await trio.leader(leader.epochs[-1])
        assert successor is not leader
        await successor.append(7)

    run(tmp_path, scenario, quorum_ms=3_000)


def test_an_election_whose_answers_are_lost_has_one_leader_in_the_end(tmp_path: Path) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        seqs = [await leader.append(number) for number in (1, 4, 7)]
        trio.memory.loses_answers = True
        await leader.crash()
        before = trio.memory.revision
        await trio.seen(lambda: trio.memory.revision > before, "the record was swapped")
        trio.memory.loses_answers = False
        successor = await trio.leader(leader.epochs[-1])
        assert await successor.append(10) > seqs[-1]
        assert (await trio.record()).leader == successor.replica

    run(tmp_path, scenario)


def test_a_node_that_is_registered_elsewhere_is_dialed_there(tmp_path: Path) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        moved = trio.others(leader)[0]
        await moved.close()
        before, (moved.port,) = moved.port, free_ports(1)
        await leader.append(1)
        await moved.start()
        assert moved.port != before
        await trio.equal()

    run(tmp_path, scenario)


def test_a_registration_without_a_usable_address_ends_no_replica(tmp_path: Path) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        stranger = trio.coordinator
        node = Node("tests", {REPLICATION: "10.0.0.9"}, group=GROUP)
        await stranger.register(node, await stranger.grant(60_000))
        members = [replica.member for replica in trio.replicas.values()]
        await trio.seen(lambda: all("tests" in member.nodes for member in members), "all know it")
        await leader.append(1)
        await trio.equal()
        assert not any(replica.ended for replica in trio.replicas.values())

    run(tmp_path, scenario)


@pytest.mark.parametrize(
    ("now", "restored"),
    [
        (GroupView(GROUP, LED, 9, None, 12), False),
        (GroupView(GROUP, replace(LED, epoch=6), 13, None, 13), False),
        (GroupView(GROUP, None, 0, None, 13), False),  # an operator has removed the record
        (GroupView(GROUP, LED, 9, None, 11), True),
        # After a restore with `--bump-revision`, the revision of etcd does not go back.
        (GroupView(GROUP, replace(LED, epoch=4), 7, None, 1_000_000), True),
        (GroupView(GROUP, LED, 7, None, 1_000_000), True),
        (GroupView(GROUP, replace(LED, epoch=4), 1_000_001, None, 1_000_001), True),
        (GroupView(GROUP, replace(LED, epoch=6, generation=1), 1_000_001, None, 1_000_001), True),
    ],
)
def test_a_restore_of_etcd_is_recognized(now: GroupView, restored: bool) -> None:
    assert is_restored(GroupView(GROUP, LED, 9, None, 12), now) is restored


def test_a_duty_that_breaks_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()

        async def broken(self: KeyCoordinator) -> dict[str, object]:
            raise ZeroDivisionError

        monkeypatch.setattr(KeyCoordinator, "nodes", broken)
        await trio.seen(lambda: all(has_ended(each) for each in trio.replicas.values()), "all end")
        assert isinstance(leader.ended[0], ZeroDivisionError)

    def has_ended(replica: Replica) -> bool:
        return bool(replica.ended)

    run(tmp_path, scenario)


def test_a_candidate_whose_disk_hangs_releases_the_group(tmp_path: Path) -> None:
    """Its swap of the record has made it the holder, before it has to store its promise."""

    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        candidate, third = trio.others(leader)
        await trio.equal()
        await third.close()
        with hanging(tmp_path / candidate.name):
            await leader.close()
            await trio.seen(lambda: candidate.role is Role.SEALING, "it is a candidate")
            await third.start()
            await leader.start()
            successor = await trio.leader(leader.epochs[-1])
            assert successor is not candidate and candidate.stepped_down

    run(tmp_path, scenario)


def test_a_leader_that_has_stepped_down_releases_the_group_when_its_lease_comes_back(tmp_path: Path) -> None:
    """etcd restarts all leases with their whole TTL when it elects a leader of its own."""

    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        with hanging(tmp_path / leader.name):
            leader.append(1)
            trio.memory.is_down = True
            await trio.seen(lambda: leader.stepped_down, "it steps down")
            for lease in trio.memory.leases.values():
                lease.ends_ms = CLOCK.boot_ms() + TTL_MS
            trio.memory.is_down = False
            successor = await trio.leader(leader.epochs[-1])
            assert successor is not leader

    run(tmp_path, scenario)
