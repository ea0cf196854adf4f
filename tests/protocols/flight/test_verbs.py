"""Each decoded request reaches its verb of a real broker, and the answer has the documented shape."""

from typing import Any

import pytest
from tests.broker.on_node import batch
from tests.node_fixture import RunningNode

from timeball import wire
from timeball.access import Caller, Verb
from timeball.errors import Forbidden, NotFound
from timeball.message import READ_SCHEMA
from timeball.protocols.flight import codec, verbs


def perform(node: RunningNode, verb: str, request: codec.ActionRequest) -> Any:
    return node.run(verbs.perform(node.broker, verb, request, node.node.status))


def test_every_action_has_a_verb(node: RunningNode) -> None:
    requests: dict[str, codec.ActionRequest] = {
        "create_topic": wire.CreateTopic(topic="verbs", queues=2),
        "commit": wire.Commit(group="g", topic="verbs", offsets={0: 0}),
        "offsets": wire.GetOffsets(group="g", topic="verbs"),
        "queues": wire.Queues(topic="verbs"),
        "topics": wire.Nothing(),
        "status": wire.Nothing(),
        "ack": wire.Acknowledge(group="g", topic="verbs", receipts=[]),
        "change_invisible_time": wire.ChangeInvisibleTime(group="g", topic="verbs", receipts=[]),
        "dead_letter": wire.DeadLetter(group="g", topic="verbs", receipts=[]),
        "cancel": wire.Cancel(ids=["nobody"]),
        "reschedule": wire.Reschedule(keys=["nobody"], delay_ms=5),
        "starts": wire.Starts(),
        "reserve": wire.Reserve(rows=3),
        "compactor": wire.Lease(lease_ms=0),
        "dispatcher": wire.DispatcherLease(lease_ms=0),
        "compact": wire.Nothing(),
        "attach": codec.decode_action("attach", b'{"job":"bulk","job_id":"verbs","epoch":1}'),
    }
    assert requests.keys() == codec.ACTIONS.keys() - {"cancel_range"}  # which has its own test below
    answers = {verb: perform(node, verb, request) for verb, request in requests.items()}
    assert answers["create_topic"] == answers["commit"] == answers["compactor"] == answers["dispatcher"] == {}
    assert answers["offsets"] == {"offsets": {"0": 0}}
    assert answers["queues"] == {"queues": {"0": {"min": 0, "max": 0}, "1": {"min": 0, "max": 0}}}
    assert answers["topics"]["topics"]["verbs"] == {"queues": 2}
    assert (
        answers["status"]["log"]["next_seq"] == answers["reserve"]["first_seq"] - 1
    )  # and the row that says so
    assert answers["ack"] == answers["dead_letter"] == {"valid": []}
    assert answers["change_invisible_time"] == {"receipts": []}
    for verb in ("cancel", "reschedule"):
        assert [v.verdict for v in answers[verb]["verdicts"]] == ["not_found"]
    for answer in answers.values():
        assert codec.encode(answer)


class Mine(Caller):
    """An account that may touch what is of one topic."""

    def check(self, verb: Verb, *, topic: str | None = None, group: str | None = None) -> None:
        if verb is Verb.ADMIN or topic not in (None, "mine"):
            raise Forbidden(f"not {topic}")


def test_promises_of_topics_that_a_caller_may_not_touch_are_not_there(node: RunningNode) -> None:
    sent = batch(2, topic=["mine", "theirs"], unique_key=["a", "b"], keys=["k", "k"], delay_ms=[60_000] * 2)
    first_seq = node.run(node.broker.send(sent)).first_seq
    requests = [
        wire.Reschedule(ids=["a", "b"], delay_ms=90_000), wire.Reschedule(seqs=[first_seq + 1], delay_ms=5),
        wire.Cancel(ids=["b"]), wire.Cancel(keys=["k"]),
    ]  # fmt: skip
    told = [
        node.run(verbs.perform(node.broker, "", request, node.node.status, Mine())) for request in requests
    ]
    assert [[v.verdict for v in answer["verdicts"]] for answer in told] == [
        ["rescheduled", "not_found"], ["not_found"], ["not_found"], ["cancelled"],
    ]  # fmt: skip
    [moved] = node.run(node.broker.reschedule(ids=["b"], delay_ms=1))
    assert moved.verdict == "rescheduled", "it is there for others"


def test_a_range_that_nobody_attached_is_not_cancelled(node: RunningNode) -> None:
    first_seq = node.run(node.broker.reserve(3))
    with pytest.raises(NotFound, match="set aside"):
        perform(node, "cancel_range", wire.CancelRange(ranges=[(first_seq, 3)], reason="verbs"))


def test_rows_of_a_pull_and_of_a_queue(node: RunningNode) -> None:
    perform(node, "create_topic", wire.CreateTopic(topic="empty", queues=1))
    pull = wire.Pull(topic="empty", offsets={0: 0}, rows=5)
    queue = wire.ReadQueue(topic="empty", queue_id=0, offset=0, rows=5)
    for request in (pull, queue):
        batch = node.run(verbs.rows(node.broker, request))
        assert batch.schema == READ_SCHEMA and batch.num_rows == 0


def test_the_brokers_errors_pass(node: RunningNode) -> None:
    with pytest.raises(NotFound):
        perform(node, "queues", wire.Queues(topic="nowhere"))
