"""Requests of clients to a name server. The node answers them on its name-server port and on its remoting port."""

from __future__ import annotations

import pytest
from tests.edges.remoting.handlers.test_sends import sent
from tests.edges.remoting.wire import Wire, json_body
from tests.node_fixture import RunningNode

from timeball.broker.registry.topics import INHERIT, READ, WRITE
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import BINARY, JSON


@pytest.mark.parametrize("serialisation", [JSON, BINARY])
def test_a_route_has_the_address_that_the_client_connected_to(node: RunningNode, serialisation: int) -> None:
    node.run(node.broker.create_topic("orders", 3))
    for port in (node.node.name_server_port, node.node.remoting_port):
        with Wire(port, serialisation) as wire:
            answer = wire.ask_ok(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="orders")
            assert answer.serialisation == serialisation
            route = json_body(answer)
        [queues], [broker] = route["queueDatas"], route["brokerDatas"]
        assert (queues["readQueueNums"], queues["writeQueueNums"], queues["perm"]) == (3, 3, READ | WRITE)
        assert broker["brokerAddrs"] == {"0": f"127.0.0.1:{node.node.remoting_port}"}
        assert broker["brokerName"] == queues["brokerName"] == "timeball"


def test_an_unknown_topic_has_no_route_but_the_template_topic_has_one(wire: Wire) -> None:
    answer = wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="nobody")
    assert answer.code == ResponseCode.TOPIC_NOT_EXIST
    assert answer.remark == "No topic route info in name server for the topic: nobody"
    route = json_body(wire.ask_ok(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="TBW102"))
    assert route["queueDatas"][0]["perm"] == READ | WRITE | INHERIT


def test_a_retry_topic_has_a_route_before_its_group_is_known(wire: Wire) -> None:
    """A consumer requests this route before its first heartbeat, and again only after a long time."""
    route = json_body(wire.ask_ok(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="%RETRY%nobody"))
    assert [(q["readQueueNums"], q["perm"]) for q in route["queueDatas"]] == [(1, READ | WRITE)]
    longest = "%RETRY%" + "x" * 248  # with the longest group and topic
    wire.ask_ok(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic=longest)
    assert wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic=longest + "x").code != 0


def test_an_invalid_topic_name_is_refused(wire: Wire) -> None:
    for name in ("../../etc", "", "a b", "x" * 128):
        answer = wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic=name)
        assert answer.code == ResponseCode.INVALID_PARAMETER, name


def test_the_cluster_and_the_broker_have_routes(wire: Wire) -> None:
    for name in ("DefaultCluster", "timeball"):
        wire.ask_ok(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic=name)
    cluster = json_body(wire.ask_ok(RequestCode.GET_BROKER_CLUSTER_INFO))
    assert cluster["clusterAddrTable"] == {"DefaultCluster": ["timeball"]}
    assert cluster["brokerAddrTable"]["timeball"]["brokerAddrs"].keys() == {"0"}


@pytest.mark.parametrize("name", ["DefaultCluster", "timeball", "RMQ_SYS_TRACE_TOPIC"])
@pytest.mark.parametrize("auto_create", [True, False])
def test_a_built_in_topic_has_all_queues_of_its_route(
    node: RunningNode, wire: Wire, name: str, auto_create: bool
) -> None:
    """A send names 4 as the number of queues of a topic that it creates. A built-in topic has those of its route."""
    object.__setattr__(node.broker.settings, "auto_create_topics", auto_create)
    [queues] = json_body(wire.ask_ok(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic=name))["queueDatas"]
    for queue_id in range(queues["writeQueueNums"]):
        assert sent(wire, topic=name, queue_id=queue_id).ext["queueId"] == str(queue_id)
    assert json_body(wire.ask_ok(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic=name))["queueDatas"] == [queues]
    listed = json_body(wire.ask_ok(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER))["topicList"]
    assert listed.count(name) == 1


def test_all_topics_are_listed(node: RunningNode, wire: Wire) -> None:
    node.run(node.broker.create_topic("orders"))
    listed = json_body(wire.ask_ok(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER))["topicList"]
    assert {"orders", "DefaultCluster"} <= set(listed)


def test_a_missing_configuration_key_is_not_found(wire: Wire) -> None:
    answer = wire.ask(RequestCode.GET_KV_CONFIG, namespace="ORDER_TOPIC_CONFIG", key="orders")
    assert answer.code == ResponseCode.QUERY_NOT_FOUND
