"""Sends: checked here, batched with those of other clients by broker/accepting/ingress.py, and answered when durable.

A send that breaks a rule is answered at once and does not enter a batch. Two kinds of sends are redirected first. A
message for a %RETRY% topic goes to the topic that broker/consuming/retry.py determines. A half message goes to a
batcher of its own, whose batches no consumer sees.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

import msgspec

from timeball.broker.accepting.appender import Accepted
from timeball.broker.accepting.ingress import Ingress
from timeball.broker.revoking.recall import RecallRefused, encode_handle
from timeball.edges.remoting.calls import (
    Call,
    Handlers,
    RemotingContext,
    Reply,
    response_code,
    store_host,
)
from timeball.edges.remoting.codec import delays
from timeball.edges.remoting.codec.codes import (
    BROKER_VERSION,
    CommandFlag,
    MessageFlag,
    RequestCode,
    ResponseCode,
)
from timeball.edges.remoting.codec.frame import Command, Frame
from timeball.edges.remoting.codec.implementation import PYTHON, Codec, SendRun
from timeball.edges.remoting.codec.records import UniqueKeys
from timeball.edges.remoting.codec.sends import (
    TRACED,
    SendFields,
    SendHeader,
    encode_reply,
    host_digits,
    read_send,
)
from timeball.edges.remoting.connection import LARGE_BYTES, Connection
from timeball.edges.remoting.handlers.retries import Retries
from timeball.edges.remoting.handlers.send_rows import (
    BATCH,
    ONE_WAY,
    OVERHEAD_BYTES,
    RunTicket,
    SendRows,
    Ticket,
)
from timeball.edges.remoting.handlers.transactions import prepared
from timeball.edges.shared.error_codes import Refused, sentence
from timeball.model import rules
from timeball.model.access import Caller
from timeball.model.errors import InvalidMessage, NotFound, TimeballError
from timeball.model.message import (
    PRIORITY,
    RETRY_PREFIX,
    decode_properties,
    encode_properties,
)

# Plain numbers: arithmetic with an IntFlag creates an object per result.
TRANSACTION_BITS = int(MessageFlag.TRANSACTION_PREPARED | MessageFlag.TRANSACTION_COMMIT)


INT32_DIGITS = 10
# A message with one of these properties has another type, and its priority does not count.
_NO_PRIORITY = frozenset(
    {"TRAN_MSG", "__SHARDINGKEY", delays.LEVEL, delays.TIMER_SECONDS, delays.TIMER_MS, delays.TIMER_INSTANT}
)


class _Recall(msgspec.Struct, rename="camel"):
    topic: str
    recall_handle: str
    producer_group: str | None = None


class Sends:
    """Serves the send requests and RECALL_MESSAGE. Belongs to the event loop."""

    def __init__(self, context: RemotingContext, retries: Retries, codec: Codec = PYTHON) -> None:
        self._context, self._retries, self._codec = context, retries, codec
        self._broker, self._policy = context.broker, context.broker.policy
        settings, self._clock = context.broker.settings, context.broker.clock
        self._broker_name = context.broker_name
        keys = UniqueKeys(b"", os.getpid(), self._clock.now_ms())
        self._user_names = settings.delay_names
        self._rows = SendRows(
            keys, settings.delay_ms_max, settings.timing_zone, self._user_names, context.cluster_name
        )
        self._turn = itertools.count()
        self.handlers: Handlers = {RequestCode.RECALL_MESSAGE: self._recall}

    def put(self, connection: Connection, header: SendHeader, frame: Frame) -> None:
        """Take a send with this header, read from `frame`."""
        try:
            ingress, ticket = self._ticket(connection, header, frame)
            size_bytes = len(frame.body)
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

    def _ticket(self, connection: Connection, header: SendHeader, frame: Frame) -> tuple[Ingress, Ticket]:
        """Return the ingress that a send goes to, and its ticket."""
        fields, ingress = header.fields, self._broker.sends
        if (fields.sys_flag or 0) & TRANSACTION_BITS or fields.topic.startswith(RETRY_PREFIX):
            ingress = self._directed(header)
            fields = header.fields
        queues = self._queues(fields, connection.caller)
        queue_id = -1 if fields.queue_id is None or fields.queue_id < 0 else fields.queue_id
        if queue_id >= queues:
            raise _no_such_queue(fields.topic, queue_id, queues)
        if queue_id < 0 and (header.code == BATCH or fields.batch):
            queue_id = next(self._turn) % queues  # the answer has one queue and offset for a whole batch
        elif PRIORITY in (fields.properties or ""):
            queue_id = self._queue_by_priority(fields, queue_id)
        body, form, now_ms = frame.body, frame.serialisation, self._clock.now_ms()
        ticket = self._rows.ticket(self, connection, header, body, form, connection.name, queue_id, now_ms)
        if ingress is self._broker.halves:
            ticket.due_ms = None  # its delay begins with the commit, so there is no recall handle yet
        return ingress, ticket

    def _queue_by_priority(self, fields: SendFields, queue_id: int) -> int:
        """Return the queue for a message's priority, or `queue_id` if the priority does not count, as in RocketMQ."""
        properties = decode_properties(fields.properties or "")
        priority = properties.get(PRIORITY, "")
        counts = _NO_PRIORITY.isdisjoint(properties) and not fields.topic.startswith(RETRY_PREFIX)
        if not (counts and priority.isascii() and priority.isdigit() and len(priority) <= INT32_DIGITS):
            return queue_id
        topic = self._broker.tables.topics.get(fields.topic)
        return rules.queue_of_priority(int(priority), max(1, topic.write_queues))

    def put_run(self, connection: Connection, run: SendRun) -> None:
        """Take a run of plain sends, one by one if the decision about them is not the usual one."""
        try:
            for name, queue_id in run.destinations:
                topic = self._policy.destination(name, connection.caller)
                if topic is None or queue_id >= max(topic.read_queues, topic.write_queues):
                    break
            else:
                settings, count = self._context.settings, len(run)
                # now_ms() reads three clocks, which costs as much as all other steps of a single send up to here.
                now_ms = self._clock.now_ms() if run.needs_time else 0
                run.plan(
                    connection.name.encode(), now_ms, settings.delay_ms_max, settings.timing_zone,
                    self._user_names,
                )  # fmt: skip
                size_bytes = run.size_bytes + OVERHEAD_BYTES * count
                self._broker.sends.put(
                    RunTicket(
                        self, run, count, size_bytes, 0, None, connection, self._codec, now_ms, self._tickets
                    )
                )
                return
        except TimeballError:
            pass  # the reference sends each of them its own error
        for frame in run.frames():
            header = read_send(frame)
            assert header is not None, "plain sends are sends"
            self.put(connection, header, frame)

    def _tickets(self, ticket: RunTicket) -> list[Ticket]:
        """Return one ticket per send of a run. Every check that could refuse one of them has passed."""
        found, origin, now_ms = [], ticket.origin, ticket.now_ms or self._clock.now_ms()
        for frame in ticket.rows.frames():
            header = read_send(frame)
            assert header is not None, "plain sends are sends"
            asked = header.fields.queue_id
            queue_id = -1 if asked is None or asked < 0 else asked
            body, form = frame.body, frame.serialisation
            found.append(self._rows.ticket(self, origin, header, body, form, origin.name, queue_id, now_ms))
        return found

    def _directed(self, header: SendHeader) -> Ingress:
        """Return the ingress for a send that is not plain, and change its fields accordingly."""
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
        properties = then.properties
        if not self._user_names.isdisjoint(properties):
            # The user's properties have delayed the message before. Now only the level decided above may delay it.
            properties = {name: value for name, value in properties.items() if name not in self._user_names}
        return msgspec.structs.replace(
            fields,
            topic=then.topic,
            queue_id=-1 if then.is_dead_letter else fields.queue_id,
            properties=encode_properties(properties),
            reconsume_times=then.reconsume_times,
            # A message that was sent in a transaction still has the bit when it comes back, but is no half message.
            sys_flag=(fields.sys_flag or 0) & ~TRANSACTION_BITS,
        )

    def _queues(self, fields: SendFields, caller: Caller) -> int:
        """Return the number of queues of the topic, which is created if that is allowed. Raises as the policy does."""
        topic = self._policy.destination(fields.topic, caller)
        if topic is None:
            self._policy.admit([fields.topic], caller, fields.default_queues)
            topic = self._broker.tables.topics.get(fields.topic)
        return max(topic.read_queues, topic.write_queues)

    async def _recall(self, call: Call) -> Reply:
        """Recall a pending message by its handle. broker/revoking/recall.py defines success.

        A refusal is ILLEGAL_OPERATION. Its text states the reason: too late, unknown, no longer known, or not a handle
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

    # -- an Edge of broker/accepting/ingress.py ------------------------------------------------------------------------

    def answer(self, pieces: list[Ticket | RunTicket], accepted: Accepted) -> None:
        """Answer these sends with one write per connection, even if the commit contains several of its sends."""
        _end(pieces)
        queue_ids, given = accepted.places()
        offsets = [offset or 0 for offset in given]  # a scheduled message has no offset yet
        answers: dict[Connection, list[bytes]] = {}
        first_seq, handle = accepted.first_seq, self._handle
        for ticket in pieces:
            at, connection = ticket.first_row, ticket.origin
            host = connection.id_prefix or self._id_prefix(connection)
            if isinstance(ticket, RunTicket):
                encode = ticket.codec.encode_replies
                answer = encode(ticket.rows, host.encode(), first_seq, at, queue_ids, offsets, handle)
            elif ticket.is_one_way:
                continue
            else:
                answer = self._reply(ticket, host, first_seq + at, queue_ids[at], offsets[at])
            answers.setdefault(connection, []).append(answer)
        for connection, parts in answers.items():
            data = b"".join(parts)
            if data:  # empty if all sends were one-way
                connection.write(data)

    def _reply(self, ticket: Ticket, host: str, first_seq: int, queue_id: int, offset: int) -> bytes:
        """Return the answer to one send, given the position of its first message."""
        due_ms, key = ticket.due_ms, ticket.unique_key
        return encode_reply(
            ticket.opaque, ticket.serialisation,
            ticket.queue_id if ticket.queue_id >= 0 else max(0, queue_id), offset,
            f"{host}{first_seq:016X}" if ticket.count == 1 else _msg_ids(host, first_seq, ticket.count),
            key, "" if due_ms is None else self._handle(ticket.topic, due_ms, key),
        )  # fmt: skip

    def _id_prefix(self, connection: Connection) -> str:
        """Compute the beginning of the ids of messages sent over a connection, for its first answer."""
        connection.id_prefix = host_digits(store_host(self._context, connection))
        return connection.id_prefix

    def refuse(self, pieces: list[Ticket | RunTicket], error: BaseException) -> None:
        """Answer that these sends were not accepted, and why."""
        for ticket in pieces:
            for opaque, serialisation in ticket.requests():
                ticket.origin.send(refusal(error, opaque, serialisation))
        _end(pieces)

    def _handle(self, topic: str, due_ms: int, unique_key: str) -> str:
        return encode_handle(topic, self._broker_name, due_ms, unique_key)


def _no_such_queue(topic: str, queue_id: int, queues: int) -> Refused:
    return Refused(
        ResponseCode.INVALID_PARAMETER,
        f"request queueId[{queue_id}] is illegal, topic {topic} has {queues} queues",
    )


def _end(tickets: Sequence[Ticket | RunTicket]) -> None:
    """Give back the bytes that large sends were counted with: they are no longer pending."""
    for ticket in tickets:
        if isinstance(ticket, Ticket) and ticket.counted_bytes:
            ticket.origin.flow.ends(ticket.counted_bytes)
            ticket.counted_bytes = 0  # only once, even if an answer fails and the send is refused afterwards


def _msg_ids(host: str, first_seq: int, rows: int) -> str:
    return ",".join(f"{host}{seq:016X}" for seq in range(first_seq, first_seq + rows))


def refusal(error: BaseException, opaque: int, serialisation: int) -> Command:
    """Create the answer to a send that was not accepted."""
    return Command(
        code=response_code(error),
        opaque=opaque,
        flag=CommandFlag.RESPONSE,
        remark=sentence(error),
        version=BROKER_VERSION,
        serialisation=serialisation,
    )
