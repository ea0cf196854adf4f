"""A leader's reaction to a request, by its state and the record."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from timeball.cluster.coordination.coordinator import GroupView, OperatorRequest, PendingRequest
from timeball.cluster.operations import RequestStep, next_request_step
from timeball.cluster.protocol import events as on
from timeball.cluster.protocol.machine import step
from timeball.cluster.protocol.messages import Position
from timeball.cluster.protocol.replica import Lead, Log, Peer, Record, Replica, Role, Rules

RECORD = Record(3, "a/1", ("a/1", "b/1", "c/1"))
END = Position(1, 192, 2)
LEADER = Replica(
    Rules("a/1"),
    Role.LEADER,
    record=RECORD,
    log=Log(ordinal=1, next_byte=192, seq=2),
    lead=Lead(3, 0, RECORD.replicas, {"b": Peer("b/1", Position(0, 0, 0), Position(0, 0, 0))}),
)


def view(request: OperatorRequest | None, record: Record = RECORD) -> GroupView:
    return GroupView("g1", record, 5, None, 9, None if request is None else PendingRequest(request, 1, 8))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (None, RequestStep.NOTHING),
        (OperatorRequest(("a/1", "b/1")), RequestStep.WANT),
        (OperatorRequest(("c/1", "b/1", "a/1")), RequestStep.SETTLE),
        (OperatorRequest(hand_over_to="a"), RequestStep.SETTLE),
        (OperatorRequest(hand_over_to="b"), RequestStep.HAND_OVER),
        (OperatorRequest(hand_over_to="c"), RequestStep.NOTHING),  # it is not connected
    ],
)
def test_a_leader_takes_a_request_up(asked: OperatorRequest | None, expected: RequestStep) -> None:
    assert next_request_step(view(asked), LEADER) is expected
    assert next_request_step(view(asked), Replica(Rules("b/1"), Role.FOLLOWER)) is RequestStep.NOTHING


def test_a_lagging_replica_gets_no_hand_over() -> None:
    behind = replace(LEADER, log=Log(LEADER.log.ends, 1, 192, 2))
    assert LEADER.lead is not None
    peer = replace(LEADER.lead.peers["b"], acked=None)
    behind = replace(behind, lead=replace(LEADER.lead, peers={"b": peer}))
    assert next_request_step(view(OperatorRequest(hand_over_to="b")), behind) is RequestStep.NOTHING


def test_a_request_that_is_taken_back_is_forgotten() -> None:
    wanted, _ = step(LEADER, on.ReplicasWanted(("a/1", "b/1", "c/1", "d/1")))
    assert wanted.lead is not None and wanted.lead.wanted
    assert next_request_step(view(None), wanted) is RequestStep.FORGET
    forgotten, effects = step(wanted, on.ReplicasWanted(RECORD.replicas))
    assert forgotten.lead is not None and not forgotten.lead.wanted and effects == []
