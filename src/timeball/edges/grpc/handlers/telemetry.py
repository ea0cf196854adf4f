"""Telemetry, heartbeats and good-byes: how clients register, and how the broker sends them settings.

    client                                broker
    Telemetry: settings            ->
                                   <-     the same settings, completed with those of the broker
    Heartbeat, every ten seconds   ->     OK; UNRECOGNIZED_CLIENT_TYPE before the first settings
                                   <-     on the open stream: a check of a transaction (transactions.py)
    NotifyClientTermination        ->     OK

The answer to the settings is the first message on the stream, since two of the clients wait for it without a time
limit. It contains:

    producer   max_body_size (with 0 a client cannot send), whether message types are checked, and three attempts
               with a growing pause, which must be exponential for the Java client
    consumer   the number of attempts and the pauses between them (the group's retry policy), whether the group
               consumes in order, how many messages a call asks for and how long it waits

The retry policy is sent as the group's operator has set it: exponential, or customised with a pause for every attempt.
The Node client does not support customised policies and would read the number of attempts as 1. It gets an exponential
policy instead. It only needs the number of attempts from it, because the broker determines its pauses (see
receipts.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from google.protobuf.duration_pb2 import Duration

from timeball.broker.registry.groups import (
    PUSH_FIRST,
    TIMES_MAX,
    ExponentialRetry,
    SubscriptionGroup,
    retry_delay_ms,
)
from timeball.edges.grpc._generated.definition_pb2 import (
    ClientType,
    Code,
    CustomizedBackoff,
    ExponentialBackoff,
    Language,
    RetryPolicy,
    Settings,
)
from timeball.edges.grpc._generated.service_pb2 import (
    HeartbeatRequest,
    HeartbeatResponse,
    NotifyClientTerminationRequest,
    NotifyClientTerminationResponse,
    TelemetryCommand,
)
from timeball.edges.grpc.calls import OK, Call, Handlers, group_name, topic_name
from timeball.edges.grpc.required_permissions import check_settings
from timeball.edges.grpc.session import Client, GrpcContext, Stream, settle
from timeball.edges.shared.error_codes import Refused
from timeball.model import limits
from timeball.model.access import Verb

PRODUCER_ATTEMPTS = 3
RECEIVE_ROWS = 32
LONG_POLLING_S = 20
PAUSES_MAX = 64  # the last one is for all later attempts
# The pauses between a producer's own attempts, in ms.
PAUSE_MS, PAUSE_MS_MAX, PAUSE_FACTOR = 10, 1_000, 2

SETTINGS_BYTES_MAX = 256 * 1024  # kept while the client is connected
TYPES = frozenset(
    {ClientType.PRODUCER, ClientType.PUSH_CONSUMER, ClientType.SIMPLE_CONSUMER, ClientType.PULL_CONSUMER}
)


class Telemetry:
    """Serves Telemetry, Heartbeat and NotifyClientTermination."""

    def __init__(self, context: GrpcContext) -> None:
        self._context = context
        self.handlers: Handlers = {
            "Telemetry": self._telemetry,
            "Heartbeat": self._heartbeat,
            "NotifyClientTermination": self._terminated,
        }

    async def _telemetry(
        self, call: Call, requests: AsyncIterator[TelemetryCommand]
    ) -> AsyncIterator[TelemetryCommand]:
        stream = Stream(call.caller)
        known: list[Client] = []
        reading = asyncio.ensure_future(self._read(call, requests, stream, known))
        try:
            while (command := await stream.commands.get()) is not None:
                yield command
            await reading  # raises the error of the reader as that of the stream
        finally:
            reading.cancel()
            for client in known:
                client.remove_stream(stream, self._context.monotonic_ms())

    async def _read(
        self, call: Call, requests: AsyncIterator[TelemetryCommand], stream: Stream, known: list[Client]
    ) -> None:
        """Read the client's commands, and return when its stream ends."""
        try:
            async for command in requests:
                if command.WhichOneof("command") != "settings":
                    continue  # an answer to a question that the broker does not ask
                client = self._settle(call, command)
                if client not in known:
                    client.add_stream(stream)
                    known.append(client)
                await stream.commands.put(TelemetryCommand(status=OK, settings=client.settings))
        finally:
            stream.end()

    def _settle(self, call: Call, command: TelemetryCommand) -> Client:
        settings = command.settings
        if settings.client_type not in TYPES:
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
            self._hear(settings)
        completed = answered(settings, group, check_types=self._context.settings.check_message_types)
        return settle(self._context.sessions, call.client_id, completed, self._context.monotonic_ms())

    async def _heartbeat(self, call: Call, request: HeartbeatRequest) -> HeartbeatResponse:
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
            self._hear(client.settings)
        return HeartbeatResponse(status=OK)

    def _hear(self, settings: Settings) -> None:
        """Report the topics of a member's subscriptions to the broker. Its filters arrive with each receive."""
        said = settings.subscription
        topics = [topic_name(one.topic) for one in said.subscriptions]
        if topics:
            self._context.broker.consuming.subscriptions.hear_topics(group_name(said.group), topics)

    async def _terminated(
        self, call: Call, _: NotifyClientTerminationRequest
    ) -> NotifyClientTerminationResponse:
        self._context.sessions.remove(call.client_id)
        return NotifyClientTerminationResponse(status=OK)


def answered(settings: Settings, group: SubscriptionGroup | None, *, check_types: bool) -> Settings:
    """Return the settings that the broker sends back. `group` is the consumer's group, or None for a producer."""
    found = Settings()
    found.CopyFrom(settings)
    if group is None:
        found.publishing.max_body_size = limits.BODY_BYTES_MAX
        found.publishing.validate_message_type = check_types
        found.backoff_policy.CopyFrom(_exponential(PRODUCER_ATTEMPTS, PAUSE_MS, PAUSE_MS_MAX, PAUSE_FACTOR))
        return found
    found.subscription.fifo = group.consume_message_orderly
    found.subscription.receive_batch_size = RECEIVE_ROWS
    found.subscription.long_polling_timeout.CopyFrom(Duration(seconds=LONG_POLLING_S))
    found.backoff_policy.CopyFrom(
        _policy(group, exponential=settings.user_agent.language == Language.NODE_JS)
    )
    return found


def attempts_max(group: SubscriptionGroup) -> int:
    """Return how often a message is handed out before it is a dead letter: once, plus the number of retries."""
    times = group.retry_max_times
    return 1 + (times if times >= 0 else TIMES_MAX)


def duration(milliseconds: int) -> Duration:
    """Convert ms to a protobuf duration."""
    return Duration(seconds=milliseconds // 1_000, nanos=milliseconds % 1_000 * 1_000_000)


def _policy(group: SubscriptionGroup, *, exponential: bool) -> RetryPolicy:
    attempts, policy = attempts_max(group), group.group_retry_policy
    if exponential or policy.type == "EXPONENTIAL":
        chosen = policy.exponential_retry_policy or ExponentialRetry()
        return _exponential(attempts, chosen.initial, chosen.max, chosen.multiplier)
    # One for each attempt that may fail: clients only look them up.
    pauses = [
        duration(retry_delay_ms(policy, attempt, first=PUSH_FIRST))
        for attempt in range(1, min(attempts, PAUSES_MAX) + 1)
    ]
    return RetryPolicy(max_attempts=attempts, customized_backoff=CustomizedBackoff(next=pauses))


def _exponential(attempts: int, initial_ms: int, max_ms: int, factor: int) -> RetryPolicy:
    return RetryPolicy(
        max_attempts=attempts,
        exponential_backoff=ExponentialBackoff(
            initial=duration(initial_ms), max=duration(max_ms), multiplier=factor
        ),
    )
