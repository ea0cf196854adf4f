"""Routes and assignments over the wire."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.broker.on_node import on_node
from tests.broker.two_groups import InGroup, Neighbours, groups_of, in_two_groups
from tests.crash.lives import run
from tests.crash.world import World
from tests.edges.grpc.wire import Wire, d, s
from tests.node_fixture import RunningNode, running_node

from timeball.broker.registry.groups import SubscriptionGroup
from timeball.broker.registry.topic import READ, WRITE, TopicConfig
from timeball.edges.grpc._generated.definition_pb2 import AddressScheme
from timeball.edges.grpc.calls import Call
from timeball.edges.grpc.handlers.routes import Routes, endpoints, told_endpoints
from timeball.edges.grpc.session import GrpcContext
from timeball.edges.shared.error_codes import Refused
from timeball.edges.shared.sessions import EdgeContext, Sessions
from timeball.model.errors import Unavailable

DIALLED = endpoints("10.9.8.7", 6543)


def route(topic: str) -> s.QueryRouteRequest:
    return s.QueryRouteRequest(topic=d.Resource(name=topic), endpoints=DIALLED)


def assignment(topic: str, group: str = "g") -> s.QueryAssignmentRequest:
    return s.QueryAssignmentRequest(
        topic=d.Resource(name=topic), group=d.Resource(name=group), endpoints=DIALLED
    )


def configure(node: RunningNode, name: str, config: TopicConfig) -> None:
    async def change() -> None:
        node.broker.tables.topics.configure(name, config)

    node.run(change())


def test_a_route_names_every_queue_and_the_address_that_was_dialled(node: RunningNode, wire: Wire) -> None:
    configure(node, "orders", TopicConfig(3, 3))
    queues = wire.ask_ok("QueryRoute", route("orders")).message_queues
    assert [queue.id for queue in queues] == [0, 1, 2]
    for queue in queues:
        assert queue.topic.name == "orders" and queue.permission == d.Permission.READ_WRITE
        assert queue.broker.endpoints == DIALLED and queue.broker.name == node.settings.broker_name
        assert set(queue.accept_message_types) == {1, 2, 3, 4, 6}  # lite topics are refused


def test_queues_may_be_for_reading_or_writing_alone(node: RunningNode, wire: Wire) -> None:
    configure(node, "orders", TopicConfig(3, 1))
    found = [queue.permission for queue in wire.ask_ok("QueryRoute", route("orders")).message_queues]
    assert found == [d.Permission.READ_WRITE, d.Permission.READ, d.Permission.READ]
    configure(node, "read", TopicConfig(1, 1, perm=READ))
    configure(node, "write", TopicConfig(1, 1, perm=WRITE))
    assert wire.ask_ok("QueryRoute", route("read")).message_queues[0].permission == d.Permission.READ
    assert wire.ask_ok("QueryRoute", route("write")).message_queues[0].permission == d.Permission.WRITE


def test_a_topic_has_a_route_before_its_first_message(node: RunningNode, wire: Wire) -> None:
    queues = wire.ask_ok("QueryRoute", route("new")).message_queues
    assert len(queues) == node.settings.queues_per_topic
    assert "new" not in node.broker.topics()  # asking makes nothing


def test_where_topics_are_made_by_operators_a_client_is_told_so(tmp_path: Path) -> None:
    with running_node(tmp_path / "data", auto_create_topics=False) as node, Wire.to(node) as wire:
        for name, request in (("QueryRoute", route("new")), ("QueryAssignment", assignment("new"))):
            status = wire.ask(name, request).status
            assert status.code == d.Code.TOPIC_NOT_FOUND
            assert "No topic route info in name server for the topic: new" in status.message


def test_consumers_read_from_any_queue_and_in_order_from_each(node: RunningNode, wire: Wire) -> None:
    configure(node, "orders", TopicConfig(3, 3))

    def queues(group: str) -> list[int]:
        found = wire.ask_ok("QueryAssignment", assignment("orders", group)).assignments
        return [each.message_queue.id for each in found]

    async def in_order() -> None:
        node.broker.tables.groups.update(SubscriptionGroup("line", consume_message_orderly=True))

    node.run(in_order())
    assert queues("g") == [-1]
    assert queues("line") == [0, 1, 2]
    configure(node, "orders", TopicConfig(3, 3, perm=WRITE))
    assert queues("g") == []


def test_names_are_checked(wire: Wire) -> None:
    assert wire.ask("QueryRoute", route("no/name")).status.code == d.Code.ILLEGAL_TOPIC
    assert wire.ask("QueryRoute", s.QueryRouteRequest()).status.code == d.Code.ILLEGAL_TOPIC
    found = wire.ask("QueryAssignment", assignment("t", "no name")).status
    assert found.code == d.Code.ILLEGAL_CONSUMER_GROUP


# ---- the address that is told -----------------------------------------------------------------------------


def context_of(world: World) -> GrpcContext:
    return EdgeContext(world.broker.settings, world.broker, Sessions(0), 8081)


@pytest.mark.parametrize(
    ("host", "scheme"),
    [
        ("10.0.0.1", AddressScheme.IPv4),
        ("::1", AddressScheme.IPv6),
        ("broker.shop", AddressScheme.DOMAIN_NAME),
    ],
)
def test_a_name_is_told_with_its_kind(host: str, scheme: AddressScheme) -> None:
    found = endpoints(host, 8081)
    assert found.scheme == scheme
    assert [(each.host, each.port) for each in found.addresses] == [(host, 8081)]


@on_node()
async def test_without_a_name_of_ours_clients_go_on_with_what_they_have_dialled(world: World) -> None:
    context = context_of(world)
    assert told_endpoints(context, DIALLED) == DIALLED
    assert told_endpoints(context, endpoints("", 0).__class__()) == endpoints("127.0.0.1", 8081)


@on_node(advertise="broker.shop:10911")
async def test_a_name_of_ours_counts_without_the_other_ports_number(world: World) -> None:
    assert told_endpoints(context_of(world), DIALLED) == endpoints("broker.shop", 8081)


@on_node(advertise="[2001:db8::1]:10911")
async def test_an_ipv6_address_may_have_brackets(world: World) -> None:
    assert told_endpoints(context_of(world), DIALLED) == endpoints("2001:db8::1", 8081)


@on_node(advertise="2001:db8::1")
async def test_an_ipv6_address_without_brackets_has_no_port(world: World) -> None:
    assert told_endpoints(context_of(world), DIALLED) == endpoints("2001:db8::1", 8081)


# ---- several groups ---------------------------------------------------------------------------------------


async def places(world: World, request: Any) -> list[tuple[str, int, Any]]:
    """Return the queues that a client is told: broker, queue, address."""
    handlers = Routes(context_of(world)).handlers
    if isinstance(request, s.QueryRouteRequest):
        queues = (await handlers["QueryRoute"](Call({}), request)).message_queues
    else:
        found = await handlers["QueryAssignment"](Call({}), request)
        queues = [each.message_queue for each in found.assignments]
    return [(queue.broker.name, queue.id, queue.broker.endpoints.addresses[0].host) for queue in queues]


OWN = DIALLED.addresses[0].host


@in_two_groups
async def test_a_route_has_the_queues_of_every_group_that_has_the_topic(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    await one.create_topic("orders", 1)
    await two.create_topic("orders", 2)
    there = [("g2", 0, "g2.example"), ("g2", 1, "g2.example")]
    assert await places(one, route("orders")) == [("g1", 0, OWN), *there]
    assert await places(one, assignment("orders")) == [("g1", -1, OWN), ("g2", -1, "g2.example")]
    line = SubscriptionGroup("line", consume_message_orderly=True)
    for world in (one, two):
        world.broker.tables.groups.update(line)
    assert await places(one, assignment("orders", "line")) == [("g1", 0, OWN), *there]
    neighbours.silent.add("g2")
    assert await places(one, route("orders")) == [("g1", 0, OWN)], "until it answers again"


@in_two_groups
async def test_a_topic_of_another_group_alone_has_its_route_there(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    config = TopicConfig(1, 1, attributes={"message.type": "DELAY"})
    two.broker.tables.topics.configure("orders", config)
    request = route("orders")
    (queue,) = (await Routes(context_of(one)).handlers["QueryRoute"](Call({}), request)).message_queues
    assert queue.broker.name == "g2" and list(queue.accept_message_types) == [d.MessageType.DELAY]
    assert [name for name, _, _ in await places(one, route("new"))] == ["g1", "g1"], "made in one group"


def test_a_topic_that_a_silent_group_may_have_is_not_said_to_be_missing() -> None:
    async def life() -> None:
        async with groups_of("g1", "g2", auto_create_topics=False) as (neighbours, worlds):
            with pytest.raises(Refused):
                await places(worlds["g1"], route("orders"))
            neighbours.silent.add("g2")
            with pytest.raises(Unavailable):
                await places(worlds["g1"], route("orders"))

    run(life())
