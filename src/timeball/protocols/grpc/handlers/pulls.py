"""PullMessage and the calls about offsets: a consumer that keeps its own place in each queue.

    PullMessage     status, messages, and the offset to go on at; also with nothing found, and with ILLEGAL_OFFSET
    UpdateOffset    how far the group has come; as durable as the broker's stored offsets are
    GetOffset       the same, or OFFSET_NOT_FOUND
    QueryOffset     where a queue begins, ends, or was at an instant

Nothing is handed out here: what is pulled stays where it is, has no handle, and comes again when it is pulled again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pyarrow as pa

from timeball import limits
from timeball.broker import searching
from timeball.broker.consuming import filter_pull
from timeball.broker.consuming.filter_pull import FilteredPull
from timeball.broker.filters import Filter
from timeball.broker.parts import in_thread
from timeball.broker.registry.topics import Queue, Topic
from timeball.errors import OutOfRange
from timeball.protocols.error_codes import Refused
from timeball.protocols.grpc._generated.definition_pb2 import Code, MessageQueue, QueryOffsetPolicy
from timeball.protocols.grpc._generated.service_pb2 import (
    GetOffsetRequest,
    GetOffsetResponse,
    PullMessageRequest,
    PullMessageResponse,
    QueryOffsetRequest,
    QueryOffsetResponse,
    UpdateOffsetRequest,
    UpdateOffsetResponse,
)
from timeball.protocols.grpc.buffers import Unread
from timeball.protocols.grpc.calls import Call, Handlers
from timeball.protocols.grpc.codec.messages_out import messages
from timeball.protocols.grpc.codec.statuses import ok, status
from timeball.protocols.grpc.handlers.consumer_request import Consuming, wait_ms
from timeball.protocols.grpc.site import Site

INSTANT_SECONDS_MAX = limits.INSTANT_MS_MAX // limits.SECOND_MS


class Pulls:
    """See the module. Belongs to the event loop."""

    def __init__(self, site: Site, consuming: Consuming, unread: Unread) -> None:
        self._site, self._broker, self._parts = site, site.broker, site.broker.parts
        self._consuming, self._unread = consuming, unread

    def handlers(self) -> Handlers:
        """The calls answered here."""
        return {
            "PullMessage": self._pull,
            "UpdateOffset": self._update,
            "GetOffset": self._get,
            "QueryOffset": self._query,
        }

    async def _pull(self, call: Call, request: PullMessageRequest) -> AsyncIterator[PullMessageResponse]:
        self._consuming.group(request.group)
        topic, queue = self._queue(request.message_queue)
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
        self._unread.check(call.peer)
        with self._consuming.waiting(call):
            rows, next_offset = await self._rows(topic.name, request, wanted, waits_ms / 1_000)
        if rows is None:
            sentence = f"no message in {waits_ms} ms; ask again at the next offset"
            yield PullMessageResponse(status=status(Code.MESSAGE_NOT_FOUND, sentence))
        else:
            asked, store_host = request.message_queue.topic, self._site.settings.broker_name
            with self._unread.held(call.peer, rows.nbytes):
                yield PullMessageResponse(status=ok())
                for message in messages(rows, asked, topic.name, store_host):
                    yield PullMessageResponse(message=message)
        yield PullMessageResponse(next_offset=next_offset)

    async def _rows(
        self, topic: str, request: PullMessageRequest, wanted: Filter, wait_s: float
    ) -> tuple[pa.RecordBatch | None, int]:
        """What is wanted from the offset on, and where to go on; None when the time is up."""
        loop, at, queue_id = asyncio.get_running_loop(), request.offset, request.message_queue.id
        until_s = loop.time() + wait_s
        while True:
            queue = self._parts.topics.get(topic).queues[queue_id]  # it may be deleted while we wait
            while at < queue.index.max_offset:
                chosen = filter_pull.candidates(
                    queue.index, max(at, queue.index.min_offset), request.batch_size, wanted,
                    bytes_max=limits.POP_BYTES_MAX,
                )  # fmt: skip
                rows = await in_thread(self._parts.reader_thread, self._read, chosen, wanted)
                at = chosen.next_offset
                if rows is not None:
                    return rows, at
            left_s = until_s - loop.time()
            if left_s <= 0 or not await self._broker.waiters.wait(topic, left_s, queue_id):
                return None, at

    def _read(self, chosen: FilteredPull, wanted: Filter) -> pa.RecordBatch | None:
        """The rows that the filter lets through, if any (reader thread)."""
        chosen = filter_pull.decide(chosen, self._parts.reader, wanted)
        return self._parts.reader.take(chosen.seqs) if len(chosen.seqs) else None

    async def _update(self, call: Call, request: UpdateOffsetRequest) -> UpdateOffsetResponse:
        group = self._consuming.group(request.group)
        topic, _ = self._queue(request.message_queue)
        try:
            await self._broker.commit_offsets(
                group.group_name, topic.name, {request.message_queue.id: request.offset}
            )
        except OutOfRange as error:
            raise Refused(Code.ILLEGAL_OFFSET, str(error)) from error
        return UpdateOffsetResponse(status=ok())

    async def _get(self, call: Call, request: GetOffsetRequest) -> GetOffsetResponse:
        group = self._consuming.group(request.group)
        topic, _ = self._queue(request.message_queue)
        found = self._broker.offsets(group.group_name, topic.name).get(request.message_queue.id)
        if found is None:
            raise Refused(
                Code.OFFSET_NOT_FOUND,
                f"group {group.group_name!r} has no offset in queue {request.message_queue.id}; ask QueryOffset for "
                "where to begin",
            )
        return GetOffsetResponse(status=ok(), offset=found)

    async def _query(self, call: Call, request: QueryOffsetRequest) -> QueryOffsetResponse:
        _, queue = self._queue(request.message_queue)
        policy = request.query_offset_policy
        if policy == QueryOffsetPolicy.TIMESTAMP:
            at = request.timestamp
            if not request.HasField("timestamp") or not 0 <= at.seconds <= INSTANT_SECONDS_MAX:
                raise Refused(
                    Code.BAD_REQUEST, "timestamp: an instant from 1970 to 9999 when it is asked for by one"
                )
            instant_ms = at.seconds * 1_000 + at.nanos // 1_000_000
            offset = await in_thread(
                self._parts.reader_thread, searching.offset_at, self._parts.reader, queue.index, instant_ms
            )
        elif policy in (QueryOffsetPolicy.BEGINNING, QueryOffsetPolicy.END):
            offset = (
                queue.index.min_offset if policy == QueryOffsetPolicy.BEGINNING else queue.index.max_offset
            )
        else:
            raise Refused(Code.BAD_REQUEST, f"query_offset_policy {policy}: BEGINNING, END or TIMESTAMP")
        return QueryOffsetResponse(status=ok(), offset=offset)

    def _queue(self, named: MessageQueue) -> tuple[Topic, Queue]:
        topic = self._consuming.topic(named.topic)
        if not 0 <= named.id < topic.read_queues:
            raise Refused(
                Code.BAD_REQUEST, f"queue {named.id}: topic {topic.name!r} has 0 to {topic.read_queues - 1}"
            )
        return topic, topic.queues[named.id]
