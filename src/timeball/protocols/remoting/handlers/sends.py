"""Sends: checked here, batched with those of others by broker/ingress.py, and answered when they are durable.

A send that breaks a rule is answered at once and shares no batch. What looks like a send and is more is directed
elsewhere first: a message for %RETRY% goes where broker/retry.py says, and a half message to a batcher of its own,
whose batches no consumer sees.
"""

from __future__ import annotations

import itertools
import os
from typing import Any

import msgspec

from timeball import rules
from timeball.access import Caller
from timeball.broker.appender import Accepted
from timeball.broker.ingress import Ingress, Piece
from timeball.broker.revoking.recall import RecallRefused, encode_handle
from timeball.errors import InvalidDelay, InvalidMessage, NotFound, TimeballError
from timeball.message import RETRY_PREFIX, SEND_NAMES, SendRow, decode_properties, encode_properties
from timeball.protocols.error_codes import Refused, sentence
from timeball.protocols.remoting.calls import (
    Call,
    Handlers,
    RemotingContext,
    Reply,
    response_code,
    store_host,
)
from timeball.protocols.remoting.codec import delays
from timeball.protocols.remoting.codec.codes import (
    BROKER_VERSION,
    CommandFlag,
    MessageFlag,
    RequestCode,
    ResponseCode,
)
from timeball.protocols.remoting.codec.frame import Command, Frame
from timeball.protocols.remoting.codec.records import UniqueKeys, decode_batch
from timeball.protocols.remoting.codec.sends import TRACED, SendFields, SendHeader, encode_reply, host_digits
from timeball.protocols.remoting.connection import LARGE_BYTES, Connection
from timeball.protocols.remoting.handlers.retries import Retries
from timeball.protocols.remoting.handlers.transactions import prepared

BATCH = int(RequestCode.SEND_BATCH_MESSAGE)
# Plain numbers: an IntFlag makes an object of every result.
TRANSACTION_BITS = int(MessageFlag.TRANSACTION_PREPARED | MessageFlag.TRANSACTION_COMMIT)
ONE_WAY = int(CommandFlag.ONE_WAY)
BATCH_ROWS_MAX = (
    8_192  # the answer names each message, some 66 characters, in a header that the client must parse
)
_BODY_SAFE, _PROPERTIES_SAFE = rules.SAFE_LENGTHS["body"], rules.SAFE_LENGTHS["properties"]
_SHORT = 60  # characters: within all limits, of any bytes
_OVERHEAD_BYTES = 256  # of a row beside its body and texts, about
_UNIQUE_KEY, _DUE_MS, _DELAY_LEVEL = (
    SEND_NAMES.index(name) for name in ("unique_key", "due_ms", "delay_level")
)


class _Recall(msgspec.Struct, rename="camel"):
    topic: str
    recall_handle: str
    producer_group: str | None = None


class Sends:
    """Serves the send requests and RECALL_MESSAGE. Belongs to the event loop."""

    def __init__(self, context: RemotingContext, retries: Retries) -> None:
        self._context, self._retries = context, retries
        self._broker, self._policy = context.broker, context.broker.policy
        settings = context.broker.parts.settings
        self._broker_name = context.broker_name
        keys = UniqueKeys(b"", os.getpid(), context.broker.parts.clock.now_ms())
        self._rows = SendRows(keys, settings.delay_ms_max, settings.timing_zone, context.cluster_name)
        self._turn = itertools.count()
        self.handlers: Handlers = {RequestCode.RECALL_MESSAGE: self._recall}

    def put(self, connection: Connection, header: SendHeader, frame: Frame, now_ms: int) -> None:
        """Take a send, by its header; `frame` is where that was read."""
        fields, ingress, size_bytes = header.fields, self._broker.sends, len(frame.body)
        try:
            if (fields.sys_flag or 0) & TRANSACTION_BITS or fields.topic.startswith(RETRY_PREFIX):
                ingress = self._directed(header)
                fields = header.fields
            queues = self._queues(fields, connection.caller)
            queue_id = -1 if fields.queue_id is None or fields.queue_id < 0 else fields.queue_id
            if queue_id >= queues:
                raise _no_such_queue(fields.topic, queue_id, queues)
            if queue_id < 0 and (header.code == BATCH or fields.batch):
                queue_id = next(self._turn) % queues  # the answer names one place for all of a batch
            ticket = self._rows.ticket(
                self, connection, header, frame.body, frame.serialisation, connection.name, queue_id, now_ms
            )
            if ingress is self._broker.halves:
                ticket.due_ms = None  # its delay begins with the commit: there is nothing to take back yet
            if size_bytes >= LARGE_BYTES:
                ticket.counted_bytes = connection.flow.begins(size_bytes)
            try:
                ingress.put(ticket)
            except TimeballError:
                _end([ticket])
                raise
        except TimeballError as error:
            if not header.flag & ONE_WAY:
                connection.send(refusal(error, header.opaque, frame.serialisation))

    def _directed(self, header: SendHeader) -> Ingress:
        """Return where a send goes that is more than a plain one; its fields are changed for that."""
        fields = header.fields
        if header.code == BATCH or fields.batch:
            raise InvalidMessage("a batch takes ordinary messages only; send these one by one")
        if fields.topic.startswith(RETRY_PREFIX):
            header.fields = self._redirected(header, fields)
        elif (fields.sys_flag or 0) & TRANSACTION_BITS == MessageFlag.TRANSACTION_PREPARED:
            properties = prepared(fields.properties or "", fields.group)
            header.fields = msgspec.structs.replace(fields, properties=properties)
            return self._broker.halves
        return self._broker.sends

    def _redirected(self, header: SendHeader, fields: SendFields) -> SendFields:
        then = self._retries.redirect(
            fields.topic,
            decode_properties(fields.properties or ""),
            fields.reconsume_times,
            fields.max_reconsume_times,
            header.version,
        )
        return msgspec.structs.replace(
            fields,
            topic=then.topic,
            queue_id=-1 if then.is_dead_letter else fields.queue_id,
            properties=encode_properties(then.properties),
            reconsume_times=then.reconsume_times,
            # A message that was sent in a transaction comes back with the bit set, and is no half message.
            sys_flag=(fields.sys_flag or 0) & ~TRANSACTION_BITS,
        )

    def _queues(self, fields: SendFields, caller: Caller) -> int:
        """How many queues the topic has to name; it is made when that is allowed. Raises what the policy raises."""
        topic = self._policy.destination(fields.topic, caller)
        if topic is None:
            self._policy.admit([fields.topic], caller, fields.default_queues)
            topic = self._broker.parts.topics.get(fields.topic)
        return max(topic.read_queues, topic.write_queues)

    async def _recall(self, call: Call) -> Reply:
        """Take a message back that waits, by its handle; what success means is decided in broker/revoking/recall.py.

        A refusal is ILLEGAL_OPERATION, and its sentence says which: too late, unknown, no longer known, or not a handle
        of this topic and broker.
        """
        fields = call.fields(_Recall)
        try:
            unique_key = await self._broker.recall(fields.topic, fields.recall_handle, call.caller)
        except NotFound as error:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, str(error)) from error
        except (InvalidMessage, RecallRefused) as error:
            raise Refused(ResponseCode.ILLEGAL_OPERATION, str(error)) from error
        return call.answer(ext={"msgId": unique_key, **TRACED})

    # -- an Edge of broker/ingress.py ------------------------------------------------------------------------

    def answer(self, pieces: list[Ticket], accepted: Accepted) -> None:
        """Answer these sends: one write a connection, however many of its sends the commit held."""
        _end(pieces)
        queue_ids = accepted.kept.column("queue_id").to_pylist()
        offsets = accepted.kept.column("queue_offset").to_pylist()
        answers: dict[Connection, tuple[str, list[bytes]]] = {}
        for ticket in pieces:
            if ticket.is_one_way:
                continue
            at = ticket.first_row
            known = answers.get(ticket.origin)
            if known is None:
                connection = ticket.origin
                if not connection.id_prefix:
                    connection.id_prefix = host_digits(store_host(self._context, connection))
                known = answers[connection] = (connection.id_prefix, [])
            host, parts = known
            queue_id = ticket.queue_id if ticket.queue_id >= 0 else max(0, queue_ids[at])
            first = accepted.first_seq + at
            parts.append(
                encode_reply(
                    ticket.opaque, ticket.serialisation, queue_id, offsets[at] or 0,
                    f"{host}{first:016X}" if ticket.count == 1 else _msg_ids(host, first, ticket.count),
                    ticket.unique_key, "" if ticket.due_ms is None else self._handle(ticket),
                )
            )  # fmt: skip
        for connection, (_, parts) in answers.items():
            connection.write(b"".join(parts))

    def refuse(self, pieces: list[Ticket], error: BaseException) -> None:
        """Answer that these were not taken, and why."""
        for ticket in pieces:
            if not ticket.is_one_way:
                ticket.origin.send(refusal(error, ticket.opaque, ticket.serialisation))
        _end(pieces)

    def _handle(self, ticket: Ticket) -> str:
        assert ticket.due_ms is not None
        return encode_handle(ticket.topic, self._broker_name, ticket.due_ms, ticket.unique_key)


def _no_such_queue(topic: str, queue_id: int, queues: int) -> Refused:
    return Refused(
        ResponseCode.INVALID_PARAMETER,
        f"request queueId[{queue_id}] is illegal, topic {topic} has {queues} queues",
    )


def _end(tickets: list[Ticket]) -> None:
    """Free what large ones were counted for: they are on their way no more."""
    for ticket in tickets:
        if ticket.counted_bytes:
            ticket.origin.flow.ends(ticket.counted_bytes)
            ticket.counted_bytes = 0  # once, also where an answer fails and is refused after all


def _msg_ids(host: str, first_seq: int, rows: int) -> str:
    return ",".join(f"{host}{seq:016X}" for seq in range(first_seq, first_seq + rows))


def refusal(error: BaseException, opaque: int, serialisation: int) -> Command:
    """The answer to a send that was not taken."""
    return Command(
        code=response_code(error),
        opaque=opaque,
        flag=CommandFlag.RESPONSE,
        remark=sentence(error),
        version=BROKER_VERSION,
        serialisation=serialisation,
    )


# ---- rows --------------------------------------------------------------------------------------------------


class Ticket(Piece, gc=False):
    """One send on its way: the rows that it brings, and what its answer repeats."""

    origin: Connection
    opaque: int
    serialisation: int
    is_one_way: bool
    topic: str
    queue_id: int  # as asked for: what the answer repeats when the message is for later
    unique_key: str
    due_ms: int | None
    counted_bytes: int = 0  # of a large one: what its connection counts as under way until it is answered


class SendRows:
    """Makes tickets of sends. `keys` names the messages whose producers did not."""

    def __init__(self, keys: UniqueKeys, delay_ms_max: int, timing_zone: str, cluster_name: str) -> None:
        self._keys, self._delay_ms_max, self._timing_zone = keys, delay_ms_max, timing_zone
        self._cluster_name = cluster_name

    def ticket(
        self,
        edge: Any,
        origin: Any,
        header: SendHeader,
        body: bytes,
        serialisation: int,
        born_host: str,
        queue_id: int,
        now_ms: int,
    ) -> Ticket:
        """Return the ticket of one send, put by `edge`; raises InvalidMessage or InvalidDelay."""
        fields = header.fields
        if header.code == BATCH or fields.batch:
            rows, unique_key = self._batch(fields, body, born_host, queue_id, now_ms)
            due_ms = None
        else:
            properties = fields.properties or ""
            row = self._row(fields, fields.flag or 0, body, properties, born_host, queue_id, now_ms)
            rows, unique_key, due_ms = [row], row[_UNIQUE_KEY], row[_DUE_MS]
        # In characters: near enough to bytes for what this is for, and a batch has its properties in the body.
        size_bytes = len(body) + len(fields.properties or "") + _OVERHEAD_BYTES * len(rows)
        return Ticket(
            edge, rows, len(rows), size_bytes, 0, None, origin, header.opaque, serialisation,
            header.flag & ONE_WAY != 0, fields.topic, queue_id, unique_key, due_ms,
        )  # fmt: skip

    def _row(
        self, fields: SendFields, flag: int, body: bytes, properties: str, born_host: str, queue_id: int, now_ms: int
    ) -> SendRow:  # fmt: skip
        if (
            len(body) > _BODY_SAFE or len(properties) > _PROPERTIES_SAFE
        ):  # hardly ever, and two calls are 0.2 us
            rules.check("body", body)
            rules.check("properties", properties)
        found = decode_properties(properties)
        level, due_ms = 0, None
        if not delays.NAMES.isdisjoint(found):
            level, due_ms = delays.plan(found, now_ms, self._delay_ms_max, self._timing_zone)
        tag, keys, unique_key = found.get("TAGS"), found.get("KEYS"), found.get("UNIQ_KEY")
        if not unique_key:
            unique_key = self._keys.next(now_ms)
            properties = with_property(properties, "UNIQ_KEY", unique_key)
        if "REPLY_TO_CLIENT" in found and "CLUSTER" not in found:
            # A request: the consumer makes the name of the topic that it replies to from this (replies.py).
            properties = with_property(properties, "CLUSTER", self._cluster_name)
        if keys is not None or len(unique_key) >= _SHORT or (tag is not None and len(tag) >= _SHORT):
            for name, text in (("tag", tag), ("keys", keys), ("unique_key", unique_key)):
                if text is not None:
                    rules.check(name, text)
        return (
            fields.topic, body, tag, keys, unique_key, properties, queue_id, fields.born_ms or now_ms, born_host, flag,
            fields.sys_flag or 0, fields.reconsume_times or 0, due_ms, level or None,
        )  # fmt: skip

    def _batch(
        self, fields: SendFields, body: bytes, born_host: str, queue_id: int, now_ms: int
    ) -> tuple[list[SendRow], str]:
        rules.check("body", body)
        records = decode_batch(body, BATCH_ROWS_MAX)
        if not records:
            raise InvalidMessage("a batch without messages")
        rows = [self._row(fields, r.flag, r.body, r.properties, born_host, queue_id, now_ms) for r in records]
        if any((row[_DUE_MS] or 0) > now_ms or row[_DELAY_LEVEL] is not None for row in rows):
            raise InvalidDelay("a batch takes no delayed messages; send them one by one")
        # The answer names one place for all, so an instant that has passed is none here.
        rows = [(*row[:_DUE_MS], None, *row[_DUE_MS + 1 :]) for row in rows]
        return rows, ",".join(row[_UNIQUE_KEY] for row in rows)


def with_property(properties: str, name: str, value: str) -> str:
    """The properties text with one more property."""
    end = "" if not properties or properties.endswith("\x02") else "\x02"
    return f"{properties}{end}{name}\x01{value}\x02"
