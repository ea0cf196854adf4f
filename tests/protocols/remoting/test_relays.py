"""Questions that a consumer answers through the broker."""

from __future__ import annotations

import pytest
from tests.node_fixture import RunningNode
from tests.protocols.remoting.wire import Wire

from timeball.protocols.remoting.codec.codes import RequestCode, ResponseCode
from timeball.protocols.remoting.codec.frame import BINARY

INFO = RequestCode.GET_CONSUMER_RUNNING_INFO
BEAT = {"clientID": "c1", "consumerDataSet": [{"groupName": "g"}]}


def test_a_consumer_tells_how_it_runs(node: RunningNode, wire: Wire) -> None:
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


def test_what_a_consumer_refuses_is_refused(node: RunningNode, wire: Wire) -> None:
    with Wire.to(node) as consumer:
        consumer.ask_ok(RequestCode.HEART_BEAT, BEAT)
        consumer.next_pushed()
        asked = wire.send(INFO, consumerGroup="g", clientId="c1")
        consumer.reply(consumer.next_pushed(), code=ResponseCode.SYSTEM_ERROR)
        assert wire.answer_to(asked).code == ResponseCode.SYSTEM_ERROR


def test_a_consumer_that_goes_instead_of_answering(node: RunningNode, wire: Wire) -> None:
    with Wire.to(node) as consumer:
        consumer.ask_ok(RequestCode.HEART_BEAT, BEAT)
        consumer.next_pushed()
        asked = wire.send(INFO, consumerGroup="g", clientId="c1")
        consumer.next_pushed()
    assert wire.answer_to(asked).code == ResponseCode.SERVICE_NOT_AVAILABLE


def test_a_consumer_that_is_not_there(wire: Wire) -> None:
    wire.ask_ok(RequestCode.HEART_BEAT, BEAT)
    for fields in ({"consumerGroup": "g", "clientId": "x"}, {"consumerGroup": "x", "clientId": "c1"}):
        answer = wire.ask(INFO, **fields)
        assert answer.code == ResponseCode.SYSTEM_ERROR
        assert "not online" in str(answer.remark)


@pytest.mark.parametrize("said", [{"x" * 40_000: ""}, {}])
def test_what_does_not_fit_the_tools_header_is_refused(node: RunningNode, said: dict[str, str]) -> None:
    with Wire.to(node) as consumer, Wire.to(node, BINARY) as tool:
        consumer.ask_ok(RequestCode.HEART_BEAT, BEAT)
        consumer.next_pushed()
        asked = tool.send(INFO, consumerGroup="g", clientId="c1")
        consumer.reply(consumer.next_pushed(), code=0 if said else 1 << 20, **said)
        answer = tool.answer_to(asked)
        assert (answer.code, "cannot be passed on" in str(answer.remark)) == (ResponseCode.SYSTEM_ERROR, True)
