"""Calls with the receipt handle of a received message: acknowledge it, deliver it later, or make it a dead letter.

    AckMessage                        ends the leases. The response has one status per handle
    ChangeInvisibleDuration           changes the invisible time. The response has a new handle, valid for the new time
    ForwardMessageToDeadLetterQueue   moves the message to the group's dead letters, after any number of attempts

The status is INVALID_RECEIPT_HANDLE if this broker did not create the handle for this group and topic, or if the
message has returned to the group meanwhile. A repeated acknowledgement is OK, because the first response may have been
lost. Responses are sent when the change is durable.

A push consumer changes the invisible time when its listener has failed. The time is the pause of the group's retry
policy. RocketMQ's Node client misreads the policy: it ignores a customised policy, and takes seconds for milliseconds.
So it would use up the attempts of a message at once. For a push consumer, the broker therefore replaces any time of
less than a second by the pause of the policy.
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

NO_LONGER_VALID = (
    "it is not valid any more: its message was answered before, or has come back when its time was over"
)


class Receipts:
    """Serves the calls with receipt handles. Belongs to the event loop."""

    def __init__(self, context: GrpcContext, receipt_handles: ReceiptHandles, renewals: Renewals) -> None:
        self._consuming, self._sessions = context.broker.consuming, context.sessions
        self._receipt_handles, self._renewals = receipt_handles, renewals
        self.handlers: Handlers = {
            "AckMessage": self._ack,
            "ChangeInvisibleDuration": self._change,
            "ForwardMessageToDeadLetterQueue": self._dead_letter,
        }

    async def _ack(self, call: Call, request: AckMessageRequest) -> AckMessageResponse:
        """Acknowledge the entries. The answer has a status for each, in their order."""
        group, topic = group_name(request.group), topic_name(request.topic)
        entries_max = limits.CANCELS_PER_REQUEST_MAX
        if not 1 <= len(request.entries) <= entries_max:
            raise Refused(
                Code.BAD_REQUEST, f"{len(request.entries)} entries: 1 to {entries_max} handles a call"
            )
        refusals: dict[int, Status] = {}  # by the index of the entry
        receipts: list[AnyReceipt] = []
        for index, entry in enumerate(request.entries):
            try:
                receipts.append(self._receipt_handles.decode(entry.receipt_handle, group, topic))
            except InvalidReceipt as error:
                refusals[index] = status_of(error)
        async with self._renewals.settling(receipts):
            is_acknowledged = await self._consuming.acknowledge(receipts)
            if not all(is_acknowledged):
                # A repeated acknowledgement is OK: an earlier call has ended this lease.
                is_acknowledged = [
                    now or earlier
                    for now, earlier in zip(is_acknowledged, self._consuming.was_ended(receipts), strict=True)
                ]
        outcomes = iter(is_acknowledged)
        no_longer_valid = status_of(invalid(NO_LONGER_VALID))
        statuses = [
            refusals[index] if index in refusals else OK if next(outcomes) else no_longer_valid
            for index in range(len(request.entries))
        ]
        entries = [
            AckMessageResultEntry(
                message_id=entry.message_id, receipt_handle=entry.receipt_handle, status=entry_status
            )
            for entry, entry_status in zip(request.entries, statuses, strict=True)
        ]
        return AckMessageResponse(status=_overall_status(statuses), entries=entries)

    async def _change(
        self, call: Call, request: ChangeInvisibleDurationRequest
    ) -> ChangeInvisibleDurationResponse:
        receipt = self._decode_receipt(request)
        invisible_ms = -1
        if request.HasField("invisible_duration"):
            invisible_ms = duration_ms(
                request.invisible_duration, Code.ILLEGAL_INVISIBLE_TIME, "invisible_duration"
            )
        if not 0 <= invisible_ms <= limits.INVISIBLE_MS_MAX:
            raise Refused(
                Code.ILLEGAL_INVISIBLE_TIME, f"invisible_duration: 0 to {limits.INVISIBLE_MS_MAX} ms from now"
            )
        async with self._renewals.settling([receipt]):
            by_policy = (
                invisible_ms < limits.SECOND_MS and not request.suspend and self._is_push_consumer(call)
            )
            # The protocol does not distinguish a failure of the listener from a request for more time.
            changed = await (
                self._consuming.nack(receipt, None, first=PUSH_FIRST)
                if by_policy
                else self._consuming.change_invisible_time(receipt, invisible_ms, counts=not request.suspend)
            )
        if changed is None:
            raise invalid(NO_LONGER_VALID)
        return ChangeInvisibleDurationResponse(
            status=OK, receipt_handle=self._receipt_handles.encode(changed)
        )

    async def _dead_letter(
        self, call: Call, request: ForwardMessageToDeadLetterQueueRequest
    ) -> ForwardMessageToDeadLetterQueueResponse:
        receipt = self._decode_receipt(request)
        async with self._renewals.settling([receipt]):
            is_valid = await self._consuming.dead_letter(receipt)
        if not is_valid:
            raise invalid(NO_LONGER_VALID)
        return ForwardMessageToDeadLetterQueueResponse(status=OK)

    def _is_push_consumer(self, call: Call) -> bool:
        client = self._sessions.get(call.client_id)
        return client is not None and client.settings.client_type == ClientType.PUSH_CONSUMER

    def _decode_receipt(
        self, request: ChangeInvisibleDurationRequest | ForwardMessageToDeadLetterQueueRequest
    ) -> AnyReceipt:
        """Decode and check the receipt handle of a request. Raises InvalidReceipt, Refused."""
        group, topic = group_name(request.group), topic_name(request.topic)
        return self._receipt_handles.decode(request.receipt_handle, group, topic)


def _overall_status(statuses: Sequence[Status]) -> Status:
    """Determine the status of the whole call: the status of the first entry if all entries have the same code."""
    codes = {entry_status.code for entry_status in statuses}
    if len(codes) == 1:
        return statuses[0]
    return status(Code.MULTIPLE_RESULTS, "each entry has a status of its own")
