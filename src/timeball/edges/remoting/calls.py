"""Types and helpers that all handlers of this edge share: the request of a client, its answer, and JSON tables.

A handler gets a `Call` and returns its answer, at once or as an awaitable. None means that there is no answer, or that
it was sent already. An error that a handler raises also becomes an answer (error_codes.py).

Routes and message ids contain the broker's address. Without `--advertise` it is the local address of the client's own
connection: the client has reached the broker at this address, so it can do so again.

Some tables are keyed by queue. Their keys are JSON objects, as fastjson writes them for a Java map. This is not valid
JSON, but all of RocketMQ's tools expect it:

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
from timeball.broker.filters.compiler import FilterCache
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

_OBJECT_KEY_ENTRY = re.compile(rb"\s*(\{[^{}]*\})\s*:\s*(-?[0-9]{1,19})\s*,?")

Reply = Command | None

# Header fields of RocketMQ 5.5 that Timeball does not support, and their values that have no effect. A request with
# another value is refused, because ignoring the field would change the meaning of the request. All fields of 5.5 and
# their treatment are listed in tests/edges/remoting/test_header_fields.py.
UNSUPPORTED_FIELDS: dict[str, frozenset[str]] = {
    "liteTopic": frozenset({""}),
    "suspend": frozenset({"", "false"}),  # of the consumer of a lite topic
    "indexType": frozenset({"", "K", "U"}),  # keys, ids; "T" (tags) is refused
    "lastKey": frozenset({""}),  # continues a query behind this key
}
_UNSUPPORTED_NAMES = frozenset(UNSUPPORTED_FIELDS)


class Call:
    """A request, the connection that it arrived on, and typed access to its fields."""

    __slots__ = ("caller", "command", "connection", "counted_bytes")

    def __init__(self, connection: Connection, command: Command) -> None:
        self.connection, self.command = connection, command
        # The signer of this request. The connection's next request may have another signer.
        self.caller: Caller = connection.caller
        self.counted_bytes = 0  # size of a large body, counted by the connection's Flow

    def fields(self, kind: type[T]) -> T:
        """Convert the extFields to a msgspec Struct. Unknown fields are ignored. Raises Refused."""
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

        The response always has extFields, even if empty, because Java clients read them without a null check.
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


def refuse_unsupported_fields(command: Command) -> None:
    """Raise Refused if a header field requests a RocketMQ 5.5 feature that Timeball does not support."""
    if _UNSUPPORTED_NAMES.isdisjoint(command.ext):
        return
    for name in _UNSUPPORTED_NAMES & command.ext.keys():
        if command.ext[name] not in UNSUPPORTED_FIELDS[name]:
            raise Refused(
                ResponseCode.INVALID_PARAMETER,
                f"code {command.code}: {name} {command.ext[name][:64]!r} is not supported by Timeball: leave it out",
            )


Handler = Callable[[Call], Reply | Awaitable[Reply]]
Handlers = dict[int, Handler]


def response_code(error: BaseException) -> int:
    """Look up RocketMQ's response code for an error. The default is SYSTEM_ERROR."""
    if isinstance(error, Refused):
        return error.protocol_code
    if isinstance(error, BadHeader):
        return error.response_code
    return ResponseCode[codes_of(error).remoting]


RemotingContext = EdgeContext[Connection, Member]


def address(context: RemotingContext, connection: Connection) -> str:
    """Return the broker's host:port for the client of this connection."""
    host, port = _host_port(context, connection)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def store_host(context: RemotingContext, connection: Connection) -> Host:
    """Return the broker's address as bytes, for stored messages and message ids. Cached in the connection."""
    host = connection.store_host
    if host is None:
        host = connection.store_host = _host_bytes(*_host_port(context, connection))
    return host


def check_advertised(advertise: str) -> None:
    """Raise SetupError if the advertised host cannot be resolved: answers to sends contain its IP address."""
    host, _ = advertised(advertise)
    if host:
        try:
            _ip_bytes(host)
        except OSError as error:
            raise SetupError(f"--advertise {advertise}: {host!r} cannot be resolved: {error}") from error


def _host_port(context: RemotingContext, connection: Connection) -> tuple[str, int]:
    """Return the broker's host and port for the client of a connection."""
    host, port = advertised(context.settings.advertise)
    if port is None:
        # Without a broker port, the name server's port also works: both ports answer every request.
        port = context.port if context.port >= 0 else context.name_server_port
    return host or str(connection.local[0]), port


@lru_cache(1_024)
def _host_bytes(host: str, port: int) -> Host:
    return Host(_ip_bytes(host), port)


@lru_cache(1_024)
def _ip_bytes(host: str) -> bytes:
    try:
        return ip_address(host.partition("%")[0]).packed
    except ValueError:
        # A host name. `check_advertised` resolves it at the start of the process, and the cache keeps the address.
        return ip_address(socket.gethostbyname(host)).packed


def compile_subscription(filters: FilterCache, expression: str, kind: str, topic: Topic) -> Filter:
    """Compile the filter expression of a subscription to this topic. Raises Refused."""
    try:
        return filters.get(expression, kind, bit_mask=topic.filter_type == MULTI_TAG)
    except InvalidFilter as error:
        remark = f"parse the consumer's subscription failed: {error}"
        raise Refused(ResponseCode.SUBSCRIPTION_PARSE_FAILED, remark) from error


def illegal_queue_error(code: ResponseCode, queue_id: int, topic: Topic) -> Refused:
    """Create the error for a queue that the topic does not have."""
    return Refused(
        code,
        f"queueId[{queue_id}] is illegal, topic:[{topic.name}] topicConfig.readQueueNums:[{topic.read_queues}]",
    )


def encode_with_object_keys(entries: Iterable[tuple[Any, Any]]) -> msgspec.Raw:
    """Encode a table whose keys are JSON objects. The result can be a value in a structure that msgspec encodes."""
    encode = msgspec.json.encode
    return msgspec.Raw(b"{" + b",".join(encode(key) + b":" + encode(value) for key, value in entries) + b"}")


async def encode_by_name(items: Iterable[T], entry: Callable[[T], tuple[str, object]]) -> msgspec.Raw:
    """Encode one entry per topic or group as a JSON object.

    `entry` creates the name and value of an item. The event loop runs between shares of the items, because there may be
    many (`rates.shares`).
    """
    encoded_shares = [msgspec.json.encode(dict(map(entry, share)))[1:-1] async for share in shares(items)]
    return msgspec.Raw(b"{" + b",".join(encoded_shares) + b"}")


def decode_object_keys(body: bytes, name: str) -> Iterator[tuple[Any, int]]:
    """Yield key and number of each entry of the table `name`, whose keys are JSON objects. No table: yields nothing.

    Used for the answers of clients. Reading stops at the first entry that does not have this form.
    """
    table_start = re.search(rb'"%s"\s*:\s*\{' % re.escape(name.encode()), body)
    position = table_start.end() if table_start else len(body)
    while (entry := _OBJECT_KEY_ENTRY.match(body, position)) is not None:
        try:
            key = msgspec.json.decode(entry[1])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        yield key, int(entry[2])
        position = entry.end()


def data_version(counter: int, since_ms: int) -> dict[str, int]:
    """Create RocketMQ's DataVersion of a table: its number of changes since a time in ms."""
    return {"stateVersion": 0, "timestamp": since_ms, "counter": counter}
