"""Real processes of a group under load: their leader is killed, wiped or stopped, or etcd is dead.

The total-queue checker compares the answers to clients with the final state (besieged.py). Each test prints how long
takeovers took: `pytest -s`.
"""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import pytest
from tests.bounds import BOUND_S
from tests.cluster.besieged import GroupSiege, replicas_of, served
from tests.cluster.etcd_cluster import need_etcd
from tests.cluster.processes import NodeProcess, running_cluster
from tests.crash.siege import CLOCK, cancel, consume, reschedule, send_levels, send_many, send_one
from tests.edges.remoting.wire import Wire
from tests.rounds import rounds

from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode

SENDS = 50
WAKES = rounds(3, 10)
TOPIC = "stopped"

# One cluster at a time: processes keep leases of a second only if they get CPU time.
pytestmark = pytest.mark.xdist_group("etcd")


def kill_leaders_under_load(folder: Path, seed: int, strikes: int, *, wipes: bool = False) -> None:
    """Kill the leader so many times while clients work, and check that no message is lost or doubled."""
    need_etcd()
    with GroupSiege(folder, seed, wipes=wipes) as siege:
        siege.clients()
        for _ in range(strikes):
            siege.kill()
        events = (
            ["acknowledged", "levels", "seen", "cancelled", "rescheduled"]
            if strikes > 2
            else ["acknowledged"]
        )
        siege.until(lambda: all(siege.counts[event] for event in events), f"each of {events}")
        faults = siege.faults()
    lines = "\n  ".join(f"{fault.kind}: {fault.text}" for fault in faults[:20])
    print(f"{siege}\n{siege.times()}")
    assert not faults, f"{len(faults)} faults after {siege}\nmoments {siege.moments}:\n  {lines}"


@pytest.mark.timeout(0)
def test_a_takeover_after_a_kill_loses_nothing(tmp_path: Path) -> None:
    kill_leaders_under_load(tmp_path, 1, 2)


@pytest.mark.slow
@pytest.mark.siege
@pytest.mark.timeout(0)
def test_many_takeovers_after_kills_lose_nothing(tmp_path: Path) -> None:
    kill_leaders_under_load(tmp_path, 2, rounds(3, 20))


@pytest.mark.slow
@pytest.mark.siege
@pytest.mark.timeout(0)
def test_takeovers_after_a_kill_and_a_wiped_disk_lose_nothing(tmp_path: Path) -> None:
    kill_leaders_under_load(tmp_path, 3, rounds(2, 10), wipes=True)


# ---- a leader that is stopped, and wakes when another one leads -------------------------------------------------


def stop_and_wake(siege: GroupSiege) -> int:
    """Stop the leader, wait for another one, send to the stopped one, and wake it. Returns how many it acknowledged."""
    broker, leader = siege.broker, siege.broker.leader()
    lives, sent = len(replicas_of(leader)), siege.ask("a", [None] * SENDS)
    with Wire(leader.ports["remoting-port"]) as wire:
        wire.ask(RequestCode.GET_BROKER_CONFIG)  # the connection is the leader's own, and no gateway's
        leader.kill(signal.SIGSTOP)
        broker.epoch = broker.wait_leads(broker.epoch)
        opaques = [
            wire.send(RequestCode.SEND_MESSAGE_V2, one.body, **send_headers(one.topic, one.key))
            for one in sent
        ]
        leader.kill(signal.SIGCONT)
        acknowledged = 0
        with suppress(EOFError, ConnectionError):
            for opaque in opaques:
                acknowledged += wire.answer_to(opaque).code == ResponseCode.SUCCESS
    if leader.environment.get("UNFENCED") != "all":
        broker.wait_all_count(leader, lives + 1)
    return acknowledged


def send_headers(topic: str, key: str) -> dict[str, object]:
    """Return the fields of a request to send a message with this key."""
    properties = f"UNIQ_KEY\x01{key}\x02"
    return {
        "a": "besiegers", "b": topic, "c": "TBW102", "d": 4, "e": 0, "f": 0, "g": CLOCK.wall_ms(), "h": 0,
        "i": properties, "j": 0,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.siege
@pytest.mark.timeout(0)
@pytest.mark.parametrize("unfenced", ["", "lease"], ids=["all fences", "without the lease check"])
def test_a_woken_leader_acknowledges_nothing_after_another_one_was_elected(
    tmp_path: Path, unfenced: str
) -> None:
    need_etcd()
    with GroupSiege(tmp_path, 4, unfenced=unfenced) as siege:
        siege.clients(send_one, send_many, send_levels, consume, cancel, reschedule)
        acknowledged = [stop_and_wake(siege) for _ in range(WAKES)]
        faults = siege.faults()
    print(f"acknowledged {acknowledged}, {siege}")
    assert acknowledged == [0] * WAKES
    assert not faults, faults[:20]


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_leader_without_fences_would_be_noticed(tmp_path: Path) -> None:
    need_etcd()
    with GroupSiege(tmp_path, 5, unfenced="all") as siege:
        assert stop_and_wake(siege) == SENDS


# ---- no majority, no coordinator ----------------------------------------------------------------------------------


def send(wire: Wire, key: str) -> int:
    """Send a request to store a message. Returns its number on the connection."""
    return wire.send(RequestCode.SEND_MESSAGE_V2, b"body", **send_headers(TOPIC, key))


def is_answered(wire: Wire, opaque: int, within_s: float) -> bool:
    """Check whether an acknowledgement comes in that time."""
    wire._socket.settimeout(within_s)
    try:
        return wire.answer_to(opaque).code == ResponseCode.SUCCESS
    except (TimeoutError, EOFError, ConnectionError):
        return False
    finally:
        with suppress(OSError):
            wire._socket.settimeout(BOUND_S)


def log_bytes(node: NodeProcess) -> bytes:
    """Read all segments of a node's log."""
    return b"".join(path.read_bytes() for path in sorted((node.data / "log").glob("*.log")))


@pytest.mark.slow
def test_a_leader_acknowledges_nothing_without_followers_and_continues_with_one(tmp_path: Path) -> None:
    need_etcd()
    # The leader stops when it has been without followers for three times the TTL.
    with running_cluster(tmp_path, **{"lease-ttl-ms": "10s"}) as cluster:
        leader = cluster.leader()
        with leader.client() as ball:
            ball.create_topic(TOPIC, 1)
        followers = [node for node in cluster.nodes.values() if node is not leader]
        with Wire(leader.ports["remoting-port"]) as wire:
            assert is_answered(wire, send(wire, "before"), BOUND_S)
            for follower in followers:
                follower.kill(signal.SIGSTOP)
            opaque = send(wire, "alone")
            cluster.wait("it is on the leader's disk", lambda: b"alone" in log_bytes(leader))
            assert not is_answered(wire, opaque, 1)
            followers[0].kill(signal.SIGCONT)
            assert wire.answer_to(opaque).code == ResponseCode.SUCCESS
            assert is_answered(wire, send(wire, "after"), BOUND_S)
            followers[1].kill(signal.SIGCONT)
            cluster.wait("all have it", lambda: all(b"after" in log_bytes(node) for node in followers))


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_a_leader_without_etcd_leads_only_while_both_followers_answer(tmp_path: Path) -> None:
    need_etcd()
    with running_cluster(tmp_path, **{"lease-ttl-ms": "1s"}) as cluster:
        leader = cluster.leader()
        epoch = served(leader)
        with leader.client() as ball:
            ball.create_topic(TOPIC, 1)
        for member in cluster.etcd.members:
            member.kill()
        with Wire(leader.ports["remoting-port"]) as wire:
            until_ms, number = CLOCK.boot_ms() + 4_000, 0
            while CLOCK.boot_ms() < until_ms:
                assert is_answered(wire, send(wire, f"without-{number}"), BOUND_S), number
                number += 1
            follower = next(node for node in cluster.nodes.values() if node is not leader)
            follower.kill()
            # The dead follower might follow another leader: without a lease the leader cannot know that it does not.
            cluster.wait("it stops", lambda: len(replicas_of(leader)) == 2)
            assert not is_answered(wire, send(wire, "stopped"), 1)
        for member in cluster.etcd.members:
            member.start()
        cluster.etcd.wait_ready()
        follower.start()
        successor = cluster.leader(epoch)
        with Wire(successor.ports["remoting-port"]) as wire:
            assert is_answered(wire, send(wire, "again"), BOUND_S)
            max_offset = wire.ask_ok(RequestCode.GET_MAX_OFFSET, topic=TOPIC, queueId=0).ext["offset"]
        # The answered messages, the last one, and perhaps the one without an answer.
        assert number + 1 <= int(max_offset) <= number + 2


def test_the_only_replica_holds_its_group_again_after_it_lost_its_lease(tmp_path: Path) -> None:
    need_etcd()
    with running_cluster(tmp_path, "a", **{"lease-ttl-ms": "1s"}) as cluster:
        leader = cluster.leader()
        leader.kill(signal.SIGSTOP)
        cluster.wait("its lease is over", lambda: not cluster.view().leader)
        leader.kill(signal.SIGCONT)
        cluster.wait("it holds the group", lambda: cluster.view().leader == "a")
        assert cluster.epoch() == served(leader), "it has led without a break"
