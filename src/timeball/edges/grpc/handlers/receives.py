"""ReceiveMessage: hand out messages with receipt handles, at once or after a wait (a long poll).

    messages       status OK, the messages, the time at which they were handed out
    no messages    status MESSAGE_NOT_FOUND, after the waiting time of the request

A consumer gets messages of any queue of the topic, whichever queue its request names, as with RocketMQ's proxy.
Consumers ask the queues of a route in turn, so they would otherwise wait at an empty queue while another queue has a
message. Only a push consumer that consumes in order gets messages of the queue in its request, which is assigned to it.

If a client disconnects before it has read its messages, they are given back at once. A client that does not read its
responses delays only itself (shared_limits.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from timeball.broker.consuming.requests import Received, ReceiveRequest
from timeball.edges.grpc._generated.definition_pb2 import Code, Message
from timeball.edges.grpc._generated.service_pb2 import ReceiveMessageRequest, ReceiveMessageResponse
from timeball.edges.grpc.calls import (
    OK,
    Call,
    Handlers,
    LongPolls,
    duration_ms,
    group_name,
    long_poll_ms,
    status,
    topic_name,
)
from timeball.edges.grpc.codec.messages_out import ReceiptFields, messages, timestamp
from timeball.edges.grpc.handlers.renewals import FIRST_LEASE_MS, Renewals
from timeball.edges.grpc.session import GrpcContext
from timeball.edges.shared.error_codes import Refused
from timeball.edges.shared.receipt_handles import ReceiptHandles
from timeball.edges.shared.shared_limits import MemoryQuota
from timeball.log.row_encoder import read_bytes
from timeball.model import limits

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
                self._broker.consuming.not_seen(received.receipts)

    def _decode_request(self, call: Call, request: ReceiveMessageRequest) -> tuple[str, ReceiveRequest]:
        """Check a request. Returns the client's id and the request for the broker. Raises Refused, NotFound, Forbidden.

        The caller joins the group.
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
            in_log=True,
        )
        return client_id, receive_request

    def _messages(
        self, request: ReceiveMessageRequest, receive_request: ReceiveRequest, received: Received
    ) -> Iterator[Message]:
        handles = [self._receipt_handles.encode(receipt) for receipt in received.receipts]
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
