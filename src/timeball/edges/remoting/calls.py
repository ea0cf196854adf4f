"""Requests of RocketMQ's clients: types and helpers that all handlers share, their dispatch, and their permissions.

A handler gets a `Call` and returns its answer, at once or as an awaitable. None means that there is no answer, or that
it was sent already. An error that a handler raises also becomes an answer (error_codes.py).

Routes and message ids contain the broker's address. Without `--advertise` it is the local address of the client's own
connection: the client has reached the broker at this address, so it can do so again.

Some tables are keyed by queue. Their keys are JSON objects, as fastjson writes them for a Java map. This is not valid
JSON, but all of RocketMQ's tools expect it:

    {{"brokerName":"b0","queueId":0,"topic":"t"}:{"maxOffset":7,"minOffset":0},…}
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import lru_cache
from ipaddress import ip_address
from typing import Any, NamedTuple, TypeVar

import msgspec

from timeball.broker.filters import Filter
from timeball.broker.filters.compiler import FilterCache
from timeball.broker.policy import Policy
from timeball.broker.registry.rates import shares
from timeball.broker.registry.topics import Topic
from timeball.edges.remoting.codec import frame as codec
from timeball.edges.remoting.codec.codes import BROKER_VERSION, CommandFlag, RequestCode, ResponseCode
from timeball.edges.remoting.codec.frame import BadHeader, Command, Frame
from timeball.edges.remoting.codec.records import Host
from timeball.edges.remoting.connection import CALLS_MAX, Connection, Member
from timeball.edges.shared.error_codes import Refused, codes_of, log_failure, sentence
from timeball.edges.shared.sessions import EdgeContext, advertised
from timeball.model.access import ASK, Access, Caller, Verb
from timeball.model.errors import UNDECODABLE, InvalidFilter, SetupError

logger = logging.getLogger(__name__)

# ---- the call, its answer, and JSON tables -------------------------------------------------------------------

T = TypeVar("T")

MULTI_TAG = "MULTI_TAG"

_OBJECT_KEY_ENTRY = re.compile(rb"\s*(\{[^{}]*\})\s*:\s*(-?[0-9]{1,19})\s*,?")

Reply = Command | None

# Header fields of RocketMQ 5.5 that Timeball does not support, and their neutral values, which have no effect. A
# request with another value is refused, because ignoring the field would change the meaning of the request. All fields
# of 5.5 and their treatment are listed in tests/edges/remoting/test_header_fields.py.
NEUTRAL_VALUES: dict[str, frozenset[str]] = {
    "liteTopic": frozenset({""}),
    "suspend": frozenset({"", "false"}),  # of the consumer of a lite topic
    "indexType": frozenset({"", "K", "U"}),  # keys, ids; "T" (tags) is refused
    "lastKey": frozenset({""}),  # continues a query after this key
}
_UNSUPPORTED_NAMES = frozenset(NEUTRAL_VALUES)


class Call:
    """A request, the connection that it arrived on, and typed access to its fields."""

    __slots__ = ("caller", "command", "connection", "counted_bytes")

    def __init__(self, connection: Connection, command: Command) -> None:
        self.connection, self.command = connection, command
        # The signer of this request. The connection's next request may have another signer.
        self.caller: Caller = connection.caller
        self.counted_bytes = 0  # size of a large body, counted by the connection's Flow

    def fields(self, kind: type[T]) -> T:
        """Convert the extFields to a msgspec Struct. Unknown fields are ignored. Raises Refused for a wrong field."""
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
        except UNDECODABLE as error:
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
        if command.ext[name] not in NEUTRAL_VALUES[name]:
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
    """Convert an IP address to bytes, or resolve a host name. Raises OSError."""
    try:
        return ip_address(host.partition("%")[0]).packed
    except ValueError:
        # A host name. `check_advertised` resolves it at the start of the process, and the cache keeps the address.
        return ip_address(socket.gethostbyname(host)).packed


def compile_subscription(filters: FilterCache, expression: str, kind: str, topic: Topic) -> Filter:
    """Compile the filter expression of a subscription to this topic. Raises Refused if it cannot be parsed.

    `kind` is TAG or SQL92.
    """
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
    """Encode a table of keys and values whose keys are JSON objects, which RocketMQ's tools expect in some tables.

    The result can be a value in a structure that msgspec encodes.
    """
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
    """Yield the key and the number of each entry of the table `name` in a JSON body. Its keys are JSON objects.

    Without the table, it yields nothing. Reading stops at the first entry that does not have this form. Used for the
    answers of clients.
    """
    table_start = re.search(rb'"%s"\s*:\s*\{' % re.escape(name.encode()), body)
    position = table_start.end() if table_start else len(body)
    while (entry := _OBJECT_KEY_ENTRY.match(body, position)) is not None:
        try:
            key = msgspec.json.decode(entry[1])
        except UNDECODABLE:
            return
        yield key, int(entry[2])
        position = entry.end()


def data_version(counter: int, since_ms: int) -> dict[str, int]:
    """Create RocketMQ's DataVersion of a table: its number of changes since a time in ms."""
    return {"stateVersion": 0, "timestamp": since_ms, "counter": counter}


# ---- dispatch ------------------------------------------------------------------------------------------------
# The table of handlers joins the tables of all handler classes. A request code without a handler is answered with
# REQUEST_CODE_NOT_SUPPORTED, which every client can handle. Every request gets exactly one answer, unless it is
# one-way. If a handler fails because of a fault in the broker, the client gets SYSTEM_ERROR and the log gets the
# reason.


class Dispatch:
    """Maps request codes to handlers. Belongs to the event loop."""

    def __init__(self, handler_tables: Iterable[Handlers]) -> None:
        self._handlers: dict[int, Handler] = {}
        for handlers in handler_tables:
            duplicates = self._handlers.keys() & handlers.keys()
            assert not duplicates, f"two handlers for the request codes {duplicates}"
            self._handlers |= handlers
        self._tasks: set[asyncio.Task[None]] = set()

    def receive(self, connection: Connection, frame: Frame) -> None:
        """Handle one frame: a request of the client, or its answer to a request of the broker. Raises BadFrame."""
        command = codec.decode(frame)
        if command.is_response:
            connection.receive_answer(command)
        else:
            self.handle(connection, command)

    def has_handler(self, code: int) -> bool:
        """Return whether there is a handler for this request code."""
        return code in self._handlers

    def refuse(self, connection: Connection, command: Command, error: Exception) -> None:
        """Answer a request with an error. Its handler is not called."""
        call = Call(connection, command)
        self._reply(call, answer_failure(call, error))

    def handle(self, connection: Connection, command: Command) -> None:
        """Call the handler of a request, and send its answer now or when it is ready.

        A request is refused with SYSTEM_BUSY if the connection has too many pending requests or unread answers.
        """
        call = Call(connection, command)
        handler = self._handlers.get(command.code)
        if handler is None:
            self._reply(call, _answer_not_supported(call))
            return
        if connection.calls >= CALLS_MAX:
            remark = f"{CALLS_MAX} requests of this connection are pending"
            self._reply(call, call.answer(ResponseCode.SYSTEM_BUSY, remark))
            return
        if connection.flow.is_full:
            remark = "too many answers to this address are unread: read them before you send more requests"
            self._reply(call, call.answer(ResponseCode.SYSTEM_BUSY, remark))
            return
        try:
            refuse_unsupported_fields(command)
            reply = handler(call)
        except Exception as error:  # any exception: the client gets an error answer, and the broker continues
            self._reply(call, answer_failure(call, error))
            return
        if reply is None or isinstance(reply, Command):
            self._reply(call, reply)
            return
        connection.calls += 1
        call.counted_bytes = connection.flow.count_request(len(command.body))
        task = asyncio.ensure_future(self._answer_later(call, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer_later(self, call: Call, reply: Awaitable[Reply]) -> None:
        """Wait for the reply of a handler, send it, and stop counting the request."""
        try:
            self._reply(call, await reply)
        except Exception as error:  # any exception, as in `handle`
            self._reply(call, answer_failure(call, error))
        finally:
            call.connection.calls -= 1
            call.connection.flow.release_request(call.counted_bytes)

    @staticmethod
    def _reply(call: Call, reply: Reply) -> None:
        if reply is not None and not call.command.is_one_way:
            call.connection.send(reply)

    async def close(self) -> None:
        """Cancel the pending requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def answer_failure(call: Call, error: Exception) -> Command:
    """Create the answer to a request that failed with this error. An internal fault is logged."""
    log_failure(logger, str(call.command.code), error)
    return call.answer(response_code(error), sentence(error))


def _answer_not_supported(call: Call) -> Command:
    """Create the answer to a request code without a handler."""
    code = call.command.code
    name = RequestCode(code).name if code in set(RequestCode) else "unknown"
    return call.answer(
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED, f"request code {code} ({name}) is not supported by Timeball"
    )


# ---- signatures and permissions ------------------------------------------------------------------------------
# `REQUIRED_PERMISSIONS` maps each request code to a verb and to the header fields that name the topic and the group.
# For some requests, the topic or group is only in the body or in a stored row. For them the table requires only an
# account (LOOK), and the handler checks the rest (`Policy.allow`) when it has read the topic or group. A code without
# an entry requires ADMIN.

ACCESS_KEY, SIGNATURE = "AccessKey", "Signature"
# Clients up to 4.9.3 add this field after they have computed the signature.
UNSIGNED_FIELD, UNSIGNED_UP_TO_VERSION = "_UNIQUE_KEY_QUERY", 399  # MQVersion.V4_9_3

_UNSIGNED_FIELDS, _UNSIGNED_FIELDS_OLD = frozenset({SIGNATURE}), frozenset({SIGNATURE, UNSIGNED_FIELD})


class RequiredPermission(NamedTuple):
    """The verb that a request requires, and the header fields that name its topic and its group."""

    verb: Verb
    topic: str | None = None
    group: str | None = None


_LOOK = RequiredPermission(Verb.LOOK)
_RECEIVE = RequiredPermission(Verb.RECEIVE, "topic", "consumerGroup")
_LOOK_AT_TOPIC = RequiredPermission(Verb.LOOK, "topic")
_ADMIN = RequiredPermission(Verb.ADMIN)

REQUIRED_PERMISSIONS: dict[int, RequiredPermission] = {
    RequestCode.SEND_MESSAGE: RequiredPermission(Verb.SEND, "topic"),
    RequestCode.SEND_MESSAGE_V2: RequiredPermission(Verb.SEND, "b"),
    RequestCode.SEND_BATCH_MESSAGE: RequiredPermission(Verb.SEND, "b"),
    RequestCode.SEND_REPLY_MESSAGE: RequiredPermission(Verb.SEND, "topic"),
    RequestCode.SEND_REPLY_MESSAGE_V2: RequiredPermission(Verb.SEND, "b"),
    RequestCode.RECALL_MESSAGE: RequiredPermission(Verb.CANCEL, "topic"),
    RequestCode.PULL_MESSAGE: _RECEIVE,
    RequestCode.LITE_PULL_MESSAGE: _RECEIVE,
    RequestCode.POP_MESSAGE: _RECEIVE,
    RequestCode.ACK_MESSAGE: _RECEIVE,
    RequestCode.CHANGE_MESSAGE_INVISIBLETIME: _RECEIVE,
    RequestCode.NOTIFICATION: _RECEIVE,
    RequestCode.QUERY_CONSUMER_OFFSET: _RECEIVE,
    RequestCode.UPDATE_CONSUMER_OFFSET: _RECEIVE,
    RequestCode.QUERY_MESSAGE: RequiredPermission(Verb.RECEIVE, "topic"),
    RequestCode.GET_CONSUMER_LIST_BY_GROUP: RequiredPermission(Verb.RECEIVE, group="consumerGroup"),
    # The handler also checks the topic of the stored row.
    RequestCode.CONSUMER_SEND_MSG_BACK: RequiredPermission(Verb.RECEIVE, group="group"),
    RequestCode.GET_MAX_OFFSET: _LOOK_AT_TOPIC,
    RequestCode.GET_MIN_OFFSET: _LOOK_AT_TOPIC,
    RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: _LOOK_AT_TOPIC,
    RequestCode.GET_EARLIEST_MSG_STORETIME: _LOOK_AT_TOPIC,
    # For these, the handler checks the topics and groups that the body or the stored row names.
    RequestCode.HEART_BEAT: _LOOK,
    RequestCode.UNREGISTER_CLIENT: _LOOK,
    RequestCode.LOCK_BATCH_MQ: _LOOK,
    RequestCode.UNLOCK_BATCH_MQ: _LOOK,
    RequestCode.BATCH_ACK_MESSAGE: _LOOK,
    RequestCode.QUERY_ASSIGNMENT: _LOOK,
    RequestCode.END_TRANSACTION: _LOOK,
    RequestCode.VIEW_MESSAGE_BY_ID: _LOOK,
    # Every client sends these, also for names that are not topics.
    RequestCode.GET_ROUTEINFO_BY_TOPIC: _LOOK,
    RequestCode.GET_BROKER_CLUSTER_INFO: _LOOK,
    RequestCode.CHECK_CLIENT_CONFIG: _LOOK,
    RequestCode.GET_KV_CONFIG: _LOOK,
    RequestCode.GET_KVLIST_BY_NAMESPACE: _LOOK,
}


def verify_signer(access: Access, command: Command) -> Caller:
    """Verify the signature of a request and return its account. Raises Unauthorized.

    RocketMQ's clients compute the signature as follows. `signed_content` returns `content`.

        Signature = base64(HMAC-SHA1(secret, content))
        content = the values of all extFields but Signature, in the order of their names, then the body
    """
    key = command.ext.get(ACCESS_KEY)
    if not key:
        raise access.refusal(ASK)
    try:
        signature = base64.b64decode(command.ext.get(SIGNATURE, ""), validate=True)
    except (binascii.Error, ValueError):  # ValueError: also text that is not ASCII
        signature = b""
    return access.verify(key, signed_content(command), signature)


def signed_content(command: Command) -> bytes:
    """Return the bytes that the signature of a request covers."""
    ext = command.ext
    unsigned_fields = _UNSIGNED_FIELDS_OLD if command.version <= UNSIGNED_UP_TO_VERSION else _UNSIGNED_FIELDS
    values = "".join(ext[name] for name in sorted(ext) if name not in unsigned_fields)
    return values.encode("utf-8", "surrogatepass") + command.body


def check_permission(caller: Caller, command: Command) -> None:
    """Check that the caller may make this request. Raises Forbidden, or Refused if a header field is missing."""
    permission = REQUIRED_PERMISSIONS.get(command.code, _ADMIN)
    names = [command.ext.get(field) for field in (permission.topic, permission.group) if field is not None]
    if None in names:
        raise Refused(
            ResponseCode.INVALID_PARAMETER, f"code {command.code}: the header names no topic, or no group"
        )
    topic = command.ext[permission.topic] if permission.topic else None
    group = command.ext[permission.group] if permission.group else None
    Policy.allow(caller, permission.verb, topic=topic, group=group)
