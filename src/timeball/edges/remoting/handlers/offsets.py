"""Offsets: the committed offsets of a group, and the minimum, maximum and time-based offsets of queues.

If a group has no offset in a queue yet, the answer is QUERY_NOT_FOUND, and its client begins where its setting
`ConsumeFromWhere` says. RocketMQ answers 0 while the queue's first message is in memory: a new group then gets the
history of a young topic, even if it is set to begin at the end. Here, a new group gets 0 only for a queue that had no
message when the group subscribed. So it misses no message sent since then.
"""

from __future__ import annotations

import msgspec

from timeball.broker.consuming import pull
from timeball.broker.registry.topics import Queue
from timeball.edges.remoting.calls import Call, Handlers, RemotingContext, Reply
from timeball.edges.remoting.codec.codes import RequestCode, ResponseCode
from timeball.edges.shared.error_codes import Refused
from timeball.io.threads import in_thread
from timeball.model import limits
from timeball.model.errors import GroupNotFound
from timeball.model.message import RETRY_PREFIX


class _Queue(msgspec.Struct, rename="camel"):
    topic: str
    queue_id: int


class _Query(_Queue, rename="camel", kw_only=True):
    consumer_group: str
    set_zero_if_not_found: bool | None = None  # None: the client leaves the decision to the broker


class _Update(_Queue, rename="camel", kw_only=True):
    consumer_group: str
    commit_offset: int


class _Search(_Queue, rename="camel", kw_only=True):
    timestamp: int
    boundary_type: str = "LOWER"


class Offsets:
    """Serves the requests about offsets."""

    def __init__(self, context: RemotingContext) -> None:
        self._context = context
        self._broker = context.broker
        self.handlers: Handlers = {
            RequestCode.QUERY_CONSUMER_OFFSET: self._query,
            RequestCode.UPDATE_CONSUMER_OFFSET: self._update,
            RequestCode.GET_MAX_OFFSET: self._max,
            RequestCode.GET_MIN_OFFSET: self._min,
            RequestCode.SEARCH_OFFSET_BY_TIMESTAMP: self._search,
            RequestCode.GET_EARLIEST_MSG_STORETIME: self._earliest,
        }

    def _queue(self, fields: _Queue) -> Queue:
        """Find the queue of a request. Raises Refused if it does not exist."""
        topic = self._broker.tables.topics.find_topic(fields.topic)
        if topic is None:
            raise Refused(
                ResponseCode.TOPIC_NOT_EXIST, f"topic[{fields.topic}] not exist, apply first please!"
            )
        if not 0 <= fields.queue_id < len(topic.queues):
            raise Refused(
                ResponseCode.INVALID_PARAMETER,
                f"queueId[{fields.queue_id}] is illegal, topic {fields.topic} has {len(topic.queues)} queues",
            )
        return topic.queues[fields.queue_id]

    def _query(self, call: Call) -> Reply:
        """Serve QUERY_CONSUMER_OFFSET: the committed offset, or 0 if the group must begin there. Raises Refused."""
        fields = call.fields(_Query)
        offsets = self._broker.offsets(fields.consumer_group, fields.topic, call.caller)
        offset = offsets.get(fields.queue_id)
        if offset is None:
            if not self._must_begin_at_zero(fields):
                raise Refused(ResponseCode.QUERY_NOT_FOUND, "Not found, maybe this group consumer boot first")
            offset = 0
        return call.answer(ext={"offset": str(offset)})

    def _must_begin_at_zero(self, fields: _Query) -> bool:
        """Return whether a group without an offset must begin with the first message of the queue."""
        topic, client_choice = (
            self._broker.tables.topics.find_topic(fields.topic),
            fields.set_zero_if_not_found,
        )
        if topic is None or not 0 <= fields.queue_id < len(topic.queues) or client_choice is False:
            return False
        if topic.queues[fields.queue_id].index.min_offset:
            return False
        if client_choice or fields.topic.startswith(
            RETRY_PREFIX
        ):  # a retry topic has only the group's own messages
            return True
        group = self._context.sessions.group(fields.consumer_group)
        nonempty = None if group is None else group.nonempty_queues.get(fields.topic)
        return nonempty is not None and fields.queue_id not in nonempty

    def _update(self, call: Call) -> Reply:
        """Serve UPDATE_CONSUMER_OFFSET: commit an offset of an existing group."""
        fields = call.fields(_Update)
        # As in RocketMQ: otherwise a misspelled name would store offsets of a group that does not exist.
        if not self._broker.is_group(fields.consumer_group):
            raise GroupNotFound(
                f"consumer group {fields.consumer_group[: limits.GROUP_BYTES_MAX]!r} does not exist: its first "
                "heartbeat, pull or POP creates it, and so does mqadmin updateSubGroup"
            )
        queue = self._queue(fields)
        self._broker.tables.offsets.commit(
            fields.consumer_group,
            fields.topic,
            {fields.queue_id: fields.commit_offset},
            {fields.queue_id: queue.index.max_offset},
        )
        return call.answer()

    def _max(self, call: Call) -> Reply:
        return call.answer(ext={"offset": str(self._queue(call.fields(_Queue)).index.max_offset)})

    def _min(self, call: Call) -> Reply:
        return call.answer(ext={"offset": str(self._queue(call.fields(_Queue)).index.min_offset)})

    async def _search(self, call: Call) -> Reply:
        """Serve SEARCH_OFFSET_BY_TIMESTAMP: the first offset from a time on, or with UPPER the last until then."""
        fields = call.fields(_Search)
        index = self._queue(fields).index
        upper = fields.boundary_type.upper() == "UPPER"
        offset = await in_thread(
            self._broker.threads.reader,
            pull.offset_at,
            self._broker.log.reader,
            index,
            fields.timestamp,
            upper,
        )
        return call.answer(ext={"offset": str(offset)})

    async def _earliest(self, call: Call) -> Reply:
        index = self._queue(call.fields(_Queue)).index
        earliest_ms = await in_thread(
            self._broker.threads.reader, pull.earliest_ms, self._broker.log.reader, index
        )
        return call.answer(ext={"timestamp": str(earliest_ms)})
