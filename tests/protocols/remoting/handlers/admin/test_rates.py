"""What goes through, as exporters and consoles ask for it: every way in and out is counted."""

from __future__ import annotations

import re
from typing import Any

import pytest
from tests.node_fixture import RunningNode, eventually
from tests.protocols.remoting.handlers.test_sends import sent
from tests.protocols.remoting.wire import Wire, json_body

from timeball.protocols.remoting.codec.codes import PullFlag, RequestCode, ResponseCode

VIEW = RequestCode.VIEW_BROKER_STATS_DATA
BEAT = {
    "clientID": "c1",
    "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [{"topic": "orders"}]}],
}


def total(wire: Wire, name: str, key: str) -> int:
    """The day's sum; 0 for what is not counted."""
    answer = wire.ask(VIEW, statsName=name, statsKey=key)
    if answer.code == ResponseCode.SYSTEM_ERROR:
        assert answer.remark == f"The stats <{name}> <{key}> not exist"
        return 0
    found = json_body(answer)
    assert found.keys() == {"statsMinute", "statsHour", "statsDay"}
    assert found["statsMinute"] == found["statsHour"] | {"tps": found["statsMinute"]["tps"]}, "all is of now"
    return int(found["statsDay"]["sum"])


def pull(wire: Wire, offset: int = 0, queue_id: int = 0) -> Any:
    return wire.ask(
        RequestCode.PULL_MESSAGE, consumerGroup="g", topic="orders", queueId=queue_id, queueOffset=offset,
        sysFlag=int(PullFlag.SUBSCRIPTION), subscription="*",
    )  # fmt: skip


def test_what_is_sent_and_pulled(wire: Wire) -> None:
    assert total(wire, "TOPIC_PUT_NUMS", "orders") == total(wire, "GROUP_GET_NUMS", "orders@g") == 0
    for _ in range(3):
        assert sent(wire, b"x" * 1_000).code == 0
    assert total(wire, "TOPIC_PUT_NUMS", "orders") == total(wire, "BROKER_PUT_NUMS", "DefaultCluster") == 3
    assert 3_000 < total(wire, "TOPIC_PUT_SIZE", "orders") < 4_000
    answer = pull(wire)
    assert total(wire, "GROUP_GET_NUMS", "orders@g") == total(wire, "BROKER_GET_NUMS", "DefaultCluster") == 3
    assert total(wire, "GROUP_GET_SIZE", "orders@g") == len(answer.body)
    pull(wire, offset=3)
    assert total(wire, "GROUP_GET_NUMS", "orders@g") == 3, "nothing was got"


def test_what_waits_is_counted_where_it_waits_and_again_when_it_comes(wire: Wire) -> None:
    sent(wire, properties={"TIMER_DELAY_MS": "50"})
    assert total(wire, "TOPIC_PUT_NUMS", "rmq_sys_wheel_timer") == 1
    sent(wire, properties={"DELAY": "18"})
    assert total(wire, "TOPIC_PUT_NUMS", "SCHEDULE_TOPIC_XXXX") == 1
    eventually(lambda: total(wire, "TOPIC_PUT_NUMS", "orders") == 1, "the timer's was released")
    assert total(wire, "BROKER_PUT_NUMS", "DefaultCluster") == 3


def test_what_is_popped_and_acknowledged(wire: Wire) -> None:
    sent(wire)
    popped = wire.ask_ok(
        RequestCode.POP_MESSAGE, consumerGroup="g", topic="orders", queueId=-1, maxMsgNums=8, invisibleTime=60_000,
        pollTime=0, bornTime=0, initMode=0,
    )  # fmt: skip
    assert total(wire, "GROUP_GET_NUMS", "orders@g") == 1
    assert total(wire, "GROUP_ACK_NUMS", "orders@g") == 0
    extra = f"0 {popped.ext['popTime']} 60000 {popped.ext['reviveQid']} 0 timeball 0 0"
    ack = {"consumerGroup": "g", "topic": "orders", "queueId": 0, "extraInfo": extra, "offset": 0}
    wire.ask_ok(RequestCode.ACK_MESSAGE, **ack)
    assert wire.ask(RequestCode.ACK_MESSAGE, **ack).code == ResponseCode.NO_MESSAGE
    assert total(wire, "GROUP_ACK_NUMS", "orders@g") == 1


def test_what_is_handed_back(wire: Wire) -> None:
    wire.ask_ok(RequestCode.HEART_BEAT, BEAT)
    number = int(sent(wire).ext["msgId"][-16:], 16)
    wire.ask_ok(RequestCode.CONSUMER_SEND_MSG_BACK, offset=number, group="g", delayLevel=3)
    assert total(wire, "SNDBCK_PUT_NUMS", "orders@g") == 1


def test_flight_s_messages_count_too(node: RunningNode, wire: Wire) -> None:
    sent(wire)
    node.run(node.broker.read_queue("orders", 0, 0, 8))
    assert total(wire, "BROKER_GET_NUMS", "DefaultCluster") == 1


def test_other_tools_see_the_same_rates(wire: Wire) -> None:
    sent(wire)
    pull(wire)
    # Their tables have objects as keys, which is no JSON.
    topic = wire.ask_ok(RequestCode.GET_TOPIC_STATS_INFO, topic="orders").body
    group = wire.ask_ok(RequestCode.GET_CONSUME_STATS, consumerGroup="g", topic="orders").body
    for name, body in ((b"topicPutTps", topic), (b"consumeTps", group)):
        found = re.search(rb'"%s":([0-9.]+)' % name, body)
        assert found is not None and float(found[1]) > 0, body
    table = json_body(wire.ask_ok(RequestCode.GET_BROKER_RUNTIME_INFO))["table"]
    assert table["msgGetTotalTodayNow"] == "1"


@pytest.mark.parametrize("name", ["TOPIC_PUT_NUMS", "BROKER_PUT_NUMS", "NO_SUCH_STATS", ""])
def test_what_is_not_counted_is_not_there(wire: Wire, name: str) -> None:
    sent(wire)
    assert total(wire, name, "nobody") == 0
