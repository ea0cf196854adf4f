"""Pulls: messages of one queue from an offset on, now or as soon as there are any.

    offset            answer                       the client then
    below the first   PULL_OFFSET_MOVED            continues at the offset in the answer
    within            FOUND, or PULL_RETRY_IMMEDIATELY if no message of the examined range matched its filter
    at the end        waits as long as it may, then PULL_NOT_FOUND
    beyond the end    PULL_OFFSET_MOVED            continues at the end

A pull from memory is answered within the same turn of the event loop. A pull becomes a task only if it reads from the
disk, filters row by row or waits.

A consumer repeats the same request a thousand times a second. So for a plain pull the compiled codec extracts the
subject, and the decision about a subject is kept until a topic, a group or a membership changes. All other pulls are
handled by the reference, `Pulls._pull`.

A waiting pull is woken by the commit that makes a message visible. This holds for released messages as for sends, so
there is no further delay between a due time and the consumer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import NamedTuple

import msgspec

from timeball.broker.consuming import pull
from timeball.broker.filters import EVERYTHING, TAG, Filter
from timeball.broker.filters.compiler import FiltersKept
from timeball.broker.registry.topics import Queue, Topic
from timeball.edges.remoting.calls import (
    Call,
    Handlers,
    RemotingContext,
    Reply,
    compiled,
    illegal_queue,
    store_host,
)
from timeball.edges.remoting.codec.codes import PullFlag, RequestCode, ResponseCode
from timeball.edges.remoting.codec.implementation import PYTHON, Codec, PlainPull
from timeball.edges.remoting.codec.records import pull_fields
from timeball.edges.remoting.connection import CALLS_MAX, Connection
from timeball.edges.remoting.stored_frames import Messages, StoredFrames
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
GRANTS_MAX = 4_096  # subjects of pulls that consumers repeat: one per queue and group
# Plain numbers: arithmetic with an IntFlag creates an object per result.
_SUBSCRIPTION, _SUSPEND, _COMMIT_OFFSET = map(
    int, (PullFlag.SUBSCRIPTION, PullFlag.SUSPEND, PullFlag.COMMIT_OFFSET)
)


class PullFields(msgspec.Struct, rename="camel"):
    """The header of a pull."""

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
    """The decision about plain pulls of one subject: they may read this queue, and every message in it matches."""

    topic: str
    group: str
    entries: QueueIndex
    commits: bool


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
        self._filters = FiltersKept()
        self._grants: dict[bytes, _Grant] = {}
        self._granted_at = -1  # the versions of all that the grants depend on, added up
        self.answered = {"plain": 0, "other": 0}  # pulls since the start, by the implementation that answered
        self.handlers: Handlers = {
            RequestCode.PULL_MESSAGE: self._pull,
            RequestCode.LITE_PULL_MESSAGE: self._pull,
        }

    def _pull(self, call: Call) -> Reply | Awaitable[Reply]:
        self.answered["other"] += 1
        fields = call.fields(PullFields)
        topic, queue = self._queue(fields, call.caller)
        wanted = self._filter(fields, topic)
        self._commit(fields)
        moved = _moved(call, queue, fields.queue_offset)
        if moved is not None:
            return moved
        if fields.queue_offset >= queue.index.max_offset:
            return self._wait(call, fields, topic, queue, wanted)
        if wanted.matches_all:
            host = store_host(self._context, call.connection)
            messages = self._stored.get_now(_next_rows(fields, queue.index), host, _bytes(fields))
            if messages is not None:
                return self._found(call, fields, queue, fields.queue_offset + messages[0], messages)
        return self._look(call, fields, queue, wanted)

    def answer(self, connection: Connection, pull: PlainPull) -> bool:
        """Answer a plain pull from memory, or return False if the reference is to handle it.

        That is the case if the pull waits, filters row by row, needs the disk or is refused. It has no effect then.
        """
        try:
            grant = self._grant(connection, pull)
            if grant is None:
                return False
            topic, group, index, commits = grant
            offset = pull.queue_offset
            if not index.min_offset <= offset < index.max_offset:
                return False
            if connection.calls >= CALLS_MAX or connection.flow.is_full:
                return False
            low, high = index.min_offset, index.max_offset
            entries = index.read(offset, _rows(pull), is_kept=False)
            asked, host = len(entries), store_host(self._context, connection)
            answer = pull.begin_answer(offset + asked, low, high)
            head_bytes = len(answer)
            count = self._stored.put_now(answer, entries, host, head_bytes + _bytes(pull))
            if not count:
                return False
        except TimeballError:  # the reference is refused too, and sends the error
            return False
        if count < asked:  # the other messages have no room
            answer = pull.begin_answer(offset + count, low, high) + answer[head_bytes:]
        pull.end_answer(answer)
        if commits:
            self._commit(pull)
        self._rates.got(topic, group, count, len(answer) - head_bytes)
        connection.write(answer)
        self.answered["plain"] += 1
        return True

    def _grant(self, connection: Connection, pull: PlainPull) -> _Grant | None:
        """Return the permission of a plain pull; None if it filters row by row. Raises as `_queue` and `_filter` do."""
        if connection.caller is not ANONYMOUS:
            return None  # a grant is valid for all anonymous clients
        version = self._topics.version + self._groups.version + self._sessions.version
        if version != self._granted_at or len(self._grants) >= GRANTS_MAX:
            self._grants.clear()
            self._granted_at = version
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
        members = self._sessions.group(fields.consumer_group)
        broadcasting = members is not None and members.how.message_model == BROADCASTING
        self._broker.policy.joined(fields.consumer_group, caller, broadcasting=broadcasting)
        topic = self._broker.policy.readable(fields.topic, caller)
        if not 0 <= fields.queue_id < topic.read_queues:
            raise illegal_queue(ResponseCode.INVALID_PARAMETER, fields.queue_id, topic)
        return topic, topic.queues[fields.queue_id]

    def _filter(self, fields: Fields, topic: Topic) -> Filter:
        """Return the filter in the request, or else the one from the heartbeats of the group's members."""
        if topic.name.startswith(RETRY_PREFIX):
            return EVERYTHING
        if fields.sys_flag & _SUBSCRIPTION:
            text, kind = fields.subscription or "*", fields.expression_type or TAG
        else:
            known = self._sessions.subscription(fields.consumer_group, topic.name)
            if known is None:
                raise Refused(ResponseCode.SUBSCRIPTION_NOT_EXIST, "the consumer's subscription not exist")
            if known.version < fields.sub_version and known.expression != "*":
                raise Refused(ResponseCode.SUBSCRIPTION_NOT_LATEST, "the consumer's subscription not latest")
            text, kind = known.expression, known.expression_type
        return compiled(self._filters, text, kind, topic)

    def _commit(self, fields: Fields) -> None:
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
                # The messages matter more than the commit. If the client's offset is wrong, the answer to the pull
                # shows it.
                pass

    async def _look(self, call: Call, fields: PullFields, queue: Queue, wanted: Filter) -> Reply:
        host = store_host(self._context, call.connection)
        if wanted.matches_all:
            messages = await self._stored.get(_next_rows(fields, queue.index), host, _bytes(fields))
            return self._found(call, fields, queue, fields.queue_offset + messages[0], messages)
        chosen = pull.candidates(queue.index, fields.queue_offset, _rows(fields), wanted, bytes_max=BYTES_MAX)
        chosen = await in_thread(
            self._broker.threads.reader, pull.decide, chosen, self._broker.log.reader, wanted
        )
        messages = await self._stored.get(chosen.seqs.tolist(), host, _bytes(fields))
        count = messages[0]
        next_offset = chosen.next_offset if count == len(chosen.seqs) else int(chosen.offsets[count])
        return self._found(call, fields, queue, next_offset, messages)

    async def _wait(
        self, call: Call, fields: PullFields, topic: Topic, queue: Queue, wanted: Filter
    ) -> Reply:
        loop = asyncio.get_running_loop()
        wait_ms = fields.suspend_timeout_millis if fields.sys_flag & _SUSPEND else 0
        deadline = loop.time() + min(max(0, wait_ms), limits.PULL_WAIT_MS_MAX) / 1000
        while True:
            # Also before the first wait: rows may have arrived between the look at the queue and the start of this
            # task.
            while fields.queue_offset < queue.index.max_offset:
                answer = await self._look(call, fields, queue, wanted)
                assert answer is not None
                if answer.code == ResponseCode.SUCCESS:
                    return answer
                # No message of that range matches this consumer's filter: it continues to wait behind the range.
                fields.queue_offset = int(answer.ext["nextBeginOffset"])
            left_s = deadline - loop.time()
            if left_s <= 0 or not call.connection.is_open:
                return _empty(call, queue, fields.queue_offset, ResponseCode.PULL_NOT_FOUND)
            with call.connection.waits():
                await self._broker.waiters.wait(topic.name, left_s, fields.queue_id)
            self._broker.policy.readable(
                topic.name, call.caller
            )  # it may have been deleted, or closed, meanwhile

    def _found(
        self, call: Call, fields: PullFields, queue: Queue, next_offset: int, messages: Messages
    ) -> Reply:
        count, body = messages
        if not count:
            return _empty(call, queue, next_offset, ResponseCode.PULL_RETRY_IMMEDIATELY)
        self._rates.got(fields.topic, fields.consumer_group, count, len(body))
        return call.answer(ext=_ext(queue, next_offset), body=body)


def _rows(fields: Fields) -> int:
    asked = fields.max_msg_nums
    # Not min and max: each call of them costs as much as this whole function.
    return ROWS_MAX if asked > ROWS_MAX else asked if asked > 0 else 1


def _bytes(fields: Fields) -> int:
    asked = fields.max_msg_bytes
    return asked if asked and asked < BYTES_MAX else BYTES_MAX


def _next_rows(fields: Fields, index: QueueIndex) -> list[int]:
    """Return the sequence numbers of the next rows of the queue. The writer of the answer finds out how many fit."""
    entries = index.read(fields.queue_offset, _rows(fields), is_kept=False)
    return entries["seq"].tolist()  # type: ignore[no-any-return]


def _moved(call: Call, queue: Queue, offset: int) -> Reply:
    low, high = queue.index.min_offset, queue.index.max_offset
    if low <= offset <= high:
        return None
    return _empty(call, queue, low if offset < low else high, ResponseCode.PULL_OFFSET_MOVED)


def _empty(call: Call, queue: Queue, next_offset: int, code: int) -> Reply:
    return call.answer(code, ResponseCode(code).name, ext=_ext(queue, next_offset))


def _ext(queue: Queue, next_offset: int) -> dict[str, str]:
    return pull_fields(next_offset, queue.index.min_offset, queue.index.max_offset)
