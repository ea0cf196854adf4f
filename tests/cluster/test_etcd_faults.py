"""Members of etcd killed, stopped and restarted while nodes compete: one winner for each epoch, without a standstill.

Also etcd with certificates and users, set up as docs/etcd.md says.
"""

from __future__ import annotations

import asyncio
import random
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from tests.certificates import certificate
from tests.cluster.etcd_cluster import EtcdCluster, Member, need_etcd
from tests.cluster.worlds import RECORD, make_group, next_record, wait_until

from timeball.cluster.coordination.coordinator import Coordinator, HeldLease, Lease, Node
from timeball.cluster.coordination.etcd import EtcdAccess, EtcdStore
from timeball.io.clock import SystemClock
from timeball.io.security import load_client_tls
from timeball.model.errors import LeaseLost, SetupError, Unavailable

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("etcd")]

TTL_MS = 2_000


@dataclass
class Election:
    """Nodes that lead, give up and lead again. `wins`: (epoch, node) of each swap that was acknowledged."""

    endpoints: list[str]
    wins: list[tuple[int, str]] = field(default_factory=list)
    unknown: int = 0

    def coordinator(self, node: str, first: int = 0) -> Coordinator:
        endpoints = self.endpoints[first:] + self.endpoints[:first]
        return Coordinator(
            EtcdStore(EtcdAccess(endpoints), ttl_ms=TTL_MS), SystemClock(), cluster="faults", node=node
        )

    async def compete(self, number: int) -> None:
        """Lead whenever the group is free, and resign at once. Begins at another member than the others."""
        node = f"n{number}"
        coordinator = self.coordinator(node, number % len(self.endpoints))
        lease: Lease | None = None
        try:
            while True:
                try:
                    lease = (lease and await coordinator.renew(lease)) or await coordinator.grant(60_000)
                    view = await coordinator.read("g1")
                    if view.holder is not None and view.holder.node != node:
                        await coordinator.wait_for_change(view.as_of, 0.1)
                        continue
                    if view.holder is None:
                        swap = await coordinator.lead("g1", view.revision, next_record(view, node), lease)
                        if swap.won and swap.view.record is not None:
                            self.wins.append((swap.view.record.epoch, node))
                    await coordinator.resign("g1", lease)
                except Unavailable as error:
                    self.unknown += 1
                    if isinstance(error, LeaseLost):
                        lease = None
        finally:
            await coordinator.close()

    async def wait_for_wins(self, wins: int = 5) -> None:
        """Wait until `wins` further epochs have been won."""
        goal = len(self.wins) + wins
        await wait_until(lambda: self._has(goal))

    async def _has(self, goal: int) -> bool:
        return len(self.wins) >= goal

    def check(self, last_epoch: int) -> None:
        """Check the wins against the epoch of the last record."""
        epochs = [epoch for epoch, _ in self.wins]
        assert len(set(epochs)) == len(epochs), "two leaders of one epoch"
        assert max(epochs) <= last_epoch, "an acknowledged swap is lost"
        # The other epochs were won by nodes that got no answer.
        assert last_epoch - RECORD.epoch - len(epochs) <= self.unknown


def test_one_leads_an_epoch_whatever_happens_to_members(tmp_path: Path) -> None:
    need_etcd()
    choice = random.Random(1)

    async def scenario(etcd: EtcdCluster) -> None:
        election = Election(etcd.endpoints)
        maker = election.coordinator("maker")
        await make_group(maker)
        nodes = [asyncio.create_task(election.compete(number)) for number in range(3)]
        try:
            await election.wait_for_wins()
            for fault in [
                kill_leader,
                kill_other,
                stop_leader,
                stop_other,
                restart_all,
                kill_leader,
                stop_leader,
            ]:
                await fault(etcd, election, choice)
                await election.wait_for_wins()
        finally:
            for task in nodes:
                task.cancel()
            await asyncio.wait(nodes)
        for task in nodes:
            assert task.cancelled(), task.exception()
        last = (await maker.read("g1")).record
        await maker.close()
        assert last is not None
        election.check(last.epoch)

    with EtcdCluster(tmp_path / "etcd") as etcd:
        asyncio.run(scenario(etcd))


async def kill_leader(etcd: EtcdCluster, election: Election, choice: random.Random) -> None:
    await kill_and_restart(etcd, election, await asyncio.to_thread(etcd.leader))


async def kill_other(etcd: EtcdCluster, election: Election, choice: random.Random) -> None:
    leader = await asyncio.to_thread(etcd.leader)
    await kill_and_restart(
        etcd, election, choice.choice([member for member in etcd.members if member is not leader])
    )


async def kill_and_restart(etcd: EtcdCluster, election: Election, member: Member) -> None:
    member.kill()
    await election.wait_for_wins()
    member.start()
    await asyncio.to_thread(etcd.wait_ready)


async def stop_leader(etcd: EtcdCluster, election: Election, choice: random.Random) -> None:
    await stop_and_continue(etcd, election, await asyncio.to_thread(etcd.leader))


async def stop_other(etcd: EtcdCluster, election: Election, choice: random.Random) -> None:
    leader = await asyncio.to_thread(etcd.leader)
    await stop_and_continue(
        etcd, election, choice.choice([member for member in etcd.members if member is not leader])
    )


async def stop_and_continue(etcd: EtcdCluster, election: Election, member: Member) -> None:
    member.stop()
    try:
        await election.wait_for_wins()
    finally:
        member.go_on()
    await asyncio.to_thread(etcd.wait_ready)


async def restart_all(etcd: EtcdCluster, election: Election, choice: random.Random) -> None:
    for member in etcd.members:
        member.kill()
    before = election.unknown
    await wait_until(lambda: has_more_unknown(election, before))  # the nodes get no answer, and try again
    for member in etcd.members:
        member.start()
    await asyncio.to_thread(etcd.wait_ready)


async def has_more_unknown(election: Election, before: int) -> bool:
    return election.unknown > before


def test_the_check_of_elections_sees_a_fault() -> None:
    """The control: two leaders of an epoch, a lost swap, epochs that no node can have won."""
    for wins, last_epoch in ([(4, "a"), (4, "b")], 4), ([(4, "a"), (5, "a")], 4), ([(4, "a")], 6):
        with pytest.raises(AssertionError):
            Election([], wins=list(wins)).check(last_epoch)


def test_a_lease_is_renewed_after_the_death_of_a_member(tmp_path: Path) -> None:
    """Any of three members may be killed, the leader too. etcd keeps the lease, and the holder asks another member."""
    need_etcd()

    async def scenario(etcd: EtcdCluster) -> None:
        election, clock = Election(etcd.endpoints), SystemClock()
        coordinator = election.coordinator("a")
        held = HeldLease(coordinator, clock, Node("a"), TTL_MS)
        await held.renew_or_grant()
        first = held.lease
        running = asyncio.create_task(held.run())
        for member in (await asyncio.to_thread(etcd.leader), etcd.members[0]):
            if member.process is None:
                continue
            member.kill()
            killed_ms = clock.boot_ms()
            await wait_until(partial(renewed_since, held, killed_ms))
            member.start()
            await asyncio.to_thread(etcd.wait_ready)
        running.cancel()
        assert first is not None and held.lease is not None and held.lease.id == first.id
        await coordinator.close()

    with EtcdCluster(tmp_path / "etcd") as etcd:
        asyncio.run(scenario(etcd))


async def renewed_since(held: HeldLease, boot_ms: int) -> bool:
    return held.lease is not None and held.lease.sent_ms > boot_ms


# ---- certificates and users ---------------------------------------------------------------------------------


def test_etcd_is_reached_only_with_the_right_certificate_and_user(tmp_path: Path) -> None:
    need_etcd()
    tls = certificate(tmp_path / "tls")
    stranger = certificate(tmp_path / "stranger")
    context = load_client_tls(tls.roots, tls.cert, tls.key)

    def coordinator(user: str, password: str, trust: ssl.SSLContext = context) -> Coordinator:
        access = EtcdAccess(etcd.endpoints, tls=trust, user=user, password=password)
        return Coordinator(EtcdStore(access, ttl_ms=4_000), SystemClock(), cluster="c", node="a")

    async def scenario() -> None:
        good = coordinator("timeball", "right")
        await make_group(good)  # before etcd requires a user, so no token is needed
        admin = enable_users(etcd)
        for _ in range(2):
            lease = await good.grant(60_000)
            await good.register(Node("a"), lease)
            view = await good.read("g1")
            assert (await good.lead("g1", view.revision, next_record(view, "a"), lease)).won
            await good.revoke(lease)
            waiting = asyncio.create_task(good.wait_for_change(view.as_of + 1_000, 0.5))
            await waiting
            # A token belongs to the process of a member, so the restarted members know none.
            for member in etcd.members:
                member.kill()
                member.start()
            await wait_until(lambda: answers(good))
        # A change of users invalidates the tokens.
        assert etcd.post(etcd.members[0], "/v3/auth/user/add", {"name": "x", "password": "y"}, admin()) != {}
        assert (await good.read("g1")).record is not None
        await good.close()
        for wrong in (
            coordinator("timeball", "wrong"),
            coordinator("reader", "right"),  # may read other keys
            coordinator("timeball", "right", load_client_tls(stranger.roots, tls.cert, tls.key)),
        ):
            with pytest.raises(SetupError, match=r"user, password|certificates") as caught:
                await wrong.read("g1")
            assert "right" not in str(caught.value) and "wrong" not in str(caught.value)
            await wrong.close()
        for uncertified in (
            coordinator("", ""),
            coordinator("timeball", "right", load_client_tls(tls.roots, "", "")),
        ):
            with pytest.raises((Unavailable, SetupError)):
                await uncertified.read("g1")
            await uncertified.close()

    with EtcdCluster(tmp_path / "etcd", tls=tls) as etcd:
        asyncio.run(scenario())


async def answers(coordinator: Coordinator) -> bool:
    return (await coordinator.read("g1")).record is not None


def enable_users(etcd: EtcdCluster) -> Callable[[], str]:
    """Enable users as docs/etcd.md says. Returns a function that requests a token for root."""
    member = etcd.members[0]
    keys = {"permType": "READWRITE", "key": "dGIvYy8=", "range_end": "dGIvYzA="}  # tb/c/ to tb/c0
    for path, body in [
        ("user/add", {"name": "root", "password": "admin"}),
        ("role/add", {"name": "root"}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("user/add", {"name": "timeball", "password": "right"}),
        ("role/add", {"name": "timeball"}),
        ("role/grant", {"name": "timeball", "perm": keys}),
        ("user/grant", {"user": "timeball", "role": "timeball"}),
        ("user/add", {"name": "reader", "password": "right"}),
        ("enable", {}),
    ]:
        assert etcd.post(member, f"/v3/auth/{path}", body) != {}, path

    def token() -> str:
        answer = etcd.post(member, "/v3/auth/authenticate", {"name": "root", "password": "admin"})
        return str(answer["token"])

    return token
