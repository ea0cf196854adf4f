"""Serve PULL_MESSAGE and the requests about offsets, and read the pulled messages from the log.

A pull returns messages of one queue from an offset on, with long polling:

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
from bisect import bisect_left
from collections.abc import Awaitable
from concurrent.futures import Executor
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
from timeball.edges.remoting.codec.implementation import PYTHON, Codec, PlainPull, StoredFrame
from timeball.edges.remoting.codec.records import Host, pull_fields
from timeball.edges.remoting.connection import CALLS_MAX, Connection
from timeball.edges.shared.error_codes import Refused
from timeball.edges.shared.sessions import BROADCASTING
from timeball.io.threads import in_thread
from timeball.log.format import EntryArray
from timeball.log.queue_index import QueueIndex
from timeball.log.reader import CACHE_FRAMES_MAX, FrameCache, FrameLocation, LogReader
from timeball.log.segment import Segment
from timeball.model import limits
from timeball.model.access import ANONYMOUS, Caller
from timeball.model.errors import Corrupt, GroupNotFound, OutOfRange, TimeballError
from timeball.model.message import RETRY_PREFIX

# ---- pulls ---------------------------------------------------------------------------------------------------

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
    """Serves PULL_MESSAGE and LITE_PULL_MESSAGE. Belongs to the event loop."""

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
        # By subject of the pull (`PlainPull.subject`).
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
        """Serve PULL_MESSAGE: answer from memory at once, or as a task from the disk or after waiting.

        Commits the offset in its header. Raises Refused, NotFound, Forbidden, InvalidName and OverLimit.
        """
        self.answered_counts["other"] += 1
        fields = call.fields(PullFields)
        topic, queue = self._find_queue(fields, call.caller)
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
                next_offset = fields.queue_offset + messages.row_count
                return self._answer_with(call, fields, queue, next_offset, messages)
        return self._read_and_answer(call, fields, queue, message_filter)

    def answer_plain(self, connection: Connection, plain_pull: PlainPull) -> bool:
        """Answer a plain pull from memory. Returns False, without any effect, if `_pull` must handle it.

        This is the case if the pull waits, filters row by row, needs the disk or is refused.
        """
        try:
            grant = self._grant(connection, plain_pull)
            if grant is None:
                return False
            topic, group, index, commits_offset = grant
            offset = plain_pull.queue_offset
            if not index.min_offset <= offset < index.max_offset:
                return False
            if connection.calls >= CALLS_MAX or connection.flow.is_full:
                return False
            min_offset, max_offset = index.min_offset, index.max_offset
            entries = index.read(offset, _rows_max(plain_pull), is_kept=False)
            entry_count, host = len(entries), store_host(self._context, connection)
            answer = plain_pull.begin_answer(offset + entry_count, min_offset, max_offset)
            head_bytes = len(answer)
            count = self._stored.append_from_memory(
                answer, entries, host, head_bytes + _bytes_max(plain_pull)
            )
            if not count:
                return False
        except TimeballError:  # `_pull` gets the same error and sends it
            return False
        if count < entry_count:  # not all messages fit into the answer: correct the next offset in its header
            answer = plain_pull.begin_answer(offset + count, min_offset, max_offset) + answer[head_bytes:]
        plain_pull.end_answer(answer)
        if commits_offset:
            self._commit(plain_pull)
        self._rates.count_received(topic, group, count, len(answer) - head_bytes)
        connection.write(answer)
        self.answered_counts["plain"] += 1
        return True

    def _grant(self, connection: Connection, plain_pull: PlainPull) -> _Grant | None:
        """Find or create the grant of a plain pull. Raises the errors of `_find_queue` and `_filter`.

        Returns None if the client is not anonymous, or if the pull filters row by row.
        """
        if connection.caller is not ANONYMOUS:
            return None  # grants are cached for anonymous clients only
        version = self._topics.version + self._groups.version + self._sessions.version
        if version != self._grants_version or len(self._grants) >= GRANTS_MAX:
            self._grants.clear()
            self._grants_version = version
        subject = plain_pull.subject
        grant = self._grants.get(subject)
        if grant is None:
            topic, queue = self._find_queue(plain_pull, connection.caller)
            if not self._filter(plain_pull, topic).matches_all:
                return None
            commits_offset = plain_pull.sys_flag & _COMMIT_OFFSET != 0
            grant = _Grant(topic.name, plain_pull.consumer_group, queue.index, commits_offset)
            self._grants[subject] = grant
        return grant

    def _find_queue(self, fields: Fields, caller: Caller) -> tuple[Topic, Queue]:
        """Find the queue of a pull, and check that the caller may read it as the group.

        Raises Refused, NotFound, Forbidden, InvalidName and OverLimit.
        """
        members = self._sessions.group(fields.consumer_group)
        broadcasting = members is not None and members.membership.message_model == BROADCASTING
        self._broker.policy.ensure_group(fields.consumer_group, caller, broadcasting=broadcasting)
        topic = self._broker.policy.find_readable_topic(fields.topic, caller)
        if not 0 <= fields.queue_id < topic.read_queues:
            raise illegal_queue_error(ResponseCode.INVALID_PARAMETER, fields.queue_id, topic)
        return topic, topic.queues[fields.queue_id]

    def _filter(self, fields: Fields, topic: Topic) -> Filter:
        """Compile the filter in the request, or else the subscription from the heartbeats of the group's members.

        Raises Refused if there is no subscription, if it is older than the client's, or if it cannot be parsed.
        """
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
        """Commit the offset in the header of a pull, if it has one. An offset beyond the queue is ignored."""
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
        """Read messages from the disk, filter them row by row if necessary, and answer the pull.

        Raises OutOfRange, and Corrupt for a damaged frame.
        """
        host = store_host(self._context, call.connection)
        if message_filter.matches_all:
            messages = await self._stored.get(_next_seqs(fields, queue.index), host, _bytes_max(fields))
            next_offset = fields.queue_offset + messages.row_count
            return self._answer_with(call, fields, queue, next_offset, messages)
        candidates = pull.candidates(
            queue.index, fields.queue_offset, _rows_max(fields), message_filter, bytes_max=BYTES_MAX
        )
        candidates = await in_thread(
            self._broker.threads.reader, pull.decide, candidates, self._broker.log.reader, message_filter
        )
        messages = await self._stored.get(candidates.seqs.tolist(), host, _bytes_max(fields))
        count = messages.row_count
        # If not all matches fit into the answer, the next pull begins at the first one that was left out.
        has_all_matches = count == len(candidates.seqs)
        next_offset = candidates.next_offset if has_all_matches else int(candidates.offsets[count])
        return self._answer_with(call, fields, queue, next_offset, messages)

    async def _wait_for_messages(
        self, call: Call, fields: PullFields, topic: Topic, queue: Queue, message_filter: Filter
    ) -> Reply:
        """Wait until a message matches or the suspend time is over, and answer the pull.

        Raises NotFound or Forbidden if the topic is deleted or closed meanwhile, and the errors of `_read_and_answer`.
        """
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
            # The topic may have been deleted, or made unreadable, meanwhile. A topic that was created again has the
            # same queues.
            self._broker.policy.find_readable_topic(topic.name, call.caller)

    def _answer_with(
        self, call: Call, fields: PullFields, queue: Queue, next_offset: int, messages: EncodedMessages
    ) -> Reply:
        """Create the answer with these messages, or PULL_RETRY_IMMEDIATELY if there are none."""
        if not messages.row_count:
            return _answer_empty(call, queue, next_offset, ResponseCode.PULL_RETRY_IMMEDIATELY)
        self._rates.count_received(
            fields.topic, fields.consumer_group, messages.row_count, len(messages.data)
        )
        return call.answer(ext=_offset_fields(queue, next_offset), body=messages.data)


def _rows_max(fields: Fields) -> int:
    """Return the requested number of messages, within 1 and ROWS_MAX."""
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
    """Create the answer to a pull at an offset outside the queue, or return None if the offset is within."""
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


# ---- offsets: those of a group, and the minimum, maximum and time-based ones of queues -----------------------
# If a group has no offset in a queue yet, the answer is QUERY_NOT_FOUND, and its client begins where its setting
# `ConsumeFromWhere` says. RocketMQ answers 0 while the queue's first message is in memory: a new group then gets the
# history of a young topic, even if it is set to begin at the end. Here, a new group gets 0 only for a queue that had no
# message when the group subscribed. So it misses no message sent since then.


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

    def _find_queue(self, fields: _Queue) -> Queue:
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
        """Serve QUERY_CONSUMER_OFFSET: return the committed offset, or 0 if the group must begin there.

        Raises Refused (QUERY_NOT_FOUND) if the client decides where the group begins.
        """
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
        client_choice = fields.set_zero_if_not_found
        topic = self._broker.tables.topics.find_topic(fields.topic)
        if topic is None or not 0 <= fields.queue_id < len(topic.queues) or client_choice is False:
            return False
        if topic.queues[fields.queue_id].index.min_offset:
            return False  # retention has deleted the first message
        # A retry topic has only the group's own messages.
        if client_choice or fields.topic.startswith(RETRY_PREFIX):
            return True
        return self._begin_at_zero_if_was_empty(fields, topic.queues[fields.queue_id])

    def _begin_at_zero_if_was_empty(self, fields: _Query, queue: Queue) -> bool:
        """Commit the offset 0 if the queue had no messages when the group subscribed. Returns whether it had none.

        The session ends with the group's last member. Without the commit, a consumer that dies before its first commit
        would begin after the messages that were sent after its subscription.
        """
        name, group = fields.consumer_group, self._context.sessions.group(fields.consumer_group)
        nonempty = None if group is None else group.nonempty_queues.get(fields.topic)
        if group is None or nonempty is None or fields.queue_id in nonempty:
            return False
        # Members of a broadcasting group keep their offsets themselves.
        if self._broker.is_group(name) and group.membership.message_model != BROADCASTING:
            self._broker.tables.offsets.commit(
                name, fields.topic, {fields.queue_id: 0}, {fields.queue_id: queue.index.max_offset}
            )
        return True

    def _update(self, call: Call) -> Reply:
        """Serve UPDATE_CONSUMER_OFFSET: commit an offset of an existing group.

        Raises GroupNotFound, Refused (no such topic or queue) and OutOfRange (an offset beyond the queue).
        """
        fields = call.fields(_Update)
        # As in RocketMQ: otherwise a misspelled name would store offsets of a group that does not exist.
        if not self._broker.is_group(fields.consumer_group):
            raise GroupNotFound(
                f"consumer group {fields.consumer_group[: limits.GROUP_BYTES_MAX]!r} does not exist: its first "
                "heartbeat, pull or POP creates it, and so does mqadmin updateSubGroup"
            )
        queue = self._find_queue(fields)
        self._broker.tables.offsets.commit(
            fields.consumer_group,
            fields.topic,
            {fields.queue_id: fields.commit_offset},
            {fields.queue_id: queue.index.max_offset},
        )
        return call.answer()

    def _max(self, call: Call) -> Reply:
        return call.answer(ext={"offset": str(self._find_queue(call.fields(_Queue)).index.max_offset)})

    def _min(self, call: Call) -> Reply:
        return call.answer(ext={"offset": str(self._find_queue(call.fields(_Queue)).index.min_offset)})

    async def _search(self, call: Call) -> Reply:
        """Serve SEARCH_OFFSET_BY_TIMESTAMP, see `pull.offset_at`. The boundary type is UPPER or LOWER."""
        fields = call.fields(_Search)
        index = self._find_queue(fields).index
        is_upper = fields.boundary_type.upper() == "UPPER"
        offset = await in_thread(
            self._broker.threads.reader,
            pull.offset_at,
            self._broker.log.reader,
            index,
            fields.timestamp,
            is_upper,
        )
        return call.answer(ext={"offset": str(offset)})

    async def _earliest(self, call: Call) -> Reply:
        """Serve GET_EARLIEST_MSG_STORETIME: read the store time in ms of the first message of a queue."""
        index = self._find_queue(call.fields(_Queue)).index
        earliest_ms = await in_thread(
            self._broker.threads.reader, pull.earliest_ms, self._broker.log.reader, index
        )
        return call.answer(ext={"timestamp": str(earliest_ms)})


# ---- pulled messages, from the frames of the log -------------------------------------------------------------
# A frame is opened, and its checksum verified, only once. It stays in a cache for the pulls of other queues and groups.
# A small frame with recently written rows is opened on the event loop, because it is in the page cache. Any other frame
# is opened in the reader thread, because the disk may have to be read. The thread also opens the frames that follow: a
# consumer that lags will need them next, and so will the consumers of other queues.

FRESH_ROWS = 65_536  # newest rows of the log, which are still in the page cache
LOOP_BYTES_MAX = 1024 * 1024  # of a frame that is opened on the loop, which takes about 100 us
AHEAD_BYTES = 1024 * 1024  # of frames that the reader thread opens at once

OpenedFrames = dict[FrameLocation, StoredFrame]


class EncodedMessages(NamedTuple):
    """Stored messages, as the body of an answer to a pull."""

    row_count: int
    data: bytes


class _UnopenedFrame(NamedTuple):
    """The position of a frame that must be opened in the reader thread."""

    segment: Segment
    position: int


class StoredFrames:
    """A cache of opened frames. Belongs to the event loop. Only `_open_following` runs in the reader thread."""

    def __init__(self, codec: Codec = PYTHON, *, reader: LogReader, reader_thread: Executor) -> None:
        self._codec, self._reader, self._reader_thread = codec, reader, reader_thread
        self._frames: FrameCache[StoredFrame] = FrameCache(reader.segments, CACHE_FRAMES_MAX)
        self._opening: dict[FrameLocation, asyncio.Future[OpenedFrames]] = {}
        # The frame that the last pull used. In most cases the next pull uses it too.
        self._last_frame: StoredFrame | None = None
        reader.segments.on_drop.append(self._forget_last_frame)

    def _forget_last_frame(self, _: list[Segment]) -> None:
        self._last_frame = None

    def get_from_memory(self, seqs: list[int], host: Host, bytes_max: int) -> EncodedMessages | None:
        """Encode as many of these messages as fit into an answer, at least one. Returns None if the disk must be read.

        `seqs` are ascending. `host` is the store host in the messages. Raises OutOfRange for a row that is not in the
        log or not visible.
        """
        body = bytearray()
        count = self._append(body, seqs, host, bytes_max, {})
        return None if isinstance(count, _UnopenedFrame) else EncodedMessages(count, bytes(body))

    def append_from_memory(self, out: bytearray, entries: EntryArray, host: Host, bytes_max: int) -> int:
        """Append the messages of these queue entries to `out` while they fit into `bytes_max`. Returns their number.

        If the disk must be read, it returns 0, and the caller must discard `out`. Raises OutOfRange.
        """
        index, count, last_frame = 0, len(entries), self._last_frame
        # In most cases all messages are in the frame that the previous pull used.
        if last_frame is not None:
            index = last_frame.append_messages(out, entries, 0, host, bytes_max)
        while index < count:
            frame = self._find_frame(int(entries[index]["seq"]), {})
            if isinstance(frame, _UnopenedFrame):
                return 0
            previous_index = index
            index = frame.append_messages(out, entries, index, host, bytes_max)
            if index == previous_index:
                break  # the next message does not fit into the answer
        return index

    async def get(self, seqs: list[int], host: Host, bytes_max: int) -> EncodedMessages:
        """Encode as many of these messages as fit into an answer, at least one. Reads the disk if necessary.

        Raises OutOfRange, and Corrupt for a damaged frame.
        """
        opened: OpenedFrames = {}  # a reference of our own, because other pulls may evict them from the cache meanwhile
        while True:
            body = bytearray()
            result = self._append(body, seqs, host, bytes_max, opened)
            if not isinstance(result, _UnopenedFrame):
                return EncodedMessages(result, bytes(body))
            opened |= await self._open(result)

    def _append(
        self, out: bytearray, seqs: list[int], host: Host, bytes_max: int, opened: OpenedFrames
    ) -> int | _UnopenedFrame:
        """Append the messages that fit, and return their number, or the frame that must be opened first."""
        index = 0
        while index < len(seqs):
            frame = self._find_frame(seqs[index], opened)
            if isinstance(frame, _UnopenedFrame):
                return frame
            index = frame.append_messages(out, seqs, index, host, bytes_max)
            if index < len(seqs) and frame.first_seq <= seqs[index] < frame.end_seq:
                break  # the next message does not fit into the answer
        return index

    def _find_frame(self, seq: int, opened: OpenedFrames) -> StoredFrame | _UnopenedFrame:
        """Find the frame that contains a row, and open it if this is possible on the event loop.

        Raises OutOfRange if the log does not have the row.
        """
        last_frame = self._last_frame
        if last_frame is not None and last_frame.first_seq <= seq < last_frame.end_seq:
            return last_frame
        reader = self._reader
        segment = reader.segments.find_segment(seq)
        position = segment.frame_position_of(seq)
        frame_key = segment.ordinal, position
        frame = self._frames.get(frame_key) or opened.get(frame_key)
        if frame is None:
            is_fresh = seq >= reader.next_seq - FRESH_ROWS
            if not is_fresh or segment.frame_bytes(position) > LOOP_BYTES_MAX:
                return _UnopenedFrame(segment, position)
            frame = reader.open_frame(segment, position, self._codec.open_frame)[1]
            self._frames.keep(frame_key, frame)
        if seq >= frame.end_seq:
            raise OutOfRange(f"seq {seq} was set aside for a bulk attach and is not in the log")
        self._last_frame = frame
        return frame

    async def _open(self, unopened: _UnopenedFrame) -> OpenedFrames:
        """Open a frame and the following ones in the reader thread. Pulls that need the same frame share this."""
        frame_key = unopened.segment.ordinal, unopened.position
        opening = self._opening.get(frame_key)
        if opening is None:
            opening = in_thread(self._reader_thread, self._open_following, unopened)
            self._opening[frame_key] = opening
            opening.add_done_callback(lambda _: self._opening.pop(frame_key))
        # Shielded: if one pull is cancelled because its client disconnects, the others still need the frame.
        return await asyncio.shield(opening)

    def _open_following(self, unopened: _UnopenedFrame) -> OpenedFrames:
        """Open a frame and the following ones, up to AHEAD_BYTES. Runs in the reader thread.

        Raises Corrupt if the first of them is damaged.
        """
        segment, first_position = unopened
        opened: OpenedFrames = {}
        for index in range(bisect_left(segment.frame_positions, first_position), len(segment.frame_seqs)):
            position = int(segment.frame_positions[index])
            if opened and position >= first_position + AHEAD_BYTES:
                break
            frame_key = segment.ordinal, position
            frame = self._frames.get(frame_key)
            if frame is None:
                try:
                    frame = self._reader.open_frame(segment, position, self._codec.open_frame)[1]
                except Corrupt:
                    if opened:
                        break  # only a pull that needs the corrupt frame gets the error
                    raise
                self._frames.keep(frame_key, frame)
            opened[frame_key] = frame
        return opened
