"""Sends: from the frames of all connections to one batch, one commit, and an answer each.

    frames -> checked, into columns -> (the commit before is on disk) -> one batch -> broker -> durable -> answers

There is no timer: while one batch is on its way to the disk the next one gathers, so a lone producer waits for
one commit and a thousand share it. A send that breaks a rule is answered at once and harms nobody; if the broker
refuses a whole batch for something that was not foreseen, its sends are handed over one by one.

What looks like a send and is more is directed elsewhere first: a message for %RETRY% goes where broker/retry.py
says, and a half message to a gathering of its own, whose batches the broker keeps and shows to nobody.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from functools import partial

import msgspec
import pyarrow as pa

from timeball import limits
from timeball.broker.service import Accepted
from timeball.broker.topics import Topic, check_name
from timeball.errors import InvalidMessage, RequestError, TimeballError, Unavailable
from timeball.message import decode_properties, encode_properties
from timeball.protocols.remoting.calls import Refused, response_code
from timeball.protocols.remoting.codec import recall
from timeball.protocols.remoting.codec.codes import (
    BROKER_VERSION,
    CommandFlag,
    MessageFlag,
    ResponseCode,
)
from timeball.protocols.remoting.codec.frame import Command, Frame
from timeball.protocols.remoting.codec.reserved import RETRY_PREFIX, forbidden
from timeball.protocols.remoting.codec.send_columns import SendColumns, Ticket
from timeball.protocols.remoting.codec.send_header import SendFields, SendHeader, read_send
from timeball.protocols.remoting.codec.send_reply import SendReply, encode_reply, host_digits
from timeball.protocols.remoting.codec.unique_keys import UniqueKeys
from timeball.protocols.remoting.connection import Connection
from timeball.protocols.remoting.retries import Retries
from timeball.protocols.remoting.site import Site
from timeball.protocols.remoting.transactions import prepared

GATHER_BYTES_MAX = 32 * 1024 * 1024  # a batch this large does not wait for the commit before it
GATHER_ROWS_MAX = limits.ROWS_PER_REQUEST_MAX // 2
PERM_WRITE = 2
# Plain numbers: an IntFlag makes an object of every result.
TRANSACTION_BITS = int(MessageFlag.TRANSACTION_PREPARED | MessageFlag.TRANSACTION_COMMIT)
ONE_WAY = int(CommandFlag.ONE_WAY)

Accept = Callable[[pa.RecordBatch], tuple[Accepted, asyncio.Future[int]]]


class Sends:
    """See the module. Belongs to the event loop."""

    def __init__(self, site: Site, retries: Retries) -> None:
        self._site, self._retries = site, retries
        self._broker, self._topics = site.broker, site.broker.parts.topics
        keys = UniqueKeys(b"", os.getpid(), site.broker.parts.clock.now_ms())
        self._plain = Gathering(site, keys, self._broker.send_nowait)
        self._halves = Gathering(site, keys, self._broker.prepare_nowait, recallable=False)
        self._allowed: set[str] = set()

    def take(self, connection: Connection, frame: Frame, now_ms: int) -> bool:
        """Take a frame if it is a send; raises BadFrame."""
        header = read_send(frame)
        if header is None:
            return False
        fields, gathering = header.fields, self._plain
        try:
            if (fields.sys_flag or 0) & TRANSACTION_BITS or fields.topic.startswith(RETRY_PREFIX):
                gathering = self._directed(header)
                fields = header.fields
            queue_id = _queue(self._topic(fields), fields.queue_id)
            gathering.columns.feed(
                connection, header, frame.body, frame.serialisation, connection.name, queue_id, now_ms
            )
        except TimeballError as error:
            if not header.flag & ONE_WAY:
                connection.send(_refusal(error, header.opaque, frame.serialisation))
            return True
        gathering.fed()
        return True

    def _directed(self, header: SendHeader) -> Gathering:
        """Where a send goes that is more than that; its fields are changed to what is to be taken."""
        fields = header.fields
        if fields.topic.startswith(RETRY_PREFIX):
            header.fields = self._redirected(header, fields)
        elif (fields.sys_flag or 0) & TRANSACTION_BITS == MessageFlag.TRANSACTION_PREPARED:
            properties = prepared(fields.properties or "", fields.group)
            header.fields = msgspec.structs.replace(fields, properties=properties)
            return self._halves
        return self._plain

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

    def _topic(self, fields: SendFields) -> Topic:
        """The topic to send to, made when that is allowed."""
        topic = self._topics.find(fields.topic)
        if topic is None:
            return self._make_topic(fields.topic, fields.default_queues)
        if fields.topic not in self._allowed:
            remark = forbidden(fields.topic)
            if remark is not None:
                raise Refused(ResponseCode.NO_PERMISSION, remark)
            self._allowed.add(fields.topic)  # only names of topics come here, and of those there is a limit
        if not topic.perm & PERM_WRITE:
            remark = f"the broker[{self._site.broker_name}] sending message is forbidden"
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


class Gathering:
    """Sends on their way to one verb of the broker, `accept`; `recallable`: a delayed one can be taken back."""

    def __init__(self, site: Site, keys: UniqueKeys, accept: Accept, *, recallable: bool = True) -> None:
        self._site, self._accept, self._recallable = site, accept, recallable
        self.columns = SendColumns(keys, site.broker.parts.settings.delay_ms_max)
        self._loop = asyncio.get_running_loop()
        self._committing = 0
        self._scheduled = False

    def fed(self) -> None:
        """Something has been put into the columns; it is answered when its commit is durable."""
        if not (self._scheduled or self._committing) or self._is_full():
            self._schedule()

    def _is_full(self) -> bool:
        return self.columns.size_bytes >= GATHER_BYTES_MAX or len(self.columns) >= GATHER_ROWS_MAX

    def _schedule(self) -> None:
        if self._is_full():
            self._drain()
        else:
            self._scheduled = True
            # The end of this turn of the loop: whatever other connections have sent meanwhile comes along.
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        if len(self.columns):
            self._hand_over(*self.columns.take())

    def _hand_over(self, batch: pa.RecordBatch, tickets: list[Ticket]) -> None:
        try:
            accepted, durable = self._accept(batch)
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
        if len(self.columns) and not self._committing:
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
        answers: dict[Connection, tuple[str, list[bytes]]] = {}
        for ticket in tickets:
            if ticket.is_one_way:
                continue
            at = ticket.first_row
            known = answers.get(ticket.origin)
            if known is None:
                known = answers[ticket.origin] = (host_digits(self._site.store_host(ticket.origin)), [])
            host, parts = known
            queue_id = ticket.queue_id if ticket.queue_id >= 0 else max(0, queue_ids[at])
            parts.append(
                encode_reply(
                    SendReply(
                        ticket.opaque, ticket.serialisation, queue_id, offsets[at] or 0,
                        _msg_ids(host, accepted.first_seq + at, ticket.rows), ticket.unique_key,
                        self._handle(ticket),
                    )
                )
            )  # fmt: skip
        for connection, (_, parts) in answers.items():
            connection.write(b"".join(parts))

    def _handle(self, ticket: Ticket) -> str:
        if ticket.due_ms is None or not self._recallable:
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


def _msg_ids(host: str, first_seq: int, rows: int) -> str:
    if rows == 1:
        return f"{host}{first_seq:016X}"
    return ",".join(f"{host}{seq:016X}" for seq in range(first_seq, first_seq + rows))


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
