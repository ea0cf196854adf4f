"""The vocabulary that all handlers of this edge share: the caller, topic and group names, waiting times, statuses.

    unary          async (call, request) -> response
    direct         (call, request, reply): the reply gets the response later, and no task waits for it
    server stream  async generator (call, request) -> responses
    Telemetry      async generator (call, requests) -> responses

This module and the handlers do not depend on the transport (http2/server.py). An error that a handler raises becomes
the response's status: a code, and a text that states the remedy (error_codes.py).

A topic or group of a namespace is `<namespace>%<name>` in the broker, as in RocketMQ's proxy. Names are also checked
here, because each kind of name has its own code. From the code, clients create an exception that shows which name was
bad.

A waiting call is answered a little before the client's deadline. A later answer would be lost, with all its messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from google.protobuf.duration_pb2 import Duration

from timeball.broker.filters import EVERYTHING, TAG, Filter
from timeball.broker.filters.compiler import SQL92, FiltersKept
from timeball.broker.filters.tags import ALL
from timeball.broker.registry.topics import Topic
from timeball.edges.grpc._generated.definition_pb2 import (
    Code,
    FilterExpression,
    FilterType,
    Resource,
    Status,
)
from timeball.edges.http2 import calls as http2
from timeball.edges.shared.error_codes import Refused, codes_of, sentence, shorten
from timeball.model import limits
from timeball.model.access import ANONYMOUS
from timeball.model.message import RETRY_PREFIX

CLIENT_ID = "x-mq-client-id"
BETWEEN = "%"
WAIT_MS_MAX = 20 * limits.SECOND_MS
MARGIN_MS, MARGIN_SHARE = (
    500,
    4,
)  # margin before the deadline, or a quarter of the time left if that is less
REMAINING_S_MAX = 3_600.0  # a longer time has the same effect
WAITS_PER_ADDRESS_MAX = limits.PULLS_WAITING_MAX // 2  # so that one address cannot take all waiting places
MULTI_TAG = "MULTI_TAG"
_KINDS = {FilterType.FILTER_TYPE_UNSPECIFIED: TAG, FilterType.TAG: TAG, FilterType.SQL: SQL92}
# The bounds of protobuf's durations.
DURATION_SECONDS_MAX, NANOS_MAX = 315_576_000_000, 999_999_999


@dataclass(slots=True)
class Call(http2.Call):
    """A call of this edge."""

    @property
    def client_id(self) -> str:
        """Return the client's id, with its account in front so that accounts cannot share ids. Raises Refused."""
        found = self.headers.get(CLIENT_ID, "")
        if not found or len(found) > limits.CLIENT_ID_CHARACTERS_MAX:
            raise Refused(
                Code.CLIENT_ID_REQUIRED,
                f"header {CLIENT_ID}: 1 to {limits.CLIENT_ID_CHARACTERS_MAX} characters, one name a client",
            )
        return found if self.caller is ANONYMOUS else f"{self.caller.name}/{found}"


class Reply(Protocol):
    """The end of a call without a task: exactly one of these is called. After the client has gone, they do nothing."""

    def answer(self, message: bytes) -> None:
        """Send this encoded response."""

    def refuse(self, error: BaseException) -> None:
        """Send the status for the error with which the call has failed."""


class Direct(NamedTuple):
    """A handler whose call needs no task: it returns at once, and calls the reply later. It may raise like others.

    `decode` creates its request from bytes if it does not use protobuf's object. It raises DecodeError.
    """

    begin: Callable[[Call, Any, Reply], None]
    decode: Callable[[bytes], Any] | None = None


Unary = Callable[[Call, Any], Awaitable[Any]]
Stream = Callable[[Call, Any], AsyncIterator[Any]]
Handlers = dict[str, Unary | Stream | Direct]  # by the name of the call in the service's definition


def topic_name(resource: Resource) -> str:
    """Return the topic's name in the broker. Raises Refused."""
    name = _name(resource)
    is_own = name.startswith(RETRY_PREFIX)  # may be longer. The broker checks the messages sent to it
    most = limits.OWN_TOPIC_BYTES_MAX if is_own else limits.TOPIC_BYTES_MAX
    return _checked(resource, name, "topic", most, Code.ILLEGAL_TOPIC)


def group_name(resource: Resource) -> str:
    """Return the consumer group's name in the broker. Raises Refused."""
    return _checked(
        resource, _name(resource), "consumer group", limits.GROUP_BYTES_MAX, Code.ILLEGAL_CONSUMER_GROUP
    )


def resource(name: str, namespace: str = "") -> Resource:
    """Return the topic or group under the name that a client of this namespace uses."""
    return Resource(
        resource_namespace=namespace, name=name.removeprefix(namespace + BETWEEN) if namespace else name
    )


def _name(resource: Resource) -> str:
    space = resource.resource_namespace
    return f"{space}{BETWEEN}{resource.name}" if space else resource.name


def _checked(resource: Resource, name: str, what: str, most: int, code: Code) -> str:
    if not resource.name or len(name) > most or not limits.NAME.fullmatch(name):
        raise Refused(code, f"{what} {name[:80]!r}: 1 to {most} of the characters % | a-z A-Z 0-9 _ -")
    return name


class Consuming:
    """The filters of consumers, and the number of waiting calls per address. Belongs to the event loop."""

    def __init__(self) -> None:
        self._filters = FiltersKept()
        self._waits: Counter[str] = Counter()  # by address

    def wanted(self, expression: FilterExpression, topic: Topic) -> Filter:
        """Return the filter. Raises Refused, InvalidFilter."""
        if topic.name.startswith(RETRY_PREFIX):
            return EVERYTHING  # the group's filter has matched these messages before
        kind = _KINDS.get(expression.type)
        if kind is None:
            raise Refused(
                Code.ILLEGAL_FILTER_EXPRESSION,
                f"filter type {expression.type}: TAG ({FilterType.TAG}) or SQL",
            )
        if kind == TAG and expression.expression in ("", ALL):
            return EVERYTHING  # the usual case: nothing to look up
        return self._filters.get(expression.expression, kind, bit_mask=topic.filter_type == MULTI_TAG)

    @contextmanager
    def waiting(self, call: Call) -> Iterator[None]:
        """Count the call as waiting inside the block. Raises Refused if too many of its address wait."""
        if self._waits[call.peer] >= WAITS_PER_ADDRESS_MAX:
            raise Refused(
                Code.TOO_MANY_REQUESTS,
                f"{self._waits[call.peer]} calls from {call.peer} wait already; let some of them end",
            )
        self._waits[call.peer] += 1
        try:
            yield
        finally:
            self._waits[call.peer] -= 1
            if not self._waits[call.peer]:
                del self._waits[call.peer]


def wait_ms(call: Call, asked: Duration | None) -> int:
    """Return how many ms a call waits for its first message. `asked` None: the maximum. Raises Refused."""
    waits = WAIT_MS_MAX
    if asked is not None:
        waits = min(waits, duration_ms(asked, Code.ILLEGAL_POLLING_TIME, "long_polling_timeout"))
    if waits < 0:
        raise Refused(
            Code.ILLEGAL_POLLING_TIME,
            f"long_polling_timeout of {waits} ms: 0 to {WAIT_MS_MAX}; more is as good as that",
        )
    if call.remaining_s is None:
        return waits
    left = int(1_000 * max(0.0, min(call.remaining_s, REMAINING_S_MAX)))
    return min(waits, left - min(MARGIN_MS, left // MARGIN_SHARE))


def duration_ms(duration: Duration, code: Code, what: str) -> int:
    """Convert a client's duration to ms, rounded down. Raises Refused with this code if it is invalid."""
    seconds, nanos = duration.seconds, duration.nanos
    if abs(seconds) > DURATION_SECONDS_MAX or abs(nanos) > NANOS_MAX or seconds * nanos < 0:
        raise Refused(code, f"{what} of {seconds} s and {nanos} ns: no duration")
    return int(seconds * 1_000 + nanos // 1_000_000)


OK = Status(code=Code.OK, message=Code.Name(Code.OK))  # messages that it is put into hold a copy


def status(code: Code, text: str) -> Status:
    """Return a status with a text of bounded length."""
    return Status(code=code, message=shorten(text))


def status_of(error: BaseException) -> Status:
    """Return the status for an error that a handler has raised."""
    if isinstance(error, Refused):
        name = Code.Name(error.protocol_code)
    else:
        name = codes_of(error).grpc
    return Status(code=name, message=sentence(error))
