"""Telemetry, heartbeats and good-byes: how a client makes itself known, and is told how to behave.

    client                                broker
    Telemetry: settings            ->
                                   <-     the same settings, and what the broker decides of them
    Heartbeat, every ten seconds   ->     OK; UNRECOGNIZED_CLIENT_TYPE while there were no settings
                                   <-     on the open stream, when a transaction wants its producer (transactions.py)
    NotifyClientTermination        ->     OK

The answer to the settings is the first thing on the stream, since two of the clients wait for it without end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from timeball.access import Verb
from timeball.protocols.error_codes import Refused
from timeball.protocols.grpc._generated.definition_pb2 import ClientType, Code
from timeball.protocols.grpc._generated.service_pb2 import (
    HeartbeatRequest,
    HeartbeatResponse,
    NotifyClientTerminationRequest,
    NotifyClientTerminationResponse,
    TelemetryCommand,
)
from timeball.protocols.grpc.calls import Call, Handlers
from timeball.protocols.grpc.clients import Client, Stream
from timeball.protocols.grpc.codec.names import group_name
from timeball.protocols.grpc.codec.statuses import ok
from timeball.protocols.grpc.handlers.client_settings import answered
from timeball.protocols.grpc.needs import check_settings
from timeball.protocols.grpc.site import Site

SETTINGS_BYTES_MAX = 256 * 1024  # kept while the client is connected
TYPES = frozenset(
    {ClientType.PRODUCER, ClientType.PUSH_CONSUMER, ClientType.SIMPLE_CONSUMER, ClientType.PULL_CONSUMER}
)


class Telemetry:
    """See the module."""

    def __init__(self, site: Site) -> None:
        self._site = site

    def handlers(self) -> Handlers:
        """The calls answered here."""
        return {
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
            await reading  # its error is the stream's
        finally:
            reading.cancel()
            for client in known:
                self._site.clients.closed(client, stream, self._site.monotonic_ms())

    async def _read(
        self, call: Call, requests: AsyncIterator[TelemetryCommand], stream: Stream, known: list[Client]
    ) -> None:
        """What the client says; ends with it."""
        try:
            async for command in requests:
                if command.WhichOneof("command") != "settings":
                    continue  # an answer to something that we do not ask
                client = self._settle(call, command)
                if client not in known:
                    self._site.clients.opened(client, stream)
                    known.append(client)
                await stream.commands.put(TelemetryCommand(status=ok(), settings=client.settings))
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
        check_settings(self._site.broker.policy, call.caller, settings)
        group = None
        if settings.HasField("subscription"):
            group = self._site.broker.parts.groups.ensure(group_name(settings.subscription.group))
        completed = answered(settings, group, check_types=self._site.settings.check_message_types)
        return self._site.clients.settle(call.client_id, completed, self._site.monotonic_ms())

    async def _heartbeat(self, call: Call, request: HeartbeatRequest) -> HeartbeatResponse:
        client = self._site.clients.heard(call.client_id, self._site.monotonic_ms())
        if client is None:
            raise Refused(
                Code.UNRECOGNIZED_CLIENT_TYPE,
                "no settings of this client: open a Telemetry stream and send them",
            )
        if client.is_consumer and request.HasField("group"):
            group = group_name(request.group)
            self._site.broker.policy.allow(call.caller, Verb.RECEIVE, group=group)
            self._site.broker.parts.groups.ensure(group)
        return HeartbeatResponse(status=ok())

    async def _terminated(
        self, call: Call, _: NotifyClientTerminationRequest
    ) -> NotifyClientTerminationResponse:
        self._site.clients.gone(call.client_id)
        return NotifyClientTerminationResponse(status=ok())
