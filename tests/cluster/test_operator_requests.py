"""A leader's reaction to a request, by its state and the record."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from timeball.cluster.coordination.coordinator import GroupView, OperatorRequest, PendingRequest
from timeball.cluster.operations import RequestStep, next_request_step
from timeball.cluster.protocol import events as on
from timeball.cluster.protocol.machine import step
from timeball.cluster.protocol.messages import BEGINNING, EpochEnd, Position
from timeball.cluster.protocol.replica import Lead, Log, Peer, Record, Replica, Role, Rules

RECORD = Record(3, "a/1", ("a/1", "b/1", "c/1"))
END = Position(1, 192, 2)
LEADER = Replica(
    Rules("a/1"),
    Role.LEADER,
    record=RECORD,
    log=Log(ordinal=1, next_byte=192, seq=2),
    # b is connected, and its log equals the leader's, which has no frame yet.
    lead=Lead(3, 0, RECORD.replicas, {"b": Peer("b/1", BEGINNING, acked=BEGINNING)}),
)


def view(request: OperatorRequest | None, record: Record = RECORD) -> GroupView:
    """Build the group with this pending request."""
    return GroupView("g1", record, 5, None, 9, None if request is None else PendingRequest(request, 1, 8))


NO_REQUEST = None
ANOTHER_SET = OperatorRequest(("a/1", "b/1"))
PRESENT_SET = OperatorRequest(("c/1", "b/1", "a/1"))
TO_LEADER, TO_B, TO_UNCONNECTED = (OperatorRequest(hand_over_to=node) for node in ("a", "b", "c"))


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        pytest.param(NO_REQUEST, RequestStep.NOTHING, id="no request"),
        pytest.param(ANOTHER_SET, RequestStep.WANT, id="another set"),
        pytest.param(PRESENT_SET, RequestStep.SETTLE, id="present set"),
        pytest.param(TO_LEADER, RequestStep.SETTLE, id="hand-over to the leader"),
        pytest.param(TO_B, RequestStep.HAND_OVER, id="hand-over"),
        pytest.param(TO_UNCONNECTED, RequestStep.NOTHING, id="hand-over to an unconnected node"),
    ],
)
def test_the_leader_alone_chooses_a_step_for_a_request(
    request_: OperatorRequest | None, expected: RequestStep
) -> None:
    assert next_request_step(view(request_), LEADER) is expected
    assert next_request_step(view(request_), Replica(Rules("b/1"), Role.FOLLOWER)) is RequestStep.NOTHING


def test_no_hand_over_begins_to_a_replica_that_has_acknowledged_nothing() -> None:
    assert LEADER.lead is not None
    peer = replace(LEADER.lead.peers["b"], acked=None)
    state = replace(LEADER, lead=replace(LEADER.lead, peers={"b": peer}))
    assert next_request_step(view(TO_B), state) is RequestStep.NOTHING


def test_no_hand_over_begins_to_a_replica_that_was_not_sent_everything() -> None:
    behind_end = Log((EpochEnd(3, *END),), END.ordinal, END.end, END.seq)
    assert next_request_step(view(TO_B), replace(LEADER, log=behind_end)) is RequestStep.NOTHING


def test_a_withdrawn_request_is_forgotten() -> None:
    wanted, _ = step(LEADER, on.ReplicasWanted(("a/1", "b/1", "c/1", "d/1")))
    assert wanted.lead is not None and wanted.lead.wanted
    assert next_request_step(view(NO_REQUEST), wanted) is RequestStep.FORGET
    forgotten, effects = step(wanted, on.ReplicasWanted(RECORD.replicas))  # as Member does for FORGET
    assert forgotten.lead is not None and not forgotten.lead.wanted and effects == []
