"""Requests of tools that the broker forwards to consumers, and the answers that it returns to the tool."""

from __future__ import annotations

import pytest
from tests.edges.remoting.handlers.test_sends import sent
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode

from timeball.edges.remoting.codec.codes import CommandFlag, RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import BINARY, Command, encode
from timeball.edges.remoting.handlers.admin import groups

STATUS, DIRECT = RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, RequestCode.CONSUME_MESSAGE_DIRECTLY
INFO = RequestCode.GET_CONSUMER_RUNNING_INFO
BEAT = {"clientID": "c1", "consumerDataSet": [{"groupName": "g"}]}


def test_the_running_information_of_a_consumer_is_returned_to_the_tool(node: RunningNode, wire: Wire) -> None:
    with Wire.to(node) as consumer:
        consumer.ask_ok(RequestCode.HEART_BEAT, BEAT)
        consumer.next_pushed()  # the notification of the changed group
        asked = wire.send(INFO, consumerGroup="g", clientId="c1", jstackEnable="true")
        question = consumer.next_pushed()
        assert (question.code, question.is_one_way) == (INFO, False)
        assert question.ext == {"consumerGroup": "g", "clientId": "c1", "jstackEnable": "true"}
        consumer.reply(question, jstack="stack of the consumer")
        answer = wire.answer_to(asked)
        assert (answer.code, answer.ext) == (ResponseCode.SUCCESS, {"jstack": "stack of the consumer"})


def test_an_error_of_the_consumer_is_returned_to_the_tool(node: RunningNode, wire: Wire) -> None:
    with Wire.to(node) as consumer:
        consumer.ask_ok(RequestCode.HEART_BEAT, BEAT)
        consumer.next_pushed()
        asked = wire.send(INFO, consumerGroup="g", clientId="c1")
        consumer.reply(consumer.next_pushed(), code=ResponseCode.SYSTEM_ERROR)
        assert wire.answer_to(asked).code == ResponseCode.SYSTEM_ERROR


def test_a_consumer_that_disconnects_gives_an_error(node: RunningNode, wire: Wire) -> None:
    with Wire.to(node) as consumer:
        consumer.ask_ok(RequestCode.HEART_BEAT, BEAT)
        consumer.next_pushed()
        asked = wire.send(INFO, consumerGroup="g", clientId="c1")
        consumer.next_pushed()
    assert wire.answer_to(asked).code == ResponseCode.SERVICE_NOT_AVAILABLE


def test_an_unknown_consumer_gives_an_error(wire: Wire) -> None:
    wire.ask_ok(RequestCode.HEART_BEAT, BEAT)
    for fields in ({"consumerGroup": "g", "clientId": "x"}, {"consumerGroup": "x", "clientId": "c1"}):
        answer = wire.ask(INFO, **fields)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "not online" in str(answer.remark)


@pytest.mark.parametrize(("code", "fields"), [(0, {"x" * 40_000: ""}), (1 << 20, {})], ids=["name", "code"])
def test_an_answer_that_the_binary_header_of_the_tool_cannot_hold_is_refused(
    node: RunningNode, code: int, fields: dict[str, str]
) -> None:
    with Wire.to(node) as consumer, Wire.to(node, BINARY) as tool:
        consumer.ask_ok(RequestCode.HEART_BEAT, BEAT)
        consumer.next_pushed()
        asked = tool.send(INFO, consumerGroup="g", clientId="c1")
        consumer.reply(consumer.next_pushed(), code=code, **fields)
        answer = tool.answer_to(asked)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "cannot be forwarded" in str(answer.remark)


# ---- a message for one consumer -------------------------------------------------------------------------------


def test_a_message_is_forwarded_to_one_consumer(node: RunningNode, wire: Wire) -> None:
    message_id = sent(wire, b"look at this").ext["msgId"]
    with Wire.to(node) as consumer:
        consumer.ask_ok(RequestCode.HEART_BEAT, BEAT)
        consumer.next_pushed()
        asked = wire.send(DIRECT, consumerGroup="g", clientId="c1", msgId=message_id, topic="orders")
        question = consumer.next_pushed()
        assert (question.code, question.ext["brokerName"], question.ext["msgId"]) == (
            DIRECT,
            "timeball",
            message_id,
        )
        assert b"look at this" in question.body
        result = b'{"consumeResult":"CR_SUCCESS","spentTimeMills":3}'
        consumer.send_bytes(encode(Command(0, question.opaque, CommandFlag.RESPONSE, body=result)))
        answer = wire.answer_to(asked)
        assert (answer.code, answer.body) == (ResponseCode.SUCCESS, result)


def test_an_unknown_message_or_consumer_is_refused(wire: Wire) -> None:
    message_id = sent(wire).ext["msgId"]
    wire.ask_ok(RequestCode.HEART_BEAT, BEAT)
    valid = {"consumerGroup": "g", "clientId": "c1", "msgId": message_id}
    for changed, code in (
        ({"clientId": "x"}, ResponseCode.SYSTEM_ERROR),
        ({"clientId": None}, ResponseCode.INVALID_PARAMETER),
        ({"msgId": "no id"}, ResponseCode.MESSAGE_ILLEGAL),
        ({"msgId": message_id[:-1] + "7"}, ResponseCode.SYSTEM_ERROR),
    ):
        assert wire.ask(DIRECT, **(valid | changed)).code == code, changed


# ---- the offsets of consumers ---------------------------------------------------------------------------------


def test_offsets_are_collected_from_the_members(node: RunningNode, wire: Wire) -> None:
    queue = b'{"brokerName":"timeball","queueId":%d,"topic":"orders"}'
    table = b"{" + queue % 0 + b":7," + queue % 1 + b":12}"
    with Wire.to(node) as first, Wire.to(node) as second:
        first.ask_ok(RequestCode.HEART_BEAT, BEAT)
        second.ask_ok(RequestCode.HEART_BEAT, BEAT | {"clientID": "c2"})
        for consumer in (first, second, first):
            consumer.next_pushed()  # the notification of the changed group
        asked = wire.send(STATUS, topic="orders", group="g", clientAddr="")
        question = first.next_pushed()
        assert question.code == RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT
        assert question.ext == {"topic": "orders", "group": "g"}
        status = b'{"consumerTable":{},"messageQueueTable":' + table + b"}"
        first.send_bytes(encode(Command(0, question.opaque, CommandFlag.RESPONSE, body=status)))
        second.reply(second.next_pushed(), code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
        answer = wire.answer_to(asked)
        assert answer.body == b'{"consumerTable":{"c1":' + table + b'},"messageQueueTable":{}}'

        asked = wire.send(STATUS, topic="orders", group="g", clientAddr="c2")
        second.reply(second.next_pushed())
        assert wire.answer_to(asked).body == b'{"consumerTable":{"c2":{}},"messageQueueTable":{}}'
        assert not first.pushed


def test_a_member_that_does_not_answer_is_omitted(
    node: RunningNode, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "STATUS_TIMEOUT_S", 0.01)
    with Wire.to(node) as consumer:
        consumer.ask_ok(RequestCode.HEART_BEAT, BEAT)
        answer = wire.ask_ok(STATUS, topic="orders", group="g")
        assert answer.body == b'{"consumerTable":{},"messageQueueTable":{}}'
    assert wire.ask(STATUS, topic="orders", group="nobody").code == ResponseCode.SYSTEM_ERROR
