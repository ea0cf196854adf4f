"""Receiving: ReceiveMessage hands out messages with receipt handles, PullMessage reads a queue without leases.

ReceiveMessage answers at once or after a wait (a long poll):

    messages       status OK, the messages, the time at which they were handed out
    no messages    status MESSAGE_NOT_FOUND, after the waiting time of the request

A consumer gets messages of any queue of the topic, whichever queue its request names, as with RocketMQ's proxy.
Consumers ask the queues of a route in turn, so they would otherwise wait at an empty queue while another queue has a
message. Only a push consumer that consumes in order gets messages of the queue in its request, which is assigned to it.

PullMessage and the calls about offsets are for a consumer that keeps its own position in each queue.

If a client disconnects before it has read its leased messages, they are given back at once. A client that does not read
its responses delays only itself (shared_limits.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pyarrow as pa

from timeball.broker.consuming import pull
from timeball.broker.consuming.pull import FilteredPull
from timeball.broker.consuming.requests import Received, ReceiveRequest
from timeball.broker.filters import Filter
from timeball.broker.registry.topics import Queue, Topic
from timeball.edges.grpc._generated.definition_pb2 import Code, Message, MessageQueue, QueryOffsetPolicy
from timeball.edges.grpc._generated.service_pb2 import (
    GetOffsetRequest,
    GetOffsetResponse,
    PullMessageRequest,
    PullMessageResponse,
    QueryOffsetRequest,
    QueryOffsetResponse,
    ReceiveMessageRequest,
    ReceiveMessageResponse,
    UpdateOffsetRequest,
    UpdateOffsetResponse,
)
from timeball.edges.grpc.calls import (
    OK,
    Call,
    GrpcContext,
    Handlers,
    LongPolls,
    duration_ms,
    group_name,
    long_poll_ms,
    status,
    topic_name,
)
from timeball.edges.grpc.codec.messages_out import ReceiptFields, messages, timestamp
from timeball.edges.grpc.handlers.receipts import FIRST_LEASE_MS, Renewals
from timeball.edges.shared.error_codes import Refused
from timeball.edges.shared.receipt_handles import ReceiptHandles
from timeball.edges.shared.shared_limits import MemoryQuota
from timeball.io.threads import in_thread
from timeball.log.row_encoder import read_bytes
from timeball.model import limits
from timeball.model.access import Caller, Verb
from timeball.model.errors import OutOfRange

# ---- ReceiveMessage ------------------------------------------------------------------------------------------

ATTEMPT_ID_CHARACTERS_MAX = 128  # the broker keeps one per queue that is consumed in order. A UUID has 36
INVISIBLE_MS_MIN = limits.SECOND_MS  # RocketMQ's minimum is 10 s


class Receives:
    """Serves ReceiveMessage. Belongs to the event loop."""

    def __init__(
        self,
        context: GrpcContext,
        long_polls: LongPolls,
        receipt_handles: ReceiptHandles,
        renewals: Renewals,
        response_buffer: MemoryQuota,
    ) -> None:
        self._broker, self._store_host = context.broker, context.settings.broker_name
        self._long_polls, self._receipt_handles, self._renewals = long_polls, receipt_handles, renewals
        self._response_buffer = response_buffer
        self.handlers: Handlers = {"ReceiveMessage": self._receive}

    async def _receive(
        self, call: Call, request: ReceiveMessageRequest
    ) -> AsyncIterator[ReceiveMessageResponse]:
        """Serve ReceiveMessage: yield a status, the messages, and the time at which they were handed out.

        Raises Refused, NotFound, Forbidden, OverLimit.
        """
        self._response_buffer.check(call.peer)
        client_id, receive_request = self._decode_request(call, request)
        wait_ms = long_poll_ms(
            call, request.long_polling_timeout if request.HasField("long_polling_timeout") else None
        )
        with self._long_polls.count_waiting(call):
            received = await self._broker.consuming.receive(receive_request, wait_ms)
        if not received.receipts:
            yield ReceiveMessageResponse(
                status=status(Code.MESSAGE_NOT_FOUND, f"no message in {wait_ms} ms; ask again")
            )
            return
        is_read = False
        try:
            with self._response_buffer.held(call.peer, read_bytes(received.handed_out)):
                yield ReceiveMessageResponse(status=OK)
                for message in self._messages(request, receive_request, received):
                    yield ReceiveMessageResponse(message=message)
                is_read = True
                if request.auto_renew:
                    self._renewals.add(client_id, received.receipts)
                yield ReceiveMessageResponse(delivery_timestamp=timestamp(received.pop_ms))
        finally:
            if not is_read:
                self._broker.consuming.return_unseen(received.receipts)

    def _decode_request(self, call: Call, request: ReceiveMessageRequest) -> tuple[str, ReceiveRequest]:
        """Check a request. The caller joins the group. Raises Refused, NotFound, Forbidden, OverLimit.

        Returns the client's id and the request for the broker.
        """
        client_id, queue = call.client_id, request.message_queue
        names = group_name(request.group), topic_name(queue.topic)
        group, topic, *_ = self._broker.consuming.join(*names, call.caller)
        if not 1 <= request.batch_size <= limits.POP_ROWS_MAX:
            raise Refused(
                Code.BAD_REQUEST,
                f"batch_size {request.batch_size}: 1 to {limits.POP_ROWS_MAX} messages a call",
            )
        if not -1 <= queue.id < topic.read_queues:
            raise Refused(
                Code.BAD_REQUEST,
                f"queue {queue.id}: topic {topic.name!r} has 0 to {topic.read_queues - 1}, -1 is any queue",
            )
        if len(request.attempt_id) > ATTEMPT_ID_CHARACTERS_MAX:
            raise Refused(Code.BAD_REQUEST, f"attempt_id: at most {ATTEMPT_ID_CHARACTERS_MAX} characters")
        in_order = group.consume_message_orderly
        receive_request = ReceiveRequest(
            group.group_name,
            topic.name,
            queue_id=queue.id if in_order and request.auto_renew else -1,
            rows=request.batch_size,
            invisible_ms=FIRST_LEASE_MS if request.auto_renew else _invisible_ms(request),
            wanted=self._long_polls.filter_for(request.filter_expression, topic),
            in_order=in_order,
            attempt_id=request.attempt_id if in_order else "",
            counts_times=True,
        )
        return client_id, receive_request

    def _messages(
        self, request: ReceiveMessageRequest, receive_request: ReceiveRequest, received: Received
    ) -> Iterator[Message]:
        """Yield the received messages, each with its receipt handle."""
        handles = self._receipt_handles.encode_all(received.receipts)
        return messages(
            received.handed_out, request.message_queue.topic, receive_request.topic, self._store_host,
            ReceiptFields(handles, receive_request.invisible_ms),
        )  # fmt: skip


def _invisible_ms(request: ReceiveMessageRequest) -> int:
    """Decode and check the invisible time of a request in ms. Raises Refused, also if it is missing."""
    invisible_ms = 0
    if request.HasField("invisible_duration"):
        invisible_ms = duration_ms(
            request.invisible_duration, Code.ILLEGAL_INVISIBLE_TIME, "invisible_duration"
        )
    if not INVISIBLE_MS_MIN <= invisible_ms <= limits.INVISIBLE_MS_MAX:
        raise Refused(
            Code.ILLEGAL_INVISIBLE_TIME,
            f"invisible_duration of {invisible_ms} ms: {INVISIBLE_MS_MIN} to {limits.INVISIBLE_MS_MAX} ms, or "
            "auto_renew",
        )
    return invisible_ms


# ---- PullMessage and the calls about offsets -----------------------------------------------------------------
# A pull creates no lease: the message has no receipt handle, and a pull at the same offset returns it again.

TIME_SECONDS_MAX = limits.INSTANT_MS_MAX // limits.SECOND_MS


class Pulls:
    """Serves PullMessage and the calls about offsets. Belongs to the event loop.

    PullMessage     returns a status, messages, and the offset to continue at. The offset is also returned if there is
                    no message, or with ILLEGAL_OFFSET
    UpdateOffset    stores the group's offset in a queue, as durable as all stored offsets of the broker
    GetOffset       returns the stored offset, or OFFSET_NOT_FOUND
    QueryOffset     returns the first or last offset of a queue, or the offset for a time
    """

    def __init__(self, context: GrpcContext, long_polls: LongPolls, response_buffer: MemoryQuota) -> None:
        self._context, self._broker = context, context.broker
        self._long_polls, self._response_buffer = long_polls, response_buffer
        self.handlers: Handlers = {
            "PullMessage": self._pull,
            "UpdateOffset": self._update_offset,
            "GetOffset": self._get_offset,
            "QueryOffset": self._query_offset,
        }

    async def _pull(self, call: Call, request: PullMessageRequest) -> AsyncIterator[PullMessageResponse]:
        """Serve PullMessage: yield a status, the messages, and the offset to continue at.

        Raises Refused, NotFound, Forbidden, OverLimit.
        """
        self._broker.policy.ensure_group(group_name(request.group), call.caller)
        topic, queue = self._find_queue(request.message_queue, call.caller)
        message_filter = self._long_polls.filter_for(request.filter_expression, topic)
        if not 1 <= request.batch_size <= limits.POP_ROWS_MAX:
            raise Refused(
                Code.BAD_REQUEST,
                f"batch_size {request.batch_size}: 1 to {limits.POP_ROWS_MAX} messages a call",
            )
        wait_ms = long_poll_ms(
            call, request.long_polling_timeout if request.HasField("long_polling_timeout") else None
        )
        low, high = queue.index.min_offset, queue.index.max_offset
        if not low <= request.offset <= high:
            sentence = f"offset {request.offset}: the queue keeps {low} to {high}"
            yield PullMessageResponse(status=status(Code.ILLEGAL_OFFSET, sentence))
            yield PullMessageResponse(next_offset=low if request.offset < low else high)
            return
        self._response_buffer.check(call.peer)
        with self._long_polls.count_waiting(call):
            rows, next_offset = await self._wait_for_rows(
                topic.name, request, message_filter, wait_ms / 1_000
            )
        if rows is None:
            sentence = f"no message in {wait_ms} ms; ask again at the next offset"
            yield PullMessageResponse(status=status(Code.MESSAGE_NOT_FOUND, sentence))
        else:
            resource, store_host = request.message_queue.topic, self._context.settings.broker_name
            with self._response_buffer.held(call.peer, rows.nbytes):
                yield PullMessageResponse(status=OK)
                for message in messages(rows, resource, topic.name, store_host):
                    yield PullMessageResponse(message=message)
        yield PullMessageResponse(next_offset=next_offset)

    async def _wait_for_rows(
        self, topic: str, request: PullMessageRequest, message_filter: Filter, wait_s: float
    ) -> tuple[pa.RecordBatch | None, int]:
        """Wait until rows from the request's offset on match the filter.

        Returns these rows (None if there are none within `wait_s`), and the offset to continue at.
        """
        loop, offset, queue_id = asyncio.get_running_loop(), request.offset, request.message_queue.id
        deadline_s = loop.time() + wait_s
        while True:
            # Looked up after each wait, because the topic may have been deleted meanwhile.
            queue = self._broker.tables.topics.get(topic).queues[queue_id]
            while offset < queue.index.max_offset:
                candidates = pull.candidates(
                    queue.index, max(offset, queue.index.min_offset), request.batch_size, message_filter,
                    bytes_max=limits.POP_BYTES_MAX,
                )  # fmt: skip
                rows, offset = await in_thread(
                    self._broker.threads.reader, self._read_matches, candidates, message_filter
                )
                if rows is not None:
                    return rows, offset
            remaining_s = deadline_s - loop.time()
            if remaining_s <= 0 or not await self._broker.waiters.wait(topic, remaining_s, queue_id):
                return None, offset

    def _read_matches(
        self, candidates: FilteredPull, message_filter: Filter
    ) -> tuple[pa.RecordBatch | None, int]:
        """Read the candidates that match the filter. Runs in the reader thread.

        Returns their rows (None if none match), and the offset at which the next search begins.
        """
        matches = pull.decide(candidates, self._broker.log.reader, message_filter)
        rows = self._broker.log.reader.read_rows(matches.seqs) if len(matches.seqs) else None
        return rows, matches.next_offset

    async def _update_offset(self, call: Call, request: UpdateOffsetRequest) -> UpdateOffsetResponse:
        """Serve UpdateOffset. Creates the group if it does not exist.

        Raises Refused for a queue that the topic does not have or an offset outside it, and NotFound, Forbidden,
        InvalidName, OverLimit.
        """
        group = self._broker.policy.ensure_group(group_name(request.group), call.caller)
        topic, _ = self._find_queue(request.message_queue, call.caller)
        try:
            await self._broker.commit_offsets(
                group.group_name, topic.name, {request.message_queue.id: request.offset}, call.caller
            )
        except OutOfRange as error:
            raise Refused(Code.ILLEGAL_OFFSET, str(error)) from error
        return UpdateOffsetResponse(status=OK)

    async def _get_offset(self, call: Call, request: GetOffsetRequest) -> GetOffsetResponse:
        """Serve GetOffset.

        Raises Refused if the group has no offset or the queue does not exist, or NotFound, Forbidden, InvalidName and
        OverLimit.
        """
        group = self._broker.policy.ensure_group(group_name(request.group), call.caller)
        topic, _ = self._find_queue(request.message_queue, call.caller)
        offsets = self._broker.offsets(group.group_name, topic.name, call.caller)
        offset = offsets.get(request.message_queue.id)
        if offset is None:
            raise Refused(
                Code.OFFSET_NOT_FOUND,
                f"group {group.group_name!r} has no offset in queue {request.message_queue.id}; ask QueryOffset for "
                "where to begin",
            )
        return GetOffsetResponse(status=OK, offset=offset)

    async def _query_offset(self, call: Call, request: QueryOffsetRequest) -> QueryOffsetResponse:
        """Serve QueryOffset: the first offset of a queue, its end, or the first offset stored at or after a time.

        Raises Refused for an invalid policy or time, and the errors of the broker's policy.
        """
        _, queue = self._find_queue(request.message_queue, call.caller, Verb.LOOK)
        policy = request.query_offset_policy
        if policy == QueryOffsetPolicy.TIMESTAMP:
            timestamp = request.timestamp
            if not request.HasField("timestamp") or not 0 <= timestamp.seconds <= TIME_SECONDS_MAX:
                raise Refused(
                    Code.BAD_REQUEST, "timestamp: the policy TIMESTAMP requires a time from 1970 to 9999"
                )
            time_ms = timestamp.seconds * 1_000 + timestamp.nanos // 1_000_000
            offset = await in_thread(
                self._broker.threads.reader,
                pull.offset_at,
                self._broker.log.reader,
                queue.index,
                time_ms,
            )
        elif policy in (QueryOffsetPolicy.BEGINNING, QueryOffsetPolicy.END):
            offset = (
                queue.index.min_offset if policy == QueryOffsetPolicy.BEGINNING else queue.index.max_offset
            )
        else:
            raise Refused(Code.BAD_REQUEST, f"query_offset_policy {policy}: BEGINNING, END or TIMESTAMP")
        return QueryOffsetResponse(status=OK, offset=offset)

    def _find_queue(
        self, queue: MessageQueue, caller: Caller, verb: Verb = Verb.RECEIVE
    ) -> tuple[Topic, Queue]:
        """Find the topic and the queue of a request. Raises Refused, NotFound, Forbidden."""
        topic = self._broker.policy.find_readable_topic(topic_name(queue.topic), caller, verb)
        if not 0 <= queue.id < topic.read_queues:
            raise Refused(
                Code.BAD_REQUEST, f"queue {queue.id}: topic {topic.name!r} has 0 to {topic.read_queues - 1}"
            )
        return topic, topic.queues[queue.id]
