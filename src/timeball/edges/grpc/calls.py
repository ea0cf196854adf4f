"""Definitions that all handlers of this edge share: calls, replies, names, long polls, statuses, clients' sessions.

A handler has one of four forms. `call` contains the headers and the caller, `request` is the decoded message:

    unary          async (call, request) -> response
    direct         (call, request, reply): the reply gets the response later, and no task waits for it
    server stream  async generator (call, request) -> responses
    Telemetry      async generator (call, requests) -> responses

This module and the handlers do not depend on the transport (http2/server.py). An error that a handler raises becomes
the response's status: a code, and a text that states the remedy (error_codes.py).

A topic or group of a namespace is `<namespace>%<name>` in the broker, as in RocketMQ's proxy. Names are checked here as
well as in the broker, because RocketMQ has a code of its own for each kind of name. From the code, clients create an
exception that shows which name was bad.

A long poll is answered a little before the client's deadline. After the deadline the answer would be lost, together
with all its messages.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import choice
from typing import Any, NamedTuple, Protocol

from google.protobuf.duration_pb2 import Duration

from timeball.broker.filters import EVERYTHING, TAG, Filter
from timeball.broker.filters.compiler import SQL92, FilterCache
from timeball.broker.filters.tags import ALL
from timeball.broker.registry.topics import Topic
from timeball.edges.grpc._generated.definition_pb2 import (
    ClientType,
    Code,
    FilterExpression,
    FilterType,
    Resource,
    Settings,
    Status,
)
from timeball.edges.grpc._generated.service_pb2 import TelemetryCommand
from timeball.edges.http2 import exchange as http2
from timeball.edges.shared.error_codes import Refused, codes_of, sentence, shorten
from timeball.edges.shared.sessions import EdgeContext, Session, Sessions
from timeball.model import limits
from timeball.model.access import ANONYMOUS, Caller
from timeball.model.errors import OverLimit
from timeball.model.message import RETRY_PREFIX

# ---- calls, names, long polls, statuses ----------------------------------------------------------------------

CLIENT_ID = "x-mq-client-id"
NAMESPACE_SEPARATOR = "%"
LONG_POLL_MS_MAX = 20 * limits.SECOND_MS
# A long poll is answered so long before its deadline, or a quarter of its remaining time before it if that is less.
DEADLINE_MARGIN_MS, DEADLINE_MARGIN_SHARE = 500, 4
REMAINING_S_MAX = 3_600.0  # caps the time until a client's deadline. A longer time has the same effect
WAITING_PER_ADDRESS_MAX = limits.PULLS_WAITING_MAX // 2  # leaves the other half to the other addresses
MULTI_TAG = "MULTI_TAG"
_FILTER_TYPES = {FilterType.FILTER_TYPE_UNSPECIFIED: TAG, FilterType.TAG: TAG, FilterType.SQL: SQL92}
# The bounds of google.protobuf.Duration.
DURATION_SECONDS_MAX, NANOS_MAX = 315_576_000_000, 999_999_999


@dataclass(slots=True)
class Call(http2.Call):
    """A call of this edge."""

    @property
    def client_id(self) -> str:
        """The client's id from its header, with its account in front so that accounts cannot share ids.

        Raises Refused.
        """
        client_id = self.headers.get(CLIENT_ID, "")
        if not client_id or len(client_id) > limits.CLIENT_ID_CHARACTERS_MAX:
            raise Refused(
                Code.CLIENT_ID_REQUIRED,
                f"header {CLIENT_ID}: 1 to {limits.CLIENT_ID_CHARACTERS_MAX} characters, an id per client",
            )
        return client_id if self.caller is ANONYMOUS else f"{self.caller.name}/{client_id}"


class Reply(Protocol):
    """Answers a call without a task. The handler calls exactly one of the two methods, exactly once.

    If the client has disconnected, they have no effect.
    """

    def answer(self, message: bytes) -> None:
        """Send this encoded response, and end the call."""

    def refuse(self, error: BaseException) -> None:
        """Send a response with the status for this error, and end the call."""


class Direct(NamedTuple):
    """A handler whose call needs no task: `begin` returns at once, and the reply is called later.

    `begin` may also raise, like any handler. `decode` converts bytes to the request, or raises DecodeError. None: the
    request is protobuf's object.
    """

    begin: Callable[[Call, Any, Reply], None]
    decode: Callable[[bytes], Any] | None = None


Unary = Callable[[Call, Any], Awaitable[Any]]
Streaming = Callable[[Call, Any], AsyncIterator[Any]]
Handlers = dict[str, Unary | Streaming | Direct]  # by the name of the call in the service definition


def topic_name(resource: Resource) -> str:
    """Convert a client's topic to its name in the broker. Raises Refused for an invalid name."""
    name = _full_name(resource)
    # The broker makes the names of retry topics from those of groups, so they may be longer. It also checks the
    # messages that are sent to them.
    is_retry = name.startswith(RETRY_PREFIX)
    length_max = limits.OWN_TOPIC_BYTES_MAX if is_retry else limits.TOPIC_BYTES_MAX
    return _check_name(resource, name, "topic", length_max, Code.ILLEGAL_TOPIC)


def group_name(resource: Resource) -> str:
    """Convert a client's consumer group to its name in the broker. Raises Refused for an invalid name."""
    name = _full_name(resource)
    return _check_name(resource, name, "consumer group", limits.GROUP_BYTES_MAX, Code.ILLEGAL_CONSUMER_GROUP)


def resource(name: str, namespace: str = "") -> Resource:
    """Convert a name in the broker to the topic or group that a client of this namespace uses."""
    return Resource(
        resource_namespace=namespace,
        name=name.removeprefix(namespace + NAMESPACE_SEPARATOR) if namespace else name,
    )


def _full_name(resource: Resource) -> str:
    namespace = resource.resource_namespace
    return f"{namespace}{NAMESPACE_SEPARATOR}{resource.name}" if namespace else resource.name


def _check_name(resource: Resource, name: str, kind: str, length_max: int, code: Code) -> str:
    """Return the full name if it is valid. Otherwise raise Refused with this code; `kind` is for the text."""
    if not resource.name or len(name) > length_max or not limits.NAME.fullmatch(name):
        raise Refused(code, f"{kind} {name[:80]!r}: 1 to {length_max} of the characters % | a-z A-Z 0-9 _ -")
    return name


class LongPolls:
    """State that all ReceiveMessage and PullMessage calls share: compiled filters, and waiting calls per address.

    Belongs to the event loop.
    """

    def __init__(self) -> None:
        self._filters = FilterCache()
        self._waiting: Counter[str] = Counter()  # the number of waiting calls by address

    def filter_for(self, expression: FilterExpression, topic: Topic) -> Filter:
        """Compile a consumer's filter for this topic, or take it from the cache. Raises Refused, InvalidFilter."""
        if topic.name.startswith(RETRY_PREFIX):
            return EVERYTHING  # a retry topic has only messages that the group's filter has matched before
        filter_type = _FILTER_TYPES.get(expression.type)
        if filter_type is None:
            raise Refused(
                Code.ILLEGAL_FILTER_EXPRESSION,
                f"filter type {expression.type}: TAG ({FilterType.TAG}) or SQL",
            )
        if filter_type == TAG and expression.expression in ("", ALL):
            return EVERYTHING  # the usual case, without a look-up
        return self._filters.get(expression.expression, filter_type, bit_mask=topic.filter_type == MULTI_TAG)

    @contextmanager
    def count_waiting(self, call: Call) -> Iterator[None]:
        """Count the call as waiting inside the block. Raises Refused if too many calls of its address wait."""
        if self._waiting[call.peer] >= WAITING_PER_ADDRESS_MAX:
            raise Refused(
                Code.TOO_MANY_REQUESTS,
                f"{self._waiting[call.peer]} calls from {call.peer} wait already; let some of them end",
            )
        self._waiting[call.peer] += 1
        try:
            yield
        finally:
            self._waiting[call.peer] -= 1
            if not self._waiting[call.peer]:
                del self._waiting[call.peer]


def long_poll_ms(call: Call, timeout: Duration | None) -> int:
    """Determine how many ms a call waits for its first message: at most its timeout, and never until its deadline.

    `timeout` None: LONG_POLL_MS_MAX. Raises Refused for an invalid timeout.
    """
    wait_ms = LONG_POLL_MS_MAX
    if timeout is not None:
        wait_ms = min(wait_ms, duration_ms(timeout, Code.ILLEGAL_POLLING_TIME, "long_polling_timeout"))
    if wait_ms < 0:
        raise Refused(
            Code.ILLEGAL_POLLING_TIME,
            f"long_polling_timeout of {wait_ms} ms: 0 to {LONG_POLL_MS_MAX}; more has the same effect",
        )
    if call.remaining_s is None:
        return wait_ms
    remaining_ms = int(1_000 * max(0.0, min(call.remaining_s, REMAINING_S_MAX)))
    return min(wait_ms, remaining_ms - min(DEADLINE_MARGIN_MS, remaining_ms // DEADLINE_MARGIN_SHARE))


def duration_ms(duration: Duration, code: Code, field: str) -> int:
    """Convert a client's duration to ms, rounded down. Raises Refused with this code and field name if invalid."""
    seconds, nanos = duration.seconds, duration.nanos
    if abs(seconds) > DURATION_SECONDS_MAX or abs(nanos) > NANOS_MAX or seconds * nanos < 0:
        raise Refused(code, f"{field} of {seconds} s and {nanos} ns: no duration")
    return int(seconds * 1_000 + nanos // 1_000_000)


# Shared by all responses. Protobuf copies it into each of them.
OK = Status(code=Code.OK, message=Code.Name(Code.OK))


def status(code: Code, text: str) -> Status:
    """Create a status. Its text is shortened to the maximum length."""
    return Status(code=code, message=shorten(text))


def status_of(error: BaseException) -> Status:
    """Convert an error that a handler has raised to a status."""
    if isinstance(error, Refused):
        code_name = Code.Name(error.protocol_code)
    else:
        code_name = codes_of(error).grpc
    return Status(code=code_name, message=sentence(error))


# ---- sessions of clients -------------------------------------------------------------------------------------
# A session has the client's settings and its open Telemetry streams. It begins with the client's first settings. It
# lasts while one of its streams is open or while it sends heartbeats. The edge ends the session of a client that has
# been silent for `EXPIRY_MS`, or that announces its termination.

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


# The constructor of each handler class of this edge gets a GrpcContext.
GrpcContext = EdgeContext[str, Client]
