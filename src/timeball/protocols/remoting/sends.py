"""Sends: from the frames of all connections to one batch, one commit, and an answer each.

    frames -> checked, into columns -> (the commit before is on disk) -> one batch -> broker -> durable -> answers

There is no timer: while one batch is on its way to the disk the next one gathers, so a lone producer waits for
one commit and a thousand share it. A send that breaks a rule is answered at once and harms nobody; if the broker
refuses a whole batch for something that was not foreseen, its sends are handed over one by one.

What looks like a send and is more goes to its own room: messages that consumers give back, and transactions.
"""

from __future__ import annotations

import asyncio
import os
from functools import partial

import pyarrow as pa

from timeball import limits
from timeball.broker.service import Accepted
from timeball.broker.topics import Topic, check_name
from timeball.errors import InvalidMessage, RequestError, TimeballError, Unavailable
from timeball.protocols.remoting.calls import Refused, response_code
from timeball.protocols.remoting.codec import recall
from timeball.protocols.remoting.codec.codes import (
    BROKER_VERSION,
    CommandFlag,
    MessageFlag,
    ResponseCode,
)
from timeball.protocols.remoting.codec.frame import Command, Frame
from timeball.protocols.remoting.codec.reserved import forbidden
from timeball.protocols.remoting.codec.send_columns import SendColumns, Ticket
from timeball.protocols.remoting.codec.send_header import SendHeader, read_send
from timeball.protocols.remoting.codec.send_reply import SendReply, encode_reply, host_digits
from timeball.protocols.remoting.codec.unique_keys import UniqueKeys
from timeball.protocols.remoting.connection import Connection
from timeball.protocols.remoting.site import Site

GATHER_BYTES_MAX = 32 * 1024 * 1024  # a batch this large does not wait for the commit before it
GATHER_ROWS_MAX = limits.ROWS_PER_REQUEST_MAX // 2
PERM_WRITE = 2
RETRY_PREFIX = "%RETRY%"
TRANSACTION_BITS = MessageFlag.TRANSACTION_PREPARED | MessageFlag.TRANSACTION_COMMIT


class Sends:
    """See the module. Belongs to the event loop."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._broker = site.broker
        self._clock = site.broker.parts.clock
        settings = site.broker.parts.settings
        self._columns = SendColumns(UniqueKeys(b"", os.getpid(), self._clock.now_ms()), settings.delay_ms_max)
        self._loop = asyncio.get_running_loop()
        self._committing = 0
        self._scheduled = False

    def take(self, connection: Connection, frame: Frame) -> bool:
        """Take a frame if it is a plain send; raises BadFrame."""
        header = read_send(frame)
        if header is None:
            return False
        fields = header.fields
        if fields.topic.startswith(RETRY_PREFIX) or (fields.sys_flag or 0) & TRANSACTION_BITS:
            return False
        try:
            topic = self._topic(header)
            self._columns.feed(
                connection,
                header,
                frame.body,
                serialisation=frame.serialisation,
                born_host=connection.name,
                queue_id=_queue(topic, fields.queue_id),
                now_ms=self._clock.now_ms(),
            )
        except TimeballError as error:
            if not header.flag & CommandFlag.ONE_WAY:
                connection.send(_refusal(error, header.opaque, frame.serialisation))
            return True
        self._schedule()
        return True

    def _topic(self, header: SendHeader) -> Topic:
        """The topic to send to, made when that is allowed."""
        fields = header.fields
        topics = self._broker.parts.topics
        topic = topics.find(fields.topic)
        if topic is None:
            topic = self._make_topic(fields.topic, fields.default_queues)
        if not topic.perm & PERM_WRITE:
            raise Refused(
                ResponseCode.NO_PERMISSION,
                f"the broker[{self._site.broker_name}] sending message is forbidden",
            )
        remark = forbidden(fields.topic)
        if remark is not None:
            raise Refused(ResponseCode.NO_PERMISSION, remark)
        return topic

    def _make_topic(self, name: str, wanted_queues: int | None) -> Topic:
        remark = forbidden(name)
        if remark is not None:
            raise Refused(ResponseCode.NO_PERMISSION, remark)
        try:
            check_name(name, limits.TOPIC_BYTES_MAX, "topic")
        except InvalidMessage as error:
            raise Refused(ResponseCode.INVALID_PARAMETER, str(error)) from error
        settings = self._broker.parts.settings
        if not settings.auto_create_topics:
            raise Refused(ResponseCode.TOPIC_NOT_EXIST, f"topic[{name}] not exist, apply first please!")
        queues = min(wanted_queues or settings.queues_per_topic, settings.queues_per_topic)
        return self._broker.parts.topics.ensure(name, max(1, queues))

    def _schedule(self) -> None:
        full = self._columns.size_bytes >= GATHER_BYTES_MAX or len(self._columns) >= GATHER_ROWS_MAX
        if full:
            self._drain()
        elif not self._scheduled and not self._committing:
            self._scheduled = True
            # The end of this turn of the loop: whatever other connections have sent meanwhile comes along.
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        if len(self._columns):
            self._hand_over(*self._columns.take())

    def _hand_over(self, batch: pa.RecordBatch, tickets: list[Ticket]) -> None:
        try:
            accepted, durable = self._broker.send_nowait(batch)
        except RequestError as error:
            if len(tickets) == 1:
                self._refuse(tickets, error)
                return
            for ticket in tickets:
                part = batch.slice(ticket.first_row, ticket.rows)
                ticket.first_row = 0
                self._hand_over(part, [ticket])
        except Exception as error:  # whatever it is, these sends get an answer and the next ones their turn
            self._refuse(tickets, error)
        else:
            self._committing += 1
            durable.add_done_callback(partial(self._committed, tickets, accepted))

    def _committed(self, tickets: list[Ticket], accepted: Accepted, durable: asyncio.Future[int]) -> None:
        self._committing -= 1
        if len(self._columns) and not self._committing:
            self._drain()  # first, so that the disk has work while we write answers
        failure = Unavailable("the broker is stopping") if durable.cancelled() else durable.exception()
        if failure is not None:
            self._refuse(tickets, failure)
        else:
            self._answer(tickets, accepted)

    def _answer(self, tickets: list[Ticket], accepted: Accepted) -> None:
        """One write a connection, however many of its sends the commit held."""
        queue_ids = accepted.kept.column("queue_id").to_pylist()
        offsets = accepted.kept.column("queue_offset").to_pylist()
        answers: dict[Connection, list[bytes]] = {}
        digits: dict[Connection, str] = {}
        for ticket in tickets:
            if ticket.is_one_way:
                continue
            connection: Connection = ticket.origin
            at = ticket.first_row
            host = digits.get(connection)
            if host is None:
                host = digits[connection] = host_digits(self._site.store_host(connection))
                answers[connection] = []
            first = accepted.first_seq + at
            ids = (
                f"{host}{first:016X}"
                if ticket.rows == 1
                else ",".join(f"{host}{seq:016X}" for seq in range(first, first + ticket.rows))
            )
            reply = SendReply(
                ticket.opaque, ticket.serialisation, ticket.queue_id if ticket.queue_id >= 0 else max(0, queue_ids[at]),
                offsets[at] or 0, ids, ticket.unique_key, self._handle(ticket),
            )  # fmt: skip
            answers[connection].append(encode_reply(reply))
        for connection, parts in answers.items():
            connection.write(b"".join(parts))

    def _handle(self, ticket: Ticket) -> str:
        if ticket.due_ms is None:
            return ""
        return recall.encode_handle(ticket.topic, self._site.broker_name, ticket.due_ms, ticket.unique_key)

    def _refuse(self, tickets: list[Ticket], error: BaseException) -> None:
        for ticket in tickets:
            if not ticket.is_one_way:
                ticket.origin.send(_refusal(error, ticket.opaque, ticket.serialisation))


def _queue(topic: Topic, queue_id: int | None) -> int:
    if queue_id is None or queue_id < 0:
        return -1
    if queue_id >= max(topic.read_queues, topic.write_queues):
        raise Refused(
            ResponseCode.INVALID_PARAMETER,
            f"request queueId[{queue_id}] is illegal, topic {topic.name} has {topic.write_queues} queues",
        )
    return queue_id


def _refusal(error: BaseException, opaque: int, serialisation: int) -> Command:
    text = str(error) if isinstance(error, TimeballError) else f"internal error: {type(error).__name__}"
    return Command(
        code=response_code(error),
        opaque=opaque,
        flag=CommandFlag.RESPONSE,
        remark=text,
        version=BROKER_VERSION,
        serialisation=serialisation,
    )
