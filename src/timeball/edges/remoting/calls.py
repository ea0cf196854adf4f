"""The vocabulary that all handlers of this edge share: a client's request, the possible answers and common helpers.

A handler takes a `Call` and returns its answer, now or as a coroutine. None means that no answer is due, or that it was
sent already. An error that a handler raises becomes an answer too (error_codes.py), so no handler translates errors.

Routes and message ids contain the address that clients connect to. Without `--advertise` it is the local address of the
client's own connection. The client reached the broker at that address, so it can do so again.

Some tables are keyed by queue: their keys are JSON objects, as fastjson writes a Java map. That is not valid JSON and
no other reader accepts it, but all of RocketMQ's tools expect it:

    {{"brokerName":"b0","queueId":0,"topic":"t"}:{"maxOffset":7,"minOffset":0},…}
"""

from __future__ import annotations

import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import lru_cache
from ipaddress import ip_address
from typing import Any, TypeVar

import msgspec

from timeball.broker.filters import Filter
from timeball.broker.filters.compiler import FiltersKept
from timeball.broker.registry.rates import shares
from timeball.broker.registry.topics import Topic
from timeball.edges.remoting.codec.codes import BROKER_VERSION, CommandFlag, ResponseCode
from timeball.edges.remoting.codec.frame import BadHeader, Command
from timeball.edges.remoting.codec.records import Host
from timeball.edges.remoting.connection import Connection, Member
from timeball.edges.shared.error_codes import Refused, codes_of
from timeball.edges.shared.sessions import EdgeContext, advertised
from timeball.model.access import Caller
from timeball.model.errors import InvalidFilter, SetupError

T = TypeVar("T")

MULTI_TAG = "MULTI_TAG"

_ENTRY = re.compile(rb"\s*(\{[^{}]*\})\s*:\s*(-?[0-9]{1,19})\s*,?")

Reply = Command | None

# Header fields of RocketMQ 5.5 that change the meaning of a request, and the values that do not. A request with another
# value is refused, because to ignore the field would do the wrong thing. All fields of 5.5 and their treatment are
# listed in tests/edges/remoting/test_header_fields.py.
NEW_FIELDS: dict[str, frozenset[str]] = {
    "liteTopic": frozenset({""}),
    "suspend": frozenset({"", "false"}),  # of the consumer of a lite topic
    "indexType": frozenset({"", "K", "U"}),  # keys, ids; "T" (tags) is refused
    "lastKey": frozenset({""}),  # continue a query behind this key
}
_NEW_NAMES = frozenset(NEW_FIELDS)


class Call:
    """A request, the connection that it arrived on, and typed access to its fields."""

    __slots__ = ("caller", "command", "connection", "counted_bytes")

    def __init__(self, connection: Connection, command: Command) -> None:
        self.connection, self.command = connection, command
        self.caller: Caller = (
            connection.caller
        )  # the signer of this request. The next request of the connection may have another
        self.counted_bytes = 0  # size of a large body, counted by the connection's Flow

    def fields(self, kind: type[T]) -> T:
        """Convert the extFields to a msgspec Struct, ignoring unknown ones. Raises Refused."""
        try:
            return msgspec.convert(self.command.ext, kind, strict=False)
        except msgspec.ValidationError as error:
            raise Refused(
                ResponseCode.INVALID_PARAMETER, f"code {self.command.code}: a field of the header: {error}"
            ) from error

    def body(self, kind: type[T]) -> T:
        """Decode the JSON body as a msgspec Struct. Numbers may be text and vice versa. Raises Refused."""
        try:
            return msgspec.json.decode(self.command.body, type=kind, strict=False)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise Refused(
                ResponseCode.INVALID_PARAMETER, f"code {self.command.code}: the body: {error}"
            ) from error

    def answer(
        self,
        code: int = ResponseCode.SUCCESS,
        remark: str | None = None,
        *,
        ext: dict[str, str] | None = None,
        body: bytes = b"",
    ) -> Command:
        """Create a response to this request.

        `ext` is never absent on the wire, because Java reads it without a null check.
        """
        return Command(
            code=code,
            opaque=self.command.opaque,
            flag=CommandFlag.RESPONSE,
            ext=ext or {},
            body=body,
            remark=remark,
            version=BROKER_VERSION,
            serialisation=self.command.serialisation,
        )

    def answer_json(self, value: Any) -> Command:
        """Create a response with a JSON body."""
        return self.answer(body=msgspec.json.encode(value))


def check_new_fields(command: Command) -> None:
    """Raise Refused if a field of newer clients asks for something that the broker does not do."""
    if _NEW_NAMES.isdisjoint(command.ext):
        return
    for name in _NEW_NAMES & command.ext.keys():
        if command.ext[name] not in NEW_FIELDS[name]:
            raise Refused(
                ResponseCode.INVALID_PARAMETER,
                f"code {command.code}: {name} {command.ext[name][:64]!r} is not supported by Timeball: leave it out",
            )


Handler = Callable[[Call], Reply | Awaitable[Reply]]
Handlers = dict[int, Handler]


def response_code(error: BaseException) -> int:
    """Return RocketMQ's code for an error, SYSTEM_ERROR for an error without a code of its own."""
    if isinstance(error, Refused):
        return error.protocol_code
    if isinstance(error, BadHeader):
        return error.response_code
    return ResponseCode[codes_of(error).remoting]


# The context that each handler of this edge gets.
RemotingContext = EdgeContext[Connection, Member]


def address(context: RemotingContext, connection: Connection) -> str:
    """Return the host:port at which the client of this connection reaches the broker."""
    host, port = _host_port(context, connection)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def store_host(context: RemotingContext, connection: Connection) -> Host:
    """Return the broker's address as bytes, for stored messages and message ids."""
    host = connection.store_host
    if host is None:
        host = connection.store_host = _as_bytes(*_host_port(context, connection))
    return host


def check_advertised(advertise: str) -> None:
    """Raise SetupError if the advertised host cannot be resolved. Answers to sends contain its address as bytes."""
    host, _ = advertised(advertise)
    if host:
        try:
            _packed(host)
        except OSError as error:
            raise SetupError(f"--advertise {advertise}: {host!r} cannot be resolved: {error}") from error


def _host_port(context: RemotingContext, connection: Connection) -> tuple[str, int]:
    host, port = advertised(context.settings.advertise)
    if port is None:
        # Both ports answer every request, so the name server's port is good enough if there is no other.
        port = context.port if context.port >= 0 else context.name_server_port
    return host or str(connection.local[0]), port


@lru_cache(1_024)
def _as_bytes(host: str, port: int) -> Host:
    return Host(_packed(host), port)


@lru_cache(1_024)
def _packed(host: str) -> bytes:
    try:
        return ip_address(host.partition("%")[0]).packed
    except ValueError:
        # A host name: resolved once per process, at the start.
        return ip_address(socket.gethostbyname(host)).packed


def compiled(filters: FiltersKept, expression: str, kind: str, topic: Topic) -> Filter:
    """Return the filter of a subscription to this topic. Raises Refused."""
    try:
        return filters.get(expression, kind, bit_mask=topic.filter_type == MULTI_TAG)
    except InvalidFilter as error:
        remark = f"parse the consumer's subscription failed: {error}"
        raise Refused(ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark) from error


def illegal_queue(code: ResponseCode, queue_id: int, topic: Topic) -> Refused:
    """Return the refusal for a queue that the topic does not have."""
    return Refused(
        code,
        f"queueId[{queue_id}] is illegal, topic:[{topic.name}] topicConfig.readQueueNums:[{topic.read_queues}]",
    )


def by_object(entries: Iterable[tuple[Any, Any]]) -> msgspec.Raw:
    """Encode a table whose keys are objects, to be placed inside a structure that is encoded as JSON."""
    encode = msgspec.json.encode
    return msgspec.Raw(b"{" + b",".join(encode(key) + b":" + encode(value) for key, value in entries) + b"}")


async def by_name(items: Iterable[T], entry: Callable[[T], tuple[str, object]]) -> msgspec.Raw:
    """Encode the entries of all topics or groups as one object, in shares, because there may be many (shares.py)."""
    parts = [msgspec.json.encode(dict(map(entry, some)))[1:-1] async for some in shares(items)]
    return msgspec.Raw(b"{" + b",".join(parts) + b"}")


def entries_by_object(body: bytes, name: str) -> Iterator[tuple[Any, int]]:
    """Yield key and number of each entry in the table `name`, whose keys are objects. Nothing if there is no table.

    Clients answer with such tables. Reading stops at the first entry of another shape.
    """
    begin = re.search(rb'"%s"\s*:\s*\{' % re.escape(name.encode()), body)
    at = begin.end() if begin else len(body)
    while (entry := _ENTRY.match(body, at)) is not None:
        try:
            key = msgspec.json.decode(entry[1])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        yield key, int(entry[2])
        at = entry.end()


def data_version(counter: int, since_ms: int) -> dict[str, int]:
    """Return RocketMQ's DataVersion: how often a table has changed since a time in ms."""
    return {"stateVersion": 0, "timestamp": since_ms, "counter": counter}
