"""SendMessage, RecallMessage and EndTransaction, and the question to producers about open transactions.

broker/accepting/ingress.py batches the messages of a call with other sends. They are accepted together or refused
together, with the code of the first bad message. So the entries of the response never have different statuses
(RocketMQ's MULTIPLE_RESULTS). Half messages go to a separate batcher. No consumer sees them before their transaction is
committed.

A topic may be restricted to messages of one type by RocketMQ's attribute `message.type`. MIXED allows all types. A
message of another type is refused with MESSAGE_PROPERTY_CONFLICT_WITH_TYPE. A topic without the attribute accepts all
types. (In RocketMQ such a topic is NORMAL and refuses every delayed message until an operator changes it, which
surprises its users.)

RecallMessage is answered with RocketMQ's codes:

    OK                                    settled (cancelled): it will not be delivered
    NOT_FOUND                             too late, unknown, or no longer known; the text states which
    BAD_REQUEST                           no handle, or one of another topic or broker
    TOPIC_NOT_FOUND, MESSAGE_PROPERTY_CONFLICT_WITH_TYPE    no topic, or none for delayed messages
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32

import pyarrow as pa

from timeball.broker.accepting.appender import Accepted
from timeball.broker.accepting.ingress import Piece
from timeball.broker.accepting.transacting import Half, Outcome
from timeball.broker.registry.topics import MESSAGE_TYPE, Topic
from timeball.broker.revoking import cancel
from timeball.broker.revoking.cancel import RecallRefused
from timeball.edges.grpc._generated.definition_pb2 import (
    Code,
    Message,
    MessageType,
    Resource,
    TransactionResolution,
)
from timeball.edges.grpc._generated.service_pb2 import (
    EndTransactionRequest,
    EndTransactionResponse,
    RecallMessageRequest,
    RecallMessageResponse,
    RecoverOrphanedTransactionCommand,
    SendMessageRequest,
    TelemetryCommand,
)
from timeball.edges.grpc.calls import (
    NAMESPACE_SEPARATOR,
    OK,
    Call,
    Direct,
    GrpcContext,
    Handlers,
    Reply,
    Stream,
    choose_producer_stream,
    resource,
    topic_name,
)
from timeball.edges.grpc.codec.messages_in import (
    TRANSACTION,
    PlainSend,
    check_delivery_time,
    decode_send,
    encode_answer,
    encode_entry,
    encode_row,
    message_type_of,
)
from timeball.edges.grpc.codec.messages_out import messages
from timeball.edges.shared.error_codes import Refused
from timeball.model.access import ANONYMOUS, Verb
from timeball.model.answers import KEPT, UniqueMessage
from timeball.model.errors import NotFound
from timeball.model.message import SEND_NAMES, SendRow
from timeball.model.send_options import ON_PENDING, UNIQUE_KEY, UniqueKey, unique_key_in

# ---- SendMessage and RecallMessage ---------------------------------------------------------------------------

ALL_TYPES = [
    MessageType.NORMAL,
    MessageType.FIFO,
    MessageType.DELAY,
    MessageType.TRANSACTION,
    MessageType.PRIORITY,
]
# By the value of the topic attribute message.type. Other values allow all types.
_TYPES_BY_ATTRIBUTE = {MessageType.Name(each): [each] for each in ALL_TYPES}

MESSAGES_MAX = 1_024  # of one call. They are checked in one turn of the event loop, and all other calls wait

# Positions of values in a SendRow.
_UNIQUE_KEY, _DUE_MS, _BODY, _PROPERTIES = (
    SEND_NAMES.index(name) for name in ("unique_key", "due_ms", "body", "properties")
)


class Destination(NamedTuple):
    """The topic of a send, with its properties that SendMessage needs."""

    name: str
    topic: Topic | None  # None until the broker creates it for the first accepted message
    queues: int  # that can be written
    types: frozenset[MessageType]


class _Piece(Piece, gc=False):
    """The messages of one call. `is_transaction`: they are half messages, and each gets the id of its transaction."""

    destination: Any  # Destination
    is_transaction: bool
    reply: Any  # Reply


class Sends:
    """Serves SendMessage and RecallMessage. Belongs to the event loop."""

    def __init__(self, context: GrpcContext) -> None:
        self._context, self._broker = context, context.broker
        self._topics = self._broker.tables.topics
        # A cache by namespace and name, valid for one version of the broker's topics.
        self._destinations: dict[tuple[str, str], Destination] = {}
        self._topics_version = -1
        self.handlers: Handlers = {
            "SendMessage": Direct(self._send, decode_send),
            "RecallMessage": self._recall,
        }

    def _send(self, call: Call, request: Any, reply: Reply) -> None:
        """Serve SendMessage: check a send and pass it to the broker. `request` is from `decode_send`.

        The reply gets the offsets when the messages are durable. Raises Refused and other TimeballErrors.
        """
        unique = None
        if isinstance(request, SendMessageRequest):
            unique = _unique_key(request.messages)
            destination, rows, is_transaction = self._convert(call, request.messages)
            size_bytes = sum(len(row[_BODY]) + len(row[_PROPERTIES]) for row in rows)
        else:
            destination, rows, is_transaction = *self._convert_plain(call, request), False
            size_bytes = request.size_bytes
        if destination.topic is None:
            # The topic is created here with the rights of this caller. The batch may have sends of other callers.
            self._context.broker.policy.ensure_topics([destination.name], call.caller)
        piece = _Piece(self, rows, len(rows), size_bytes, 0, None, destination, is_transaction, reply)
        if unique is not None:
            self._broker.unique_sends.put(piece, unique, call.caller)
            return
        ingress = self._broker.halves if is_transaction else self._broker.sends
        ingress.put(piece)

    def _convert(self, call: Call, messages: Sequence[Message]) -> tuple[Destination, list[SendRow], bool]:
        """Check and convert the messages of a call.

        Returns their destination, their rows, and whether they are half messages. Raises Refused.
        """
        if not 0 < len(messages) <= MESSAGES_MAX:
            raise Refused(Code.BAD_REQUEST, f"{len(messages)} messages in one call: 1 to {MESSAGES_MAX}")
        topic = messages[0].topic
        destination = self._find_destination((topic.resource_namespace, topic.name))
        types = [message_type_of(message.system_properties) for message in messages]
        self._check_call(messages, set(types), destination)
        now_ms, delay_ms_max = self._broker.clock.now_ms(), self._broker.settings.delay_ms_max
        rows = [
            encode_row(
                message, message_type, destination.name, destination.queues, now_ms, delay_ms_max, call.peer
            )
            for message, message_type in zip(messages, types, strict=True)
        ]
        return destination, rows, TRANSACTION in types

    def _convert_plain(self, call: Call, request: PlainSend) -> tuple[Destination, list[SendRow]]:
        """Check and convert a plain send. Returns its destination and its row. Raises Refused."""
        destination = self._find_destination(request.topic)
        # To read the clock costs as much as to create the row.
        now_ms = self._broker.clock.now_ms() if request.needs_now else 0
        if request.message_type not in destination.types:
            check_type(destination.topic, destination.name, request.message_type)
        if request.due_ms is not None:
            check_delivery_time(request.due_ms, now_ms, self._broker.settings.delay_ms_max)
        return destination, [request.row(destination.name, now_ms, call.peer)]

    async def _recall(self, call: Call, request: RecallMessageRequest) -> RecallMessageResponse:
        """Serve RecallMessage: recall (cancel) a delayed message by its recall handle. Raises Refused, Forbidden.

        The status is never MESSAGE_NOT_FOUND. Clients take that code for an empty poll, and RocketMQ's Python client
        takes it for success.
        """
        topic = topic_name(request.topic)
        if self._context.settings.check_message_types:
            check_type(self._topics.find_topic(topic), topic, MessageType.DELAY)
        try:
            message_id = await self._broker.recall(topic, request.recall_handle, call.caller)
        except NotFound as error:
            raise Refused(Code.TOPIC_NOT_FOUND, str(error)) from error
        except RecallRefused as error:
            raise Refused(Code.NOT_FOUND, error.sentence) from error
        return RecallMessageResponse(status=OK, message_id=message_id)

    # -- the interface Edge of broker/accepting/ingress.py ------------------------------------------------------------

    def answer(self, pieces: list[_Piece], accepted: Accepted) -> None:
        """Answer each call with the offsets of its messages. The messages are durable."""
        _, offsets = accepted.queues_and_offsets()
        for piece in pieces:
            if accepted.sent is not None and accepted.sent.outcome == KEPT:
                piece.rows = [_row_of_pending(piece.rows[0], accepted.sent.pending)]
            entries = [
                self._encode_entry(piece, row, accepted.first_seq + index, offsets[index])
                for index, row in enumerate(piece.rows, piece.first_row)
            ]
            piece.reply.answer(encode_answer(entries))

    def refuse(self, pieces: list[_Piece], error: BaseException) -> None:
        """Answer each call with the error with which its messages were refused."""
        for piece in pieces:
            piece.reply.refuse(error)

    def _check_call(
        self, messages: Sequence[Message], types: set[MessageType], destination: Destination
    ) -> None:
        """Raise Refused if the messages have several topics, or types that one call or the topic does not allow."""
        if len(messages) > 1:
            first_topic = messages[0].topic
            if any(message.topic != first_topic for message in messages):
                raise Refused(Code.BAD_REQUEST, "messages of several topics: send those of each in a call")
            if len(types) > 1 and TRANSACTION in types:
                raise Refused(Code.BAD_REQUEST, "messages of a transaction and others: send them apart")
        if not types <= destination.types:
            for message_type in types:
                check_type(destination.topic, destination.name, message_type)

    def _find_destination(self, key: tuple[str, str]) -> Destination:
        """Find the destination for this namespace and name, in the cache or by the broker's policy, which may raise."""
        if self._topics.version != self._topics_version:
            self._destinations.clear()
        destination = self._destinations.get(key)
        if destination is None:
            destination = self._create_destination(
                topic_name(Resource(resource_namespace=key[0], name=key[1]))
            )
            if destination.topic is not None:
                self._topics_version = self._topics.version
                self._destinations[key] = destination
        return destination

    def _create_destination(self, name: str) -> Destination:
        """Ask the broker's policy whether a topic can be sent to, and collect its properties. Raises its errors."""
        settings = self._context.settings
        # ANONYMOUS, because all callers share the cache. The permissions of an account are checked with each call
        # (dispatch.py).
        topic = self._context.broker.policy.find_destination(name, ANONYMOUS)
        if topic is None:
            return Destination(name, None, settings.queues_per_topic, frozenset(accepted_types(None)))
        types = accepted_types(topic if settings.check_message_types else None)
        queues = self._context.broker.policy.queues_to_write(topic)
        return Destination(name, topic, queues, frozenset(types))

    def _encode_entry(self, piece: _Piece, row: SendRow, seq: int, offset: int | None) -> bytes:
        """Encode the response's entry for one message, with its ids, its offset, and the recall handle of a delay."""
        message_id, due_ms = row[_UNIQUE_KEY], row[_DUE_MS]
        assert message_id is not None, "a message without an id is refused"
        transaction = message_id  # without a transaction, RocketMQ's proxy returns the message id, too
        if piece.is_transaction:
            transaction = transaction_id(seq, piece.destination.name, message_id)
        recall_handle = ""
        if due_ms is not None:
            recall_handle = cancel.encode_handle(
                piece.destination.name, self._context.settings.broker_name, due_ms, message_id
            )
        return encode_entry(message_id, transaction, offset or 0, recall_handle)


def _unique_key(messages: Sequence[Message]) -> UniqueKey | None:
    """Read the unique key of the message of a call. Returns None if no message has one.

    Raises Refused for several messages or a half message, and InvalidMessage for an invalid key.
    """
    for message in messages:
        if UNIQUE_KEY in message.user_properties or ON_PENDING in message.user_properties:
            if len(messages) > 1:
                raise Refused(Code.BAD_REQUEST, "a message with a unique key is sent alone, in its own call")
            if message.system_properties.message_type == MessageType.TRANSACTION:
                raise Refused(Code.BAD_REQUEST, f"property {UNIQUE_KEY}: not for messages of a transaction")
            return unique_key_in(message.user_properties)
    return None


def _row_of_pending(row: SendRow, pending: UniqueMessage | None) -> SendRow:
    """Put the id and the due time of the pending message into the row of a send that kept it (by its unique key)."""
    if pending is None:
        return row
    values = list(row)
    values[_UNIQUE_KEY], values[_DUE_MS] = pending.id, pending.due_ms
    return tuple(values)


def accepted_types(topic: Topic | None) -> list[MessageType]:
    """List the types of messages that a topic accepts. `topic` None: it does not exist yet, and accepts all types."""
    return types_of_attribute("" if topic is None else topic.config.attributes.get(MESSAGE_TYPE, ""))


def types_of_attribute(attribute: str) -> list[MessageType]:
    """List the types that a topic accepts whose attribute message.type has this value."""
    return _TYPES_BY_ATTRIBUTE.get(attribute, ALL_TYPES)


def check_type(topic: Topic | None, name: str, message_type: MessageType) -> None:
    """Raise Refused if the topic does not accept messages of this type."""
    types = accepted_types(topic)
    if message_type not in types:
        names = ", ".join(MessageType.Name(each) for each in types)
        raise Refused(
            Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
            f"topic {name!r} takes {names} messages, and this is {_type_name(message_type)}; use another topic, change "
            f"its {MESSAGE_TYPE}, or start the broker with --no-check-message-types",
        )


def _type_name(message_type: MessageType) -> str:
    known_types = MessageType.values()
    return MessageType.Name(message_type) if message_type in known_types else f"of type {message_type}"


# ---- transactions --------------------------------------------------------------------------------------------
# The response to a half message contains the id of its transaction. Over gRPC a producer has no group, so the topic is
# used as its group. If a transaction stays open, the broker asks a producer of the topic about it on its Telemetry
# stream, and the producer answers with EndTransaction. broker/accepting/transacting.py decides when to ask. A second
# EndTransaction with the same resolution succeeds, too. With the opposite resolution it is refused.

_ID_FORMAT = re.compile(r"[0-9A-F]{24}")
SEQ_MAX = 2**63 - 1


class Transactions:
    """Serves EndTransaction, and asks producers about open half messages."""

    def __init__(self, context: GrpcContext) -> None:
        self._context, self._transactions = context, context.broker.transactions
        context.broker.transaction_checks.askers.append(self)
        self.handlers: Handlers = {"EndTransaction": self._end}

    async def _end(self, call: Call, request: EndTransactionRequest) -> EndTransactionResponse:
        """Serve EndTransaction: commit or roll back a half message.

        Raises Refused for an unknown transaction, or one that has ended in the opposite way.
        """
        topic = topic_name(request.topic)
        seq = parse_transaction_id(request.transaction_id, topic, request.message_id)
        if seq is None:
            raise _invalid_transaction("it is no transaction of this topic and message")
        is_commit = request.resolution == TransactionResolution.COMMIT
        if is_commit or request.resolution == TransactionResolution.ROLLBACK:
            outcome = await self._transactions.end(seq, topic, commit=is_commit)
            if outcome is Outcome.NOT_FOUND:
                raise _invalid_transaction("it is not known to this broker, or not any more")
            if outcome is (Outcome.ROLLED_BACK if is_commit else Outcome.COMMITTED):
                raise _invalid_transaction(f"it was {outcome.value} before")
        # Any other resolution means "not known yet": the producer is asked again later.
        return EndTransactionResponse(status=OK)

    # -- the interface Asker of broker/accepting/transacting.py --------------------------------------------------------

    def has_producer(self, half: Half) -> bool:
        """Return whether the half message arrived by this edge, and a producer of its topic is connected."""
        return half.group == half.topic and self._choose_stream(half) is not None

    def ask(self, half: Half, row: pa.RecordBatch) -> int:
        """Send a half message to a producer of its topic, and ask for its resolution.

        Returns the number of bytes queued for the producer, 0 if no producer could be asked.
        """
        stream = self._choose_stream(half)
        if stream is None:
            return 0
        namespace, separator, _ = half.topic.partition(NAMESPACE_SEPARATOR)
        topic = resource(half.topic, namespace if separator else "")
        [message] = messages(row, topic, half.topic, self._context.settings.host)
        message.system_properties.message_type = MessageType.TRANSACTION
        half_id = transaction_id(half.seq, half.topic, message.system_properties.message_id)
        command = TelemetryCommand(
            recover_orphaned_transaction_command=RecoverOrphanedTransactionCommand(
                message=message, transaction_id=half_id
            )
        )
        return command.ByteSize() if stream.push(command) else 0

    def _choose_stream(self, half: Half) -> Stream | None:
        """Choose a Telemetry stream of a producer of the half message's topic. None if no producer is connected."""
        # An account may have lost its rights since it opened the stream. To see a half message, it needs the right to
        # send to the topic.
        allows = self._context.broker.policy.allows
        return choose_producer_stream(
            self._context.sessions, half.topic, lambda caller: allows(caller, Verb.SEND, topic=half.topic)
        )


def _invalid_transaction(reason: str) -> Refused:
    return Refused(Code.INVALID_TRANSACTION_ID, f"transaction_id: {reason}")


def transaction_id(seq: int, topic: str, message_id: str) -> str:
    """Create the id of the transaction whose half message has the number `seq`. It is opaque to clients.

        | number of the half message, 16 hexadecimal digits | crc32 of topic and message id, 8 |

    The checksum prevents that a client ends another message's transaction by mistake. It is no secret: a client that
    may send to a topic may also end its transactions, as in RocketMQ.
    """
    return f"{seq:016X}{_checksum(topic, message_id):08X}"


def parse_transaction_id(text: str, topic: str, message_id: str) -> int | None:
    """Parse a transaction id to the number of its half message.

    Returns None if the id is malformed, or belongs to no transaction of this topic and message id.
    """
    if not _ID_FORMAT.fullmatch(text):
        return None
    seq = int(text[:16], 16)
    return seq if seq <= SEQ_MAX and int(text[16:], 16) == _checksum(topic, message_id) else None


def _checksum(topic: str, message_id: str) -> int:
    return crc32(f"{topic} {message_id}".encode())
