"""QueryRoute and QueryAssignment: the queues of a topic, and those that a consumer reads.

A single broker has all queues of a topic. In a cluster, the broker groups share the topics. The route then contains the
queues of all broker groups that have the topic, each with the address of the group's leader. It does not contain a
broker group without a leader, or whose leader does not answer; the client will ask again.

If topics are created on first use, a topic that does not exist yet also gets a route, with queues of this broker group.
Clients ask for the route before their first message, and most do not start without it.

A consumer group without order reads from any queue of a topic (queue -1). For a consumer group in order, the assignment
lists each queue.
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
from timeball.edges.grpc.handlers.sends import accepted_types, types_of_attribute
from timeball.edges.grpc.session import GrpcContext
from timeball.edges.shared.error_codes import Refused
from timeball.edges.shared.sessions import advertised
from timeball.model import limits
from timeball.model.access import Caller
from timeball.model.errors import Unavailable

ANY_QUEUE = -1  # the broker chooses the queue of each receive
PERMISSIONS = {
    READ | WRITE: Permission.READ_WRITE,
    READ: Permission.READ,
    WRITE: Permission.WRITE,
    0: Permission.NONE,
}


class _BrokerQueues(NamedTuple):
    """The queues of a topic at one broker. `read` and `write` are numbers of queues."""

    broker: Broker
    read: int
    write: int
    types: list[MessageType]  # that the topic accepts
    in_order: bool  # the consumer group of the request consumes in order


class Routes:
    """Serves QueryRoute and QueryAssignment."""

    def __init__(self, context: GrpcContext) -> None:
        self._context = context
        self.handlers: Handlers = {"QueryRoute": self._query_route, "QueryAssignment": self._query_assignment}

    async def _query_route(self, call: Call, request: QueryRouteRequest) -> QueryRouteResponse:
        brokers = await self._find_queues(call.caller, request.topic, request.endpoints)
        queues = [
            _message_queue(
                request.topic,
                queue_id,
                broker,
                (READ if queue_id < broker.read else 0) | (WRITE if queue_id < broker.write else 0),
            )
            for broker in brokers
            for queue_id in range(max(broker.read, broker.write))
        ]
        return QueryRouteResponse(status=OK, message_queues=queues)

    async def _query_assignment(self, call: Call, request: QueryAssignmentRequest) -> QueryAssignmentResponse:
        brokers = await self._find_queues(
            call.caller, request.topic, request.endpoints, group_name(request.group)
        )
        queues = [
            _message_queue(request.topic, queue_id, broker, READ)
            for broker in brokers
            for queue_id in (range(broker.read) if broker.in_order else [ANY_QUEUE] if broker.read else [])
        ]
        return QueryAssignmentResponse(
            status=OK, assignments=[Assignment(message_queue=queue) for queue in queues]
        )

    async def _find_queues(
        self,
        caller: Caller,
        resource: Resource,
        client_endpoints: Endpoints,
        consumer_group: str | None = None,
    ) -> list[_BrokerQueues]:
        """Find the queues of a topic at each broker that has it, this broker first. Raises Refused, Unavailable.

        `client_endpoints`: the address to which the client has connected, as it states it.
        """
        broker, name = self._context.broker, topic_name(resource)
        others, has_silent_group = [], False
        if isinstance(broker, GroupedBroker):
            routes = await broker.routes(name, caller, consumer_group)
            others = [
                queues
                for broker_group, route in routes.items()
                if (queues := _remote_queues(broker, broker_group, route))
            ]
            has_silent_group = None in routes.values()
        topic = broker.tables.topics.find_topic(name)
        if topic is None and others:
            return others
        if topic is None and not broker.policy.is_auto_created(name):
            if has_silent_group:
                raise Unavailable("a group of the cluster did not answer, and the others have no such topic")
            raise Refused(
                Code.TOPIC_NOT_FOUND,
                f"No topic route info in name server for the topic: {name[: limits.TOPIC_BYTES_MAX]}; create it first",
            )
        return [self._local_queues(topic, client_endpoints, consumer_group), *others]

    def _local_queues(
        self, topic: Topic | None, client_endpoints: Endpoints, consumer_group: str | None
    ) -> _BrokerQueues:
        """Describe the queues at this broker. `topic` None: the topic that the first send will create."""
        context = self._context
        read = write = context.settings.queues_per_topic
        if topic is None:
            write = 0 if context.broker.policy.closed else write
        else:
            read, write = queues_to_read(topic), context.broker.policy.queues_to_write(topic)
        groups = context.broker.tables.groups
        in_order = consumer_group is not None and groups.ensure(consumer_group).consume_message_orderly
        broker = Broker(
            name=context.settings.broker_name,
            id=0,
            endpoints=advertised_endpoints(context, client_endpoints),
        )
        return _BrokerQueues(broker, read, write, accepted_types(topic), in_order)


def _remote_queues(
    grouped_broker: GroupedBroker, broker_group: str, route: GroupRoute | None
) -> _BrokerQueues | None:
    """Describe the queues in another broker group. Returns None while its leader or its route is unknown."""
    address = grouped_broker.others.grpc_address(broker_group)
    if route is None or address is None:
        return None
    broker = Broker(name=route.broker_name, id=0, endpoints=endpoints(*address))
    return _BrokerQueues(
        broker, route.read_queues, route.write_queues, types_of_attribute(route.message_type), route.in_order
    )


def _message_queue(topic: Resource, queue_id: int, queues: _BrokerQueues, perm: int) -> MessageQueue:
    return MessageQueue(
        topic=topic,
        id=queue_id,
        permission=PERMISSIONS[perm],
        broker=queues.broker,
        accept_message_types=queues.types,
    )


def advertised_endpoints(context: GrpcContext, client_endpoints: Endpoints) -> Endpoints:
    """Determine this broker's endpoints for a client: the host of `--advertise`, or else the client's own endpoints."""
    # The port of `--advertise` is that of the remoting edge.
    host, _ = advertised(context.settings.advertise)
    if not host and client_endpoints.addresses:
        return client_endpoints
    return endpoints(host or "127.0.0.1", context.port)


def endpoints(host: str, port: int) -> Endpoints:
    """Create Endpoints with one address, and with the scheme (IPv4, IPv6, domain name) of its host."""
    try:
        scheme = AddressScheme.IPv6 if ip_address(host).version == 6 else AddressScheme.IPv4
    except ValueError:
        scheme = AddressScheme.DOMAIN_NAME
    return Endpoints(scheme=scheme, addresses=[Address(host=host, port=port)])
