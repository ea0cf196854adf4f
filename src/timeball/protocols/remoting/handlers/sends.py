"""Sends: checked here, batched with those of others by broker/ingress.py, and answered when they are durable.

A send that breaks a rule is answered at once and shares no batch. What looks like a send and is more is directed
elsewhere first: a message for %RETRY% goes where broker/retry.py says, and a half message to a batcher of its own,
whose batches no consumer sees.
"""

from __future__ import annotations

import itertools
import os

import msgspec

from timeball.access import Caller
from timeball.broker.appending import Accepted
from timeball.broker.ingress import Ingress
from timeball.broker.registry.reserved_topics import RETRY_PREFIX
from timeball.broker.revoking.recall_handle import encode_handle
from timeball.errors import InvalidMessage, TimeballError
from timeball.message import decode_properties, encode_properties
from timeball.protocols.error_codes import Refused, sentence
from timeball.protocols.remoting.calls import response_code
from timeball.protocols.remoting.codec.codes import (
    BROKER_VERSION,
    CommandFlag,
    MessageFlag,
    RequestCode,
    ResponseCode,
)
from timeball.protocols.remoting.codec.frame import Command, Frame
from timeball.protocols.remoting.codec.send_header import SendFields, SendHeader
from timeball.protocols.remoting.codec.send_reply import encode_reply, host_digits
from timeball.protocols.remoting.codec.send_rows import SendRows, Ticket
from timeball.protocols.remoting.codec.unique_keys import UniqueKeys
from timeball.protocols.remoting.connection import Connection
from timeball.protocols.remoting.flow import LARGE_BYTES
from timeball.protocols.remoting.handlers.retries import Retries
from timeball.protocols.remoting.handlers.transactions import prepared
from timeball.protocols.remoting.site import Site

BATCH = int(RequestCode.SEND_BATCH_MESSAGE)
# Plain numbers: an IntFlag makes an object of every result.
TRANSACTION_BITS = int(MessageFlag.TRANSACTION_PREPARED | MessageFlag.TRANSACTION_COMMIT)
ONE_WAY = int(CommandFlag.ONE_WAY)


class Sends:
    """See the module. Belongs to the event loop."""

    def __init__(self, site: Site, retries: Retries) -> None:
        self._site, self._retries = site, retries
        self._broker, self._policy = site.broker, site.broker.policy
        settings = site.broker.parts.settings
        keys = UniqueKeys(b"", os.getpid(), site.broker.parts.clock.now_ms())
        self._rows = SendRows(keys, settings.delay_ms_max, settings.timing_zone, site.cluster_name)
        self._turn = itertools.count()

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
        """Where a send goes that is more than that; its fields are changed to what is to be taken."""
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
            self._policy.admit([fields.topic], fields.default_queues, caller)
            topic = self._broker.parts.topics.get(fields.topic)
        return max(topic.read_queues, topic.write_queues)

    # -- an Edge of broker/ingress.py ------------------------------------------------------------------------

    def answer(self, pieces: list[Ticket], accepted: Accepted) -> None:
        """Answer these sends: one write a connection, however many of its sends the commit held."""
        queue_ids = accepted.kept.column("queue_id").to_pylist()
        offsets = accepted.kept.column("queue_offset").to_pylist()
        answers: dict[Connection, tuple[str, list[bytes]]] = {}
        for ticket in pieces:
            if ticket.is_one_way:
                continue
            at = ticket.first_row
            known = answers.get(ticket.origin)
            if known is None:
                known = answers[ticket.origin] = (host_digits(self._site.store_host(ticket.origin)), [])
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
        _end(pieces)

    def refuse(self, pieces: list[Ticket], error: BaseException) -> None:
        """Answer that these were not taken, and why."""
        for ticket in pieces:
            if not ticket.is_one_way:
                ticket.origin.send(refusal(error, ticket.opaque, ticket.serialisation))
        _end(pieces)

    def _handle(self, ticket: Ticket) -> str:
        assert ticket.due_ms is not None
        return encode_handle(ticket.topic, self._site.broker_name, ticket.due_ms, ticket.unique_key)


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
