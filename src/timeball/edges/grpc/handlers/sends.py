"""SendMessage: checked here and batched with other sends by broker/accepting/ingress.py. RecallMessage: by its handle.

A call is one piece: its messages are accepted together or refused together, with the code of the first bad message. So
its entries never differ (RocketMQ's MULTIPLE_RESULTS). Messages of a transaction go to a separate batcher, whose
batches no consumer sees before the transaction is committed (transactions.py).

A topic may be restricted to messages of one type by RocketMQ's attribute `message.type`. MIXED allows all types. A
message of another type is refused with MESSAGE_PROPERTY_CONFLICT_WITH_TYPE. A topic without the attribute accepts all
types. (In RocketMQ such a topic is NORMAL and refuses every delayed message until an operator changes it, which
surprises its users.)

A recall is answered with RocketMQ's codes:

    OK                                    settled (cancelled): it will not be delivered
    NOT_FOUND                             too late, unknown, or no longer known; the text states which
    INTERNAL_SERVER_ERROR                 too late, with --recall-answers rocketmq, as RocketMQ's proxy answers
    BAD_REQUEST                           no handle, or one of another topic or broker
    TOPIC_NOT_FOUND, MESSAGE_PROPERTY_CONFLICT_WITH_TYPE    no topic, or none for delayed messages
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from timeball.broker.accepting.appender import Accepted
from timeball.broker.accepting.ingress import Piece
from timeball.broker.registry.topic import MESSAGE_TYPE
from timeball.broker.registry.topics import Topic
from timeball.broker.revoking import recall
from timeball.broker.revoking.recall import RecallRefused
from timeball.edges.grpc._generated.definition_pb2 import Code, Message, MessageType, Resource
from timeball.edges.grpc._generated.service_pb2 import (
    RecallMessageRequest,
    RecallMessageResponse,
    SendMessageRequest,
)
from timeball.edges.grpc.calls import OK, Call, Direct, Handlers, Reply, topic_name
from timeball.edges.grpc.codec.messages_in import TRANSACTION, check_instant, row_of, type_of
from timeball.edges.grpc.codec.send_requests import PlainSend, decoder_of, encode_answer, encode_entry
from timeball.edges.grpc.handlers.transactions import transaction_id
from timeball.edges.grpc.session import GrpcContext
from timeball.edges.shared.error_codes import Refused
from timeball.model.access import ANONYMOUS
from timeball.model.errors import NotFound
from timeball.model.message import SEND_NAMES, SendRow

ALL = [MessageType.NORMAL, MessageType.FIFO, MessageType.DELAY, MessageType.TRANSACTION, MessageType.PRIORITY]
_OF_NAME = {MessageType.Name(each): [each] for each in ALL}

MESSAGES_MAX = 1_024  # of one call: they are checked without a pause, while all other calls wait

_UNIQUE_KEY, _DUE_MS, _BODY, _PROPERTIES = (
    SEND_NAMES.index(name) for name in ("unique_key", "due_ms", "body", "properties")
)


class Destination(NamedTuple):
    """The properties of a topic that a sender needs."""

    name: str
    topic: Topic | None  # None until the broker creates it for the first accepted message
    queues: int
    types: frozenset[MessageType]


class _Piece(Piece, gc=False):
    """The messages of one call. `is_transaction`: half messages, each of which gets the id of its transaction."""

    to: Any
    is_transaction: bool
    reply: Any


class Sends:
    """Serves SendMessage and RecallMessage. Belongs to the event loop."""

    def __init__(self, context: GrpcContext) -> None:
        self._context, self._broker = context, context.broker
        self._topics, decode = self._broker.tables.topics, decoder_of(self._broker.settings.codec)
        # By namespace and name, for this version of the topics. Cached because every message needs one.
        self._destinations: dict[tuple[str, str], Destination] = {}
        self._version = -1
        self.handlers: Handlers = {"SendMessage": Direct(self._send, decode), "RecallMessage": self._recall}

    def _send(self, call: Call, request: Any, reply: Reply) -> None:
        """Begin a send. Its reply gets the offsets of its messages when they are durable."""
        if isinstance(request, SendMessageRequest):
            to, rows, is_transaction = self._rows(call, request.messages)
            size_bytes = sum(len(row[_BODY]) + len(row[_PROPERTIES]) for row in rows)
        else:
            to, rows, is_transaction = *self._plain_row(call, request), False
            size_bytes = request.size_bytes
        if to.topic is None:  # created for this caller, not for every caller of the batch
            self._context.broker.policy.admit([to.name], call.caller)
        ingress = self._broker.halves if is_transaction else self._broker.sends
        ingress.put(_Piece(self, rows, len(rows), size_bytes, 0, None, to, is_transaction, reply))

    def _rows(self, call: Call, messages: Sequence[Message]) -> tuple[Destination, list[SendRow], bool]:
        """Return a call's destination, its rows, and whether these are half messages. Raises Refused."""
        if not 0 < len(messages) <= MESSAGES_MAX:
            raise Refused(Code.BAD_REQUEST, f"{len(messages)} messages in one call: 1 to {MESSAGES_MAX}")
        topic = messages[0].topic
        to = self._destination((topic.resource_namespace, topic.name))
        kinds = [type_of(message.system_properties) for message in messages]
        self._check(messages, set(kinds), to)
        now_ms, delay_ms_max = self._broker.clock.now_ms(), self._broker.settings.delay_ms_max
        rows = [
            row_of(message, kind, to.name, to.queues, now_ms, delay_ms_max, call.peer)
            for message, kind in zip(messages, kinds, strict=True)
        ]
        return to, rows, TRANSACTION in kinds

    def _plain_row(self, call: Call, request: PlainSend) -> tuple[Destination, list[SendRow]]:
        """Return destination and row of a message that was decoded as a plain send. Raises Refused."""
        to = self._destination(request.topic)
        now_ms = self._broker.clock.now_ms() if request.needs_now else 0  # clocks cost as much as the row
        if request.kind not in to.types:
            check_type(to.topic, to.name, request.kind)
        if request.due_ms is not None:
            check_instant(request.due_ms, now_ms, self._broker.settings.delay_ms_max)
        return to, [request.row(to.name, now_ms, call.peer)]

    async def _recall(self, call: Call, request: RecallMessageRequest) -> RecallMessageResponse:
        """Recall a delayed message. The broker defines success.

        The answer is never MESSAGE_NOT_FOUND. Clients read that as an empty poll, and RocketMQ's Python client as
        success.
        """
        topic, settings = topic_name(request.topic), self._context.settings
        if settings.check_message_types:
            check_type(self._topics.find_topic(topic), topic, MessageType.DELAY)
        try:
            message_id = await self._broker.recall(topic, request.recall_handle, call.caller)
        except NotFound as error:
            raise Refused(Code.TOPIC_NOT_FOUND, str(error)) from error
        except RecallRefused as error:
            as_rocketmq = settings.recall_answers == "rocketmq"
            code = Code.INTERNAL_SERVER_ERROR if as_rocketmq else Code.NOT_FOUND
            raise Refused(code, error.sentence) from error
        return RecallMessageResponse(status=OK, message_id=message_id)

    # -- an Edge of broker/accepting/ingress.py ------------------------------------------------------------------------

    def answer(self, pieces: list[_Piece], accepted: Accepted) -> None:
        """Send each call the offsets of its messages."""
        _, offsets = accepted.places()
        for piece in pieces:
            at, seq = piece.first_row, accepted.first_seq + piece.first_row
            entries = [self._entry(piece, row, seq + n, offsets[at + n]) for n, row in enumerate(piece.rows)]
            piece.reply.answer(encode_answer(entries))

    def refuse(self, pieces: list[_Piece], error: BaseException) -> None:
        """Send each call the reason why its messages were refused."""
        for piece in pieces:
            piece.reply.refuse(error)

    def _check(self, messages: Sequence[Message], kinds: set[MessageType], to: Destination) -> None:
        """Raise Refused unless these messages may share one call to this topic."""
        if len(messages) > 1:
            first = messages[0].topic
            if any(message.topic != first for message in messages):
                raise Refused(Code.BAD_REQUEST, "messages of several topics: send those of each in a call")
            if len(kinds) > 1 and TRANSACTION in kinds:
                raise Refused(Code.BAD_REQUEST, "messages of a transaction and others: send them apart")
        if not kinds <= to.types:
            for kind in kinds:
                check_type(to.topic, to.name, kind)

    def _destination(self, key: tuple[str, str]) -> Destination:
        """Return the destination of messages to this namespace and name. Raises as the policy does."""
        if self._topics.version != self._version:
            self._destinations.clear()
        found = self._destinations.get(key)
        if found is None:
            found = self._look_up(topic_name(Resource(resource_namespace=key[0], name=key[1])))
            if found.topic is not None:
                self._version = self._topics.version
                self._destinations[key] = found
        return found

    def _look_up(self, name: str) -> Destination:
        settings = self._context.settings
        # Cached for all callers: the permissions of an account are checked with each call (required_permissions.py).
        topic = self._context.broker.policy.destination(name, ANONYMOUS)
        if topic is None:
            return Destination(name, None, settings.queues_per_topic, frozenset(accepted_types(None)))
        types = accepted_types(topic if settings.check_message_types else None)
        queues = self._context.broker.policy.queues_to_write(topic)
        return Destination(name, topic, queues, frozenset(types))

    def _entry(self, piece: _Piece, row: SendRow, seq: int, offset: int | None) -> bytes:
        message_id, due_ms = row[_UNIQUE_KEY], row[_DUE_MS]
        assert message_id is not None, "a message without an id is refused"
        transaction = message_id  # not an id of a transaction. RocketMQ's proxy returns the same
        if piece.is_transaction:
            transaction = transaction_id(seq, piece.to.name, message_id)
        handle = ""
        if due_ms is not None:
            handle = recall.encode_handle(
                piece.to.name, self._context.settings.broker_name, due_ms, message_id
            )
        return encode_entry(message_id, transaction, offset or 0, handle)


def accepted_types(topic: Topic | None) -> list[MessageType]:
    """Return the types that a topic accepts: all of them if it does not exist yet."""
    return named_types("" if topic is None else topic.config.attributes.get(MESSAGE_TYPE, ""))


def named_types(attribute: str) -> list[MessageType]:
    """Return the types that a topic with this attribute accepts."""
    return _OF_NAME.get(attribute, ALL)


def check_type(topic: Topic | None, name: str, message_type: MessageType) -> None:
    """Raise Refused if the topic does not accept messages of this type."""
    accepted = accepted_types(topic)
    if message_type not in accepted:
        names = ", ".join(MessageType.Name(each) for each in accepted)
        raise Refused(
            Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
            f"topic {name!r} takes {names} messages, and this is {_name(message_type)}; use another topic, change its "
            f"{MESSAGE_TYPE}, or start the broker with --no-check-message-types",
        )


def _name(message_type: MessageType) -> str:
    known = MessageType.values()
    return MessageType.Name(message_type) if message_type in known else f"of type {message_type}"
