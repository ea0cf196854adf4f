"""The session of a client of the gRPC edge: its settings, and its open Telemetry streams.

A session begins with the client's first settings. It lasts while one of its streams is open or while it sends
heartbeats. The edge ends the session of a client that has been silent for `EXPIRY_MS`, or that announces its
termination.
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

# Clients send heartbeats every 10 s. Not longer, because a killed client holds its messages until then.
EXPIRY_MS = 30_000
STREAMS_PER_CLIENT_MAX = 16  # clients open one per address of the broker, and another while they replace one
QUEUED_COMMANDS_MAX = 256  # of one stream, for a client that reads slowly

CONSUMERS = frozenset({ClientType.PUSH_CONSUMER, ClientType.SIMPLE_CONSUMER, ClientType.PULL_CONSUMER})


@dataclass(eq=False)
class Stream:
    """One open Telemetry stream, with the queue of commands that the handler sends to the client. None ends it."""

    caller: Caller = ANONYMOUS
    commands: asyncio.Queue[TelemetryCommand | None] = field(
        default_factory=lambda: asyncio.Queue(QUEUED_COMMANDS_MAX)
    )

    def push(self, command: TelemetryCommand) -> bool:
        """Queue a command. Returns False if the queue is full, because the client has not read earlier commands."""
        try:
            self.commands.put_nowait(command)
        except asyncio.QueueFull:
            return False
        return True

    def end(self) -> None:
        """End the stream after the queued commands. If the queue is full, its oldest command is dropped."""
        while self.commands.full():
            self.commands.get_nowait()
        self.commands.put_nowait(None)


@dataclass(eq=False)
class Client(Session[str]):
    """The session of one client. Its `produces` has topics, because a producer has no group over gRPC."""

    settings: Settings
    streams: list[Stream] = field(default_factory=list)

    @property
    def is_consumer(self) -> bool:
        """Whether the client is a consumer of any type."""
        return self.settings.client_type in CONSUMERS

    def add_stream(self, stream: Stream) -> None:
        """Register a Telemetry stream of this client. Raises OverLimit."""
        if len(self.streams) >= STREAMS_PER_CLIENT_MAX:
            raise OverLimit(f"{STREAMS_PER_CLIENT_MAX} Telemetry streams of one client; close some first")
        self.streams.append(stream)

    def remove_stream(self, stream: Stream, now_ms: int) -> None:
        """Remove a stream that has ended. The client has `EXPIRY_MS` from now to open another."""
        if stream in self.streams:
            self.streams.remove(stream)
            self.heard_ms = now_ms


def store_settings(
    sessions: Sessions[str, Client], client_id: str, settings: Settings, now_ms: int
) -> Client:
    """Store a client's settings in its session, and begin the session if it is new. Raises OverLimit, Refused."""
    topics = {topic_name(topic) for topic in settings.publishing.topics}
    client = sessions.get(client_id) or Client(client_id, client_id, settings)
    sessions.add(client, now_ms)
    sessions.set_produces(client, topics)
    client.settings = settings
    return client


def choose_producer_stream(
    sessions: Sessions[str, Client], topic: str, is_allowed: Callable[[Caller], bool]
) -> Stream | None:
    """Choose at random a stream of a producer of this topic whose caller is allowed. Returns None if there is none."""
    streams = [stream for client in sessions.producers(topic) for stream in client.streams]
    streams = [stream for stream in streams if is_allowed(stream.caller)]
    return choice(streams) if streams else None


# The constructor of each handler class of this edge gets it.
GrpcContext = EdgeContext[str, Client]
