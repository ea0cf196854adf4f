"""One subscription: receives as a member of its group, sends, and settles each lease by what the receiver said.

    2xx                            acknowledged
    410                            given back, no attempt; the subscription is paused
    anything else, or no answer    an attempt that failed: it comes again by the group's retry policy, or later if
                                   the receiver asks for that; after the last attempt it is a dead letter

A lease lasts longer than a request may, so it need not be extended: what is sent at most waits for this broker's own
log after that. After a crash the leases end by themselves, as they stand in the log, and the messages are sent again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NamedTuple

from timeball import limits
from timeball.access import ANONYMOUS
from timeball.broker.consuming.requests import AnyReceipt, ReceiveRequest
from timeball.broker.filters.compiler import FiltersKept
from timeball.broker.push_changes import EXPRESSION_TYPES
from timeball.broker.registry.groups import retry_delay_ms
from timeball.broker.registry.push_subscriptions import PushSubscription
from timeball.broker.service import Broker
from timeball.errors import NotFound, TimeballError
from timeball.monitoring.push_figures import PushFigures
from timeball.protocols.push.codec import Answer, Delivery, deliveries, signed
from timeball.protocols.push.pace import Pace
from timeball.protocols.shared_limits import ByteShares

if TYPE_CHECKING:  # the library behind it is imported with the first subscription
    from timeball.protocols.push.sender import Receiver

logger = logging.getLogger(__name__)

LEASE_SLACK_MS = 30_000  # of a lease beyond a request's time: to write down how it ended
WAIT_MS = 30_000  # for messages, before it is asked anew whether the group may consume
ROWS_MAX = 256  # received at once
AGAIN_S = 2.0  # after a refusal of the broker's own, as of a topic that is not there yet
# Received nothing of what is there: another member was first, or all of it is leased. Not to ask in circles.
TURN_S = 0.01


class _UnderWay(NamedTuple):
    delivery: Delivery
    receipt: AnyReceipt
    size_bytes: int


class Worker:
    """Works from `start` to `halt`. Belongs to the event loop."""

    def __init__(
        self,
        name: str,
        subscription: PushSubscription,
        broker: Broker,
        receiver: Receiver,
        figures: PushFigures,
        bytes_held: ByteShares,
        filters: FiltersKept,
    ) -> None:
        self._name, self._subscription, self._broker = name, subscription, broker
        self._receiver, self._figures, self._bytes_held = receiver, figures, bytes_held
        self._filters, self._clock = filters, broker.parts.clock.clock
        self._pace = Pace(self._clock, subscription.in_flight_max, subscription.rate_per_s)
        self._changed = asyncio.Event()
        self._requests: set[asyncio.Task[None]] = set()
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to receive."""
        self._running = asyncio.create_task(self._run())

    def halt(self) -> None:
        """Receive nothing more; requests under way go on."""
        if self._running is not None:
            self._running.cancel()

    async def end(self, wait_s: float | None) -> None:
        """Return when the requests have ended; give back what has not by then."""
        if self._running is not None:
            # First: a receive that is cut short gives back what it has leased.
            await asyncio.gather(self._running, return_exceptions=True)
        if self._requests:
            _, late = await asyncio.wait(self._requests, timeout=wait_s)
            for request in late:
                request.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._receiver.close()

    # -- receiving -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._receive()
            except TimeballError as error:
                self._figures.last_failure = str(error)
                logger.info("push waits subscription=%s reason=%s", self._name, error)
                await asyncio.sleep(AGAIN_S)
            except Exception as error:  # of any kind: one subscription must not end, or end the broker
                self._figures.last_failure = f"{type(error).__name__}; the broker's log says more"
                logger.error("push failed subscription=%s reason=%s", self._name, error, exc_info=error)
                await asyncio.sleep(AGAIN_S)

    async def _receive(self) -> None:
        consuming, rows = self._broker.consuming, await self._room()
        try:
            request = self._request(rows)
        except NotFound as error:
            # Its first message makes the topic; an operator may, too, which wakes no consumer.
            self._figures.last_failure = str(error)
            await self._broker.waiters.wait(self._subscription.topic, AGAIN_S)
            return
        if not await consuming.wait_for_some(request, WAIT_MS):
            return
        # Before they are received: the bodies of all subscriptions together have a bound.
        await self._bytes_held.room(self._name, limits.POP_BYTES_MAX)
        rows = self._pace.room()
        try:
            if not rows:
                return
            received = await consuming.receive(self._request(rows), 0)
            found = list(deliveries(received.rows, self._name, self._subscription.topic))
            for delivery, receipt in zip(found, received.receipts, strict=True):
                self._begin(_UnderWay(delivery, receipt, len(delivery.body) + 1))
        finally:
            self._bytes_held.remove(self._name, limits.POP_BYTES_MAX)
        if not found:
            await asyncio.sleep(TURN_S)

    async def _room(self) -> int:
        """Return how many requests may begin, once that is one or more."""
        while not (rows := self._pace.room()):
            self._changed.clear()
            try:
                async with asyncio.timeout(self._pace.wait_s()):
                    await self._changed.wait()
            except TimeoutError:
                pass
        return rows

    def _request(self, rows: int) -> ReceiveRequest:
        wanted, consuming = self._subscription, self._broker.consuming
        # Asked each time: a topic may be made, a group switched off or made an orderly one meanwhile.
        found = consuming.join(wanted.group, wanted.topic, ANONYMOUS)
        bit_mask = found.topic.filter_type == "MULTI_TAG"
        in_order = found.group.consume_message_orderly
        return ReceiveRequest(
            wanted.group,
            wanted.topic,
            # In order a queue gives nothing while one of its messages is leased: so no two of it are under way.
            rows=1 if in_order else min(rows, ROWS_MAX),
            invisible_ms=wanted.timeout_ms + LEASE_SLACK_MS,
            wanted=self._filters.get(wanted.filter, EXPRESSION_TYPES[wanted.filter_type], bit_mask=bit_mask),
            in_order=in_order,
            in_log=True,
        )

    # -- sending -------------------------------------------------------------------------------------------------

    def _begin(self, one: _UnderWay) -> None:
        self._bytes_held.add(self._name, one.size_bytes)
        self._pace.begin()
        self._figures.in_flight += 1
        task = asyncio.create_task(self._deliver(one))
        self._requests.add(task)
        task.add_done_callback(self._requests.discard)

    async def _deliver(self, one: _UnderWay) -> None:
        began_ns = self._clock.monotonic_ns()
        try:
            try:
                answer = await self._post(one.delivery)
            except asyncio.CancelledError:
                # The receiver may have it or not; this broker stops, which is no fault of the message.
                self._broker.consuming.not_seen([one.receipt])
                raise
            finally:
                self._figures.in_flight -= 1
                self._bytes_held.remove(self._name, one.size_bytes)
            self._figures.add(answer.outcome, self._clock.monotonic_ns() - began_ns)
            self._count(answer)
            await self._settle(one, answer)
        except TimeballError as error:
            # Its lease ends by itself, and it is sent again.
            logger.warning("push outcome not kept subscription=%s reason=%s", self._name, error)

    async def _post(self, delivery: Delivery) -> Answer:
        now_ms = self._clock.wall_ms()
        try:
            secrets = self._broker.parts.push_subscriptions.secrets(self._name, now_ms)
            return await self._receiver.post(delivery.body, signed(delivery, secrets, now_ms), now_ms)
        except Exception as error:  # of any kind: its lease is to be settled as that of other failures
            logger.error("push failed subscription=%s reason=%s", self._name, error, exc_info=error)
            return Answer("failed", words=type(error).__name__)

    def _count(self, answer: Answer) -> None:
        """Tell the pace and the figures how a request has ended."""
        was_open = self._pace.is_open
        if answer.outcome == "delivered":
            self._pace.succeeded()
        else:
            asks = answer.status in (429, 503)  # the receiver is overloaded: not this message's fault
            self._pace.failed(_bounded(answer.retry_after_ms) if asks else 0)
            self._figures.last_failure = f"{answer.outcome}: {answer.words}"[:300]
        self._figures.failures, self._figures.is_held = self._pace.failures, self._pace.is_open
        if self._pace.is_open and not was_open:
            logger.warning(
                "push receiver fails subscription=%s failures=%d reason=%s",
                self._name, self._pace.failures, self._figures.last_failure,
            )  # fmt: skip
        elif was_open and not self._pace.is_open:
            logger.warning("push receiver works again subscription=%s", self._name)
        self._changed.set()

    async def _settle(self, one: _UnderWay, answer: Answer) -> None:
        consuming = self._broker.consuming
        if answer.outcome == "delivered":
            if not all(await consuming.acknowledge([one.receipt])):
                self._figures.late_acks += 1
        elif answer.is_gone:
            consuming.not_seen([one.receipt])
            logger.warning("push paused by its receiver subscription=%s", self._name)
            await self._broker.push.pause(self._name, ANONYMOUS, by="receiver")
        else:
            group = self._broker.parts.groups.find_group(self._subscription.group)
            policy = group.group_retry_policy if group is not None else None
            # Never sooner than the group says: a receiver that asks for a second would use up all attempts in a minute.
            delay_ms = max(retry_delay_ms(policy, one.delivery.attempt), _bounded(answer.retry_after_ms))
            await consuming.nack(one.receipt, delay_ms, f"push: {answer.outcome}: {answer.words}")


def _bounded(retry_after_ms: int) -> int:
    return min(retry_after_ms, limits.PUSH_RETRY_AFTER_MS_MAX)
