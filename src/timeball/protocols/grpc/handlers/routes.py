"""Where a topic's queues are, and which of them a consumer reads.

There is one broker, so every queue is here. A topic that does not exist yet has a route all the same while topics
are made on first use: a client asks for the route before its first message, and most of them do not start without.
Consumers that do not care for order read from any queue of a topic (queue -1); a group in order gets them one by one.
"""

from __future__ import annotations

from ipaddress import ip_address

from timeball import limits
from timeball.broker.policy import queues_to_read, queues_to_write
from timeball.broker.registry.topic import READ, WRITE
from timeball.broker.registry.topics import Topic
from timeball.protocols.error_codes import Refused
from timeball.protocols.grpc._generated.definition_pb2 import (
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
from timeball.protocols.grpc._generated.service_pb2 import (
    QueryAssignmentRequest,
    QueryAssignmentResponse,
    QueryRouteRequest,
    QueryRouteResponse,
)
from timeball.protocols.grpc.calls import OK, Call, Handlers, group_name, topic_name
from timeball.protocols.grpc.handlers.sends import accepted_types
from timeball.protocols.grpc.session import GrpcContext
from timeball.protocols.sessions import advertised

ANY_QUEUE = -1
PERMISSIONS = {
    READ | WRITE: Permission.READ_WRITE,
    READ: Permission.READ,
    WRITE: Permission.WRITE,
    0: Permission.NONE,
}


class Routes:
    """Serves QueryRoute and QueryAssignment."""

    def __init__(self, context: GrpcContext) -> None:
        self._context = context
        self.handlers: Handlers = {"QueryRoute": self._route, "QueryAssignment": self._assignment}

    async def _route(self, call: Call, request: QueryRouteRequest) -> QueryRouteResponse:
        topic = self._find(topic_name(request.topic))
        settings = self._context.settings
        read = write = settings.queues_per_topic
        types = accepted_types(None)
        if topic is not None:
            read, write = queues_to_read(topic), queues_to_write(topic)
            types = accepted_types(topic)
        queues = [
            self._queue(
                request.topic,
                i,
                request.endpoints,
                (READ if i < read else 0) | (WRITE if i < write else 0),
                types,
            )
            for i in range(max(read, write))
        ]
        return QueryRouteResponse(status=OK, message_queues=queues)

    async def _assignment(self, call: Call, request: QueryAssignmentRequest) -> QueryAssignmentResponse:
        topic = self._find(topic_name(request.topic))
        group = self._context.broker.parts.groups.ensure(group_name(request.group))
        count = self._context.settings.queues_per_topic if topic is None else queues_to_read(topic)
        ids = list(range(count)) if group.consume_message_orderly else [ANY_QUEUE] if count else []
        queues = [self._queue(request.topic, i, request.endpoints, READ, accepted_types(topic)) for i in ids]
        return QueryAssignmentResponse(
            status=OK, assignments=[Assignment(message_queue=queue) for queue in queues]
        )

    def _find(self, name: str) -> Topic | None:
        topic = self._context.broker.parts.topics.find_topic(name)
        if topic is None and not self._context.broker.policy.may_be_made(name):
            raise Refused(
                Code.TOPIC_NOT_FOUND,
                f"No topic route info in name server for the topic: {name[: limits.TOPIC_BYTES_MAX]}; make it first",
            )
        return topic

    def _queue(
        self,
        topic: Resource,
        queue_id: int,
        dialled: Endpoints,
        perm: int,
        types: list[MessageType],
    ) -> MessageQueue:
        broker = Broker(
            name=self._context.settings.broker_name, id=0, endpoints=told_endpoints(self._context, dialled)
        )
        return MessageQueue(
            topic=topic,
            id=queue_id,
            permission=PERMISSIONS[perm],
            broker=broker,
            accept_message_types=types,
        )


def told_endpoints(context: GrpcContext, dialled: Endpoints) -> Endpoints:
    """Return where a client reaches the broker; `dialled`, what it says it has come by, unless a name is advertised."""
    # The port of `--advertise` is the remoting port's, which clients of this edge do not dial.
    host, _ = advertised(context.settings.advertise)
    if not host and dialled.addresses:
        return dialled
    return endpoints(host or "127.0.0.1", context.port)


def endpoints(host: str, port: int) -> Endpoints:
    """Return one address as gRPC's clients take it, with the kind of its name."""
    try:
        scheme = AddressScheme.IPv6 if ip_address(host).version == 6 else AddressScheme.IPv4
    except ValueError:
        scheme = AddressScheme.DOMAIN_NAME
    return Endpoints(scheme=scheme, addresses=[Address(host=host, port=port)])
