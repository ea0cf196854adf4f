"""Groups over Flight: leases that survive what clients do, retries shown as what they are, and who may."""

from __future__ import annotations

import asyncio

import pytest
from tests.broker.on_node import batch
from tests.node_fixture import RunningNode

from timeball import wire
from timeball.access import ANONYMOUS, Caller, Verb
from timeball.broker.consuming.receipts import Receipt
from timeball.errors import Forbidden, InvalidReceipt, NotFound
from timeball.protocols.flight import groups

TOPIC = "grouped"


def receive(node: RunningNode, group: str = "g", **fields: object) -> groups.HandedOut:
    request = wire.Receive(topic=TOPIC, group=group, rows=10, **fields)  # type: ignore[arg-type]
    return node.run(groups.receive(node.broker, request, ANONYMOUS))


def send(node: RunningNode, count: int) -> None:
    node.run(node.broker.send(batch(count, topic=[TOPIC] * count)))


def test_rows_have_a_receipt_each_and_what_comes_again_the_topic_that_was_asked_for(
    node: RunningNode,
) -> None:
    send(node, 3)
    first = receive(node)
    assert first.rows.schema == wire.RECEIVED_SCHEMA
    texts = first.rows.column("receipt").to_pylist()
    assert len(set(texts)) == 3 and all(isinstance(one, Receipt) for one in first.receipts)
    change = wire.ChangeInvisibleTime(topic=TOPIC, group="g", receipts=texts, invisible_ms=0)
    changed = node.run(groups.change_invisible_time(node.broker, change, ANONYMOUS))
    assert None not in changed and not {*changed} & {*texts}
    again = receive(node, wait_ms=30_000)
    assert set(again.rows.column("topic").to_pylist()) == {TOPIC}
    assert set(again.rows.column("reconsume_times").to_pylist()) == {1}
    ack = wire.Acknowledge(
        topic=TOPIC, group="g", receipts=[*texts, *again.rows.column("receipt").to_pylist()]
    )
    verdicts = node.run(groups.acknowledge(node.broker, ack, ANONYMOUS))
    assert verdicts == [False] * 3 + [True] * again.rows.num_rows


def test_a_message_that_is_given_up_is_a_dead_letter(node: RunningNode) -> None:
    send(node, 1)
    handed_out = receive(node, "quitters")
    texts = handed_out.rows.column("receipt").to_pylist()
    give_up = wire.DeadLetter(topic=TOPIC, group="quitters", receipts=texts)
    assert all(node.run(groups.dead_letter(node.broker, give_up, ANONYMOUS)))
    assert not any(node.run(groups.dead_letter(node.broker, give_up, ANONYMOUS)))
    assert node.broker.queues("%DLQ%quitters")[0][1] == len(texts)


def test_a_client_that_goes_while_it_waits_leaves_no_lease(node: RunningNode) -> None:
    receive(node, "gone")

    async def leave() -> None:
        request = wire.Receive(topic=TOPIC, group="gone", rows=10, wait_ms=30_000)
        asking = asyncio.create_task(groups.receive(node.broker, request, ANONYMOUS))
        await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    node.run(leave())
    send(node, 1)
    assert receive(node, "gone", wait_ms=30_000).rows.num_rows == 1


class Reader(Caller):
    """An account that may receive from one topic as one group."""

    def check(self, verb: Verb, *, topic: str | None = None, group: str | None = None) -> None:
        if verb is not Verb.RECEIVE or topic not in (None, TOPIC) or group not in (None, "mine"):
            raise Forbidden(f"not {verb} {topic} {group}")


def test_an_account_needs_the_topic_and_the_group(node: RunningNode) -> None:
    send(node, 1)

    def ask(topic: str, group: str) -> list[groups.HandedOut]:
        request = wire.Receive(topic=topic, group=group, rows=1)
        return [node.run(groups.receive(node.broker, request, Reader()))]

    ((rows, _),) = ask(TOPIC, "mine")
    for topic, group in ((TOPIC, "theirs"), ("other", "mine")):
        with pytest.raises(Forbidden):
            ask(topic, group)
    receipts = rows.column("receipt").to_pylist()
    for group, error in (("theirs", Forbidden), ("mine", None)):
        ack = wire.Acknowledge(topic=TOPIC, group=group, receipts=receipts)
        if error is None:
            assert node.run(groups.acknowledge(node.broker, ack, Reader())) == [True]
        else:
            with pytest.raises(error):
                node.run(groups.acknowledge(node.broker, ack, Reader()))
    assert "theirs" not in [group.group_name for group in node.broker.parts.groups.all()]


def test_what_is_not_there_or_not_ours_is_said(node: RunningNode) -> None:
    with pytest.raises(NotFound):
        node.run(groups.receive(node.broker, wire.Receive(topic="none", group="g", rows=1), ANONYMOUS))
    with pytest.raises(InvalidReceipt, match="none of ours"):
        ack = wire.Acknowledge(topic=TOPIC, group="g", receipts=["made-up"])
        node.run(groups.acknowledge(node.broker, ack, ANONYMOUS))
