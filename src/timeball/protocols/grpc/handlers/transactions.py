"""Transactions at the edge: EndTransaction from producers, and the question to them about what they have not ended.

A half message comes by SendMessage (sends.py), whose answer names its transaction; over gRPC a producer has no group,
so the producers of the topic stand for it. A half is asked about on the Telemetry stream of one of them
(broker/transaction_checks.py says when), and the answer is an EndTransaction again. To end a transaction twice the same
way is to succeed twice; the other way it is refused.
"""

from __future__ import annotations

import pyarrow as pa

from timeball.access import Verb
from timeball.broker.transactions import Half, Outcome
from timeball.protocols.error_codes import Refused
from timeball.protocols.grpc._generated.definition_pb2 import (
    Code,
    MessageType,
    TransactionResolution,
)
from timeball.protocols.grpc._generated.service_pb2 import (
    EndTransactionRequest,
    EndTransactionResponse,
    RecoverOrphanedTransactionCommand,
    TelemetryCommand,
)
from timeball.protocols.grpc.calls import Call, Handlers
from timeball.protocols.grpc.clients import Stream
from timeball.protocols.grpc.codec.messages_out import messages
from timeball.protocols.grpc.codec.names import BETWEEN, resource, topic_name
from timeball.protocols.grpc.codec.statuses import ok
from timeball.protocols.grpc.codec.transaction_ids import seq_of, transaction_id
from timeball.protocols.grpc.site import Site


class Transactions:
    """See the module."""

    def __init__(self, site: Site) -> None:
        self._site, self._core = site, site.broker.transactions
        site.broker.transaction_checks.askers.append(self)

    def handlers(self) -> Handlers:
        """The calls answered here."""
        return {"EndTransaction": self._end}

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
        # Anything else is "not known yet": its producer is asked again later.
        return EndTransactionResponse(status=ok())

    # -- asking ----------------------------------------------------------------------------------------------

    def has_producer(self, half: Half) -> bool:
        """Whether a producer of the half's topic is connected, and the half came by this edge."""
        return half.group == half.topic and self._producer(half) is not None

    def ask(self, half: Half, row: pa.RecordBatch) -> int:
        """Push the half message to one of them; returns the bytes pushed, 0 when nobody took it."""
        stream = self._producer(half)
        if stream is None:
            return 0
        namespace, between, _ = half.topic.partition(BETWEEN)
        asked = resource(half.topic, namespace if between else "")
        [message] = messages(row, asked, half.topic, self._site.settings.host)
        message.system_properties.message_type = MessageType.TRANSACTION
        named = transaction_id(half.seq, half.topic, message.system_properties.message_id)
        command = TelemetryCommand(
            recover_orphaned_transaction_command=RecoverOrphanedTransactionCommand(
                message=message, transaction_id=named
            )
        )
        return command.ByteSize() if stream.push(command) else 0

    def _producer(self, half: Half) -> Stream | None:
        # A stream may be older than its account's rights: what it is sent is a message of the topic.
        allows = self._site.broker.policy.allows
        return self._site.clients.producer(
            half.topic, lambda caller: allows(caller, Verb.SEND, topic=half.topic)
        )


def _unknown(why: str) -> Refused:
    return Refused(Code.INVALID_TRANSACTION_ID, f"transaction_id: {why}")
