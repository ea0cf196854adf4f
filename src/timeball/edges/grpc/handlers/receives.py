"""ReceiveMessage: messages with receipt handles, now or after a wait.

    found      status OK, the messages, the time at which they were handed out
    nothing    status MESSAGE_NOT_FOUND, after the client's waiting time

A consumer gets messages of any queue, as with RocketMQ's proxy. It asks the queues of a route in turn, and would wait
at an empty queue while another has a message. Only a push consumer in order gets messages of the queue it asks, which
was assigned to it. If a client goes before it has read its messages, they are given back at once. A client that does
not read delays only itself (shared_limits.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

from timeball.broker.consuming.requests import Received, ReceiveRequest
from timeball.edges.grpc._generated.definition_pb2 import Code, Message
from timeball.edges.grpc._generated.service_pb2 import ReceiveMessageRequest, ReceiveMessageResponse
from timeball.edges.grpc.calls import (
    OK,
    Call,
    Consuming,
    Handlers,
    duration_ms,
    group_name,
    status,
    topic_name,
    wait_ms,
)
from timeball.edges.grpc.codec.messages_out import HandedOut, messages, timestamp
from timeball.edges.grpc.handlers.renewals import FIRST_MS, Renewals
from timeball.edges.grpc.session import GrpcContext
from timeball.edges.shared.error_codes import Refused
from timeball.edges.shared.receipt_handles import ReceiptHandles
from timeball.edges.shared.shared_limits import MemoryQuota
from timeball.log.row_encoder import read_bytes
from timeball.model import limits

ATTEMPT_ID_CHARACTERS_MAX = 128  # kept with each queue in order. A UUID has 36
INVISIBLE_MS_MIN = limits.SECOND_MS  # RocketMQ requires 10 s. Here its clients may ask for less


class Receives:
    """Serves ReceiveMessage. Belongs to the event loop."""

    def __init__(
        self,
        context: GrpcContext,
        consuming: Consuming,
        handles: ReceiptHandles,
        renewals: Renewals,
        response_buffer: MemoryQuota,
    ) -> None:
        self._broker, self._store_host = context.broker, context.settings.broker_name
        self._consuming, self._handles, self._renewals = consuming, handles, renewals
        self._response_buffer = response_buffer
        self.handlers: Handlers = {"ReceiveMessage": self._receive}

    async def _receive(
        self, call: Call, request: ReceiveMessageRequest
    ) -> AsyncIterator[ReceiveMessageResponse]:
        self._response_buffer.check(call.peer)
        client_id, ask = self._ask(call, request)
        waits_ms = wait_ms(
            call, request.long_polling_timeout if request.HasField("long_polling_timeout") else None
        )
        with self._consuming.waiting(call):
            received = await self._broker.consuming.receive(ask, waits_ms)
        if not received.receipts:
            yield ReceiveMessageResponse(
                status=status(Code.MESSAGE_NOT_FOUND, f"no message in {waits_ms} ms; ask again")
            )
            return
        is_read = False
        try:
            with self._response_buffer.held(call.peer, read_bytes(received.handed_out)):
                yield ReceiveMessageResponse(status=OK)
                for message in self._messages(request, ask, received):
                    yield ReceiveMessageResponse(message=message)
                is_read = True
                if request.auto_renew:
                    self._renewals.add(client_id, received.receipts)
                yield ReceiveMessageResponse(delivery_timestamp=timestamp(received.pop_ms))
        finally:
            if not is_read:
                self._broker.consuming.not_seen(received.receipts)

    def _ask(self, call: Call, request: ReceiveMessageRequest) -> tuple[str, ReceiveRequest]:
        """Return the id of the client, and its request. Raises Refused, NotFound, Forbidden."""
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
                f"queue {queue.id}: topic {topic.name!r} has 0 to {topic.read_queues - 1}, -1 is any",
            )
        if len(request.attempt_id) > ATTEMPT_ID_CHARACTERS_MAX:
            raise Refused(Code.BAD_REQUEST, f"attempt_id: at most {ATTEMPT_ID_CHARACTERS_MAX} characters")
        in_order = group.consume_message_orderly
        ask = ReceiveRequest(
            group.group_name,
            topic.name,
            queue_id=queue.id if in_order and request.auto_renew else -1,
            rows=request.batch_size,
            invisible_ms=FIRST_MS if request.auto_renew else _invisible_ms(request),
            wanted=self._consuming.wanted(request.filter_expression, topic),
            in_order=in_order,
            attempt_id=request.attempt_id if in_order else "",
            in_log=True,
        )
        return client_id, ask

    def _messages(
        self, request: ReceiveMessageRequest, ask: ReceiveRequest, received: Received
    ) -> Iterator[Message]:
        handed_out = HandedOut([self._handles.encode(each) for each in received.receipts], ask.invisible_ms)
        return messages(
            received.handed_out, request.message_queue.topic, ask.topic, self._store_host, handed_out
        )


def _invisible_ms(request: ReceiveMessageRequest) -> int:
    asked = 0
    if request.HasField("invisible_duration"):
        asked = duration_ms(request.invisible_duration, Code.ILLEGAL_INVISIBLE_TIME, "invisible_duration")
    if not INVISIBLE_MS_MIN <= asked <= limits.INVISIBLE_MS_MAX:
        raise Refused(
            Code.ILLEGAL_INVISIBLE_TIME,
            f"invisible_duration of {asked} ms: {INVISIBLE_MS_MIN} to {limits.INVISIBLE_MS_MAX} ms, or auto_renew",
        )
    return asked
