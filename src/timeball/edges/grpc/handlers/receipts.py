"""Leases of received messages: the calls that settle or change them by receipt handles, and their auto-renewal.

    AckMessage                        ends the leases. The response has one status per handle
    ChangeInvisibleDuration           changes the invisible time. The response has a new handle, valid for the new time
    ForwardMessageToDeadLetterQueue   moves the message to the group's dead letters, after any number of attempts
    auto-renewal                      messages held by a push consumer stay invisible for as long as it is connected

The status is INVALID_RECEIPT_HANDLE if this broker did not create the handle for this group and topic, or if the
message has returned to the group meanwhile. A repeated acknowledgement is OK, because the first response may have been
lost. Responses are sent when the change is durable.

A push consumer changes the invisible time when its listener has failed. The time is the pause of the group's retry
policy. RocketMQ's Node client misreads the policy: it ignores a customised policy, and takes seconds for milliseconds.
So it would use up the attempts of a message at once. For a push consumer, the broker therefore replaces any time of
less than a second by the pause of the policy.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from timeball.broker.consuming.engine import Consuming
from timeball.broker.consuming.requests import Receipt
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
    Client,
    GrpcContext,
    Handlers,
    duration_ms,
    group_name,
    status,
    status_of,
    topic_name,
)
from timeball.edges.shared.error_codes import Refused
from timeball.edges.shared.receipt_handles import ReceiptHandles, invalid_receipt
from timeball.edges.shared.sessions import Sessions
from timeball.model import limits
from timeball.model.errors import InvalidReceipt, TimeballError

logger = logging.getLogger(__name__)

# ---- the calls with a receipt handle -------------------------------------------------------------------------

NO_LONGER_VALID = "it is not valid any more: its message was answered before, or its invisible time is over"


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
        """Serve AckMessage: acknowledge the entries. The response has a status for each, in their order.

        Raises Refused for no or too many entries, or an invalid name.
        """
        group, topic = group_name(request.group), topic_name(request.topic)
        entries_max = limits.CANCELS_PER_REQUEST_MAX
        if not 1 <= len(request.entries) <= entries_max:
            raise Refused(
                Code.BAD_REQUEST, f"{len(request.entries)} entries: 1 to {entries_max} handles a call"
            )
        refusals: dict[int, Status] = {}  # by the index of the entry
        receipts: list[Receipt] = []
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
                    is_now or was_earlier
                    for is_now, was_earlier in zip(
                        is_acknowledged, self._consuming.was_ended(receipts), strict=True
                    )
                ]
        outcomes = iter(is_acknowledged)
        no_longer_valid = status_of(invalid_receipt(NO_LONGER_VALID))
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
        """Serve ChangeInvisibleDuration: the invisible time of a message ends `invisible_duration` from now.

        The response has the handle for the new time. When it ends, the delivery counts as an attempt unless the request
        has `suspend`. Raises Refused, InvalidReceipt.
        """
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
            counts = not request.suspend
            if self._is_push_consumer(call):
                # The broker renews its leases, so this call means that the listener has failed. A time of less than a
                # second is a fault of the Node client (see the module docstring): the retry policy decides (None).
                by_policy = counts and invisible_ms < limits.SECOND_MS
                delay_ms = None if by_policy else invisible_ms
                new_receipt = await self._consuming.nack(receipt, delay_ms, counts=counts, first=PUSH_FIRST)
            else:
                new_receipt = await self._consuming.change_invisible_time(
                    receipt, invisible_ms, counts=counts
                )
        if new_receipt is None:
            raise invalid_receipt(NO_LONGER_VALID)
        return ChangeInvisibleDurationResponse(
            status=OK, receipt_handle=self._receipt_handles.encode(new_receipt)
        )

    async def _dead_letter(
        self, call: Call, request: ForwardMessageToDeadLetterQueueRequest
    ) -> ForwardMessageToDeadLetterQueueResponse:
        """Serve ForwardMessageToDeadLetterQueue. Raises Refused, InvalidReceipt."""
        receipt = self._decode_receipt(request)
        async with self._renewals.settling([receipt]):
            is_valid = await self._consuming.dead_letter(receipt)
        if not is_valid:
            raise invalid_receipt(NO_LONGER_VALID)
        return ForwardMessageToDeadLetterQueueResponse(status=OK)

    def _is_push_consumer(self, call: Call) -> bool:
        client = self._sessions.get(call.client_id)
        return client is not None and client.settings.client_type == ClientType.PUSH_CONSUMER

    def _decode_receipt(
        self, request: ChangeInvisibleDurationRequest | ForwardMessageToDeadLetterQueueRequest
    ) -> Receipt:
        """Decode and check the receipt handle of a request. Raises InvalidReceipt, Refused."""
        group, topic = group_name(request.group), topic_name(request.topic)
        return self._receipt_handles.decode(request.receipt_handle, group, topic)


def _overall_status(statuses: Sequence[Status]) -> Status:
    """Determine the status of the whole call: the status of the first entry if all entries have the same code."""
    codes = {entry_status.code for entry_status in statuses}
    if len(codes) == 1:
        return statuses[0]
    return status(Code.MULTIPLE_RESULTS, "each entry has a status of its own")


# ---- auto-renewal --------------------------------------------------------------------------------------------
# A push consumer sets no invisible time, since the duration of its listener is unknown. Its messages begin with an
# invisible time of one minute. The broker renews it before it ends, for longer each time, up to three hours in total.
# After that the message is delivered again. The receipt stays valid. When the client disconnects, its messages are
# given back.


FIRST_LEASE_MS = limits.MINUTE_MS
LEASE_STEPS_MS = (limits.MINUTE_MS, 3 * limits.MINUTE_MS, 5 * limits.MINUTE_MS, 10 * limits.MINUTE_MS)
TOTAL_MS_MAX = 3 * limits.HOUR_MS
AHEAD_MS = 10 * limits.SECOND_MS  # how long before the end of its invisible time a message is renewed
LOOK_S = 1.0  # between two searches for messages to renew
RENEWED_MAX = limits.POP_HELD_MAX
RENEWED_PER_CLIENT_MAX = 20_000  # ordinary clients hold a few thousand
RENEWING_MAX = 64  # concurrent renewals. More would delay the acknowledgements of consumers


@dataclass(slots=True, eq=False)
class _HeldMessage:
    """One message held by a client. Times are from `now_ms` of Renewals."""

    client: str
    due_ms: int  # the end of the invisible time
    received_ms: int
    renewals: int = 0  # the number of renewals so far
    is_settling: bool = False  # a call with its receipt runs (see Renewals.settling)
    renewing: asyncio.Future[None] | None = None  # done at the end of the renewal that runs now


class Renewals:
    """Renews the leases of push consumers. Belongs to the event loop. `close` ends its tasks.

    The state is kept in memory only, so after a restart nothing is renewed. A message is then delivered again at the
    end of its last renewal, unless it is settled by its receipt handle before. The number of renewed messages is
    bounded, per client and in total. Messages beyond the bound get only the first minute.

    `now_ms` never decreases. The receipt of each held message is in `_due` or `_ready`, unless the message is renewed
    or settled at the moment.
    """

    def __init__(
        self, consuming: Consuming, sessions: Sessions[str, Client], now_ms: Callable[[], int]
    ) -> None:
        self._consuming, self._sessions, self._now_ms = consuming, sessions, now_ms
        self._held: dict[Receipt, _HeldMessage] = {}
        self._by_client: dict[str, set[Receipt]] = {}
        self._due: dict[int, set[Receipt]] = {}  # by the second in which to renew
        self._ready: deque[Receipt] = deque()  # due, but no task has begun to renew them
        self._renewing: set[asyncio.Task[None]] = set()
        self.renewed = 0  # the number of renewals so far
        self._watch: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        sessions.on_session_removed.append(self._end_client)

    def __len__(self) -> int:
        return len(self._held)

    def add(self, client: str, receipts: Sequence[Receipt]) -> None:
        """Renew these receipts from now on. They were handed to `client` with `FIRST_LEASE_MS` each."""
        now_ms = self._now_ms()
        client_receipts = self._by_client.setdefault(client, set())
        free_slots = min(RENEWED_MAX - len(self._held), RENEWED_PER_CLIENT_MAX - len(client_receipts))
        for receipt in receipts[: max(0, free_slots)]:
            message = self._held[receipt] = _HeldMessage(client, now_ms + FIRST_LEASE_MS, now_ms)
            client_receipts.add(receipt)
            self._schedule_renewal(receipt, message)
        if not client_receipts:
            del self._by_client[client]
        if self._held and (self._watch is None or self._watch.done()):
            self._watch = asyncio.create_task(self._start_due_repeatedly())
            self._watch.add_done_callback(_log_failure)

    @asynccontextmanager
    async def settling(self, receipts: Sequence[Receipt]) -> AsyncIterator[None]:
        """Suspend the renewal of these messages while the block acknowledges or changes them, then forget them.

        A renewal moves a scheduled message, which cannot be settled (released or cancelled) at the same time. So the
        block begins after the renewals that run now. If the block fails, the messages are renewed again.
        """
        held_messages = [
            (receipt, message)
            for receipt in set(receipts)
            if (message := self._held.get(receipt)) is not None
        ]
        try:
            for _, message in held_messages:
                message.is_settling = True
            for _, message in held_messages:
                if message.renewing is not None:
                    await asyncio.wait([message.renewing])
            yield
        except BaseException:
            # Also CancelledError, if the client has disconnected. Its messages are unsettled.
            for receipt, message in held_messages:
                message.is_settling = False
                if receipt in self._held:
                    self._schedule_renewal(receipt, message)
            raise
        for receipt, _ in held_messages:
            self._forget(receipt)

    def start_due(self) -> list[asyncio.Task[None]]:
        """Start tasks for the renewals that are due, at most RENEWING_MAX at once, and return the new tasks."""
        now_ms = self._now_ms()
        for second in sorted(second for second in self._due if second * limits.SECOND_MS <= now_ms):
            self._ready.extend(self._due.pop(second))
        tasks = [
            self._start_task(self._renew_ready())
            for _ in range(min(RENEWING_MAX - len(self._renewing), len(self._ready)))
        ]
        self._renewing.update(tasks)
        for task in tasks:
            task.add_done_callback(self._renewing.discard)
        return tasks

    async def close(self) -> None:
        """Stop renewing: held messages are delivered again when their time ends."""
        tasks = [*self._tasks, *([self._watch] if self._watch is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- one message -------------------------------------------------------------------------------------------

    async def _renew_ready(self) -> None:
        """Renew messages of `_ready` one after the other until it is empty."""
        while self._ready:
            receipt, now_ms = self._ready.popleft(), self._now_ms()
            message = self._held.get(receipt)
            if message is None or message.is_settling or message.renewing is not None:
                continue
            if message.client not in self._sessions or now_ms - message.received_ms >= TOTAL_MS_MAX:
                self._forget(receipt)  # the message is delivered again when its invisible time ends
                continue
            message.renewing = asyncio.get_running_loop().create_future()
            try:
                await self._renew(receipt, message, now_ms)
            finally:
                message.renewing.set_result(None)
                message.renewing = None
            if self._held.get(receipt) is message and not message.is_settling:
                self._schedule_renewal(receipt, message)

    async def _renew(self, receipt: Receipt, message: _HeldMessage, now_ms: int) -> None:
        """Extend the invisible time of one message. A failure is logged, and the next renewal tries again."""
        remaining_ms = TOTAL_MS_MAX - (now_ms - message.received_ms)
        # Longer with each renewal, but not beyond the end of the total time. AHEAD_MS: a renewal must extend the time.
        step_ms = min(
            LEASE_STEPS_MS[min(message.renewals, len(LEASE_STEPS_MS) - 1)], max(remaining_ms, AHEAD_MS)
        )
        try:
            if await self._consuming.change_invisible_time(receipt, step_ms) is None:
                self._forget(receipt)  # it was settled meanwhile, or its invisible time is over
                return
            message.due_ms, message.renewals = now_ms + step_ms, message.renewals + 1
            self.renewed += 1
        except TimeballError as error:
            logger.warning("message in flight not renewed reason=%s", error)

    def _schedule_renewal(self, receipt: Receipt, message: _HeldMessage) -> None:
        """Renew a message AHEAD_MS before its invisible time ends."""
        # In the next second at the earliest, so that a failed renewal is not tried again at once.
        renew_at_ms = max(message.due_ms - AHEAD_MS, self._now_ms() + limits.SECOND_MS)
        self._due.setdefault(renew_at_ms // limits.SECOND_MS, set()).add(receipt)

    def _forget(self, receipt: Receipt) -> None:
        """Renew a message no more. Has no effect for a message that is not held."""
        message = self._held.pop(receipt, None)
        if message is None:
            return
        second = (message.due_ms - AHEAD_MS) // limits.SECOND_MS
        if (due := self._due.get(second)) is not None:
            due.discard(receipt)
            if not due:
                del self._due[second]
        client_receipts = self._by_client[message.client]
        client_receipts.discard(receipt)
        if not client_receipts:
            del self._by_client[message.client]

    # -- all messages of a client, and all tasks -----------------------------------------------------------------

    def _end_client(self, client: Client) -> None:
        """Give back the messages of a client whose session has ended, except those with a running call."""
        client_receipts = self._by_client.get(client.client_id, set())
        unsettled = {
            receipt: self._held[receipt] for receipt in client_receipts if not self._held[receipt].is_settling
        }
        for receipt in list(client_receipts):
            self._forget(receipt)
        if unsettled:
            self._start_task(self._give_back_messages(unsettled))

    async def _give_back_messages(self, unsettled: dict[Receipt, _HeldMessage]) -> None:
        """Give messages back after the renewals that run now."""
        renewing = [message.renewing for message in unsettled.values() if message.renewing is not None]
        if renewing:
            await asyncio.wait(renewing)
        await self._consuming.give_back(list(unsettled))

    async def _start_due_repeatedly(self) -> None:
        while self._held:
            await asyncio.sleep(LOOK_S)
            self.start_due()

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task that `close` cancels. Its failure is logged."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_log_failure)
        return task


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("messages in flight not renewed reason=%s", error, exc_info=error)
