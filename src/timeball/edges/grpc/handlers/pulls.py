"""PullMessage and the calls about offsets, for a consumer that keeps its own position in each queue.

    PullMessage     status, messages, and the offset to continue at; also if nothing is found or with ILLEGAL_OFFSET
    UpdateOffset    store the group's progress; as durable as the broker's stored offsets
    GetOffset       the stored offset, or OFFSET_NOT_FOUND
    QueryOffset     the first, the last or a time-based offset of a queue

A pull creates no lease: the message stays in its queue, has no handle, and is returned again by the next pull.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pyarrow as pa

from timeball.broker.consuming import pull
from timeball.broker.consuming.pull import FilteredPull
from timeball.broker.filters import Filter
from timeball.broker.registry.topics import Queue, Topic
from timeball.edges.grpc._generated.definition_pb2 import Code, MessageQueue, QueryOffsetPolicy
from timeball.edges.grpc._generated.service_pb2 import (
    GetOffsetRequest,
    GetOffsetResponse,
    PullMessageRequest,
    PullMessageResponse,
    QueryOffsetRequest,
    QueryOffsetResponse,
    UpdateOffsetRequest,
    UpdateOffsetResponse,
)
from timeball.edges.grpc.calls import (
    OK,
    Call,
    Consuming,
    Handlers,
    group_name,
    status,
    topic_name,
    wait_ms,
)
from timeball.edges.grpc.codec.messages_out import messages
from timeball.edges.grpc.session import GrpcContext
from timeball.edges.shared.error_codes import Refused
from timeball.edges.shared.shared_limits import MemoryQuota
from timeball.io.threads import in_thread
from timeball.model import limits
from timeball.model.access import Caller, Verb
from timeball.model.errors import OutOfRange

INSTANT_SECONDS_MAX = limits.INSTANT_MS_MAX // limits.SECOND_MS


class Pulls:
    """Serves PullMessage and the calls about offsets. Belongs to the event loop."""

    def __init__(self, context: GrpcContext, consuming: Consuming, response_buffer: MemoryQuota) -> None:
        self._context, self._broker = context, context.broker
        self._consuming, self._response_buffer = consuming, response_buffer
        self.handlers: Handlers = {
            "PullMessage": self._pull,
            "UpdateOffset": self._update,
            "GetOffset": self._get,
            "QueryOffset": self._query,
        }

    async def _pull(self, call: Call, request: PullMessageRequest) -> AsyncIterator[PullMessageResponse]:
        self._broker.policy.joined(group_name(request.group), call.caller)
        topic, queue = self._queue(request.message_queue, call.caller)
        wanted = self._consuming.wanted(request.filter_expression, topic)
        if not 1 <= request.batch_size <= limits.POP_ROWS_MAX:
            raise Refused(
                Code.BAD_REQUEST,
                f"batch_size {request.batch_size}: 1 to {limits.POP_ROWS_MAX} messages a call",
            )
        waits_ms = wait_ms(
            call, request.long_polling_timeout if request.HasField("long_polling_timeout") else None
        )
        low, high = queue.index.min_offset, queue.index.max_offset
        if not low <= request.offset <= high:
            sentence = f"offset {request.offset}: the queue keeps {low} to {high}"
            yield PullMessageResponse(status=status(Code.ILLEGAL_OFFSET, sentence))
            yield PullMessageResponse(next_offset=low if request.offset < low else high)
            return
        self._response_buffer.check(call.peer)
        with self._consuming.waiting(call):
            rows, next_offset = await self._rows(topic.name, request, wanted, waits_ms / 1_000)
        if rows is None:
            sentence = f"no message in {waits_ms} ms; ask again at the next offset"
            yield PullMessageResponse(status=status(Code.MESSAGE_NOT_FOUND, sentence))
        else:
            asked, store_host = request.message_queue.topic, self._context.settings.broker_name
            with self._response_buffer.held(call.peer, rows.nbytes):
                yield PullMessageResponse(status=OK)
                for message in messages(rows, asked, topic.name, store_host):
                    yield PullMessageResponse(message=message)
        yield PullMessageResponse(next_offset=next_offset)

    async def _rows(
        self, topic: str, request: PullMessageRequest, wanted: Filter, wait_s: float
    ) -> tuple[pa.RecordBatch | None, int]:
        """Return the matching rows (None when the time is up), and the offset to continue at."""
        loop, at, queue_id = asyncio.get_running_loop(), request.offset, request.message_queue.id
        until_s = loop.time() + wait_s
        while True:
            # Looked up after each wait, because the topic may have been deleted meanwhile.
            queue = self._broker.tables.topics.get(topic).queues[queue_id]
            while at < queue.index.max_offset:
                chosen = pull.candidates(
                    queue.index, max(at, queue.index.min_offset), request.batch_size, wanted,
                    bytes_max=limits.POP_BYTES_MAX,
                )  # fmt: skip
                rows = await in_thread(self._broker.threads.reader, self._read, chosen, wanted)
                at = chosen.next_offset
                if rows is not None:
                    return rows, at
            left_s = until_s - loop.time()
            if left_s <= 0 or not await self._broker.waiters.wait(topic, left_s, queue_id):
                return None, at

    def _read(self, chosen: FilteredPull, wanted: Filter) -> pa.RecordBatch | None:
        """Return the rows that match the filter, if any (reader thread)."""
        chosen = pull.decide(chosen, self._broker.log.reader, wanted)
        return self._broker.log.reader.read_rows(chosen.seqs) if len(chosen.seqs) else None

    async def _update(self, call: Call, request: UpdateOffsetRequest) -> UpdateOffsetResponse:
        group = self._broker.policy.joined(group_name(request.group), call.caller)
        topic, _ = self._queue(request.message_queue, call.caller)
        try:
            await self._broker.commit_offsets(
                group.group_name, topic.name, {request.message_queue.id: request.offset}, call.caller
            )
        except OutOfRange as error:
            raise Refused(Code.ILLEGAL_OFFSET, str(error)) from error
        return UpdateOffsetResponse(status=OK)

    async def _get(self, call: Call, request: GetOffsetRequest) -> GetOffsetResponse:
        group = self._broker.policy.joined(group_name(request.group), call.caller)
        topic, _ = self._queue(request.message_queue, call.caller)
        found = self._broker.offsets(group.group_name, topic.name, call.caller).get(request.message_queue.id)
        if found is None:
            raise Refused(
                Code.OFFSET_NOT_FOUND,
                f"group {group.group_name!r} has no offset in queue {request.message_queue.id}; ask QueryOffset for "
                "where to begin",
            )
        return GetOffsetResponse(status=OK, offset=found)

    async def _query(self, call: Call, request: QueryOffsetRequest) -> QueryOffsetResponse:
        _, queue = self._queue(request.message_queue, call.caller, Verb.LOOK)
        policy = request.query_offset_policy
        if policy == QueryOffsetPolicy.TIMESTAMP:
            at = request.timestamp
            if not request.HasField("timestamp") or not 0 <= at.seconds <= INSTANT_SECONDS_MAX:
                raise Refused(
                    Code.BAD_REQUEST, "timestamp: an instant from 1970 to 9999 when it is asked for by one"
                )
            instant_ms = at.seconds * 1_000 + at.nanos // 1_000_000
            offset = await in_thread(
                self._broker.threads.reader,
                pull.offset_at,
                self._broker.log.reader,
                queue.index,
                instant_ms,
            )
        elif policy in (QueryOffsetPolicy.BEGINNING, QueryOffsetPolicy.END):
            offset = (
                queue.index.min_offset if policy == QueryOffsetPolicy.BEGINNING else queue.index.max_offset
            )
        else:
            raise Refused(Code.BAD_REQUEST, f"query_offset_policy {policy}: BEGINNING, END or TIMESTAMP")
        return QueryOffsetResponse(status=OK, offset=offset)

    def _queue(self, named: MessageQueue, caller: Caller, verb: Verb = Verb.RECEIVE) -> tuple[Topic, Queue]:
        topic = self._broker.policy.readable(topic_name(named.topic), caller, verb)
        if not 0 <= named.id < topic.read_queues:
            raise Refused(
                Code.BAD_REQUEST, f"queue {named.id}: topic {topic.name!r} has 0 to {topic.read_queues - 1}"
            )
        return topic, topic.queues[named.id]
