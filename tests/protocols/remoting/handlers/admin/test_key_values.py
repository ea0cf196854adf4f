"""Ordered topics in the name server's words: one fact, wherever it is written or read."""

from __future__ import annotations

import pytest
from tests.node_fixture import RunningNode
from tests.protocols.remoting.wire import Wire, json_body

from timeball.broker.registry.topic_config import TopicConfig
from timeball.protocols.remoting.codec.codes import RequestCode, ResponseCode
from timeball.protocols.remoting.handlers.admin.key_values import ORDER_NAMESPACE

PUT, GET, DELETE = RequestCode.PUT_KV_CONFIG, RequestCode.GET_KV_CONFIG, RequestCode.DELETE_KV_CONFIG
LIST, ROUTE = RequestCode.GET_KVLIST_BY_NAMESPACE, RequestCode.GET_ROUTEINFO_BY_TOPIC
ORDERS = {"namespace": ORDER_NAMESPACE, "key": "orders"}


def test_a_topic_becomes_an_ordered_one_and_a_plain_one_again(node: RunningNode, wire: Wire) -> None:
    wire.ask_ok(
        RequestCode.UPDATE_AND_CREATE_TOPIC, topic="orders", readQueueNums=4, writeQueueNums=3, topicSysFlag=2
    )
    route = json_body(wire.ask_ok(ROUTE, topic="orders"))
    assert "orderTopicConf" not in route
    assert route["queueDatas"][0]["topicSysFlag"] == 2
    wire.ask_ok(PUT, **ORDERS, value="timeball:3")
    assert node.node.broker.parts.topics.get("orders").config == TopicConfig(4, 3, order=True, sys_flag=2)
    assert json_body(wire.ask_ok(ROUTE, topic="orders"))["orderTopicConf"] == "timeball:3"
    assert wire.ask_ok(GET, **ORDERS).ext == {"value": "timeball:3"}
    assert json_body(wire.ask_ok(LIST, namespace=ORDER_NAMESPACE)) == {"table": {"orders": "timeball:3"}}
    wire.ask_ok(DELETE, **ORDERS)
    assert wire.ask(GET, **ORDERS).code == ResponseCode.QUERY_NOT_FOUND
    assert not node.node.broker.parts.topics.get("orders").config.order


def test_what_is_not_there_is_not_found_and_need_not_be_deleted(wire: Wire) -> None:
    answer = wire.ask(GET, **ORDERS)
    assert (answer.code, answer.remark) == (
        ResponseCode.QUERY_NOT_FOUND, "No config item, Namespace: ORDER_TOPIC_CONFIG Key: orders",
    )  # fmt: skip
    for namespace in (ORDER_NAMESPACE, "MINE"):
        assert wire.ask(LIST, namespace=namespace).code == ResponseCode.QUERY_NOT_FOUND
    wire.ask_ok(DELETE, **ORDERS)
    wire.ask_ok(PUT, **ORDERS, value="timeball:3")
    assert wire.ask(GET, **ORDERS).code == ResponseCode.QUERY_NOT_FOUND, "no topic, no order"


@pytest.mark.parametrize("code", [PUT, DELETE])
def test_other_namespaces_are_not_kept(wire: Wire, code: int) -> None:
    assert wire.ask(code, namespace="MINE", key="a", value="b").code == ResponseCode.NO_PERMISSION
