"""The answers of consumers to received messages: acknowledge, deliver later, or give up.

    AckMessage                        one status per handle
    ChangeInvisibleDuration           a handle with the same meaning, valid for the new time
    ForwardMessageToDeadLetterQueue   to the group's dead letters, after any number of attempts

A handle is INVALID_RECEIPT_HANDLE if this broker did not create it for this group and topic, or if its message has
returned to the group meanwhile. A repeated acknowledgement is OK, because the first answer may have been lost. Answers
are sent when their effect is durable.

A push consumer changes the invisible time when its listener has failed, and the pause is the group's policy. RocketMQ's
Node client reads the policy wrongly (a customised one as none, seconds as milliseconds). It would use up the attempts
of a message at once. So for a push consumer, any time of less than a second is replaced by the pause of the policy.
"""

from __future__ import annotations

from collections.abc import Sequence

from timeball.broker.consuming.requests import AnyReceipt
from timeball.broker.registry.groups import PUSH_FIRST
from timeball.edges.grpc._generated.definition_pb2 import ClientType, Code, Status
from timeball.edges.grpc._generated.service_pb2 import (
    AckMessageRequest,
    AckMessageResponse,
    AckMessageResultEntry,
    ChangeInvisibleDurationRequest,
    ChangeInvisibleDurationResponse,
    ForwardMessageToDeadLetterQueueRequest,
    ForwardMessageToDeadLetterQueueResponse,
)
from timeball.edges.grpc.calls import (
    OK,
    Call,
    Handlers,
    duration_ms,
    group_name,
    status,
    status_of,
    topic_name,
)
from timeball.edges.grpc.handlers.renewals import Renewals
from timeball.edges.grpc.session import GrpcContext
from timeball.edges.shared.error_codes import Refused
from timeball.edges.shared.receipt_handles import ReceiptHandles, invalid
from timeball.model import limits
from timeball.model.errors import InvalidReceipt

LATE = "it is not valid any more: its message was answered before, or has come back when its time was over"


class Receipts:
    """Serves the calls that contain a receipt handle. Belongs to the event loop."""

    def __init__(self, context: GrpcContext, handles: ReceiptHandles, renewals: Renewals) -> None:
        self._consuming, self._sessions = context.broker.consuming, context.sessions
        self._handles, self._renewals = handles, renewals
        self.handlers: Handlers = {
            "AckMessage": self._ack,
            "ChangeInvisibleDuration": self._change,
            "ForwardMessageToDeadLetterQueue": self._dead_letter,
        }

    async def _ack(self, call: Call, request: AckMessageRequest) -> AckMessageResponse:
        group, topic = group_name(request.group), topic_name(request.topic)
        most = limits.CANCELS_PER_REQUEST_MAX
        if not 1 <= len(request.entries) <= most:
            raise Refused(Code.BAD_REQUEST, f"{len(request.entries)} entries: 1 to {most} handles a call")
        refused: dict[int, Status] = {}
        receipts: list[AnyReceipt] = []
        for at, entry in enumerate(request.entries):
            try:
                receipts.append(self._handles.decode(entry.receipt_handle, group, topic))
            except InvalidReceipt as error:
                refused[at] = status_of(error)
        async with self._renewals.answering(receipts):
            ended = await self._consuming.acknowledge(receipts)
            if not all(ended):
                ended = [
                    now or before
                    for now, before in zip(ended, self._consuming.was_ended(receipts), strict=True)
                ]
        verdicts = iter(ended)
        fine, late = OK, status_of(invalid(LATE))
        statuses = [
            refused[at] if at in refused else fine if next(verdicts) else late
            for at in range(len(request.entries))
        ]
        entries = [
            AckMessageResultEntry(
                message_id=entry.message_id, receipt_handle=entry.receipt_handle, status=each
            )
            for entry, each in zip(request.entries, statuses, strict=True)
        ]
        return AckMessageResponse(status=_of_all(statuses), entries=entries)

    async def _change(
        self, call: Call, request: ChangeInvisibleDurationRequest
    ) -> ChangeInvisibleDurationResponse:
        receipt = self._receipt(request)
        invisible_ms = -1
        if request.HasField("invisible_duration"):
            invisible_ms = duration_ms(
                request.invisible_duration, Code.ILLEGAL_INVISIBLE_TIME, "invisible_duration"
            )
        if not 0 <= invisible_ms <= limits.INVISIBLE_MS_MAX:
            raise Refused(
                Code.ILLEGAL_INVISIBLE_TIME, f"invisible_duration: 0 to {limits.INVISIBLE_MS_MAX} ms from now"
            )
        async with self._renewals.answering([receipt]):
            by_policy = invisible_ms < limits.SECOND_MS and not request.suspend and self._is_push(call)
            # Any other time may be a failure or an extension: the protocol does not distinguish them.
            changed = await (
                self._consuming.nack(receipt, None, first=PUSH_FIRST)
                if by_policy
                else self._consuming.change_invisible_time(receipt, invisible_ms, counts=not request.suspend)
            )
        if changed is None:
            raise invalid(LATE)
        return ChangeInvisibleDurationResponse(status=OK, receipt_handle=self._handles.encode(changed))

    async def _dead_letter(
        self, call: Call, request: ForwardMessageToDeadLetterQueueRequest
    ) -> ForwardMessageToDeadLetterQueueResponse:
        receipt = self._receipt(request)
        async with self._renewals.answering([receipt]):
            is_valid = await self._consuming.dead_letter(receipt)
        if not is_valid:
            raise invalid(LATE)
        return ForwardMessageToDeadLetterQueueResponse(status=OK)

    def _is_push(self, call: Call) -> bool:
        client = self._sessions.get(call.client_id)
        return client is not None and client.settings.client_type == ClientType.PUSH_CONSUMER

    def _receipt(
        self, request: ChangeInvisibleDurationRequest | ForwardMessageToDeadLetterQueueRequest
    ) -> AnyReceipt:
        group, topic = group_name(request.group), topic_name(request.topic)
        return self._handles.decode(request.receipt_handle, group, topic)


def _of_all(statuses: Sequence[Status]) -> Status:
    """Return one status for the call: that of the entries if they all have the same code."""
    codes = {each.code for each in statuses}
    if len(codes) == 1:
        return statuses[0]
    return status(Code.MULTIPLE_RESULTS, "each entry has a status of its own")
