"""Routes: the queues of a topic, and those among them that a consumer reads.

A single broker has every queue. In a cluster the route contains the queues of all groups that have the topic, each with
the address of the group's leader. A group without a leader, or whose leader does not answer, is left out until the
client asks again. While topics are created on first use, a topic that no group has yet also gets a route, with the
queues of this group. Clients ask for the route before their first message, and most do not start without it.

Consumers without order read from any queue of a topic (queue -1). A group that consumes in order gets the queues one by
one.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import NamedTuple

from timeball.broker.groups.grouped import GroupedBroker
from timeball.broker.policy import queues_to_read
from timeball.broker.registry.topic import READ, WRITE
from timeball.broker.registry.topics import Topic
from timeball.broker.revoking.group_questions import GroupRoute
from timeball.edges.grpc._generated.definition_pb2 import (
    Address,
    AddressScheme,
    Assignment,
    Broker,
    Code,
    Endpoints,
    MessageQueue,
    MessageType,
    Permission,
    Resource,
)
from timeball.edges.grpc._generated.service_pb2 import (
    QueryAssignmentRequest,
    QueryAssignmentResponse,
    QueryRouteRequest,
    QueryRouteResponse,
)
from timeball.edges.grpc.calls import OK, Call, Handlers, group_name, topic_name
from timeball.edges.grpc.handlers.sends import accepted_types, named_types
from timeball.edges.grpc.session import GrpcContext
from timeball.edges.shared.error_codes import Refused
from timeball.edges.shared.sessions import advertised
from timeball.model import limits
from timeball.model.access import Caller
from timeball.model.errors import Unavailable

ANY_QUEUE = -1
PERMISSIONS = {
    READ | WRITE: Permission.READ_WRITE,
    READ: Permission.READ,
    WRITE: Permission.WRITE,
    0: Permission.NONE,
}


class _Place(NamedTuple):
    """The queues of a topic at one broker."""

    broker: Broker
    read: int
    write: int
    types: list[MessageType]
    in_order: bool


class Routes:
    """Serves QueryRoute and QueryAssignment."""

    def __init__(self, context: GrpcContext) -> None:
        self._context = context
        self.handlers: Handlers = {"QueryRoute": self._route, "QueryAssignment": self._assignment}

    async def _route(self, call: Call, request: QueryRouteRequest) -> QueryRouteResponse:
        places = await self._places(call.caller, request.topic, request.endpoints)
        queues = [
            _queue(
                request.topic, i, place, (READ if i < place.read else 0) | (WRITE if i < place.write else 0)
            )
            for place in places
            for i in range(max(place.read, place.write))
        ]
        return QueryRouteResponse(status=OK, message_queues=queues)

    async def _assignment(self, call: Call, request: QueryAssignmentRequest) -> QueryAssignmentResponse:
        places = await self._places(call.caller, request.topic, request.endpoints, group_name(request.group))
        queues = [
            _queue(request.topic, i, place, READ)
            for place in places
            for i in (range(place.read) if place.in_order else [ANY_QUEUE] if place.read else [])
        ]
        return QueryAssignmentResponse(
            status=OK, assignments=[Assignment(message_queue=queue) for queue in queues]
        )

    async def _places(
        self, caller: Caller, resource: Resource, dialled: Endpoints, group: str | None = None
    ) -> list[_Place]:
        """Return the queues of the topic by broker, this one first. Raises Refused, Unavailable."""
        broker, name = self._context.broker, topic_name(resource)
        others, is_silent = [], False
        if isinstance(broker, GroupedBroker):
            routes = await broker.routes(name, caller, group)
            others = [place for each, route in routes.items() if (place := _there(broker, each, route))]
            is_silent = None in routes.values()
        topic = broker.tables.topics.find_topic(name)
        if topic is None and others:
            return others
        if topic is None and not broker.policy.is_auto_created(name):
            if is_silent:
                raise Unavailable("a group of the cluster did not answer, and the others have no such topic")
            raise Refused(
                Code.TOPIC_NOT_FOUND,
                f"No topic route info in name server for the topic: {name[: limits.TOPIC_BYTES_MAX]}; make it first",
            )
        return [self._here(topic, dialled, group), *others]

    def _here(self, topic: Topic | None, dialled: Endpoints, group: str | None) -> _Place:
        context = self._context
        read = write = context.settings.queues_per_topic
        if topic is None:
            write = 0 if context.broker.policy.closed else write
        else:
            read, write = queues_to_read(topic), context.broker.policy.queues_to_write(topic)
        in_order = group is not None and context.broker.tables.groups.ensure(group).consume_message_orderly
        at = Broker(name=context.settings.broker_name, id=0, endpoints=told_endpoints(context, dialled))
        return _Place(at, read, write, accepted_types(topic), in_order)


def _there(broker: GroupedBroker, group: str, route: GroupRoute | None) -> _Place | None:
    """Return the queues in another group, or None while its leader is not known."""
    address = broker.others.grpc_address(group)
    if route is None or address is None:
        return None
    at = Broker(name=route.broker_name, id=0, endpoints=endpoints(*address))
    return _Place(at, route.read_queues, route.write_queues, named_types(route.message_type), route.in_order)


def _queue(topic: Resource, queue_id: int, place: _Place, perm: int) -> MessageQueue:
    return MessageQueue(
        topic=topic,
        id=queue_id,
        permission=PERMISSIONS[perm],
        broker=place.broker,
        accept_message_types=place.types,
    )


def told_endpoints(context: GrpcContext, dialled: Endpoints) -> Endpoints:
    """Return the broker's endpoints for a client: an advertised host, or else `dialled`, where the client connected."""
    # `--advertise` states the port for remoting, which is not the port of this edge.
    host, _ = advertised(context.settings.advertise)
    if not host and dialled.addresses:
        return dialled
    return endpoints(host or "127.0.0.1", context.port)


def endpoints(host: str, port: int) -> Endpoints:
    """Return one address as gRPC's clients expect it, with the scheme of its host."""
    try:
        scheme = AddressScheme.IPv6 if ip_address(host).version == 6 else AddressScheme.IPv4
    except ValueError:
        scheme = AddressScheme.DOMAIN_NAME
    return Endpoints(scheme=scheme, addresses=[Address(host=host, port=port)])
