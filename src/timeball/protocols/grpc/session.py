"""A client of the gRPC edge: its settings, and its open Telemetry streams.

A client is known from its first settings on. It stays known while one of its streams is open or while it goes on
beating; the edge forgets one that has been silent for `EXPIRY_MS`, and one that says good-bye.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import choice

from timeball.access import ANONYMOUS, Caller
from timeball.errors import OverLimit
from timeball.protocols.grpc._generated.definition_pb2 import ClientType, Settings
from timeball.protocols.grpc._generated.service_pb2 import TelemetryCommand
from timeball.protocols.grpc.calls import topic_name
from timeball.protocols.sessions import EdgeContext, Session, Sessions

EXPIRY_MS = 30_000  # clients beat every ten seconds, and a killed one has messages in its hand
STREAMS_PER_CLIENT_MAX = 16  # one for each address of a broker, and one that is just being replaced
COMMANDS_WAITING_MAX = 256  # that a client has not taken: a slow one is not sent more

CONSUMERS = frozenset({ClientType.PUSH_CONSUMER, ClientType.SIMPLE_CONSUMER, ClientType.PULL_CONSUMER})


@dataclass(eq=False)
class Stream:
    """One open Telemetry stream: what is put here is sent to its caller."""

    caller: Caller = ANONYMOUS
    commands: asyncio.Queue[TelemetryCommand | None] = field(
        default_factory=lambda: asyncio.Queue(COMMANDS_WAITING_MAX)
    )

    def push(self, command: TelemetryCommand) -> bool:
        """False when the client does not take what it was sent before."""
        try:
            self.commands.put_nowait(command)
        except asyncio.QueueFull:
            return False
        return True

    def end(self) -> None:
        """Send nothing more; what waits is dropped when the client does not take it."""
        while self.commands.full():
            self.commands.get_nowait()
        self.commands.put_nowait(None)


@dataclass(eq=False)
class Client(Session[str]):
    """A client as far as it has told us; it produces topics, since over gRPC a producer has no group."""

    settings: Settings
    streams: list[Stream] = field(default_factory=list)

    @property
    def is_consumer(self) -> bool:
        """Return whether it consumes."""
        return self.settings.client_type in CONSUMERS

    def add_stream(self, stream: Stream) -> None:
        """Count a Telemetry stream of this client; raises OverLimit."""
        if len(self.streams) >= STREAMS_PER_CLIENT_MAX:
            raise OverLimit(f"{STREAMS_PER_CLIENT_MAX} Telemetry streams of one client; close some first")
        self.streams.append(stream)

    def remove_stream(self, stream: Stream, now_ms: int) -> None:
        """Forget a stream that has ended; the client has until its expiry to open another."""
        if stream in self.streams:
            self.streams.remove(stream)
            self.heard_ms = now_ms


def settle(sessions: Sessions[str, Client], name: str, settings: Settings, now_ms: int) -> Client:
    """Take a client's settings, its first or later ones; raises OverLimit, Refused."""
    topics = {topic_name(topic) for topic in settings.publishing.topics}
    client = sessions.get(name) or Client(name, name, settings)
    sessions.add(client, now_ms)
    sessions.set_produces(client, topics)
    client.settings = settings
    return client


def producer_stream(
    sessions: Sessions[str, Client], topic: str, may: Callable[[Caller], bool]
) -> Stream | None:
    """Return a stream to one of the producers of a topic whose caller `may` be sent its messages."""
    streams = [stream for client in sessions.producers(topic) for stream in client.streams]
    streams = [stream for stream in streams if may(stream.caller)]
    return choice(streams) if streams else None


# What the handlers of this edge are given.
GrpcContext = EdgeContext[str, Client]
