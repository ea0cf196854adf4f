"""Transactions: serve END_TRANSACTION (37) from producers, and send them CHECK_TRANSACTION_STATE (39).

Half messages arrive as sends (sends.py). A client ends a transaction with the sequence number that it got as the
message's physical offset, nearly always in a one-way request. broker/transacting/transaction_checks.py decides when to
check a transaction that was not ended. This module then pushes the half message to a producer of the group, which
answers with another END_TRANSACTION.
"""

from __future__ import annotations

from random import choice

import msgspec
import pyarrow as pa

from timeball.broker.transacting import transactions as core
from timeball.broker.transacting.transactions import Half, Outcome
from timeball.edges.remoting.calls import Call, Handlers, RemotingContext, Reply, store_host
from timeball.edges.remoting.codec import delays
from timeball.edges.remoting.codec.codes import (
    MessageFlag,
    RequestCode,
    ResponseCode,
)
from timeball.edges.remoting.codec.frame import Command
from timeball.edges.remoting.codec.records import encode_stored, offset_msg_id
from timeball.edges.remoting.connection import Connection
from timeball.edges.shared.error_codes import Refused
from timeball.model import limits
from timeball.model.access import Verb
from timeball.model.errors import InvalidMessage
from timeball.model.message import READ_SCHEMA, decode_properties, encode_properties

PREPARED, GROUP = "TRAN_MSG", core.GROUP
TRANSACTION_ID, UNIQUE_KEY = "__transactionId__", "UNIQ_KEY"
CHECK_TIMES = "TRANSACTION_CHECK_TIMES"


class _End(msgspec.Struct):
    producerGroup: str  # noqa: N815  RocketMQ's names
    commitLogOffset: int  # noqa: N815
    commitOrRollback: int  # noqa: N815


def add_half_properties(properties: str, group: str | None) -> str:
    """Add the properties of a half message that a later check and consumers need. Raises InvalidMessage."""
    parsed = decode_properties(properties)
    producer_group = parsed.get(GROUP) or group or ""
    if len(producer_group) > limits.GROUP_BYTES_MAX:
        # The name is kept in memory for each open half message, and there may be many.
        raise InvalidMessage(
            f"the producer group has {len(producer_group)} characters; at most {limits.GROUP_BYTES_MAX}"
        )
    added = {PREPARED: "true", GROUP: producer_group}
    if parsed.get(UNIQUE_KEY):
        added[TRANSACTION_ID] = parsed[UNIQUE_KEY]  # consumers read it
    if added.items() <= parsed.items():
        return properties
    return encode_properties({**parsed, **added})


class Transactions:
    """Serves END_TRANSACTION, and sends the checks of broker/transacting/transaction_checks.py to producers."""

    def __init__(self, context: RemotingContext) -> None:
        self._context = context
        self._core = context.broker.transactions
        self._user_names = context.broker.settings.delay_names
        context.broker.transaction_checks.askers.append(self)
        self.handlers: Handlers = {RequestCode.END_TRANSACTION: self.end}

    async def end(self, call: Call) -> Reply:
        """Serve END_TRANSACTION: commit or roll back the half message at `commitLogOffset`."""
        fields = call.fields(_End)
        commit = fields.commitOrRollback == MessageFlag.TRANSACTION_COMMIT
        if not commit and fields.commitOrRollback != MessageFlag.TRANSACTION_ROLLBACK:
            return call.answer()  # the producer does not know the state: it is checked again later
        half = self._core.find_half(fields.commitLogOffset)
        if half is not None:
            self._context.broker.policy.allow(call.caller, Verb.SEND, topic=half.topic)
        outcome = await self._core.end(
            fields.commitLogOffset, fields.producerGroup, commit=commit, delay=self._delay
        )
        if outcome is Outcome.NOT_FOUND:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"Find prepared transaction message failed: {fields.commitLogOffset} of group "
                f"{fields.producerGroup[: limits.GROUP_BYTES_MAX]}",
            )
        opposite_outcome = Outcome.ROLLED_BACK if commit else Outcome.COMMITTED
        if outcome is opposite_outcome:
            raise Refused(
                ResponseCode.ILLEGAL_OPERATION,
                f"the transaction at {fields.commitLogOffset} was {outcome.value} before",
            )
        return call.answer()

    def _delay(self, properties: dict[str, str]) -> dict[str, int]:
        """Compute the delay of a committed message, as the columns `delay_level` or `due_ms`. Empty: no delay."""
        settings = self._context.broker.settings
        level, due_ms = delays.plan(
            properties,
            self._context.broker.clock.now_ms(),
            settings.delay_ms_max,
            settings.timing_zone,
            self._user_names,
        )
        if level:
            return {"delay_level": level}
        return {} if due_ms is None else {"due_ms": due_ms}

    # -- checks ----------------------------------------------------------------------------------------------

    def has_producer(self, half: Half) -> bool:
        """Return whether a producer of the half message's group is connected."""
        return bool(self._permitted_producers(half))

    def ask(self, half: Half, row: pa.RecordBatch) -> int:
        """Push the half message to a random producer of its group. Returns the size in bytes, 0 without a producer."""
        producers = self._permitted_producers(half)
        if not producers:
            return 0
        connection = choice(producers)
        host, key = store_host(self._context, connection), half.unique_key or ""
        command = Command(
            code=RequestCode.CHECK_TRANSACTION_STATE,
            ext={
                "topic": half.topic,
                "commitLogOffset": str(half.seq),
                "tranStateTableOffset": "0",
                "offsetMsgId": offset_msg_id(host, half.seq),
                "msgId": key,
                "transactionId": key,
                "bname": self._context.broker_name,
            },
            body=encode_stored(_row_for_check(row, half), store_host=host, born_host=host),
        )
        connection.push(command)
        return len(command.body)

    def _permitted_producers(self, half: Half) -> list[Connection]:
        """Return the connected producers of the group that may send to the topic.

        Permission is checked because any client can claim to be a producer of a group.
        """
        return [
            member.connection
            for member in self._context.sessions.producers(half.group)
            if member.connection.is_open
            and self._context.broker.policy.allows(member.connection.caller, Verb.SEND, topic=half.topic)
        ]


def _row_for_check(row: pa.RecordBatch, half: Half) -> pa.RecordBatch:
    """Add the properties that a producer expects in a check to the row of a half message."""
    properties = decode_properties(row.column("properties")[0].as_py() or "")
    properties[CHECK_TIMES] = str(half.checks + 1)
    if half.unique_key is not None:
        properties.setdefault(UNIQUE_KEY, half.unique_key)
        properties[TRANSACTION_ID] = half.unique_key
    column_index = READ_SCHEMA.get_field_index("properties")
    return row.set_column(
        column_index, READ_SCHEMA.field(column_index), pa.array([encode_properties(properties)])
    )
