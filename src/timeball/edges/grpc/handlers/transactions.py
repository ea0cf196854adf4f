"""EndTransaction, and the question to producers about transactions that they have not ended.

A half message arrives by SendMessage (sends.py), whose response contains the id of its transaction. Over gRPC a
producer has no group, so the topic is used as its group. If a transaction stays open, the broker asks a producer of the
topic about it on its Telemetry stream, and the producer answers with EndTransaction.
broker/transacting/transaction_checks.py decides when to ask. A second EndTransaction with the same resolution succeeds,
too. With the opposite resolution it is refused.

Clients get the id of a transaction with the response to a half message, and send it back in EndTransaction. It is
opaque to them:

    | number of the half message, 16 hexadecimal digits | crc32 of topic and message id, 8 |

The checksum prevents that a client ends another message's transaction by mistake. It is no secret: a client that may
send to a topic may also end its transactions, as in RocketMQ.
"""

from __future__ import annotations

import re
from zlib import crc32

import pyarrow as pa

from timeball.broker.transacting.transactions import Half, Outcome
from timeball.edges.grpc._generated.definition_pb2 import (
    Code,
    MessageType,
    TransactionResolution,
)
from timeball.edges.grpc._generated.service_pb2 import (
    EndTransactionRequest,
    EndTransactionResponse,
    RecoverOrphanedTransactionCommand,
    TelemetryCommand,
)
from timeball.edges.grpc.calls import NAMESPACE_SEPARATOR, OK, Call, Handlers, resource, topic_name
from timeball.edges.grpc.codec.messages_out import messages
from timeball.edges.grpc.session import GrpcContext, Stream, choose_producer_stream
from timeball.edges.shared.error_codes import Refused
from timeball.model.access import Verb

_ID_FORMAT = re.compile(r"[0-9A-F]{24}")
SEQ_MAX = 2**63 - 1


class Transactions:
    """Serves EndTransaction, and asks producers about open half messages."""

    def __init__(self, context: GrpcContext) -> None:
        self._context, self._transactions = context, context.broker.transactions
        context.broker.transaction_checks.askers.append(self)
        self.handlers: Handlers = {"EndTransaction": self._end}

    async def _end(self, call: Call, request: EndTransactionRequest) -> EndTransactionResponse:
        topic = topic_name(request.topic)
        seq = parse_transaction_id(request.transaction_id, topic, request.message_id)
        if seq is None:
            raise _invalid_transaction("it is no transaction of this topic and message")
        commit = request.resolution == TransactionResolution.COMMIT
        if commit or request.resolution == TransactionResolution.ROLLBACK:
            outcome = await self._transactions.end(seq, topic, commit=commit)
            if outcome is Outcome.NOT_FOUND:
                raise _invalid_transaction("it is not known to this broker, or not any more")
            if outcome is (Outcome.ROLLED_BACK if commit else Outcome.COMMITTED):
                raise _invalid_transaction(f"it was {outcome.value} before")
        # Any other resolution means "not known yet": the producer is asked again later.
        return EndTransactionResponse(status=OK)

    # -- the interface Asker of transaction_checks.py --------------------------------------------------------

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
        # An account may have lost its rights since it opened the stream. To see a half message, it needs the right to
        # send to the topic.
        allows = self._context.broker.policy.allows
        return choose_producer_stream(
            self._context.sessions, half.topic, lambda caller: allows(caller, Verb.SEND, topic=half.topic)
        )


def _invalid_transaction(reason: str) -> Refused:
    return Refused(Code.INVALID_TRANSACTION_ID, f"transaction_id: {reason}")


def transaction_id(seq: int, topic: str, message_id: str) -> str:
    """Create the id of the transaction whose half message has the number `seq`."""
    return f"{seq:016X}{_checksum(topic, message_id):08X}"


def parse_transaction_id(text: str, topic: str, message_id: str) -> int | None:
    """Parse a transaction id to the number of its half message.

    Returns None if the id is malformed, or is not that of a transaction of this topic and message id.
    """
    if not _ID_FORMAT.fullmatch(text):
        return None
    seq = int(text[:16], 16)
    return seq if seq <= SEQ_MAX and int(text[16:], 16) == _checksum(topic, message_id) else None


def _checksum(topic: str, message_id: str) -> int:
    return crc32(f"{topic} {message_id}".encode())
