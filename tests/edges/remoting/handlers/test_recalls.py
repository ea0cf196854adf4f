"""Recalls over remoting: the response code for each outcome of broker/revoking/cancel.py."""

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


def send_scheduled(node: RunningNode, wire: Wire, delay_ms: int = HOUR_MS, **more: object) -> str:
    """Send a message that is due in `delay_ms`, and return its recall handle."""
    due_ms = node.broker.clock.now_ms() + delay_ms
    answer = sent(wire, properties={"TIMER_DELIVER_MS": str(due_ms)}, **more)
    assert answer.code == 0, answer.remark
    return answer.ext["recallHandle"]


def recall(wire: Wire, handle: str, topic: str = "orders") -> Command:
    """Recall a message, and return the answer."""
    return wire.ask(RECALL, producerGroup="producers", topic=topic, recallHandle=handle)


def pending_count(node: RunningNode) -> int:
    """Return the number of pending messages."""
    schedule = node.broker.status()["schedule"]
    assert isinstance(schedule, dict)
    return int(schedule["tail_rows"]) - int(schedule["cancelled_rows"])


def test_a_pending_message_is_recalled(node: RunningNode, wire: Wire) -> None:
    handle = send_scheduled(node, wire)
    assert pending_count(node) == 1
    answer = recall(wire, handle)
    trace_fields = {"MSG_REGION": "DefaultRegion", "TRACE_ON": "true"}
    assert (answer.code, answer.ext) == (0, {"msgId": "AB" * 16} | trace_fields)
    assert pending_count(node) == 0
    assert recall(wire, handle).code == 0, "a repeated recall succeeds, too"


def test_a_recall_leaves_a_message_with_the_same_id_in_another_topic(node: RunningNode, wire: Wire) -> None:
    handle = send_scheduled(node, wire)
    send_scheduled(node, wire, topic="others")
    assert recall(wire, handle).code == 0
    assert pending_count(node) == 1


def test_a_recall_after_the_due_time_is_refused_as_too_late(node: RunningNode, wire: Wire) -> None:
    handle = send_scheduled(node, wire, delay_ms=20)
    eventually(lambda: rows(node), "the message is released")
    answer = recall(wire, handle)
    assert answer.code == ResponseCode.ILLEGAL_OPERATION
    assert "too late" in str(answer.remark)


@pytest.mark.parametrize(
    "changed", [{"topic": "others"}, {"broker_name": "another-broker"}, {"unique_key": "unknown"}]
)
def test_a_handle_with_a_changed_field_is_refused(
    node: RunningNode, wire: Wire, changed: dict[str, str]
) -> None:
    handle = decode_handle(send_scheduled(node, wire))
    assert recall(wire, encode_handle(*handle._replace(**changed))).code == ResponseCode.ILLEGAL_OPERATION
    assert pending_count(node) == 1


@pytest.mark.parametrize(
    "text", ["@@@", "", "djIgYSBiIDEgYw=="], ids=["not Base64", "empty", "unknown version"]
)
def test_text_that_is_no_handle_is_refused(node: RunningNode, wire: Wire, text: str) -> None:
    send_scheduled(node, wire)
    assert recall(wire, text).code == ResponseCode.ILLEGAL_OPERATION
    assert pending_count(node) == 1


def test_a_recall_from_an_unknown_topic_is_refused(wire: Wire) -> None:
    assert recall(wire, "x", topic="nobody").code == ResponseCode.TOPIC_NOT_EXIST
