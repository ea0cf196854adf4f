"""Sends: what a producer hands over is checked, and gathered with what others send meanwhile (gathering.py).

A send that breaks a rule is answered at once and harms nobody. What looks like a send and is more is directed
elsewhere first: a message for %RETRY% goes where broker/retry.py says, and a half message to a gathering of its
own, whose batches the broker keeps and shows to nobody.
"""

from __future__ import annotations

import itertools
import os

import msgspec

from timeball.access import Caller
from timeball.broker.registry.reserved_topics import RETRY_PREFIX
from timeball.errors import InvalidMessage, TimeballError
from timeball.message import decode_properties, encode_properties
from timeball.protocols.remoting.calls import Refused
from timeball.protocols.remoting.codec.codes import (
    CommandFlag,
    MessageFlag,
    RequestCode,
    ResponseCode,
)
from timeball.protocols.remoting.codec.frame import Frame
from timeball.protocols.remoting.codec.send_header import SendFields, SendHeader
from timeball.protocols.remoting.codec.unique_keys import UniqueKeys
from timeball.protocols.remoting.connection import Connection
from timeball.protocols.remoting.flow import LARGE_BYTES
from timeball.protocols.remoting.gathering import Gathering, refusal
from timeball.protocols.remoting.retries import Retries
from timeball.protocols.remoting.site import Site
from timeball.protocols.remoting.transactions import prepared

BATCH = int(RequestCode.SEND_BATCH_MESSAGE)
# Plain numbers: an IntFlag makes an object of every result.
TRANSACTION_BITS = int(MessageFlag.TRANSACTION_PREPARED | MessageFlag.TRANSACTION_COMMIT)
ONE_WAY = int(CommandFlag.ONE_WAY)


class Sends:
    """See the module. Belongs to the event loop."""

    def __init__(self, site: Site, retries: Retries) -> None:
        self._site, self._retries = site, retries
        self._broker, self._policy = site.broker, site.broker.policy
        keys = UniqueKeys(b"", os.getpid(), site.broker.parts.clock.now_ms())
        self._plain = Gathering(site, keys, self._broker.send_nowait)
        self._halves = Gathering(site, keys, self._broker.prepare_nowait, recallable=False)
        self._turn = itertools.count()

    def take(self, connection: Connection, header: SendHeader, frame: Frame, now_ms: int) -> None:
        """Take a send, by its header; `frame` is where that was read."""
        fields, gathering = header.fields, self._plain
        try:
            if (fields.sys_flag or 0) & TRANSACTION_BITS or fields.topic.startswith(RETRY_PREFIX):
                gathering = self._directed(header)
                fields = header.fields
            queues = self._queues(fields, connection.caller)
            queue_id = -1 if fields.queue_id is None or fields.queue_id < 0 else fields.queue_id
            if queue_id >= queues:
                raise _no_such_queue(fields.topic, queue_id, queues)
            if queue_id < 0 and (header.code == BATCH or fields.batch):
                queue_id = next(self._turn) % queues  # the answer names one place for all of a batch
            gathering.columns.feed(
                connection, header, frame.body, frame.serialisation, connection.name, queue_id, now_ms
            )
        except TimeballError as error:
            if not header.flag & ONE_WAY:
                connection.send(refusal(error, header.opaque, frame.serialisation))
            return
        if len(frame.body) >= LARGE_BYTES:
            gathering.columns.tickets[-1].counted_bytes = connection.flow.begins(len(frame.body))
        gathering.fed()

    def _directed(self, header: SendHeader) -> Gathering:
        """Where a send goes that is more than that; its fields are changed to what is to be taken."""
        fields = header.fields
        if header.code == BATCH or fields.batch:
            raise InvalidMessage("a batch takes ordinary messages only; send these one by one")
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

    def _queues(self, fields: SendFields, caller: Caller) -> int:
        """How many queues the topic has to name; it is made when that is allowed. Raises what the policy raises."""
        topic = self._policy.destination(fields.topic, caller)
        if topic is None:
            self._policy.admit([fields.topic], fields.default_queues, caller)
            topic = self._broker.parts.topics.get(fields.topic)
        return max(topic.read_queues, topic.write_queues)


def _no_such_queue(topic: str, queue_id: int, queues: int) -> Refused:
    return Refused(
        ResponseCode.INVALID_PARAMETER,
        f"request queueId[{queue_id}] is illegal, topic {topic} has {queues} queues",
    )
