"""Requests of tools that create, change, list and delete topics, and the table of ordered topics."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from tests.broker.on_node import batch, on_node
from tests.broker.registry.state_rows import rows_of
from tests.crash.world import World
from tests.edges.remoting.pairs import Pair, context_of
from tests.edges.remoting.wire import Wire, json_body
from tests.node_fixture import RunningNode

from timeball.broker.registry.topics import READ, WRITE, TopicConfig
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.handlers.admin.topics import ORDER_NAMESPACE, TopicAdmin
from timeball.model import limits
from timeball.model.rules import SCHEDULE_TOPIC

UPDATE, DELETE = RequestCode.UPDATE_AND_CREATE_TOPIC, RequestCode.DELETE_TOPIC_IN_BROKER
ROUTE, GET_ONE = RequestCode.GET_ROUTEINFO_BY_TOPIC, RequestCode.GET_TOPIC_CONFIG


def update_header(topic: str = "orders", **changes: Any) -> dict[str, Any]:
    """Build the header of `mqadmin updateTopic`, as version 5.3 sends it, with some fields changed."""
    return {
        "topic": topic, "defaultTopic": "TBW102", "readQueueNums": 4, "writeQueueNums": 3, "perm": READ | WRITE,
        "topicFilterType": "SINGLE_TAG", "topicSysFlag": 0, "order": False, "attributes": "", "force": False,
        **changes,
    }  # fmt: skip


def test_a_created_topic_has_its_configuration(wire: Wire) -> None:
    wire.ask_ok(UPDATE, **update_header(order=True, attributes="+message.type=DELAY", topicSysFlag=1))
    assert json_body(wire.ask_ok(GET_ONE, topic="orders")) == {
        "topicName": "orders", "readQueueNums": 4, "writeQueueNums": 3, "perm": READ | WRITE,
        "topicFilterType": "SINGLE_TAG", "topicSysFlag": 1, "order": True,
        "attributes": {"message.type": "DELAY"},
    }  # fmt: skip
    (queues,) = json_body(wire.ask_ok(ROUTE, topic="orders"))["queueDatas"]
    assert (queues["readQueueNums"], queues["writeQueueNums"], queues["perm"]) == (4, 3, READ | WRITE)
    listed = json_body(wire.ask_ok(RequestCode.GET_ALL_TOPIC_CONFIG))
    assert listed["topicConfigTable"]["orders"]["attributes"] == {"message.type": "DELAY"}
    assert listed["dataVersion"]["counter"] >= 1


def test_a_change_keeps_attributes_that_it_does_not_name(wire: Wire) -> None:
    wire.ask_ok(UPDATE, **update_header(attributes="+message.type=DELAY"))
    wire.ask_ok(UPDATE, **update_header(perm=READ, readQueueNums=8))
    result = json_body(wire.ask_ok(GET_ONE, topic="orders"))
    assert (result["perm"], result["readQueueNums"]) == (READ, 8)
    assert result["attributes"] == {"message.type": "DELAY"}
    wire.ask_ok(UPDATE, **update_header(attributes="-message.type"))
    assert json_body(wire.ask_ok(GET_ONE, topic="orders"))["attributes"] == {}


def test_a_change_is_saved_before_the_answer(node: RunningNode, wire: Wire) -> None:
    wire.ask_ok(UPDATE, **update_header(perm=READ))
    saved = rows_of(node.node.broker, "topic/")
    assert saved["orders"]["config"]["perm"] == READ


@pytest.mark.parametrize(
    "wrong",
    [
        {"topic": SCHEDULE_TOPIC},
        {"topic": "rmq_sys_x"},
        {"topic": "TBW102"},
        {"topic": "a/b"},
        {"topic": "x" * 128},
        {"readQueueNums": 0, "writeQueueNums": 0},
        {"readQueueNums": 1_025},
        {"readQueueNums": "many"},
        {"writeQueueNums": None},
        {"perm": 9},
        {"topicFilterType": "NO_TAG"},
        {"attributes": "+nothing=1"},
    ],
)
def test_an_invalid_configuration_creates_no_topic(wire: Wire, wrong: dict[str, Any]) -> None:
    answer = wire.ask(UPDATE, **update_header(**wrong))
    assert answer.code == ResponseCode.INVALID_PARAMETER
    assert answer.remark
    assert json_body(wire.ask_ok(RequestCode.GET_ALL_TOPIC_CONFIG))["topicConfigTable"] == {}


def test_an_unknown_topic_has_no_configuration(wire: Wire) -> None:
    assert wire.ask(GET_ONE, topic="orders").code == ResponseCode.TOPIC_NOT_EXIST


@on_node()
async def test_deleting_a_topic_deletes_its_messages_and_offsets(world: World) -> None:
    pair, admin = await Pair.create(), TopicAdmin(context_of(world.broker)).handlers
    await world.broker.send(batch(3, queue_id=pa.array([0, 0, 0], pa.int32())))
    await world.broker.commit_offsets("g", "orders", {0: 2})
    assert (await pair.ask(admin, DELETE, topic="orders")).code == 0
    assert world.broker.topics() == {}
    assert world.broker.offsets("g", "orders") == {}
    await world.restart()
    assert world.broker.topics() == {}
    await world.broker.send(batch(1, queue_id=pa.array([0], pa.int32())))
    assert world.broker.queues("orders")[0] == (3, 4), "the offsets of the deleted topic are not used again"
    pair.close()


@on_node()
async def test_a_scheduled_message_is_released_after_its_topic_is_deleted(world: World) -> None:
    pair, admin = await Pair.create(), TopicAdmin(context_of(world.broker)).handlers
    await world.broker.send(batch(1, delay_ms=[5_000]))
    assert (await pair.ask(admin, DELETE, topic="orders")).code == 0
    await world.advance(6_000)
    assert sum(high - low for low, high in world.broker.queues("orders").values()) == 1
    pair.close()


def test_a_retry_topic_with_the_longest_name_can_be_managed(node: RunningNode, wire: Wire) -> None:
    name = f"%RETRY%{'g' * limits.GROUP_BYTES_MAX}_{'t' * limits.TOPIC_BYTES_MAX}"
    node.run(node.broker.create_topic(name, 1))
    assert json_body(wire.ask_ok(GET_ONE, topic=name))["topicName"] == name
    wire.ask_ok(DELETE, topic=name)
    assert name not in node.broker.topics()
    assert wire.ask(DELETE, topic=name + "x").code == ResponseCode.INVALID_PARAMETER


def test_deleting_an_unknown_topic_succeeds_and_a_system_topic_is_refused(wire: Wire) -> None:
    wire.ask_ok(DELETE, topic="nothing")
    wire.ask_ok(RequestCode.DELETE_TOPIC_IN_NAMESRV, topic="nothing")
    assert wire.ask(DELETE, topic=SCHEDULE_TOPIC).code == ResponseCode.INVALID_PARAMETER


def test_system_topics_are_listed_with_the_cluster_and_broker_names(wire: Wire) -> None:
    for code in (
        RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_NS, RequestCode.GET_SYSTEM_TOPIC_LIST_FROM_BROKER,
    ):  # fmt: skip
        listed = json_body(wire.ask_ok(code))["topicList"]
        assert {SCHEDULE_TOPIC, "TBW102", "DefaultCluster", "timeball"} <= set(listed)


# ---- several topics in one request ----------------------------------------------------------------------------

UPDATE_LIST = RequestCode.UPDATE_AND_CREATE_TOPIC_LIST


def test_several_topics_are_created_by_one_request(node: RunningNode, wire: Wire) -> None:
    wire.ask_ok(UPDATE, **update_header("b", attributes="+queue.type=SimpleCQ"))
    configs = [
        {"topicName": "a", "readQueueNums": 2, "writeQueueNums": 1, "perm": READ, "order": True},
        {
            "topicName": "b",
            "attributes": {"+message.type": "DELAY", "-queue.type": ""},
            "topicFilterType": "SINGLE_TAG",
        },
        {"topicName": "c", "attributes": {"message.type": "FIFO"}, "readQueueNums": 3},
    ]
    wire.ask_ok(UPDATE_LIST, {"topicConfigList": configs})
    a, b, c = (json_body(wire.ask_ok(GET_ONE, topic=name)) for name in "abc")
    assert (a["readQueueNums"], a["writeQueueNums"], a["perm"], a["order"]) == (2, 1, READ, True)
    assert (b["attributes"], b["readQueueNums"]) == ({"message.type": "DELAY"}, 16)
    assert (c["attributes"], c["readQueueNums"], c["writeQueueNums"]) == ({"message.type": "FIFO"}, 3, 16)
    saved = rows_of(node.node.broker, "topic/")
    assert saved.keys() >= {"a", "b", "c"}, "saved before the answer"


@pytest.mark.parametrize(
    "wrong",
    [
        {"topicName": "a b"}, {"topicName": "TBW102"}, {"topicName": "x", "perm": 9}, {"readQueueNums": 1},
        {"topicName": "x", "readQueueNums": 9_999}, {"topicName": "x", "attributes": {"unknown": "1"}},
    ],
)  # fmt: skip
def test_no_topic_is_created_if_one_of_several_is_invalid(wire: Wire, wrong: dict[str, Any]) -> None:
    configs = [{"topicName": "valid"}, wrong]
    assert wire.ask(UPDATE_LIST, {"topicConfigList": configs}).code == ResponseCode.INVALID_PARAMETER
    assert wire.ask(GET_ONE, topic="valid").code == ResponseCode.TOPIC_NOT_EXIST


@pytest.mark.parametrize("code", [RequestCode.CLEAN_UNUSED_TOPIC, RequestCode.CLEAN_EXPIRED_CONSUMEQUEUE])
def test_clean_up_requests_succeed_without_effect(wire: Wire, code: int) -> None:
    wire.ask_ok(UPDATE, **update_header())
    wire.ask_ok(code)
    wire.ask_ok(GET_ONE, topic="orders")


PUT, GET, DELETE_VALUE = RequestCode.PUT_KV_CONFIG, RequestCode.GET_KV_CONFIG, RequestCode.DELETE_KV_CONFIG
LIST = RequestCode.GET_KVLIST_BY_NAMESPACE
ORDERS = {"namespace": ORDER_NAMESPACE, "key": "orders"}


def test_a_topic_is_ordered_while_the_table_of_ordered_topics_names_it(node: RunningNode, wire: Wire) -> None:
    wire.ask_ok(
        RequestCode.UPDATE_AND_CREATE_TOPIC, topic="orders", readQueueNums=4, writeQueueNums=3, topicSysFlag=2
    )
    route = json_body(wire.ask_ok(ROUTE, topic="orders"))
    assert "orderTopicConf" not in route
    assert route["queueDatas"][0]["topicSysFlag"] == 2
    wire.ask_ok(PUT, **ORDERS, value="timeball:3")
    assert node.node.broker.tables.topics.get("orders").config == TopicConfig(4, 3, order=True, sys_flag=2)
    assert json_body(wire.ask_ok(ROUTE, topic="orders"))["orderTopicConf"] == "timeball:3"
    assert wire.ask_ok(GET, **ORDERS).ext == {"value": "timeball:3"}
    assert json_body(wire.ask_ok(LIST, namespace=ORDER_NAMESPACE)) == {"table": {"orders": "timeball:3"}}
    wire.ask_ok(DELETE_VALUE, **ORDERS)
    assert wire.ask(GET, **ORDERS).code == ResponseCode.QUERY_NOT_FOUND
    assert not node.node.broker.tables.topics.get("orders").config.order


def test_an_unknown_key_is_not_found_and_its_deletion_succeeds(wire: Wire) -> None:
    answer = wire.ask(GET, **ORDERS)
    assert (answer.code, answer.remark) == (
        ResponseCode.QUERY_NOT_FOUND, "No config item, Namespace: ORDER_TOPIC_CONFIG Key: orders",
    )  # fmt: skip
    for namespace in (ORDER_NAMESPACE, "MINE"):
        assert wire.ask(LIST, namespace=namespace).code == ResponseCode.QUERY_NOT_FOUND
    wire.ask_ok(DELETE_VALUE, **ORDERS)
    wire.ask_ok(PUT, **ORDERS, value="timeball:3")
    assert wire.ask(GET, **ORDERS).code == ResponseCode.QUERY_NOT_FOUND, "an unknown topic cannot be ordered"


@pytest.mark.parametrize("code", [PUT, DELETE_VALUE])
def test_other_namespaces_are_refused(wire: Wire, code: int) -> None:
    assert wire.ask(code, namespace="MINE", key="a", value="b").code == ResponseCode.NO_PERMISSION
