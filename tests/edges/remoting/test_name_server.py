"""The name server of a cluster, with two real brokers as the leaders of two groups."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.bounds import BOUND_S
from tests.edges.remoting.wire import Wire, json_body
from tests.node_fixture import RunningNode, running_node

from timeball.edges.remoting.codec.codes import CommandFlag, RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import Command, Splitter, decode, encode
from timeball.edges.remoting.name_server import GroupLeader, NameServer
from timeball.model.errors import SetupError

NOWHERE = ("127.0.0.1", 1)


class RunningNameServer:
    """A name server on its own event loop.

    `leaders` has the address (host, port) of the leader of each group by broker name, None for a group without a
    leader. It may be changed while the server runs.
    """

    def __init__(self, leaders: dict[str, tuple[str, int] | None]) -> None:
        self.leaders = leaders
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server = self._run(self._make())
        self.port = self._run(self.server.start("127.0.0.1", 0))

    async def _make(self) -> NameServer:
        return NameServer(lambda: [GroupLeader(*item) for item in self.leaders.items()])

    def _run(self, coroutine: Any) -> Any:
        """Run a coroutine in the server's loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(BOUND_S)

    def close(self) -> None:
        self._run(self.server.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(BOUND_S)
        self._loop.close()


@contextmanager
def name_server_of(leaders: dict[str, tuple[str, int] | None]) -> Iterator[tuple[RunningNameServer, Wire]]:
    """Run a name server with these leaders and a client during a block."""
    server = RunningNameServer(leaders)
    try:
        with Wire(server.port) as wire:
            yield server, wire
    finally:
        server.close()


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningNode]]:
    folder = tmp_path_factory.mktemp("groups")
    with (
        running_node(folder / "one", broker_name="g1") as one,
        running_node(folder / "two", broker_name="g2") as two,
    ):
        for node, queues in ((one, 2), (two, 3)):
            node.run(node.broker.create_topic("orders", queues))
        one.run(one.broker.create_topic("only-one", 1))
        yield [one, two]


def address_of(node: RunningNode) -> tuple[str, int]:
    """Return the address of a node's remoting port."""
    return "127.0.0.1", node.node.remoting_port


def route(wire: Wire, topic: str) -> tuple[dict[str, int], dict[str, dict[str, str]]]:
    """Return the queues and the addresses of a route, by broker."""
    result = json_body(wire.ask_ok(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic=topic))
    return (
        {queues["brokerName"]: queues["writeQueueNums"] for queues in result["queueDatas"]},
        {broker["brokerName"]: broker["brokerAddrs"] for broker in result["brokerDatas"]},
    )


def test_a_route_has_the_queues_of_all_groups(groups: list[RunningNode]) -> None:
    one, two = map(address_of, groups)
    with name_server_of({"g1": one, "g2": two}) as (_, wire):
        queues, addresses = route(wire, "orders")
        assert queues == {"g1": 2, "g2": 3}
        assert addresses == {"g1": {"0": f"127.0.0.1:{one[1]}"}, "g2": {"0": f"127.0.0.1:{two[1]}"}}
        assert route(wire, "only-one")[0] == {"g1": 1}
        assert set(route(wire, "TBW102")[0]) == {"g1", "g2"}, "a new topic may be created in each group"
        answer = wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="unknown")
        assert answer.code == ResponseCode.TOPIC_NOT_EXIST


def test_a_group_without_a_leader_keeps_its_queues_and_has_no_address(groups: list[RunningNode]) -> None:
    one, two = map(address_of, groups)
    with name_server_of({"g1": one, "g2": two}) as (server, wire):
        route(wire, "orders")
        for leader in (None, NOWHERE):  # no leader, or one that cannot be reached
            server.leaders["g2"] = leader
            queues, addresses = route(wire, "orders")
            assert queues == {"g1": 2, "g2": 3} and addresses["g2"] == {} and addresses["g1"]
        server.leaders["g2"] = two
        assert route(wire, "orders")[1]["g2"], "the leader can be reached again"


@contextmanager
def fake_leader(body: bytes) -> Iterator[tuple[str, int]]:
    """A leader that answers one request with success and this body."""

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            (frame,) = Splitter().feed(connection.recv(1 << 16))
            connection.sendall(
                encode(Command(code=0, opaque=decode(frame).opaque, flag=CommandFlag.RESPONSE, body=body))
            )
            connection.recv(1)  # returns when the name server closes the connection

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield listener.getsockname()


def test_an_invalid_route_from_a_leader_is_answered_with_an_error() -> None:
    with (
        fake_leader(b'{"queueDatas": [{}], "brokerDatas": [{}]}') as leader,
        name_server_of({"g1": leader}) as (_, wire),
    ):
        answer = wire.ask(RequestCode.GET_ROUTEINFO_BY_TOPIC, topic="orders")
        assert answer.code == ResponseCode.SYSTEM_ERROR


def test_without_any_leader_the_client_is_told_to_ask_again() -> None:
    with name_server_of({"g1": None}) as (_, wire):
        for code in (
            RequestCode.GET_ROUTEINFO_BY_TOPIC,
            RequestCode.GET_BROKER_CLUSTER_INFO,
            RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
            RequestCode.GET_ALL_TOPIC_CONFIG,
        ):
            answer = wire.ask(code, topic="orders")
            assert answer.code == ResponseCode.SERVICE_NOT_AVAILABLE and "leader" in (answer.remark or "")


def test_tools_see_one_cluster_of_all_groups(groups: list[RunningNode]) -> None:
    with name_server_of({"g1": address_of(groups[0]), "g2": address_of(groups[1])}) as (_, wire):
        cluster = json_body(wire.ask_ok(RequestCode.GET_BROKER_CLUSTER_INFO))
        assert cluster["clusterAddrTable"] == {"DefaultCluster": ["g1", "g2"]}
        assert set(cluster["brokerAddrTable"]) == {"g1", "g2"}
        topics = json_body(wire.ask_ok(RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER))["topicList"]
        assert {"orders", "only-one", "g1", "g2"} <= set(topics)


def test_other_requests_are_forwarded_to_a_leader(groups: list[RunningNode]) -> None:
    with name_server_of({"g1": None, "g2": address_of(groups[1])}) as (_, wire):
        assert b"orders" in wire.ask_ok(RequestCode.GET_ALL_TOPIC_CONFIG).body


def test_a_taken_port_is_a_setup_error(groups: list[RunningNode]) -> None:
    with pytest.raises(SetupError, match="--name-server-port"):
        asyncio.run(NameServer(list).start("127.0.0.1", groups[0].node.remoting_port))
