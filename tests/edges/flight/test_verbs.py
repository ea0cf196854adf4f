"""Each decoded request reaches its verb of a real broker, and the answer has the documented shape."""

from __future__ import annotations

import asyncio
from typing import Any

import pyarrow as pa
import pytest
from tests.broker.on_node import batch
from tests.node_fixture import RunningNode

from timeball.broker.consuming.requests import Receipt
from timeball.broker.filters.compiler import FilterCache
from timeball.edges.flight import codec, verbs
from timeball.log.row_encoder import encoder_of
from timeball.model import wire
from timeball.model.access import ANONYMOUS, Caller, Verb
from timeball.model.errors import Forbidden, InvalidReceipt, NotFound
from timeball.model.message import READ_SCHEMA, RECEIVED_SCHEMA


def served(node: RunningNode) -> verbs.ServedBroker:
    return verbs.ServedBroker.by(node.broker, node.node.status)


def perform(node: RunningNode, verb: str, request: codec.ActionRequest) -> Any:
    return node.run(verbs.perform(served(node), verb, request, ANONYMOUS))


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
        "groups": wire.Groups(),
        "dead_letters": wire.DeadLetters(group="g"),
        "resend_dead_letters": wire.ResolveDeadLetters(group="g", dead_letters=["0-1"]),
        "delete_dead_letters": wire.ResolveDeadLetters(group="g"),
        "get": wire.Get(id="nobody"),
        "cancel": wire.Cancel(ids=["nobody"]),
        "reschedule": wire.Reschedule(keys=["nobody"], delay_ms=5),
        "starts": wire.Starts(),
        "reserve": wire.Reserve(rows=3),
        "compactor": wire.Lease(lease_ms=0),
        "dispatcher": wire.DispatcherLease(lease_ms=0),
        "compact": wire.Nothing(),
        "attach": codec.decode_action("attach", b'{"job":"bulk","job_id":"verbs","epoch":1}'),
        "campaign": wire.ChangeCampaign(campaign="spring", change="plan", rows=1),
        "campaigns": wire.Campaigns(),
        "source_positions": wire.SourcePositions(source="kafka"),
    }
    # The first has its own test below; a drain needs two groups (tests/cluster/test_drain.py).
    assert requests.keys() == codec.ACTIONS.keys() - {"cancel_range", "drain"}
    answers = {verb: perform(node, verb, request) for verb, request in requests.items()}
    assert answers["create_topic"] == answers["commit"] == answers["compactor"] == answers["dispatcher"] == {}
    assert answers["offsets"] == {"offsets": {"0": 0}}
    assert answers["queues"] == {"queues": {"0": {"min": 0, "max": 0}, "1": {"min": 0, "max": 0}}}
    assert answers["topics"]["topics"]["verbs"] == {"queues": 2}
    # Between the two lie the row that reserves, and the offsets where their moment comes just then.
    assert answers["status"]["log"]["next_seq"] < answers["reserve"]["first_seq"]
    assert answers["ack"] == answers["dead_letter"] == {"valid": []}
    assert answers["change_invisible_time"] == {"receipts": []}
    assert answers["campaigns"]["campaigns"] == [answers["campaign"]]
    assert answers["get"] == {"messages": []}
    assert answers["source_positions"] == {"positions": {}}
    for verb in ("cancel", "reschedule"):
        assert [v.verdict for v in answers[verb]["verdicts"]] == ["not_found"]
    for answer in answers.values():
        assert codec.encode(answer)


class Mine(Caller):
    """An account that may touch what is of one topic."""

    def check(self, verb: Verb, *, topic: str | None = None, group: str | None = None) -> None:
        if verb is Verb.ADMIN or topic not in (None, "mine"):
            raise Forbidden(f"not {topic}")


def test_scheduled_messages_of_forbidden_topics_are_not_found(node: RunningNode) -> None:
    sent = batch(2, topic=["mine", "theirs"], unique_key=["a", "b"], keys=["k", "k"], delay_ms=[60_000] * 2)
    first_seq = node.run(node.broker.send(sent)).first_seq
    requests = [
        wire.Reschedule(ids=["a", "b"], delay_ms=90_000), wire.Reschedule(seqs=[first_seq + 1], delay_ms=5),
        wire.Cancel(ids=["b"]), wire.Cancel(keys=["k"]),
    ]  # fmt: skip
    reported = [node.run(verbs.perform(served(node), "", request, Mine())) for request in requests]
    assert [[v.verdict for v in answer["verdicts"]] for answer in reported] == [
        ["rescheduled", "not_found"], ["not_found"], ["not_found"], ["cancelled"],
    ]  # fmt: skip
    [moved] = node.run(node.broker.reschedule(ids=["b"], delay_ms=1))
    assert moved.verdict == "rescheduled", "it is there for others"


def test_a_range_that_nobody_attached_is_not_cancelled(node: RunningNode) -> None:
    first_seq = node.run(node.broker.reserve(3))
    with pytest.raises(NotFound, match="set aside"):
        perform(node, "cancel_range", wire.CancelRange(ranges=[(first_seq, 3)], reason="verbs"))


def test_a_pull_and_a_queue_read_return_the_rows(node: RunningNode) -> None:
    perform(node, "create_topic", wire.CreateTopic(topic="empty", queues=1))
    pull = wire.Pull(topic="empty", offsets={0: 0}, rows=5)
    queue = wire.ReadQueue(topic="empty", queue_id=0, offset=0, rows=5)
    for request in (pull, queue):
        batch = node.run(verbs.rows(node.broker, request, ANONYMOUS))
        assert batch.schema == READ_SCHEMA and batch.num_rows == 0


def test_errors_of_the_broker_are_raised_unchanged(node: RunningNode) -> None:
    with pytest.raises(NotFound):
        perform(node, "queues", wire.Queues(topic="nowhere"))


TOPIC = "grouped"


def receive(node: RunningNode, group: str = "g", **fields: object) -> verbs.LeasedRows:
    request = wire.Receive(topic=TOPIC, group=group, rows=10, **fields)  # type: ignore[arg-type]
    return node.run(verbs.receive(served(node), FilterCache(), request, ANONYMOUS))


def batch_of(handed_out: verbs.LeasedRows) -> pa.RecordBatch:
    rows = handed_out.rows
    batch = pa.ipc.read_record_batch(rows, RECEIVED_SCHEMA) if isinstance(rows, bytes) else rows
    assert batch.schema == RECEIVED_SCHEMA
    return batch


def send(node: RunningNode, count: int) -> None:
    node.run(node.broker.send(batch(count, topic=[TOPIC] * count)))


def test_each_row_has_a_receipt_and_redelivered_rows_have_the_requested_topic(
    node: RunningNode,
) -> None:
    send(node, 3)
    handed_out = receive(node)
    first = batch_of(handed_out)
    texts = first.column("receipt").to_pylist()
    assert len(set(texts)) == 3 and all(isinstance(item, Receipt) for item in handed_out.receipts)
    change = wire.ChangeInvisibleTime(topic=TOPIC, group="g", receipts=texts, invisible_ms=0)
    changed = node.run(verbs.change_invisible_time(served(node), change, ANONYMOUS))
    assert changed == texts
    again = batch_of(receive(node, wait_ms=30_000))
    assert set(again.column("topic").to_pylist()) == {TOPIC}
    assert set(again.column("reconsume_times").to_pylist()) == {1}
    ack = wire.Acknowledge(topic=TOPIC, group="g", receipts=[*texts, *again.column("receipt").to_pylist()])
    verdicts = node.run(verbs.acknowledge(served(node), ack, ANONYMOUS))
    assert verdicts == [False] * 3 + [True] * again.num_rows


def test_directly_encoded_rows_equal_rows_read_from_the_log(
    node: RunningNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = batch(3, topic=["twice"] * 3, tag=["a", None, "b"], keys=[None, "k l", ""])
    node.run(node.broker.send(sent))
    request = wire.Receive(topic="twice", group="memory", rows=10)
    few = node.run(verbs.receive(served(node), FilterCache(), request, ANONYMOUS))
    monkeypatch.setattr(node.broker.log.writer.newest, "values_of", lambda seqs: None)
    request = wire.Receive(topic="twice", group="log", rows=10)
    read = node.run(verbs.receive(served(node), FilterCache(), request, ANONYMOUS))
    assert isinstance(few.rows, bytes) == (encoder_of(RECEIVED_SCHEMA) is not None)
    assert not isinstance(read.rows, bytes) and read.rows.num_rows == 3
    columns = [name for name in RECEIVED_SCHEMA.names if name != "receipt"]
    result, expected = (batch.select(columns).sort_by("seq") for batch in (batch_of(few), read.rows))
    assert result.equals(expected)


def test_the_dead_letter_verb_makes_a_dead_letter(node: RunningNode) -> None:
    send(node, 1)
    handed_out = receive(node, "quitters")
    texts = batch_of(handed_out).column("receipt").to_pylist()
    give_up = wire.DeadLetter(topic=TOPIC, group="quitters", receipts=texts)
    assert all(node.run(verbs.dead_letter(served(node), give_up, ANONYMOUS)))
    assert not any(node.run(verbs.dead_letter(served(node), give_up, ANONYMOUS)))
    assert node.broker.queues("%DLQ%quitters")[0][1] == len(texts)


def test_a_client_that_disconnects_while_waiting_leaves_no_lease(node: RunningNode) -> None:
    send(node, 1)  # whichever test comes first: the group needs a topic
    receive(node, "gone")

    async def leave() -> None:
        request = wire.Receive(topic=TOPIC, group="gone", rows=10, wait_ms=30_000)
        asking = asyncio.create_task(verbs.receive(served(node), FilterCache(), request, ANONYMOUS))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    node.run(leave())
    send(node, 1)
    assert batch_of(receive(node, "gone", wait_ms=30_000)).num_rows == 1


class Reader(Caller):
    """An account that may receive from one topic as one group."""

    def check(self, verb: Verb, *, topic: str | None = None, group: str | None = None) -> None:
        if verb is not Verb.RECEIVE or topic not in (None, TOPIC) or group not in (None, "mine"):
            raise Forbidden(f"not {verb} {topic} {group}")


def test_a_receive_needs_permission_for_topic_and_group(node: RunningNode) -> None:
    send(node, 1)

    def ask(topic: str, group: str) -> list[verbs.LeasedRows]:
        request = wire.Receive(topic=topic, group=group, rows=1)
        return [node.run(verbs.receive(served(node), FilterCache(), request, Reader()))]

    (handed_out,) = ask(TOPIC, "mine")
    for topic, group in ((TOPIC, "theirs"), ("other", "mine")):
        with pytest.raises(Forbidden):
            ask(topic, group)
    receipts = batch_of(handed_out).column("receipt").to_pylist()
    for group, error in (("theirs", Forbidden), ("mine", None)):
        ack = wire.Acknowledge(topic=TOPIC, group=group, receipts=receipts)
        if error is None:
            assert node.run(verbs.acknowledge(served(node), ack, Reader())) == [True]
        else:
            with pytest.raises(error):
                node.run(verbs.acknowledge(served(node), ack, Reader()))
    assert "theirs" not in [group.group_name for group in node.broker.tables.groups.all()]


def test_unknown_topics_and_invalid_receipts_are_refused(node: RunningNode) -> None:
    with pytest.raises(NotFound):
        node.run(
            verbs.receive(
                served(node), FilterCache(), wire.Receive(topic="none", group="g", rows=1), ANONYMOUS
            )
        )
    with pytest.raises(InvalidReceipt, match="did not make it"):
        ack = wire.Acknowledge(topic=TOPIC, group="g", receipts=["made-up"])
        node.run(verbs.acknowledge(served(node), ack, ANONYMOUS))
