"""Clients register and get settings (Telemetry, Heartbeat, NotifyClientTermination), and ask for queues (routes).

    client                                broker
    Telemetry: settings            ->
                                   <-     the same settings, completed with those of the broker
    Heartbeat, every ten seconds   ->     OK; UNRECOGNIZED_CLIENT_TYPE before the first settings
                                   <-     on the open stream: a check of a transaction (sends.py)
    NotifyClientTermination        ->     OK

A client also asks for the queues of a topic (QueryRoute), and for those that a consumer reads (QueryAssignment).

The answer to the settings is the first message on the stream, because two of RocketMQ's clients wait for it without a
time limit. It contains:

    producer   max_body_size (with 0 a client cannot send), whether message types are checked, and three attempts
               with a growing pause, which must be exponential for the Java client
    consumer   the number of attempts and the pauses between them (the group's retry policy), whether the group
               consumes in order, how many messages a call asks for and how long it waits

The retry policy is sent as the group's operator has set it: exponential, or customised with a pause for every attempt.
The Node client does not support customised policies, and would take the number of attempts for 1. So it gets an
exponential policy with the same number of attempts. It does not need the pauses, because the broker determines them
(see receipts.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from ipaddress import ip_address
from typing import NamedTuple

from google.protobuf.duration_pb2 import Duration

from timeball.broker.groups.grouped import GroupedBroker
from timeball.broker.policy import queues_to_read
from timeball.broker.registry.groups import (
    PUSH_FIRST,
    TIMES_MAX,
    ExponentialRetry,
    SubscriptionGroup,
    retry_delay_ms,
)
from timeball.broker.registry.topics import READ, WRITE, Topic
from timeball.broker.revoking.group_questions import GroupRoute
from timeball.edges.grpc._generated.definition_pb2 import (
    Address,
    AddressScheme,
    Assignment,
    Broker,
    ClientType,
    Code,
    CustomizedBackoff,
    Endpoints,
    ExponentialBackoff,
    Language,
    MessageQueue,
    MessageType,
    Permission,
    Resource,
    RetryPolicy,
    Settings,
)
from timeball.edges.grpc._generated.service_pb2 import (
    HeartbeatRequest,
    HeartbeatResponse,
    NotifyClientTerminationRequest,
    NotifyClientTerminationResponse,
    QueryAssignmentRequest,
    QueryAssignmentResponse,
    QueryRouteRequest,
    QueryRouteResponse,
    TelemetryCommand,
)
from timeball.edges.grpc.calls import (
    OK,
    Call,
    Client,
    GrpcContext,
    Handlers,
    Stream,
    group_name,
    store_settings,
    topic_name,
)
from timeball.edges.grpc.dispatch import check_settings
from timeball.edges.grpc.handlers.sends import accepted_types, types_of_attribute
from timeball.edges.shared.error_codes import Refused
from timeball.edges.shared.sessions import advertised
from timeball.model import limits
from timeball.model.access import Caller, Verb
from timeball.model.errors import Unavailable

# ---- Telemetry, Heartbeat and NotifyClientTermination --------------------------------------------------------

PRODUCER_ATTEMPTS = 3
RECEIVE_ROWS = 32  # how many messages a consumer asks for in one call
LONG_POLLING_S = 20  # how long a consumer's call waits
PAUSES_MAX = 64  # of a customised retry policy. The last pause is for all later attempts
# The pauses between the attempts of a producer to send a message.
PAUSE_MS, PAUSE_MS_MAX, PAUSE_FACTOR = 10, 1_000, 2

SETTINGS_BYTES_MAX = 256 * 1024  # the broker keeps them in memory while the client is connected
CLIENT_TYPES = frozenset(
    {ClientType.PRODUCER, ClientType.PUSH_CONSUMER, ClientType.SIMPLE_CONSUMER, ClientType.PULL_CONSUMER}
)


class Telemetry:
    """Serves Telemetry, Heartbeat and NotifyClientTermination."""

    def __init__(self, context: GrpcContext) -> None:
        self._context = context
        self.handlers: Handlers = {
            "Telemetry": self._telemetry,
            "Heartbeat": self._heartbeat,
            "NotifyClientTermination": self._terminate,
        }

    async def _telemetry(
        self, call: Call, requests: AsyncIterator[TelemetryCommand]
    ) -> AsyncIterator[TelemetryCommand]:
        """Answer the client's settings, and send it the commands that other handlers queue in its stream."""
        stream = Stream(call.caller)
        clients: list[Client] = []
        reader = asyncio.ensure_future(self._read_commands(call, requests, stream, clients))
        try:
            while (command := await stream.commands.get()) is not None:
                yield command
            await reader  # raises the reader's error, which then ends the stream
        finally:
            reader.cancel()
            for client in clients:
                client.remove_stream(stream, self._context.monotonic_ms())

    async def _read_commands(
        self, call: Call, requests: AsyncIterator[TelemetryCommand], stream: Stream, clients: list[Client]
    ) -> None:
        """Read the client's commands until its stream ends.

        Adds the client to `clients` when its first settings have registered it.
        """
        try:
            async for command in requests:
                if command.WhichOneof("command") != "settings":
                    continue  # a reply to a command that the broker does not send
                client = self._store_settings(call, command)
                if client not in clients:
                    client.add_stream(stream)
                    clients.append(client)
                await stream.commands.put(TelemetryCommand(status=OK, settings=client.settings))
        finally:
            stream.end()

    def _store_settings(self, call: Call, command: TelemetryCommand) -> Client:
        """Check the client's settings, complete them, and store them in its session.

        Raises Refused, Forbidden, Unauthorized, OverLimit.
        """
        settings = command.settings
        if settings.client_type not in CLIENT_TYPES:
            raise Refused(
                Code.UNRECOGNIZED_CLIENT_TYPE,
                f"client type {settings.client_type}: a producer, or a push, simple or pull consumer",
            )
        if settings.ByteSize() > SETTINGS_BYTES_MAX:
            raise Refused(
                Code.PAYLOAD_TOO_LARGE,
                f"settings of {settings.ByteSize()} bytes; {SETTINGS_BYTES_MAX} at most",
            )
        check_settings(self._context.broker.policy, call.caller, settings)
        group = None
        if settings.HasField("subscription"):
            group = self._context.broker.tables.groups.ensure(group_name(settings.subscription.group))
            self._report_subscriptions(settings)
        completed = complete_settings(settings, group, check_types=self._context.settings.check_message_types)
        return store_settings(self._context.sessions, call.client_id, completed, self._context.monotonic_ms())

    async def _heartbeat(self, call: Call, request: HeartbeatRequest) -> HeartbeatResponse:
        """Serve Heartbeat: extend the client's session. Raises Refused without a session, or Forbidden."""
        client = self._context.sessions.get(call.client_id)
        if client is None:
            raise Refused(
                Code.UNRECOGNIZED_CLIENT_TYPE,
                "no settings of this client: open a Telemetry stream and send them",
            )
        client.heard_ms = self._context.monotonic_ms()
        if client.is_consumer and request.HasField("group"):
            group = group_name(request.group)
            self._context.broker.policy.allow(call.caller, Verb.RECEIVE, group=group)
            self._context.broker.tables.groups.ensure(group)
            self._report_subscriptions(client.settings)
        return HeartbeatResponse(status=OK)

    def _report_subscriptions(self, settings: Settings) -> None:
        """Report the topics of a consumer's subscriptions to the broker. Filters arrive with each receive."""
        subscription = settings.subscription
        topics = [topic_name(entry.topic) for entry in subscription.subscriptions]
        if topics:
            self._context.broker.consuming.subscriptions.hear_topics(group_name(subscription.group), topics)

    async def _terminate(
        self, call: Call, _: NotifyClientTerminationRequest
    ) -> NotifyClientTerminationResponse:
        """Serve NotifyClientTermination: end the client's session. Succeeds also without a session."""
        self._context.sessions.remove(call.client_id)
        return NotifyClientTerminationResponse(status=OK)


def complete_settings(settings: Settings, group: SubscriptionGroup | None, *, check_types: bool) -> Settings:
    """Copy a client's settings and add those of the broker. `group` is the consumer's group, or None for a producer."""
    completed = Settings()
    completed.CopyFrom(settings)
    if group is None:
        completed.publishing.max_body_size = limits.BODY_BYTES_MAX
        completed.publishing.validate_message_type = check_types
        completed.backoff_policy.CopyFrom(
            _create_exponential_policy(PRODUCER_ATTEMPTS, PAUSE_MS, PAUSE_MS_MAX, PAUSE_FACTOR)
        )
        return completed
    completed.subscription.fifo = group.consume_message_orderly
    completed.subscription.receive_batch_size = RECEIVE_ROWS
    completed.subscription.long_polling_timeout.CopyFrom(Duration(seconds=LONG_POLLING_S))
    completed.backoff_policy.CopyFrom(
        _retry_policy(group, is_exponential=settings.user_agent.language == Language.NODE_JS)
    )
    return completed


def attempts_max(group: SubscriptionGroup) -> int:
    """Compute how often a message is handed out before it becomes a dead letter: once, plus the number of retries."""
    retries = group.retry_max_times
    return 1 + (retries if retries >= 0 else TIMES_MAX)


def duration(milliseconds: int) -> Duration:
    """Convert ms to a protobuf duration."""
    return Duration(seconds=milliseconds // 1_000, nanos=milliseconds % 1_000 * 1_000_000)


def _retry_policy(group: SubscriptionGroup, *, is_exponential: bool) -> RetryPolicy:
    """Convert a group's retry policy. `is_exponential`: to an exponential policy, even if it is customised."""
    attempts, policy = attempts_max(group), group.group_retry_policy
    if is_exponential or policy.type == "EXPONENTIAL":
        retry = policy.exponential_retry_policy or ExponentialRetry()
        return _create_exponential_policy(attempts, retry.initial, retry.max, retry.multiplier)
    # A pause for each attempt that may fail, because clients only look the pauses up.
    pauses = [
        duration(retry_delay_ms(policy, attempt, first=PUSH_FIRST))
        for attempt in range(1, min(attempts, PAUSES_MAX) + 1)
    ]
    return RetryPolicy(max_attempts=attempts, customized_backoff=CustomizedBackoff(next=pauses))


def _create_exponential_policy(attempts: int, initial_ms: int, max_ms: int, factor: int) -> RetryPolicy:
    """Create a policy whose pauses grow by `factor` from `initial_ms` to `max_ms`."""
    return RetryPolicy(
        max_attempts=attempts,
        exponential_backoff=ExponentialBackoff(
            initial=duration(initial_ms), max=duration(max_ms), multiplier=factor
        ),
    )


# ---- QueryRoute and QueryAssignment --------------------------------------------------------------------------
# A single broker has all queues of a topic. In a cluster, the broker groups share the topics. The route then contains
# the queues of all broker groups that have the topic, each with the address of the group's leader. It does not contain
# a broker group without a leader, or whose leader does not answer. The client will ask again.

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
    """Serves QueryRoute and QueryAssignment.

    If topics are created on first use, a topic that does not exist yet also gets a route, with queues of this broker
    group. Clients ask for the route before their first message, and most do not start without it.

    A consumer group without order reads from any queue of a topic (queue -1). For a consumer group in order, the
    assignment lists each queue.
    """

    def __init__(self, context: GrpcContext) -> None:
        self._context = context
        self.handlers: Handlers = {"QueryRoute": self._query_route, "QueryAssignment": self._query_assignment}

    async def _query_route(self, call: Call, request: QueryRouteRequest) -> QueryRouteResponse:
        """Serve QueryRoute: each queue of the topic at each broker. Raises Refused, Unavailable."""
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
        """Serve QueryAssignment: the readable queues for a group that consumes in order, else ANY_QUEUE per broker.

        A broker without readable queues is left out. Raises Refused, Unavailable.
        """
        brokers = await self._find_queues(
            call.caller, request.topic, request.endpoints, group_name(request.group)
        )
        queues = [
            _message_queue(request.topic, queue_id, broker, READ)
            for broker in brokers
            if broker.read
            for queue_id in (range(broker.read) if broker.in_order else [ANY_QUEUE])
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
        remote_queues, has_silent_group = [], False
        if isinstance(broker, GroupedBroker):
            routes = await broker.routes(name, caller, consumer_group)
            remote_queues = [
                queues
                for broker_group, route in routes.items()
                if (queues := _remote_queues(broker, broker_group, route))
            ]
            has_silent_group = None in routes.values()
        topic = broker.tables.topics.find_topic(name)
        if topic is None and remote_queues:
            return remote_queues
        if topic is None and not broker.policy.is_auto_created(name):
            if has_silent_group:
                raise Unavailable("a group of the cluster did not answer, and the others have no such topic")
            raise Refused(
                Code.TOPIC_NOT_FOUND,
                f"No topic route info in name server for the topic: {name[: limits.TOPIC_BYTES_MAX]}; create it first",
            )
        return [self._local_queues(topic, client_endpoints, consumer_group), *remote_queues]

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
    """Describe one queue of a topic at a broker. `perm` has the bits READ and WRITE."""
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
