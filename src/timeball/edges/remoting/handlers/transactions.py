"""Transactions: handle END_TRANSACTION (37) from producers and send them CHECK_TRANSACTION_STATE (39).

Half messages arrive as sends (sends.py). A client ends a transaction by the number that it got as the message's
physical offset, nearly always with a one-way request. broker/transacting/transaction_checks.py decides when a producer
is asked about a transaction that was not ended. Then the half message is pushed to a producer of the group, which
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


def prepared(properties: str, group: str | None) -> str:
    """Return a half message's properties with everything that a later check needs. Raises InvalidMessage."""
    found = decode_properties(properties)
    owner = found.get(GROUP) or group or ""
    if len(owner) > limits.GROUP_BYTES_MAX:
        # Each open half message keeps this name in memory, and there may be many.
        raise InvalidMessage(
            f"the producer group has {len(owner)} characters; at most {limits.GROUP_BYTES_MAX}"
        )
    marks = {PREPARED: "true", GROUP: owner}
    if found.get(UNIQUE_KEY):
        marks[TRANSACTION_ID] = found[UNIQUE_KEY]  # consumers read it
    if marks.items() <= found.items():
        return properties
    return encode_properties({**found, **marks})


class Transactions:
    """Serves END_TRANSACTION, and asks producers for broker/transacting/transaction_checks.py."""

    def __init__(self, context: RemotingContext) -> None:
        self._context = context
        self._core = context.broker.transactions
        self._user_names = context.broker.settings.delay_names
        context.broker.transaction_checks.askers.append(self)
        self.handlers: Handlers = {RequestCode.END_TRANSACTION: self.end}

    async def end(self, call: Call) -> Reply:
        """Serve END_TRANSACTION: commit or roll back the half message at `commitLogOffset`, or leave it open."""
        asked = call.fields(_End)
        commit = asked.commitOrRollback == MessageFlag.TRANSACTION_COMMIT
        if not commit and asked.commitOrRollback != MessageFlag.TRANSACTION_ROLLBACK:
            return call.answer()  # the state is unknown: the producer is asked again later
        half = self._core.find_half(asked.commitLogOffset)
        if half is not None:
            self._context.broker.policy.allow(call.caller, Verb.SEND, topic=half.topic)
        outcome = await self._core.end(
            asked.commitLogOffset, asked.producerGroup, commit=commit, delay=self._delay
        )
        if outcome is Outcome.NOT_FOUND:
            raise Refused(
                ResponseCode.SYSTEM_ERROR,
                f"Find prepared transaction message failed: {asked.commitLogOffset} of group "
                f"{asked.producerGroup[: limits.GROUP_BYTES_MAX]}",
            )
        other = Outcome.ROLLED_BACK if commit else Outcome.COMMITTED
        if outcome is other:
            raise Refused(
                ResponseCode.ILLEGAL_OPERATION,
                f"the transaction at {asked.commitLogOffset} was {outcome.value} before",
            )
        return call.answer()

    def _delay(self, properties: dict[str, str]) -> dict[str, int]:
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

    # -- asking ----------------------------------------------------------------------------------------------

    def has_producer(self, half: Half) -> bool:
        """Return whether a producer of the half's group is connected."""
        return bool(self._producers(half))

    def ask(self, half: Half, row: pa.RecordBatch) -> int:
        """Push the half message to one of its producers, and return the number of bytes pushed."""
        producers = self._producers(half)
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
            body=encode_stored(_asked(row, half), store_host=host, born_host=host),
        )
        connection.push(command)
        return len(command.body)

    def _producers(self, half: Half) -> list[Connection]:
        """Return the producers that may see the half message: any client can claim to be a producer of a group."""
        return [
            one.connection
            for one in self._context.sessions.producers(half.group)
            if one.connection.is_open
            and self._context.broker.policy.allows(one.connection.caller, Verb.SEND, topic=half.topic)
        ]


def _asked(row: pa.RecordBatch, half: Half) -> pa.RecordBatch:
    """Return the half message as a producer gets it in a check."""
    properties = decode_properties(row.column("properties")[0].as_py() or "")
    properties[CHECK_TIMES] = str(half.checks + 1)
    if half.unique_key is not None:
        properties.setdefault(UNIQUE_KEY, half.unique_key)
        properties[TRANSACTION_ID] = half.unique_key
    at = READ_SCHEMA.get_field_index("properties")
    return row.set_column(at, READ_SCHEMA.field(at), pa.array([encode_properties(properties)]))
