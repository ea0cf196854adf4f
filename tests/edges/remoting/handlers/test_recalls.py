"""Recalls over remoting: the response codes of the decisions in broker/revoking/cancel.py."""

from __future__ import annotations

import pytest
from tests.edges.remoting.handlers.test_sends import rows, sent
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode, eventually

from timeball.broker.revoking.cancel import decode_handle, encode_handle
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import Command

RECALL = RequestCode.RECALL_MESSAGE
HOUR_MS = 3_600_000


def scheduled(node: RunningNode, wire: Wire, ahead_ms: int = HOUR_MS, **more: object) -> str:
    due_ms = node.broker.clock.now_ms() + ahead_ms
    answer = sent(wire, properties={"TIMER_DELIVER_MS": str(due_ms)}, **more)
    assert answer.code == 0, answer.remark
    return answer.ext["recallHandle"]


def recalled(wire: Wire, handle: str, topic: str = "orders") -> Command:
    return wire.ask(RECALL, producerGroup="producers", topic=topic, recallHandle=handle)


def pending_count(node: RunningNode) -> int:
    schedule = node.broker.status()["schedule"]
    assert isinstance(schedule, dict)
    return int(schedule["tail_rows"]) - int(schedule["cancelled_rows"])


def test_a_pending_message_is_recalled_for_good(node: RunningNode, wire: Wire) -> None:
    handle = scheduled(node, wire)
    assert pending_count(node) == 1
    answer = recalled(wire, handle)
    traced = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}  # what a client that traces looks for
    assert (answer.code, answer.ext) == (0, {"msgId": "AB" * 16} | traced)
    assert pending_count(node) == 0
    assert recalled(wire, handle).code == 0, "to recall twice is to succeed twice"


def test_another_topics_message_of_the_same_id_stays(node: RunningNode, wire: Wire) -> None:
    handle = scheduled(node, wire)
    scheduled(node, wire, topic="others")
    assert recalled(wire, handle).code == 0
    assert pending_count(node) == 1


def test_a_recall_after_the_due_time_is_refused_as_too_late(node: RunningNode, wire: Wire) -> None:
    handle = scheduled(node, wire, ahead_ms=20)
    eventually(lambda: rows(node), "released")
    answer = recalled(wire, handle)
    assert answer.code == ResponseCode.ILLEGAL_OPERATION
    assert "too late" in str(answer.remark)


@pytest.mark.parametrize("what", ["topic", "broker", "key", "garbage", "empty", "version"])
def test_an_unknown_handle_is_refused(node: RunningNode, wire: Wire, what: str) -> None:
    handle = scheduled(node, wire)
    parts = decode_handle(handle)._asdict()
    changed = {
        "topic": encode_handle("others", *list(parts.values())[1:]),
        "broker": encode_handle(parts["topic"], "elsewhere", parts["timestamp_ms"], parts["unique_key"]),
        "key": encode_handle(parts["topic"], parts["broker_name"], parts["timestamp_ms"], "nobody"),
        "garbage": "@@@",
        "empty": "",
        "version": "djIgYSBiIDEgYw==",
    }[what]
    assert recalled(wire, changed).code == ResponseCode.ILLEGAL_OPERATION
    assert pending_count(node) == 1


def test_a_recall_from_an_unknown_topic_is_refused(wire: Wire) -> None:
    assert recalled(wire, "x", topic="nobody").code == ResponseCode.TOPIC_NOT_EXIST
