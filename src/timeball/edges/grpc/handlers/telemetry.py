"""Telemetry, Heartbeat and NotifyClientTermination: clients register, and the broker sends them settings.

    client                                broker
    Telemetry: settings            ->
                                   <-     the same settings, completed with those of the broker
    Heartbeat, every ten seconds   ->     OK; UNRECOGNIZED_CLIENT_TYPE before the first settings
                                   <-     on the open stream: a check of a transaction (transactions.py)
    NotifyClientTermination        ->     OK

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
from timeball.edges.grpc.session import Client, GrpcContext, Stream, store_settings
from timeball.edges.shared.error_codes import Refused
from timeball.model import limits
from timeball.model.access import Verb

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
            _exponential(PRODUCER_ATTEMPTS, PAUSE_MS, PAUSE_MS_MAX, PAUSE_FACTOR)
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
        return _exponential(attempts, retry.initial, retry.max, retry.multiplier)
    # A pause for each attempt that may fail, because clients only look the pauses up.
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
