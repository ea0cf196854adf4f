"""Transactions: handle EndTransaction from producers, and ask producers about transactions they have not ended.

A half message arrives by SendMessage (sends.py), whose answer contains the id of its transaction. Over gRPC a producer
has no group, so the topic is used as its group. A producer of the topic is asked about an open half message on its
Telemetry stream, and answers with another EndTransaction. broker/transacting/transaction_checks.py decides when. To end
a transaction twice in the same way succeeds both times. The opposite end is refused.

Clients get the id of a transaction with the answer to a half message and return it. To them it is opaque:

    | number of the half message, 16 hexadecimal digits | crc32 of topic and message id, 8 |

The check prevents that a client ends another message's transaction by mistake. It is no secret: a client that may send
to a topic may also end its transactions, as in RocketMQ.
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
from timeball.edges.grpc.calls import BETWEEN, OK, Call, Handlers, resource, topic_name
from timeball.edges.grpc.codec.messages_out import messages
from timeball.edges.grpc.session import GrpcContext, Stream, producer_stream
from timeball.edges.shared.error_codes import Refused
from timeball.model.access import Verb

_TEXT = re.compile(r"[0-9A-F]{24}")
SEQ_MAX = 2**63 - 1


class Transactions:
    """Serves EndTransaction, and asks producers about open half messages."""

    def __init__(self, context: GrpcContext) -> None:
        self._context, self._core = context, context.broker.transactions
        context.broker.transaction_checks.askers.append(self)
        self.handlers: Handlers = {"EndTransaction": self._end}

    async def _end(self, call: Call, request: EndTransactionRequest) -> EndTransactionResponse:
        topic = topic_name(request.topic)
        seq = seq_of(request.transaction_id, topic, request.message_id)
        if seq is None:
            raise _unknown("it is no transaction of this topic and message")
        commit = request.resolution == TransactionResolution.COMMIT
        if commit or request.resolution == TransactionResolution.ROLLBACK:
            outcome = await self._core.end(seq, topic, commit=commit)
            if outcome is Outcome.NOT_FOUND:
                raise _unknown("it is not known here, or not any more")
            if outcome is (Outcome.ROLLED_BACK if commit else Outcome.COMMITTED):
                raise _unknown(f"it was {outcome.value} before")
        # Any other resolution means "not known yet": the producer is asked again later.
        return EndTransactionResponse(status=OK)

    # -- asking ----------------------------------------------------------------------------------------------

    def has_producer(self, half: Half) -> bool:
        """Return whether a producer of the half's topic is connected, and the half arrived by this edge."""
        return half.group == half.topic and self._producer(half) is not None

    def ask(self, half: Half, row: pa.RecordBatch) -> int:
        """Push the half message to one of its producers, and return the bytes pushed, 0 if no producer took it."""
        stream = self._producer(half)
        if stream is None:
            return 0
        namespace, between, _ = half.topic.partition(BETWEEN)
        asked = resource(half.topic, namespace if between else "")
        [message] = messages(row, asked, half.topic, self._context.settings.host)
        message.system_properties.message_type = MessageType.TRANSACTION
        named = transaction_id(half.seq, half.topic, message.system_properties.message_id)
        command = TelemetryCommand(
            recover_orphaned_transaction_command=RecoverOrphanedTransactionCommand(
                message=message, transaction_id=named
            )
        )
        return command.ByteSize() if stream.push(command) else 0

    def _producer(self, half: Half) -> Stream | None:
        # The rights of an account may be newer than its stream. The half message requires the right to send to its
        # topic.
        allows = self._context.broker.policy.allows
        return producer_stream(
            self._context.sessions, half.topic, lambda caller: allows(caller, Verb.SEND, topic=half.topic)
        )


def _unknown(why: str) -> Refused:
    return Refused(Code.INVALID_TRANSACTION_ID, f"transaction_id: {why}")


def transaction_id(seq: int, topic: str, message_id: str) -> str:
    """Return the id of the transaction whose half message has the number `seq`."""
    return f"{seq:016X}{_check(topic, message_id):08X}"


def seq_of(text: str, topic: str, message_id: str) -> int | None:
    """Return the number in a transaction id, or None if it is not the transaction of this message."""
    if not _TEXT.fullmatch(text):
        return None
    seq = int(text[:16], 16)
    return seq if seq <= SEQ_MAX and int(text[16:], 16) == _check(topic, message_id) else None


def _check(topic: str, message_id: str) -> int:
    return crc32(f"{topic} {message_id}".encode())
