"""Running replicas: three threads over real sockets and folders, with the coordinator in memory."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from tests.bounds import BOUND_S
from tests.cluster.trio import Replica, Trio, running_trio
from tests.crash_files import CrashFiles

from timeball.cluster.protocol import events as on
from timeball.cluster.protocol.replica import Role
from timeball.io.files import Files
from timeball.model.errors import DiskFailed, LeaseLost, NotLeader, StorageError, TimeballError

Scenario = Callable[[Trio], Awaitable[None]]


def run(
    folder: Path,
    scenario: Scenario,
    *,
    acks_all: bool = False,
    quorum_ms: int = 60_000,
    files: dict[str, Files] | None = None,
) -> None:
    """Run a scenario with three replicas."""

    async def within() -> None:
        async with running_trio(folder, acks_all=acks_all, quorum_ms=quorum_ms, files=files) as trio:
            await scenario(trio)

    asyncio.run(asyncio.wait_for(within(), 4 * BOUND_S))


async def append_commits(leader: Replica, first: int, commits: int) -> list[int]:
    """Append commits of three rows, one after the other. Returns their first sequence numbers."""
    return [await leader.append(first + 3 * number) for number in range(commits)]


def test_followers_have_the_leader_s_log_byte_for_byte_and_apply_it(tmp_path: Path) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        assert leader.thread.epoch == leader.epochs[-1] == (await trio.record()).epoch
        seqs = await append_commits(leader, 1, 40)
        assert seqs == list(range(seqs[0], seqs[0] + 120, 3)) and leader.segments.next_seq == seqs[-1] + 3
        assert len(leader.segments.all) > 1, "the log has several segments"
        await trio.wait_for_equal_logs()
        for follower in trio.others(leader):
            assert follower.role is Role.FOLLOWER
            await trio.wait_until(lambda f=follower: f.applied == seqs[-1] + 3, "all is applied")

    run(tmp_path, scenario)


def test_a_takeover_keeps_all_acknowledged_rows_and_the_old_leader_catches_up(tmp_path: Path) -> None:
    async def scenario(trio: Trio) -> None:
        number, epoch = 1, 0
        for _ in range(4):
            leader = await trio.leader(epoch)
            epoch = leader.epochs[-1]
            seqs = await append_commits(leader, number, 12)
            number += 36
            await leader.crash()
            successor = await trio.leader(epoch)
            assert successor.segments.next_seq > seqs[-1] + 3, "the EPOCH row follows the acknowledged rows"
            await append_commits(successor, number, 3)
            number += 9
            epoch = successor.epochs[-1] - 1
            await leader.start()
            await trio.wait_for_equal_logs()
        assert {replica.replica for replica in trio.replicas.values()} == set((await trio.record()).replicas)

    run(tmp_path, scenario)


def test_a_replica_with_a_wiped_log_joins_as_a_new_incarnation_without_an_operator(tmp_path: Path) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        await append_commits(leader, 1, 30)
        follower = trio.others(leader)[0]
        before = follower.replica
        await follower.crash()
        for name in follower.files.list_dir("log"):
            follower.files.remove(f"log/{name}")
        await append_commits(leader, 91, 5)
        await follower.start()
        assert follower.replica != before and follower.role in (Role.LEARNER, Role.FOLLOWER)
        await trio.wait_for_record()
        await trio.wait_for_equal_logs()
        await trio.wait_until(lambda: follower.role is Role.FOLLOWER, "it counts")
        async with asyncio.timeout(BOUND_S):
            # Until a majority of the former set has stored the new one.
            while (record := await trio.record()).former:
                await asyncio.sleep(0.01)
        for replica in trio.replicas.values():
            await trio.wait_until(
                lambda r=replica: r.log.identity.members == record.members, "all store the set"
            )

    run(tmp_path, scenario)


def test_a_commit_waits_until_one_follower_has_it(tmp_path: Path) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        await append_commits(leader, 1, 3)
        others = trio.others(leader)
        for follower in others:
            await follower.crash()
        next_seq = leader.thread.state.log.seq
        waiting = [leader.append(10), leader.append(13)]
        await trio.wait_until(lambda: leader.thread.state.log.seq > next_seq, "it is on the leader's disk")
        assert not any(future.done() for future in waiting) and leader.segments.next_seq == next_seq
        await others[1].start()
        await asyncio.gather(*waiting)
        await others[0].start()
        await trio.wait_for_equal_logs()

    run(tmp_path, scenario)


def test_with_acks_all_a_commit_waits_for_every_replica(tmp_path: Path) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        await append_commits(leader, 1, 3)
        absent, other = trio.others(leader)
        await absent.crash()
        waiting = leader.append(10)
        await trio.wait_until(
            lambda: acked(leader, other) == leader.thread.state.log.end.seq > 13, "the other follower has it"
        )
        assert not waiting.done()
        await absent.start()
        await waiting
        assert acked(leader, absent) == leader.thread.state.log.end.seq

    def acked(leader: Replica, follower: Replica) -> int:
        """Return the sequence number up to which a follower has acknowledged, or 0."""
        lead = leader.thread.state.lead
        peer = lead.peers.get(follower.name) if lead else None
        return peer.acked.seq if peer and peer.acked else 0

    run(tmp_path, scenario, acks_all=True)


def test_a_leader_without_a_majority_stops_and_does_not_acknowledge_the_pending_commit(
    tmp_path: Path,
) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        await append_commits(leader, 1, 3)
        for follower in trio.others(leader):
            await follower.crash()
        with pytest.raises(NotLeader):
            await leader.append(10)
        assert leader.role is Role.STOPPED
        await trio.wait_until(lambda: leader.ended, "its process ends")
        assert isinstance(leader.ended[0], LeaseLost)
        assert leader.writer is not None and leader.writer.failed is not None

    run(tmp_path, scenario, quorum_ms=1_000)


def test_the_successor_of_a_hand_over_has_the_whole_log(tmp_path: Path) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        seqs = await append_commits(leader, 1, 5)
        successor = trio.others(leader)[1]
        leader.thread.tell(on.HandOver(successor.name))
        assert await trio.leader(leader.epochs[-1]) is successor
        assert successor.segments.next_seq == seqs[-1] + 3 + 1, "the last commit of 3 rows, and the EPOCH row"
        assert leader.role is Role.STOPPED

    run(tmp_path, scenario)


# ---- disks that fail --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", [1, 2], ids=["write", "sync"])
def test_a_leader_whose_disk_fails_ends_and_another_leads(tmp_path: Path, call: int) -> None:
    files = {name: CrashFiles() for name in "abc"}

    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        await append_commits(leader, 1, 3)
        disk = files[leader.name]
        disk.fail_at(disk.calls + call, DiskFailed("broken"), forever=True)
        with pytest.raises(TimeballError):
            await leader.append(10)
        await trio.wait_until(lambda: leader.ended, "its process ends")
        # The state of the protocol is ahead of the disk, so the thread refuses all calls and sends nothing more.
        with pytest.raises(StorageError):
            await asyncio.wrap_future(leader.thread.submit(leader.log.log))
        disk.heal()
        await leader.crash()
        successor = await trio.leader(leader.epochs[-1])
        await append_commits(successor, 13, 3)
        await leader.start()
        await trio.wait_for_equal_logs()

    run(tmp_path, scenario, files=dict(files))


def test_a_follower_whose_disk_fails_ends_and_the_others_continue(tmp_path: Path) -> None:
    files = {name: CrashFiles() for name in "abc"}

    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        await append_commits(leader, 1, 3)
        follower = trio.others(leader)[0]
        disk = files[follower.name]
        disk.fail_at(disk.calls + 1, DiskFailed("broken"), forever=True)
        await append_commits(leader, 10, 5)
        await trio.wait_until(lambda: follower.ended, "its process ends")
        assert isinstance(follower.ended[0], DiskFailed) and not leader.ended
        disk.heal()
        await follower.crash()
        await follower.start()
        await trio.wait_for_equal_logs()

    run(tmp_path, scenario, files=dict(files))


# ---- calls of the broker ----------------------------------------------------------------------------------------


def test_calls_run_in_their_order_in_the_replica_s_thread_and_their_errors_reach_the_caller(
    tmp_path: Path,
) -> None:
    async def scenario(trio: Trio) -> None:
        leader = await trio.leader()
        calls: list[object] = []
        for number in range(5):
            leader.thread.post(lambda number=number: calls.append((number, threading.current_thread().name)))
        name = await asyncio.wrap_future(leader.thread.submit(lambda: threading.current_thread().name))
        assert calls == [(number, name) for number in range(5)] and name == "replica"

        def fail() -> None:
            raise ValueError("a caller's own")

        with pytest.raises(ValueError, match="own"):
            await asyncio.wrap_future(leader.thread.submit(fail))
        assert not leader.ended

    run(tmp_path, scenario)


def test_a_call_after_the_end_of_the_thread_is_refused(tmp_path: Path) -> None:
    async def scenario(trio: Trio) -> None:
        follower = trio.others(await trio.leader())[0]
        await follower.close()
        with pytest.raises(RuntimeError):
            follower.thread.submit(print)
        await follower.start()

    run(tmp_path, scenario)
