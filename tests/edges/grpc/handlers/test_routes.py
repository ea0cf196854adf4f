"""QueryRoute and QueryAssignment, over the wire and with two broker groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.broker.on_node import on_node
from tests.broker.two_groups import InGroup, Neighbours, groups_of, in_two_groups
from tests.crash.lives import run
from tests.crash.world import World
from tests.edges.grpc.wire import Wire, definition, service
from tests.node_fixture import RunningNode, running_node

from timeball.broker.registry.groups import SubscriptionGroup
from timeball.broker.registry.topics import READ, WRITE, TopicConfig
from timeball.edges.grpc._generated.definition_pb2 import AddressScheme
from timeball.edges.grpc.calls import Call, GrpcContext
from timeball.edges.grpc.handlers.telemetry import Routes, advertised_endpoints, endpoints
from timeball.edges.shared.error_codes import Refused
from timeball.edges.shared.sessions import EdgeContext, Sessions
from timeball.model.errors import Unavailable

CLIENT_ENDPOINTS = endpoints("10.9.8.7", 6543)


def route(topic: str) -> service.QueryRouteRequest:
    """Return a QueryRoute request."""
    return service.QueryRouteRequest(topic=definition.Resource(name=topic), endpoints=CLIENT_ENDPOINTS)


def assignment(topic: str, group: str = "g") -> service.QueryAssignmentRequest:
    """Return a QueryAssignment request."""
    return service.QueryAssignmentRequest(
        topic=definition.Resource(name=topic),
        group=definition.Resource(name=group),
        endpoints=CLIENT_ENDPOINTS,
    )


def configure(node: RunningNode, name: str, config: TopicConfig) -> None:
    async def change() -> None:
        node.broker.tables.topics.configure(name, config)

    node.run(change())


def test_a_route_has_every_queue_with_the_address_of_the_client(node: RunningNode, wire: Wire) -> None:
    configure(node, "orders", TopicConfig(3, 3))
    queues = wire.ask_ok("QueryRoute", route("orders")).message_queues
    assert [queue.id for queue in queues] == [0, 1, 2]
    for queue in queues:
        assert queue.topic.name == "orders" and queue.permission == definition.Permission.READ_WRITE
        assert queue.broker.endpoints == CLIENT_ENDPOINTS and queue.broker.name == node.settings.broker_name
        assert set(queue.accept_message_types) == {1, 2, 3, 4, 6}  # lite topics are refused


def test_the_permission_of_a_queue_follows_from_topic_and_counts(node: RunningNode, wire: Wire) -> None:
    configure(node, "orders", TopicConfig(3, 1))
    permissions = [queue.permission for queue in wire.ask_ok("QueryRoute", route("orders")).message_queues]
    assert permissions == [
        definition.Permission.READ_WRITE,
        definition.Permission.READ,
        definition.Permission.READ,
    ]
    configure(node, "read", TopicConfig(1, 1, perm=READ))
    configure(node, "write", TopicConfig(1, 1, perm=WRITE))
    assert wire.ask_ok("QueryRoute", route("read")).message_queues[0].permission == definition.Permission.READ
    assert (
        wire.ask_ok("QueryRoute", route("write")).message_queues[0].permission == definition.Permission.WRITE
    )


def test_an_auto_created_topic_has_a_route_before_its_first_message(node: RunningNode, wire: Wire) -> None:
    queues = wire.ask_ok("QueryRoute", route("new")).message_queues
    assert len(queues) == node.settings.queues_per_topic
    assert "new" not in node.broker.topics()  # a query does not create it


def test_without_auto_creation_an_unknown_topic_has_no_route(tmp_path: Path) -> None:
    with running_node(tmp_path / "data", auto_create_topics=False) as node, Wire.to(node) as wire:
        for name, request in (("QueryRoute", route("new")), ("QueryAssignment", assignment("new"))):
            status = wire.ask(name, request).status
            assert status.code == definition.Code.TOPIC_NOT_FOUND
            assert "No topic route info in name server for the topic: new" in status.message


def test_an_assignment_is_any_queue_or_for_a_group_in_order_each_queue(node: RunningNode, wire: Wire) -> None:
    configure(node, "orders", TopicConfig(3, 3))

    def queues(group: str) -> list[int]:
        assignments = wire.ask_ok("QueryAssignment", assignment("orders", group)).assignments
        return [each.message_queue.id for each in assignments]

    async def in_order() -> None:
        node.broker.tables.groups.update(SubscriptionGroup("line", consume_message_orderly=True))

    node.run(in_order())
    assert queues("g") == [-1]
    assert queues("line") == [0, 1, 2]
    configure(node, "orders", TopicConfig(3, 3, perm=WRITE))
    assert queues("g") == []


def test_invalid_names_are_refused(wire: Wire) -> None:
    assert wire.ask("QueryRoute", route("no/name")).status.code == definition.Code.ILLEGAL_TOPIC
    assert wire.ask("QueryRoute", service.QueryRouteRequest()).status.code == definition.Code.ILLEGAL_TOPIC
    status = wire.ask("QueryAssignment", assignment("t", "no name")).status
    assert status.code == definition.Code.ILLEGAL_CONSUMER_GROUP


# ---- the advertised address -------------------------------------------------------------------------------


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
def test_endpoints_have_the_scheme_of_their_host(host: str, scheme: AddressScheme) -> None:
    result = endpoints(host, 8081)
    assert result.scheme == scheme
    assert [(each.host, each.port) for each in result.addresses] == [(host, 8081)]


@on_node()
async def test_without_advertise_the_client_s_address_is_returned(world: World) -> None:
    context = context_of(world)
    assert advertised_endpoints(context, CLIENT_ENDPOINTS) == CLIENT_ENDPOINTS
    assert advertised_endpoints(context, endpoints("", 0).__class__()) == endpoints("127.0.0.1", 8081)


@on_node(advertise="broker.shop:10911")
async def test_an_advertised_host_is_returned_with_the_grpc_port(world: World) -> None:
    assert advertised_endpoints(context_of(world), CLIENT_ENDPOINTS) == endpoints("broker.shop", 8081)


@on_node(advertise="[2001:db8::1]:10911")
async def test_an_advertised_ipv6_address_can_have_brackets(world: World) -> None:
    assert advertised_endpoints(context_of(world), CLIENT_ENDPOINTS) == endpoints("2001:db8::1", 8081)


@on_node(advertise="2001:db8::1")
async def test_an_advertised_ipv6_address_without_brackets_is_accepted(world: World) -> None:
    assert advertised_endpoints(context_of(world), CLIENT_ENDPOINTS) == endpoints("2001:db8::1", 8081)


# ---- several groups ---------------------------------------------------------------------------------------


async def queues_for_client(world: World, request: Any) -> list[tuple[str, int, Any]]:
    """Make a call, and return (broker, queue, address) of each queue in the response."""
    handlers = Routes(context_of(world)).handlers
    if isinstance(request, service.QueryRouteRequest):
        queues = (await handlers["QueryRoute"](Call({}), request)).message_queues
    else:
        response = await handlers["QueryAssignment"](Call({}), request)
        queues = [each.message_queue for each in response.assignments]
    return [(queue.broker.name, queue.id, queue.broker.endpoints.addresses[0].host) for queue in queues]


OWN_HOST = CLIENT_ENDPOINTS.addresses[0].host


@in_two_groups
async def test_a_route_has_the_queues_of_every_group_that_has_the_topic(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    await one.create_topic("orders", 1)
    await two.create_topic("orders", 2)
    queues_of_g2 = [("g2", 0, "g2.example"), ("g2", 1, "g2.example")]
    assert await queues_for_client(one, route("orders")) == [("g1", 0, OWN_HOST), *queues_of_g2]
    assert await queues_for_client(one, assignment("orders")) == [
        ("g1", -1, OWN_HOST),
        ("g2", -1, "g2.example"),
    ]
    line = SubscriptionGroup("line", consume_message_orderly=True)
    for world in (one, two):
        world.broker.tables.groups.update(line)
    assert await queues_for_client(one, assignment("orders", "line")) == [("g1", 0, OWN_HOST), *queues_of_g2]
    neighbours.silent.add("g2")
    assert await queues_for_client(one, route("orders")) == [("g1", 0, OWN_HOST)], (
        "the silent group is left out"
    )


@in_two_groups
async def test_the_route_of_another_group_s_topic_leads_to_that_group(
    neighbours: Neighbours, one: InGroup, two: InGroup
) -> None:
    config = TopicConfig(1, 1, attributes={"message.type": "DELAY"})
    two.broker.tables.topics.configure("orders", config)
    request = route("orders")
    (queue,) = (await Routes(context_of(one)).handlers["QueryRoute"](Call({}), request)).message_queues
    assert queue.broker.name == "g2" and list(queue.accept_message_types) == [definition.MessageType.DELAY]
    assert [name for name, _, _ in await queues_for_client(one, route("new"))] == ["g1", "g1"], (
        "one group will create it"
    )


def test_a_topic_that_a_silent_group_may_have_is_unavailable() -> None:
    async def check() -> None:
        async with groups_of("g1", "g2", auto_create_topics=False) as (neighbours, worlds):
            with pytest.raises(Refused):
                await queues_for_client(worlds["g1"], route("orders"))
            neighbours.silent.add("g2")
            with pytest.raises(Unavailable):
                await queues_for_client(worlds["g1"], route("orders"))

    run(check())
