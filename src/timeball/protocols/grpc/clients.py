"""Who is connected: clients by the name they give themselves, their settings, and their open Telemetry streams.

A client is known from its first settings on. It stays known while one of its streams is open or while it goes on
beating; one that has been silent for `EXPIRY_MS` is forgotten, and so is one that says good-bye. Whoever waits for
clients to go (receives.py gives back what they had in hand) is told once, by name.
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
from timeball.protocols.grpc.codec.names import topic_name

EXPIRY_MS = 30_000  # clients beat every ten seconds, and a killed one has messages in its hand
CLIENTS_MAX = 65_536
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
class Client:
    """A client as far as it has told us."""

    name: str
    settings: Settings
    heard_ms: int
    streams: list[Stream] = field(default_factory=list)

    @property
    def is_consumer(self) -> bool:
        """Whether it consumes."""
        return self.settings.client_type in CONSUMERS


class Clients:
    """See the module. Belongs to the event loop."""

    def __init__(self) -> None:
        self._clients: dict[str, Client] = {}
        self._publish: dict[str, dict[str, Client]] = {}  # topic -> producers by name
        self.on_gone: list[Callable[[Client], None]] = []

    def __len__(self) -> int:
        return len(self._clients)

    def find(self, name: str) -> Client | None:
        """The client of this name, if it has told its settings."""
        return self._clients.get(name)

    def all(self) -> list[Client]:
        """Every client known."""
        return list(self._clients.values())

    def settle(self, name: str, settings: Settings, now_ms: int) -> Client:
        """A client tells its settings, for the first time or anew. Raises OverLimit, Refused."""
        client = self._clients.get(name)
        topics = {topic_name(topic) for topic in settings.publishing.topics}
        if client is None:
            if len(self._clients) >= CLIENTS_MAX:
                raise OverLimit(f"{CLIENTS_MAX} clients are connected")
            client = self._clients[name] = Client(name, settings, now_ms)
        self._stop_publishing(client)
        client.settings, client.heard_ms = settings, now_ms
        for topic in topics:
            self._publish.setdefault(topic, {})[name] = client
        return client

    def opened(self, client: Client, stream: Stream) -> None:
        """A Telemetry stream of this client; raises OverLimit."""
        if len(client.streams) >= STREAMS_PER_CLIENT_MAX:
            raise OverLimit(f"{STREAMS_PER_CLIENT_MAX} Telemetry streams of one client; close some first")
        client.streams.append(stream)

    def closed(self, client: Client, stream: Stream, now_ms: int) -> None:
        """The stream has ended; the client has until its expiry to open another."""
        if stream in client.streams:
            client.streams.remove(stream)
            client.heard_ms = now_ms

    def heard(self, name: str, now_ms: int) -> Client | None:
        """A heartbeat; None of a client that has not told its settings."""
        client = self._clients.get(name)
        if client is not None:
            client.heard_ms = now_ms
        return client

    def gone(self, name: str) -> None:
        """The client has said good-bye, or has been silent for too long."""
        client = self._clients.pop(name, None)
        if client is None:
            return
        self._stop_publishing(client)
        for tell in self.on_gone:
            tell(client)

    def expire(self, now_ms: int) -> None:
        """Forget who has been silent for too long."""
        silent = [c.name for c in self._clients.values() if now_ms - c.heard_ms > EXPIRY_MS and not c.streams]
        for name in silent:
            self.gone(name)

    def close(self) -> None:
        """End every Telemetry stream: the broker stops."""
        for client in self._clients.values():
            for stream in client.streams:
                stream.end()

    def producer(self, topic: str, may: Callable[[Caller], bool] = lambda caller: True) -> Stream | None:
        """Return a stream to one of the producers of a topic whose caller `may` be sent its messages."""
        streams = [stream for client in self._publish.get(topic, {}).values() for stream in client.streams]
        streams = [stream for stream in streams if may(stream.caller)]
        return choice(streams) if streams else None

    def _stop_publishing(self, client: Client) -> None:
        for topic in client.settings.publishing.topics:
            name = topic_name(topic)
            producers = self._publish.get(name, {})
            producers.pop(client.name, None)
            if not producers:
                self._publish.pop(name, None)
