"""Serve PULL_MESSAGE: messages of one queue from an offset on, with long polling.

    offset            answer                       the client then
    below the first   PULL_OFFSET_MOVED            continues at the offset in the answer
    within            FOUND, or PULL_RETRY_IMMEDIATELY if no message of the examined range matched its filter
    at the end        waits as long as it may, then PULL_NOT_FOUND
    beyond the end    PULL_OFFSET_MOVED            continues at the end

A pull from memory is answered within the same iteration of the event loop. A pull becomes a task only if it reads from
the disk, filters row by row or waits.

A consumer repeats the same request a thousand times a second. So the compiled codec recognises plain pulls
(`PlainPull`), and `Pulls` caches the permission and the queue of each (`_Grant`) until a topic, a group or a membership
changes. `Pulls.answer_plain` answers plain pulls from memory, and `Pulls._pull` all others.

A pull that waits is woken by the commit that makes a message visible, of sends and of released messages alike. So no
polling interval is added between a due time and the consumer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import NamedTuple

import msgspec

from timeball.broker.consuming import pull
from timeball.broker.filters import EVERYTHING, TAG, Filter
from timeball.broker.filters.compiler import FilterCache
from timeball.broker.registry.topics import Queue, Topic
from timeball.edges.remoting.calls import (
    Call,
    Handlers,
    RemotingContext,
    Reply,
    compile_subscription,
    illegal_queue_error,
    store_host,
)
from timeball.edges.remoting.codec.codes import PullFlag, RequestCode, ResponseCode
from timeball.edges.remoting.codec.implementation import PYTHON, Codec, PlainPull
from timeball.edges.remoting.codec.records import pull_fields
from timeball.edges.remoting.connection import CALLS_MAX, Connection
from timeball.edges.remoting.stored_frames import EncodedMessages, StoredFrames
from timeball.edges.shared.error_codes import Refused
from timeball.edges.shared.sessions import BROADCASTING
from timeball.io.threads import in_thread
from timeball.log.queue_index import QueueIndex
from timeball.model import limits
from timeball.model.access import ANONYMOUS, Caller
from timeball.model.errors import OutOfRange, TimeballError
from timeball.model.message import RETRY_PREFIX

ROWS_MAX = 1_024
BYTES_MAX = 4 * 1024 * 1024  # of one answer. A single message may be larger
GRANTS_MAX = 4_096  # cached grants, usually one per queue and group
# Plain numbers: arithmetic with an IntFlag creates an object per result.
_SUBSCRIPTION, _SUSPEND, _COMMIT_OFFSET = map(
    int, (PullFlag.SUBSCRIPTION, PullFlag.SUSPEND, PullFlag.COMMIT_OFFSET)
)


class PullFields(msgspec.Struct, rename="camel"):
    """The header of PULL_MESSAGE."""

    consumer_group: str
    topic: str
    queue_id: int
    queue_offset: int
    max_msg_nums: int = 32
    sys_flag: int = 0
    commit_offset: int = 0
    suspend_timeout_millis: int = 0
    subscription: str | None = None
    sub_version: int = 0
    expression_type: str | None = None
    max_msg_bytes: int | None = None


Fields = PullFields | PlainPull


class _Grant(NamedTuple):
    """Permits plain pulls with one subject: they may read this queue, and their filter matches every message."""

    topic: str
    group: str
    queue_index: QueueIndex
    commits_offset: bool


class Pulls:
    """Serves PULL_MESSAGE. Belongs to the event loop."""

    def __init__(self, context: RemotingContext, codec: Codec = PYTHON) -> None:
        self._context = context
        self._broker, self._sessions = context.broker, context.sessions
        self._topics, self._groups, self._rates = (
            context.broker.tables.topics,
            context.broker.tables.groups,
            context.broker.rates,
        )
        self._stored = StoredFrames(
            codec, reader=context.broker.log.reader, reader_thread=context.broker.threads.reader
        )
        self._filters = FilterCache()
        self._grants: dict[bytes, _Grant] = {}
        # Sum of the versions of topics, groups and sessions for which the grants are valid.
        self._grants_version = -1
        # Pulls since the start: answered by `answer_plain`, and by `_pull`.
        self.answered_counts = {"plain": 0, "other": 0}
        self.handlers: Handlers = {
            RequestCode.PULL_MESSAGE: self._pull,
            RequestCode.LITE_PULL_MESSAGE: self._pull,
        }

    def _pull(self, call: Call) -> Reply | Awaitable[Reply]:
        """Serve PULL_MESSAGE: answer from memory at once, or as a task from the disk or after waiting."""
        self.answered_counts["other"] += 1
        fields = call.fields(PullFields)
        topic, queue = self._queue(fields, call.caller)
        message_filter = self._filter(fields, topic)
        self._commit(fields)
        moved_answer = _answer_moved(call, queue, fields.queue_offset)
        if moved_answer is not None:
            return moved_answer
        if fields.queue_offset >= queue.index.max_offset:
            return self._wait_for_messages(call, fields, topic, queue, message_filter)
        if message_filter.matches_all:
            host = store_host(self._context, call.connection)
            messages = self._stored.get_from_memory(_next_seqs(fields, queue.index), host, _bytes_max(fields))
            if messages is not None:
                return self._answer_with(call, fields, queue, fields.queue_offset + messages[0], messages)
        return self._read_and_answer(call, fields, queue, message_filter)

    def answer_plain(self, connection: Connection, pull: PlainPull) -> bool:
        """Answer a plain pull from memory. Returns False, without any effect, if `_pull` must handle it.

        This is the case if the pull waits, filters row by row, needs the disk or is refused.
        """
        try:
            grant = self._grant(connection, pull)
            if grant is None:
                return False
            topic, group, index, commits_offset = grant
            offset = pull.queue_offset
            if not index.min_offset <= offset < index.max_offset:
                return False
            if connection.calls >= CALLS_MAX or connection.flow.is_full:
                return False
            min_offset, max_offset = index.min_offset, index.max_offset
            entries = index.read(offset, _rows_max(pull), is_kept=False)
            entry_count, host = len(entries), store_host(self._context, connection)
            answer = pull.begin_answer(offset + entry_count, min_offset, max_offset)
            head_bytes = len(answer)
            count = self._stored.append_from_memory(answer, entries, host, head_bytes + _bytes_max(pull))
            if not count:
                return False
        except TimeballError:  # `_pull` gets the same error and sends it
            return False
        if count < entry_count:  # the others do not fit: correct the next offset in the header
            answer = pull.begin_answer(offset + count, min_offset, max_offset) + answer[head_bytes:]
        pull.end_answer(answer)
        if commits_offset:
            self._commit(pull)
        self._rates.got(topic, group, count, len(answer) - head_bytes)
        connection.write(answer)
        self.answered_counts["plain"] += 1
        return True

    def _grant(self, connection: Connection, pull: PlainPull) -> _Grant | None:
        """Find or create the grant of a plain pull. None if it filters row by row. Raises as `_queue` and `_filter`."""
        if connection.caller is not ANONYMOUS:
            return None  # grants are cached for anonymous clients only
        version = self._topics.version + self._groups.version + self._sessions.version
        if version != self._grants_version or len(self._grants) >= GRANTS_MAX:
            self._grants.clear()
            self._grants_version = version
        subject = pull.subject
        grant = self._grants.get(subject)
        if grant is None:
            topic, queue = self._queue(pull, connection.caller)
            if not self._filter(pull, topic).matches_all:
                return None
            grant = _Grant(topic.name, pull.consumer_group, queue.index, pull.sys_flag & _COMMIT_OFFSET != 0)
            self._grants[subject] = grant
        return grant

    def _queue(self, fields: Fields, caller: Caller) -> tuple[Topic, Queue]:
        """Find the queue of a pull and check that the caller may read it. Raises Refused and the policy's errors."""
        members = self._sessions.group(fields.consumer_group)
        broadcasting = members is not None and members.membership.message_model == BROADCASTING
        self._broker.policy.joined(fields.consumer_group, caller, broadcasting=broadcasting)
        topic = self._broker.policy.readable(fields.topic, caller)
        if not 0 <= fields.queue_id < topic.read_queues:
            raise illegal_queue_error(ResponseCode.INVALID_PARAMETER, fields.queue_id, topic)
        return topic, topic.queues[fields.queue_id]

    def _filter(self, fields: Fields, topic: Topic) -> Filter:
        """Compile the filter in the request, or else the subscription from the heartbeats of the group's members."""
        if topic.name.startswith(RETRY_PREFIX):
            return EVERYTHING
        if fields.sys_flag & _SUBSCRIPTION:
            expression, expression_type = fields.subscription or "*", fields.expression_type or TAG
        else:
            subscription = self._sessions.subscription(fields.consumer_group, topic.name)
            if subscription is None:
                raise Refused(ResponseCode.SUBSCRIPTION_NOT_EXIST, "the consumer's subscription not exist")
            if subscription.version < fields.sub_version and subscription.expression != "*":
                raise Refused(ResponseCode.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest")
            expression, expression_type = subscription.expression, subscription.expression_type
        return compile_subscription(self._filters, expression, expression_type, topic)

    def _commit(self, fields: Fields) -> None:
        """Commit the offset in the header of a pull, if it has one."""
        if fields.sys_flag & _COMMIT_OFFSET and fields.commit_offset > 0:
            queue = self._topics.get(fields.topic).queues[fields.queue_id]
            try:
                self._broker.tables.offsets.commit(
                    fields.consumer_group,
                    fields.topic,
                    {fields.queue_id: fields.commit_offset},
                    {fields.queue_id: queue.index.max_offset},
                )
            except OutOfRange:
                # The messages are more important than the commit. If the client's offset is wrong, it learns this
                # from the answer to the pull.
                pass

    async def _read_and_answer(
        self, call: Call, fields: PullFields, queue: Queue, message_filter: Filter
    ) -> Reply:
        """Read messages from the disk, filter them row by row if necessary, and answer the pull."""
        host = store_host(self._context, call.connection)
        if message_filter.matches_all:
            messages = await self._stored.get(_next_seqs(fields, queue.index), host, _bytes_max(fields))
            return self._answer_with(call, fields, queue, fields.queue_offset + messages[0], messages)
        candidates = pull.candidates(
            queue.index, fields.queue_offset, _rows_max(fields), message_filter, bytes_max=BYTES_MAX
        )
        candidates = await in_thread(
            self._broker.threads.reader, pull.decide, candidates, self._broker.log.reader, message_filter
        )
        messages = await self._stored.get(candidates.seqs.tolist(), host, _bytes_max(fields))
        count = messages[0]
        next_offset = (
            candidates.next_offset if count == len(candidates.seqs) else int(candidates.offsets[count])
        )
        return self._answer_with(call, fields, queue, next_offset, messages)

    async def _wait_for_messages(
        self, call: Call, fields: PullFields, topic: Topic, queue: Queue, message_filter: Filter
    ) -> Reply:
        """Wait until a message matches or the suspend time is over, and answer the pull."""
        loop = asyncio.get_running_loop()
        wait_ms = fields.suspend_timeout_millis if fields.sys_flag & _SUSPEND else 0
        deadline_s = loop.time() + min(max(0, wait_ms), limits.PULL_WAIT_MS_MAX) / 1000
        while True:
            # Also before the first wait: rows may have arrived between `_pull`'s check and the start of this task.
            while fields.queue_offset < queue.index.max_offset:
                answer = await self._read_and_answer(call, fields, queue, message_filter)
                assert answer is not None
                if answer.code == ResponseCode.SUCCESS:
                    return answer
                # No message of this range matches the filter: continue to wait at the end of the range.
                fields.queue_offset = int(answer.ext["nextBeginOffset"])
            remaining_s = deadline_s - loop.time()
            if remaining_s <= 0 or not call.connection.is_open:
                return _answer_empty(call, queue, fields.queue_offset, ResponseCode.PULL_NOT_FOUND)
            with call.connection.cancelled_on_close():
                await self._broker.waiters.wait(topic.name, remaining_s, fields.queue_id)
            # The topic may have been deleted, or made unreadable, meanwhile.
            self._broker.policy.readable(topic.name, call.caller)

    def _answer_with(
        self, call: Call, fields: PullFields, queue: Queue, next_offset: int, messages: EncodedMessages
    ) -> Reply:
        """Create the answer with these messages, or PULL_RETRY_IMMEDIATELY if there are none."""
        count, body = messages
        if not count:
            return _answer_empty(call, queue, next_offset, ResponseCode.PULL_RETRY_IMMEDIATELY)
        self._rates.got(fields.topic, fields.consumer_group, count, len(body))
        return call.answer(ext=_offset_fields(queue, next_offset), body=body)


def _rows_max(fields: Fields) -> int:
    requested = fields.max_msg_nums
    # Not min() and max(): one call of them takes as long as this whole function.
    return ROWS_MAX if requested > ROWS_MAX else requested if requested > 0 else 1


def _bytes_max(fields: Fields) -> int:
    requested_bytes = fields.max_msg_bytes
    return requested_bytes if requested_bytes and requested_bytes < BYTES_MAX else BYTES_MAX


def _next_seqs(fields: Fields, index: QueueIndex) -> list[int]:
    """Return the sequence numbers of the next rows of the queue. Fewer may fit into the answer."""
    entries = index.read(fields.queue_offset, _rows_max(fields), is_kept=False)
    return entries["seq"].tolist()  # type: ignore[no-any-return]


def _answer_moved(call: Call, queue: Queue, offset: int) -> Reply:
    """Create the answer to a pull at an offset outside the queue, or None if the offset is within."""
    min_offset, max_offset = queue.index.min_offset, queue.index.max_offset
    if min_offset <= offset <= max_offset:
        return None
    return _answer_empty(
        call, queue, min_offset if offset < min_offset else max_offset, ResponseCode.PULL_OFFSET_MOVED
    )


def _answer_empty(call: Call, queue: Queue, next_offset: int, code: int) -> Reply:
    return call.answer(code, ResponseCode(code).name, ext=_offset_fields(queue, next_offset))


def _offset_fields(queue: Queue, next_offset: int) -> dict[str, str]:
    return pull_fields(next_offset, queue.index.min_offset, queue.index.max_offset)
