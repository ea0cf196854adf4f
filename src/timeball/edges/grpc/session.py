"""A client of the gRPC edge: its settings, and its open Telemetry streams.

A client is known from its first settings on. It stays known while one of its streams is open or while it sends
heartbeats. The edge forgets a client that has been silent for `EXPIRY_MS`, or that says good-bye.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from random import choice

from timeball.edges.grpc._generated.definition_pb2 import ClientType, Settings
from timeball.edges.grpc._generated.service_pb2 import TelemetryCommand
from timeball.edges.grpc.calls import topic_name
from timeball.edges.shared.sessions import EdgeContext, Session, Sessions
from timeball.model.access import ANONYMOUS, Caller
from timeball.model.errors import OverLimit

EXPIRY_MS = 30_000  # clients send heartbeats every 10 s. A killed client still holds messages
STREAMS_PER_CLIENT_MAX = 16  # one per address of a broker, and one that is being replaced
COMMANDS_WAITING_MAX = 256  # that a client has not read. A slow client is sent no more

CONSUMERS = frozenset({ClientType.PUSH_CONSUMER, ClientType.SIMPLE_CONSUMER, ClientType.PULL_CONSUMER})


@dataclass(eq=False)
class Stream:
    """One open Telemetry stream. The commands in its queue are sent to its caller."""

    caller: Caller = ANONYMOUS
    commands: asyncio.Queue[TelemetryCommand | None] = field(
        default_factory=lambda: asyncio.Queue(COMMANDS_WAITING_MAX)
    )

    def push(self, command: TelemetryCommand) -> bool:
        """Queue a command, or return False if the client has not read its earlier ones."""
        try:
            self.commands.put_nowait(command)
        except asyncio.QueueFull:
            return False
        return True

    def end(self) -> None:
        """Send nothing more. Drop a waiting command if the queue is full."""
        while self.commands.full():
            self.commands.get_nowait()
        self.commands.put_nowait(None)


@dataclass(eq=False)
class Client(Session[str]):
    """A client as described by its settings. It produces topics, since over gRPC a producer has no group."""

    settings: Settings
    streams: list[Stream] = field(default_factory=list)

    @property
    def is_consumer(self) -> bool:
        """Return whether the client consumes."""
        return self.settings.client_type in CONSUMERS

    def add_stream(self, stream: Stream) -> None:
        """Register a Telemetry stream of this client. Raises OverLimit."""
        if len(self.streams) >= STREAMS_PER_CLIENT_MAX:
            raise OverLimit(f"{STREAMS_PER_CLIENT_MAX} Telemetry streams of one client; close some first")
        self.streams.append(stream)

    def remove_stream(self, stream: Stream, now_ms: int) -> None:
        """Forget a stream that has ended. The client has until its expiry to open another."""
        if stream in self.streams:
            self.streams.remove(stream)
            self.heard_ms = now_ms


def settle(sessions: Sessions[str, Client], name: str, settings: Settings, now_ms: int) -> Client:
    """Store a client's settings, and register the client if it is new. Raises OverLimit, Refused."""
    topics = {topic_name(topic) for topic in settings.publishing.topics}
    client = sessions.get(name) or Client(name, name, settings)
    sessions.add(client, now_ms)
    sessions.set_produces(client, topics)
    client.settings = settings
    return client


def producer_stream(
    sessions: Sessions[str, Client], topic: str, may: Callable[[Caller], bool]
) -> Stream | None:
    """Return a stream to one of the topic's producers, chosen at random among those whose caller `may` read it."""
    streams = [stream for client in sessions.producers(topic) for stream in client.streams]
    streams = [stream for stream in streams if may(stream.caller)]
    return choice(streams) if streams else None


# The context that each handler of this edge gets.
GrpcContext = EdgeContext[str, Client]
