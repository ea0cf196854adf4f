"""Each decoded request calls a method of a real broker, and the answer has the documented form."""

from __future__ import annotations

from typing import Any

import pytest
from tests.node_fixture import RunningNode

from timeball.edges.flight import codec, verbs
from timeball.model import wire
from timeball.model.access import ANONYMOUS
from timeball.model.errors import NotFound
from timeball.model.message import READ_SCHEMA


def perform(node: RunningNode, verb: str, request: codec.ActionRequest) -> Any:
    """Perform an action in the loop of the node, and return its result."""
    return node.run(verbs.perform(node.broker, node.node.status, verb, request, ANONYMOUS))


def test_every_action_is_performed_and_its_answer_can_be_encoded(node: RunningNode) -> None:
    node.run(node.broker.create_topic("verbs", 2))
    requests: dict[str, codec.ActionRequest] = {
        "queues": wire.Queues(topic="verbs"),
        "status": wire.Nothing(),
        "starts": wire.Starts(),
        "reserve": wire.Reserve(rows=3),
        "compactor": wire.Lease(lease_ms=0),
        "dispatcher": wire.DispatcherLease(lease_ms=0),
        "compact": wire.Nothing(),
        "attach": codec.decode_action("attach", b'{"job":"bulk","job_id":"verbs","epoch":1}'),
        "campaign": wire.ChangeCampaign(campaign="spring", change="plan", rows=1),
        "campaigns": wire.Campaigns(),
        "source_positions": wire.SourcePositions(source="kafka"),
        "occurrences": wire.Occurrences(from_ms=0, to_ms=60_000, width_ms=1_000),
        "schedules": wire.Schedules(),
        "selections": wire.Selections(),
    }
    # cancel_range has its own test below. A drain needs two groups (tests/cluster/test_drain.py).
    assert requests.keys() == codec.ACTIONS.keys() - {"cancel_range", "drain"}
    answers = {verb: perform(node, verb, request) for verb, request in requests.items()}
    assert answers["compactor"] == answers["dispatcher"] == {}
    assert answers["queues"] == {"queues": {"0": {"min": 0, "max": 0}, "1": {"min": 0, "max": 0}}}
    # Rows were written since the status: that of the reservation, and perhaps offsets.
    assert answers["status"]["log"]["next_seq"] < answers["reserve"]["first_seq"]
    assert answers["campaigns"]["campaigns"] == [answers["campaign"]]
    assert answers["source_positions"] == {"positions": {}}
    assert answers["schedules"] == {"schedules": [], "next_page": None}
    assert answers["selections"] == {"selections": []}
    for answer in answers.values():
        assert codec.encode(answer)


def test_a_cancel_of_a_reserved_range_is_refused(node: RunningNode) -> None:
    first_seq = node.run(node.broker.reserve(3))
    with pytest.raises(NotFound, match="set aside"):
        perform(node, "cancel_range", wire.CancelRange(ranges=[(first_seq, 3)], reason="verbs"))


def test_a_pull_and_a_queue_read_return_the_rows(node: RunningNode) -> None:
    node.run(node.broker.create_topic("empty", 1))
    pull = wire.Pull(topic="empty", offsets={0: 0}, rows=5)
    queue = wire.ReadQueue(topic="empty", queue_id=0, offset=0, rows=5)
    for request in (pull, queue):
        batch = node.run(verbs.rows(node.broker, request, ANONYMOUS))
        assert batch.schema == READ_SCHEMA and batch.num_rows == 0


def test_errors_of_the_broker_are_raised_unchanged(node: RunningNode) -> None:
    with pytest.raises(NotFound):
        perform(node, "queues", wire.Queues(topic="nowhere"))
