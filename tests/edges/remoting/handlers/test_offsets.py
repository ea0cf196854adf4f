"""Requests about consumer offsets and about the offsets of a queue."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.edges.remoting.handlers.test_sends import sent
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode, eventually, running_node

from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.model.access import ANONYMOUS

QUERY, UPDATE = RequestCode.QUERY_CONSUMER_OFFSET, RequestCode.UPDATE_CONSUMER_OFFSET
PULL = {"maxMsgNums": 1, "sysFlag": 4, "commitOffset": 0, "subscription": "*", "subVersion": 0}


def queue(topic: str = "orders", queue_id: int = 0, **more: object) -> dict[str, object]:
    """Return the fields that name a queue and a group."""
    return {"topic": topic, "queueId": queue_id, "consumerGroup": "group", **more}


def test_committed_offsets_survive_a_restart(tmp_path: Path) -> None:
    with running_node(tmp_path) as node, Wire.to(node) as wire:
        sent(wire)
        beat(wire, "orders")
        wire.ask_ok(UPDATE, **queue(commitOffset=1))
    with running_node(tmp_path) as node, Wire.to(node) as wire:
        assert wire.ask_ok(QUERY, **queue()).ext["offset"] == "1"


def test_a_one_way_commit_is_stored(node: RunningNode, wire: Wire) -> None:
    sent(wire)
    beat(wire, "orders")
    wire.send(UPDATE, one_way=True, **queue(commitOffset=1))
    assert wire.ask_ok(QUERY, **queue()).ext["offset"] == "1"
    assert not wire._answers


def beat(wire: Wire, *topics: str, model: str = "CLUSTERING") -> None:
    """Send a heartbeat of one consumer of the group `group`, which subscribes to all messages of the topics."""
    subscribed = [{"topic": topic, "subString": "*", "subVersion": 1} for topic in topics]
    group = {"groupName": "group", "subscriptionDataSet": subscribed, "messageModel": model}
    wire.ask_ok(RequestCode.HEART_BEAT, {"clientID": "c", "consumerDataSet": [group]})


def query_offset(wire: Wire, **more: object) -> str | None:
    """Query the offset of a group, None for QUERY_NOT_FOUND."""
    answer = wire.ask(QUERY, **queue(**more))
    assert answer.code in (0, ResponseCode.QUERY_NOT_FOUND)
    return answer.ext["offset"] if answer.code == 0 else None


def test_a_new_group_has_no_offset_in_a_queue_that_holds_messages(node: RunningNode, wire: Wire) -> None:
    """The client applies its ConsumeFromWhere only if the broker answers that there is no offset."""
    sent(wire)
    assert query_offset(wire) is None
    beat(wire, "orders")
    assert query_offset(wire) is None
    assert query_offset(wire, setZeroIfNotFound=False) is None
    assert query_offset(wire, setZeroIfNotFound=True) == "0"


def test_a_group_begins_at_zero_in_a_queue_that_was_empty_when_it_subscribed(
    node: RunningNode, wire: Wire
) -> None:
    sent(wire, queue_id=0)
    beat(wire, "orders", "later")
    sent(wire, queue_id=1)
    sent(wire, topic="later", queue_id=0)
    assert query_offset(wire, queue_id=0) is None
    assert query_offset(wire, queue_id=1) == "0"
    assert query_offset(wire, topic="later") == "0"
    beat(wire, "orders", "later")  # clients repeat their heartbeat with the same subscriptions
    assert query_offset(wire, queue_id=1) == "0"
    assert query_offset(wire, queue_id=2, setZeroIfNotFound=False) is None
    sent(wire, queue_id=2)
    beat(wire, "later")
    beat(wire, "later", "orders")
    assert query_offset(wire, queue_id=1) == "0", "the earlier query has committed offset 0"
    assert query_offset(wire, queue_id=2) is None, "queue 2 held a message when the group subscribed again"


def test_the_queried_beginning_of_a_group_remains_when_its_consumer_disconnects(
    node: RunningNode, wire: Wire
) -> None:
    node.run(node.broker.create_topic("orders", 1))
    with Wire.to(node) as consumer:
        beat(consumer, "orders")
        assert query_offset(consumer) == "0"
    edges = node.node.edges
    assert edges is not None and edges.remoting is not None
    sessions = edges.remoting.context.sessions
    eventually(lambda: sessions.group("group") is None, "the group has no more members")
    sent(wire, queue_id=0)
    beat(wire, "orders")
    assert query_offset(wire) == "0"


def test_the_beginning_of_a_broadcasting_group_is_not_stored(node: RunningNode, wire: Wire) -> None:
    node.run(node.broker.create_topic("orders", 1))
    beat(wire, "orders", model="BROADCASTING")
    assert query_offset(wire) == "0"
    assert node.broker.offsets("group", "orders", ANONYMOUS) == {}


def test_a_group_begins_at_zero_in_its_retry_topic(node: RunningNode, wire: Wire) -> None:
    beat(wire, "orders")
    assert sent(wire, topic="%RETRY%group", queue_id=0, reconsume_times=1).code == 0
    eventually(lambda: node.broker.queues("%RETRY%group")[0][1], "the retry topic holds a message")
    assert query_offset(wire, topic="%RETRY%group") == "0"


def test_a_queue_without_its_first_message_has_no_offset_zero(node: RunningNode, wire: Wire) -> None:
    sent(wire)
    assert query_offset(wire, setZeroIfNotFound=True) == "0"
    index = node.broker.tables.topics.get("orders").queues[0].index

    async def remove() -> None:
        index.min_offset = 1

    node.run(remove())
    assert query_offset(wire, setZeroIfNotFound=True) is None


@pytest.mark.parametrize("offset", [2, -1, 1 << 40])
def test_an_offset_beyond_the_queue_is_refused(wire: Wire, offset: int) -> None:
    sent(wire)
    beat(wire, "orders")
    assert wire.ask(UPDATE, **queue(commitOffset=offset)).code == ResponseCode.INVALID_PARAMETER


def test_an_offset_of_an_unknown_group_is_refused(node: RunningNode, wire: Wire) -> None:
    """As in RocketMQ, a commit creates no group. A pull does, so a client needs no heartbeat before its commit."""
    sent(wire)
    for topic in ("orders", "nobody"):
        answer = wire.ask(UPDATE, **queue(topic, commitOffset=1))
        assert answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
        assert answer.remark and "'group'" in answer.remark and "updateSubGroup" in answer.remark
    assert not node.broker.is_group("group")
    assert wire.ask(RequestCode.PULL_MESSAGE, **queue(queueOffset=0, **PULL)).code == 0
    wire.ask_ok(UPDATE, **queue(commitOffset=1))
    wire.ask_ok(RequestCode.DELETE_SUBSCRIPTIONGROUP, groupName="group", cleanOffset=True)
    assert wire.ask(UPDATE, **queue(commitOffset=1)).code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST


def test_minimum_maximum_and_time_based_offsets_are_returned(wire: Wire) -> None:
    receipts = [sent(wire) for _ in range(3)]
    assert all(receipt.code == 0 for receipt in receipts)
    assert wire.ask_ok(RequestCode.GET_MAX_OFFSET, **queue()).ext["offset"] == "3"
    assert wire.ask_ok(RequestCode.GET_MIN_OFFSET, **queue()).ext["offset"] == "0"
    stored_ms = int(wire.ask_ok(RequestCode.GET_EARLIEST_MSG_STORETIME, **queue()).ext["timestamp"])
    search = RequestCode.SEARCH_OFFSET_BY_TIMESTAMP
    assert wire.ask_ok(search, **queue(timestamp=stored_ms)).ext["offset"] == "0"
    assert wire.ask_ok(search, **queue(timestamp=stored_ms + 60_000)).ext["offset"] == "3"
    assert wire.ask_ok(search, **queue(timestamp=0, boundaryType="UPPER")).ext["offset"] == "0"


@pytest.mark.parametrize("code", [UPDATE, RequestCode.GET_MAX_OFFSET, RequestCode.SEARCH_OFFSET_BY_TIMESTAMP])
def test_an_unknown_topic_or_queue_is_refused(wire: Wire, code: int) -> None:
    sent(wire)
    beat(wire, "orders")
    more = {"commitOffset": 0, "timestamp": 0}
    assert wire.ask(code, **queue("nobody", **more)).code == ResponseCode.TOPIC_NOT_EXIST
    assert wire.ask(code, **queue(queue_id=99, **more)).code == ResponseCode.INVALID_PARAMETER
