"""Serve the send requests. `Ingress` batches the sends of all clients. A send is answered when its batch is durable.

A send that breaks a rule is refused at once and does not enter a batch. Two kinds of sends are redirected. A message
for a %RETRY% topic goes to the topic that broker/consuming/retry.py decides. A half message goes to an ingress of its
own (`Broker.halves`), so that no consumer sees it before the commit.
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
from timeball.edges.remoting.handlers.transactions import add_half_properties
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
# The priority of a message with one of these properties is ignored, because the message is of another type.
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
        unique_keys = UniqueKeys(b"", os.getpid(), self._clock.now_ms())
        self._user_names = settings.delay_names
        self._rows = SendRows(
            unique_keys, settings.delay_ms_max, settings.timing_zone, self._user_names, context.cluster_name
        )
        self._batch_count = itertools.count()  # distributes batches over the queues
        self.handlers: Handlers = {RequestCode.RECALL_MESSAGE: self._recall}

    def put(self, connection: Connection, header: SendHeader, frame: Frame) -> None:
        """Check a send and pass it to its ingress. A refusal is sent at once. `header` was read from `frame`."""
        try:
            ingress, ticket = self._create_ticket(connection, header, frame)
            size_bytes = len(frame.body)
            if size_bytes >= LARGE_BYTES:
                ticket.counted_bytes = connection.flow.count_request(size_bytes)
            try:
                ingress.put(ticket)
            except TimeballError:
                _release_memory([ticket])
                raise
        except TimeballError as error:
            if not header.flag & ONE_WAY:
                connection.send(refusal(error, header.opaque, frame.serialisation))

    def _create_ticket(
        self, connection: Connection, header: SendHeader, frame: Frame
    ) -> tuple[Ingress, Ticket]:
        """Choose the ingress and the queue of a send, and create its ticket. Raises an error that refuses the send."""
        fields, ingress = header.fields, self._broker.sends
        if (fields.sys_flag or 0) & TRANSACTION_BITS or fields.topic.startswith(RETRY_PREFIX):
            ingress = self._redirect(header)
            fields = header.fields
        queue_count = self._queue_count(fields, connection.caller)
        queue_id = -1 if fields.queue_id is None or fields.queue_id < 0 else fields.queue_id
        if queue_id >= queue_count:
            raise _no_such_queue(fields.topic, queue_id, queue_count)
        if queue_id < 0 and (header.code == BATCH or fields.batch):
            # One queue for the whole batch, since the answer has one queue and offset.
            queue_id = next(self._batch_count) % queue_count
        elif PRIORITY in (fields.properties or ""):
            queue_id = self._queue_by_priority(fields, queue_id)
        body, serialisation, now_ms = frame.body, frame.serialisation, self._clock.now_ms()
        ticket = self._rows.ticket(
            self, connection, header, body, serialisation, connection.name, queue_id, now_ms
        )
        if ingress is self._broker.halves:
            ticket.due_ms = None  # the delay begins with the commit, so the answer has no recall handle
        return ingress, ticket

    def _queue_by_priority(self, fields: SendFields, queue_id: int) -> int:
        """Choose the queue by the PRIORITY property, as RocketMQ does. Returns `queue_id` without a valid priority."""
        properties = decode_properties(fields.properties or "")
        priority = properties.get(PRIORITY, "")
        has_valid_type = _NO_PRIORITY.isdisjoint(properties) and not fields.topic.startswith(RETRY_PREFIX)
        if not (
            has_valid_type and priority.isascii() and priority.isdigit() and len(priority) <= INT32_DIGITS
        ):
            return queue_id
        topic = self._broker.tables.topics.get(fields.topic)
        return rules.queue_of_priority(int(priority), max(1, topic.write_queues))

    def put_run(self, connection: Connection, run: SendRun) -> None:
        """Pass a run of plain sends to the ingress, as one piece if possible, or one by one."""
        try:
            for topic_name, queue_id in run.destinations:
                topic = self._policy.destination(topic_name, connection.caller)
                if topic is None or queue_id >= max(topic.read_queues, topic.write_queues):
                    break
            else:
                settings, count = self._context.settings, len(run)
                # now_ms() reads three clocks, which takes as long as all other steps of a single send up to here.
                now_ms = self._clock.now_ms() if run.needs_time else 0
                run.plan(
                    connection.name.encode(), now_ms, settings.delay_ms_max, settings.timing_zone,
                    self._user_names,
                )  # fmt: skip
                size_bytes = run.size_bytes + OVERHEAD_BYTES * count
                self._broker.sends.put(
                    RunTicket(
                        self,
                        run,
                        count,
                        size_bytes,
                        0,
                        None,
                        connection,
                        self._codec,
                        now_ms,
                        self._create_tickets,
                    )
                )
                return
        except TimeballError:
            pass  # `put` below sends each of them its own answer
        for frame in run.frames():
            header = read_send(frame)
            assert header is not None, "a run contains only sends"
            self.put(connection, header, frame)

    def _create_tickets(self, ticket: RunTicket) -> list[Ticket]:
        """Create one ticket per send of a run. `put_run` has made every check that could refuse one of them."""
        tickets, origin, now_ms = [], ticket.origin, ticket.now_ms or self._clock.now_ms()
        for frame in ticket.rows.frames():
            header = read_send(frame)
            assert header is not None, "a run contains only sends"
            requested_queue_id = header.fields.queue_id
            queue_id = -1 if requested_queue_id is None or requested_queue_id < 0 else requested_queue_id
            body, serialisation = frame.body, frame.serialisation
            tickets.append(
                self._rows.ticket(self, origin, header, body, serialisation, origin.name, queue_id, now_ms)
            )
        return tickets

    def _redirect(self, header: SendHeader) -> Ingress:
        """Choose the ingress of a half message or a retry, and replace the fields in its header."""
        fields = header.fields
        if header.code == BATCH or fields.batch:
            raise InvalidMessage("a batch takes ordinary messages only; send these one by one")
        if fields.topic.startswith(RETRY_PREFIX):
            header.fields = self._redirect_retry(header, fields)
        elif (fields.sys_flag or 0) & TRANSACTION_BITS == MessageFlag.TRANSACTION_PREPARED:
            properties = add_half_properties(fields.properties or "", fields.group)
            header.fields = msgspec.structs.replace(fields, properties=properties)
            return self._broker.halves
        return self._broker.sends

    def _redirect_retry(self, header: SendHeader, fields: SendFields) -> SendFields:
        """Return the fields of a send to a %RETRY% topic with its real destination."""
        destination = self._retries.redirect(
            fields.topic,
            decode_properties(fields.properties or ""),
            fields.reconsume_times,
            fields.max_reconsume_times,
            header.version,
        )
        properties = destination.properties
        if not self._user_names.isdisjoint(properties):
            # The user's delay properties applied to the first delivery. Only the delay level of the retry applies now.
            properties = {name: value for name, value in properties.items() if name not in self._user_names}
        return msgspec.structs.replace(
            fields,
            topic=destination.topic,
            queue_id=-1 if destination.is_dead_letter else fields.queue_id,
            properties=encode_properties(properties),
            reconsume_times=destination.reconsume_times,
            # A message from a transaction still has these bits when it is retried, but it is not a half message.
            sys_flag=(fields.sys_flag or 0) & ~TRANSACTION_BITS,
        )

    def _queue_count(self, fields: SendFields, caller: Caller) -> int:
        """Return the number of queues of the topic. Creates the topic if the policy allows it, or raises its error."""
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

    # -- the interface `Edge` of broker/accepting/ingress.py -----------------------------------------------------------

    def answer(self, pieces: list[Ticket | RunTicket], accepted: Accepted) -> None:
        """Answer the sends of a commit, with one write per connection."""
        _release_memory(pieces)
        queue_ids, row_offsets = accepted.places()
        offsets = [offset or 0 for offset in row_offsets]  # a scheduled message has no offset yet
        answers: dict[Connection, list[bytes]] = {}
        first_seq, handle = accepted.first_seq, self._recall_handle
        for ticket in pieces:
            row, connection = ticket.first_row, ticket.origin
            host = connection.id_prefix or self._id_prefix(connection)
            if isinstance(ticket, RunTicket):
                encode = ticket.codec.encode_replies
                answer = encode(ticket.rows, host.encode(), first_seq, row, queue_ids, offsets, handle)
            elif ticket.is_one_way:
                continue
            else:
                answer = self._encode_answer(ticket, host, first_seq + row, queue_ids[row], offsets[row])
            answers.setdefault(connection, []).append(answer)
        for connection, encoded in answers.items():
            data = b"".join(encoded)
            if data:  # empty if all sends were one-way
                connection.write(data)

    def _encode_answer(self, ticket: Ticket, host: str, first_seq: int, queue_id: int, offset: int) -> bytes:
        """Encode the answer to one send. `first_seq`, `queue_id` and `offset` are of its first message."""
        due_ms, key = ticket.due_ms, ticket.unique_key
        return encode_reply(
            ticket.opaque, ticket.serialisation,
            ticket.queue_id if ticket.queue_id >= 0 else max(0, queue_id), offset,
            f"{host}{first_seq:016X}" if ticket.count == 1 else _msg_ids(host, first_seq, ticket.count),
            key, "" if due_ms is None else self._recall_handle(ticket.topic, due_ms, key),
        )  # fmt: skip

    def _id_prefix(self, connection: Connection) -> str:
        """Compute the first part of the message ids for a connection, and cache it there."""
        connection.id_prefix = host_digits(store_host(self._context, connection))
        return connection.id_prefix

    def refuse(self, pieces: list[Ticket | RunTicket], error: BaseException) -> None:
        """Answer these sends with an error."""
        for ticket in pieces:
            for opaque, serialisation in ticket.requests():
                ticket.origin.send(refusal(error, opaque, serialisation))
        _release_memory(pieces)

    def _recall_handle(self, topic: str, due_ms: int, unique_key: str) -> str:
        return encode_handle(topic, self._broker_name, due_ms, unique_key)


def _no_such_queue(topic: str, queue_id: int, queue_count: int) -> Refused:
    return Refused(
        ResponseCode.INVALID_PARAMETER,
        f"request queueId[{queue_id}] is illegal, topic {topic} has {queue_count} queues",
    )


def _release_memory(tickets: Sequence[Ticket | RunTicket]) -> None:
    """Release the counted bytes of large sends, which are no longer pending."""
    for ticket in tickets:
        if isinstance(ticket, Ticket) and ticket.counted_bytes:
            ticket.origin.flow.release_request(ticket.counted_bytes)
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
