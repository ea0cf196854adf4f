"""Requests of tools that are forwarded to a consumer."""

from __future__ import annotations

import pytest
from tests.edges.remoting.handlers.test_sends import sent
from tests.edges.remoting.wire import Wire
from tests.node_fixture import RunningNode

from timeball.edges.remoting.codec.codes import CommandFlag, RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import BINARY, Command, encode
from timeball.edges.remoting.handlers.admin import groups as relays

STATUS, DIRECT = RequestCode.INVOKE_BROKER_TO_GET_CONSUMER_STATUS, RequestCode.CONSUME_MESSAGE_DIRECTLY
INFO = RequestCode.GET_CONSUMER_RUNNING_INFO
BEAT = {"clientID": "c1", "consumerDataSet": [{"groupName": "g"}]}


def test_running_info_is_forwarded_from_the_consumer(node: RunningNode, wire: Wire) -> None:
    with Wire.to(node) as consumer:
        consumer.ask_ok(RequestCode.HEART_BEAT, BEAT)
        consumer.next_pushed()  # that its group has changed
        asked = wire.send(INFO, consumerGroup="g", clientId="c1", jstackEnable="true")
        question = consumer.next_pushed()
        assert (question.code, question.is_one_way) == (INFO, False)
        assert question.ext == {"consumerGroup": "g", "clientId": "c1", "jstackEnable": "true"}
        consumer.reply(question, jstack="all well")
        answer = wire.answer_to(asked)
        assert (answer.code, answer.ext) == (ResponseCode.SUCCESS, {"jstack": "all well"})


def test_an_error_of_the_consumer_is_forwarded(node: RunningNode, wire: Wire) -> None:
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


@pytest.mark.parametrize("said", [{"x" * 40_000: ""}, {}])
def test_an_answer_that_does_not_fit_the_tools_header_is_refused(
    node: RunningNode, said: dict[str, str]
) -> None:
    with Wire.to(node) as consumer, Wire.to(node, BINARY) as tool:
        consumer.ask_ok(RequestCode.HEART_BEAT, BEAT)
        consumer.next_pushed()
        asked = tool.send(INFO, consumerGroup="g", clientId="c1")
        consumer.reply(consumer.next_pushed(), code=0 if said else 1 << 20, **said)
        answer = tool.answer_to(asked)
        assert (answer.code, "cannot be forwarded" in str(answer.remark)) == (ResponseCode.SYSTEM_ERROR, True)


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
        told = b'{"consumeResult":"CR_SUCCESS","spentTimeMills":3}'
        consumer.send_bytes(encode(Command(0, question.opaque, CommandFlag.RESPONSE, body=told)))
        answer = wire.answer_to(asked)
        assert (answer.code, answer.body) == (ResponseCode.SUCCESS, told)


def test_an_unknown_message_or_consumer_is_refused(wire: Wire) -> None:
    message_id = sent(wire).ext["msgId"]
    wire.ask_ok(RequestCode.HEART_BEAT, BEAT)
    good = {"consumerGroup": "g", "clientId": "c1", "msgId": message_id}
    for wrong, code in (
        ({"clientId": "x"}, ResponseCode.SYSTEM_ERROR),
        ({"clientId": None}, ResponseCode.INVALID_PARAMETER),
        ({"msgId": "no id"}, ResponseCode.MESSAGE_ILLEGAL),
        ({"msgId": message_id[:-1] + "7"}, ResponseCode.SYSTEM_ERROR),
    ):
        assert wire.ask(DIRECT, **(good | wrong)).code == code, wrong


# ---- where consumers stand ------------------------------------------------------------------------------------


def test_offsets_are_collected_from_the_members(node: RunningNode, wire: Wire) -> None:
    queue = b'{"brokerName":"timeball","queueId":%d,"topic":"orders"}'
    table = b"{" + queue % 0 + b":7," + queue % 1 + b":12}"
    with Wire.to(node) as first, Wire.to(node) as second:
        first.ask_ok(RequestCode.HEART_BEAT, BEAT)
        second.ask_ok(RequestCode.HEART_BEAT, BEAT | {"clientID": "c2"})
        for one in (first, second, first):
            one.next_pushed()  # the group has changed
        asked = wire.send(STATUS, topic="orders", group="g", clientAddr="")
        question = first.next_pushed()
        assert question.code == RequestCode.GET_CONSUMER_STATUS_FROM_CLIENT
        assert question.ext == {"topic": "orders", "group": "g"}
        told = b'{"consumerTable":{},"messageQueueTable":' + table + b"}"
        first.send_bytes(encode(Command(0, question.opaque, CommandFlag.RESPONSE, body=told)))
        second.reply(second.next_pushed(), code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
        answer = wire.answer_to(asked)
        assert answer.body == b'{"consumerTable":{"c1":' + table + b'},"messageQueueTable":{}}'

        asked = wire.send(STATUS, topic="orders", group="g", clientAddr="c2")
        second.reply(second.next_pushed())
        assert wire.answer_to(asked).body == b'{"consumerTable":{"c2":{}},"messageQueueTable":{}}'
        assert not first.pushed


def test_a_member_that_does_not_answer_is_left_out(
    node: RunningNode, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relays, "STATUS_TIMEOUT_S", 0.01)
    with Wire.to(node) as consumer:
        consumer.ask_ok(RequestCode.HEART_BEAT, BEAT)
        answer = wire.ask_ok(STATUS, topic="orders", group="g")
        assert answer.body == b'{"consumerTable":{},"messageQueueTable":{}}'
    assert wire.ask(STATUS, topic="orders", group="nobody").code == ResponseCode.SYSTEM_ERROR
