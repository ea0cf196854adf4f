"""A replica whose clock differs from the majority's lets others lead first, and leads if none does."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from timeball.cluster.protocol import events as on
from timeball.cluster.protocol.effects import Propose, Send
from timeball.cluster.protocol.leading import QUICK_MS, clock_deviations_ms
from timeball.cluster.protocol.machine import step
from timeball.cluster.protocol.messages import BEGINNING, Ping, Pong, Position
from timeball.cluster.protocol.replica import Lead, Peer, Record, Replica, Role, Rules, Source

RECORD = Record(3, "a/1", ("a/1", "b/1", "c/1"))
NOW_MS, WALL_MS = 50_000, 1_700_000_000_000


def leader(**ahead_ms: int) -> Replica:
    """Make the leader a, whom b and c have answered with clocks that are ahead by so much."""
    peers = {node: Peer(f"{node}/1", BEGINNING, BEGINNING) for node in ("b", "c")}
    state = Replica(
        Rules("a/1"), Role.LEADER, promised=3, record=RECORD, now_ms=NOW_MS, wall_ms=WALL_MS,
        lease_until_ms=NOW_MS + 60_000, lead=Lead(3, NOW_MS, RECORD.replicas, peers),
    )  # fmt: skip
    for node, node_ahead_ms in ahead_ms.items():
        pong = Pong(3, WALL_MS + node_ahead_ms - 5, NOW_MS - 10)
        state, _ = step(state, on.Received(node, pong))
    return state


def follower(deviation_ms: int) -> Replica:
    """Make the follower b, whose last PING stated this deviation of its clock. It has not heard its leader since."""
    state = Replica(
        Rules("b/1"), Role.FOLLOWER, promised=3, revision=7, record=RECORD, now_ms=NOW_MS, wall_ms=WALL_MS,
        source=Source("a", matched=True),
    )  # fmt: skip
    state, _ = step(state, on.Received("a", Ping(3, WALL_MS, NOW_MS, 0, deviation_ms)))
    return replace(state, heard_ms=NOW_MS - state.rules.heard_ms_max - 1)


def step_and_check_candidacy(state: Replica, event: on.Event) -> tuple[Replica, bool]:
    """Step the state. Returns it, and whether the replica has become a candidate."""
    state, effects = step(state, event)
    return state, any(isinstance(effect, Propose) for effect in effects)


@pytest.mark.parametrize(
    ("ahead_ms", "deviation_ms"),
    [
        ({"b": 600, "c": 10}, {"b": 590, "c": 0}),
        ({"b": -3_000, "c": 0}, {"b": 3_000, "c": 0}),
        ({"b": 2_000, "c": 2_010}, {"b": 0, "c": 10}),  # the leader's is the wrong one
        ({"b": 600}, {}),  # of two clocks none is known to be right
        ({}, {}),
    ],
)
def test_a_leader_s_ping_states_the_deviation_of_the_receiver_s_clock_from_the_median(
    ahead_ms: dict[str, int], deviation_ms: dict[str, int]
) -> None:
    state = leader(**ahead_ms)
    assert clock_deviations_ms(state) == deviation_ms
    _, effects = step(state, on.Tick(NOW_MS + 50, WALL_MS + 50))
    sent = {
        effect.node: effect.message.deviation_ms
        for effect in effects
        if isinstance(effect, Send) and isinstance(effect.message, Ping)
    }
    assert sent == {"b": 0, "c": 0} | deviation_ms


def test_a_slow_answer_does_not_measure_the_clock() -> None:
    state, _ = step(leader(c=0), on.Received("b", Pong(3, WALL_MS + 9_000, NOW_MS - QUICK_MS - 1)))
    assert state.lead is not None and state.lead.peers["b"].clock_ahead_ms is None
    assert state.lead.peers["b"].heard_ms == NOW_MS, "the answer still counts"


def test_the_round_trip_of_an_answer_ends_at_its_arrival_and_not_at_the_last_tick() -> None:
    late_ms = QUICK_MS + 1  # after the ping of the last tick; the leader's thread was busy meanwhile
    pong = Pong(3, WALL_MS + late_ms, NOW_MS)
    event = on.Received("b", pong, NOW_MS + late_ms, WALL_MS + late_ms)
    state, _ = step(leader(c=0), event)
    assert state.lead is not None and state.lead.peers["b"].clock_ahead_ms is None


def test_of_four_clocks_the_middle_one_nearer_to_the_leader_s_is_the_median() -> None:
    state = leader(b=10, c=600)
    assert state.lead is not None
    replicas = (*RECORD.replicas, "d/1")
    peers = {**state.lead.peers, "d": Peer("d/1", BEGINNING, Position(0, 0, 0), clock_ahead_ms=700)}
    state = replace(state, lead=replace(state.lead, replicas=replicas, peers=peers))
    assert clock_deviations_ms(state) == {"b": 0, "c": 590, "d": 690}


@pytest.mark.parametrize("deviation_ms", [0, 500])
def test_a_replica_with_a_right_clock_becomes_a_candidate_at_once(deviation_ms: int) -> None:
    assert step_and_check_candidacy(follower(deviation_ms), on.Seen(7, RECORD, None))[1]
    assert step_and_check_candidacy(follower(deviation_ms), on.LeaderDied("a"))[1]


def test_a_replica_with_a_wrong_clock_becomes_a_candidate_only_after_the_wait() -> None:
    state = follower(501)
    assert not step_and_check_candidacy(state, on.LeaderDied("a"))[1], (
        "the key is not yet deleted, and others may stand first"
    )
    state, is_candidate = step_and_check_candidacy(state, on.Seen(7, RECORD, None))
    assert not is_candidate
    wait_ms = state.rules.defer_ms
    state, _ = step(state, on.Tick(NOW_MS + wait_ms - 1, WALL_MS))
    assert not step_and_check_candidacy(state, on.Seen(7, RECORD, None))[1]
    led, _ = step_and_check_candidacy(state, on.Seen(8, replace(RECORD, epoch=4, leader="c/1"), "c"))
    led, _ = step(led, on.Tick(NOW_MS + wait_ms, WALL_MS))
    assert not step_and_check_candidacy(led, on.Seen(8, replace(RECORD, epoch=4, leader="c/1"), None))[1], (
        "the wait starts again"
    )
    state, _ = step(state, on.Tick(NOW_MS + wait_ms, WALL_MS))
    assert step_and_check_candidacy(state, on.Seen(7, RECORD, None))[1]


def test_a_replica_with_a_wrong_clock_begins_at_once_after_a_hand_over_to_it() -> None:
    """An operator has chosen it."""
    state, _ = step(follower(5_000), on.Seen(8, replace(RECORD, epoch=4, leader="b/1"), None))
    assert state.role is Role.SEALING
