"""One subscription: it receives as a member of its group, sends, and settles each lease by the receiver's answer.

    2xx                            acknowledged
    410                            given back without counting an attempt; the subscription is paused
    anything else, or no answer    a failed attempt: the message is delivered again by the group's retry policy, or
                                   later if the receiver requests that; after the last attempt it is a dead letter

A lease lasts longer than a request may, so it need not be extended. After its request, a message waits at most for this
broker's log. After a crash the leases end by themselves, because they are stored in the log, and the messages are sent
again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, NamedTuple

from timeball.broker.admin.push_changes import EXPRESSION_TYPES
from timeball.broker.consuming.requests import AnyReceipt, ReceiveRequest
from timeball.broker.filters.compiler import FiltersKept
from timeball.broker.registry.groups import retry_delay_ms
from timeball.broker.registry.push_subscriptions import PushSubscription
from timeball.broker.service import Broker
from timeball.edges.push.codec import Answer, Delivery, deliveries, signed
from timeball.edges.shared.shared_limits import MemoryQuota
from timeball.io.clock import Clock
from timeball.model import limits
from timeball.model.access import ANONYMOUS
from timeball.model.errors import NotFound, TimeballError
from timeball.monitoring.push_figures import PushFigures

if TYPE_CHECKING:  # the library behind it is imported with the first subscription
    from timeball.edges.push.sender import Receiver

logger = logging.getLogger(__name__)

LEASE_SLACK_MS = 30_000  # the time of a lease after a request's time limit, for storing the outcome
WAIT_MS = 30_000  # the longest wait for messages before the group's permission is checked again
ROWS_MAX = 256  # received at once
AGAIN_S = 2.0  # after a refusal by this broker, for example when the topic does not exist yet
# The pause after a receive without messages, although some are pending: another member was first, or all are leased. It
# avoids a busy loop.
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
        bytes_held: MemoryQuota,
        filters: FiltersKept,
    ) -> None:
        self._name, self._subscription, self._broker = name, subscription, broker
        self._receiver, self._figures, self._bytes_held = receiver, figures, bytes_held
        self._filters, self._clock = filters, broker.clock.clock
        self._pace = Pace(self._clock, subscription.in_flight_max, subscription.rate_per_s)
        self._changed = asyncio.Event()
        self._requests: set[asyncio.Task[None]] = set()  # requests under way
        self._running: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to receive."""
        self._running = asyncio.create_task(self._run())

    def halt(self) -> None:
        """Stop receiving. Requests under way go on."""
        if self._running is not None:
            self._running.cancel()

    async def end(self, wait_s: float | None) -> None:
        """Wait for the requests to end, and give back the messages of those that do not.

        `wait_s` is the longest time to wait, in seconds. None means no limit.
        """
        if self._running is not None:
            # The receive ends first: a cancelled receive gives back the messages that it has leased.
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
            except Exception as error:  # of any kind: it must end neither this subscription nor the broker
                self._figures.last_failure = f"{type(error).__name__}; the broker's log says more"
                logger.error("push failed subscription=%s reason=%s", self._name, error, exc_info=error)
                await asyncio.sleep(AGAIN_S)

    async def _receive(self) -> None:
        consuming, rows = self._broker.consuming, await self._room()
        try:
            request = self._request(rows)
        except NotFound as error:
            # The first message creates the topic. An operator may create it too, which wakes no consumer, so look
            # again.
            self._figures.last_failure = str(error)
            await self._broker.waiters.wait(self._subscription.topic, AGAIN_S)
            return
        if not await consuming.wait_for_some(request, WAIT_MS):
            return
        # Reserve the bytes before receiving, because the bodies of all subscriptions together have a limit.
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
        """Wait until at least one request may begin, and return their number."""
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
        # Looked up each time: the topic may have been created, or the group disabled or made ordered.
        found = consuming.join(wanted.group, wanted.topic, ANONYMOUS)
        bit_mask = found.topic.filter_type == "MULTI_TAG"
        in_order = found.group.consume_message_orderly
        return ReceiveRequest(
            wanted.group,
            wanted.topic,
            # In order, a queue hands out nothing while one of its messages is leased. So no two of them are under way.
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
                # The receiver may have the message or not. The broker is stopping, so the attempt does not count.
                self._broker.consuming.not_seen([one.receipt])
                raise
            finally:
                self._figures.in_flight -= 1
                self._bytes_held.remove(self._name, one.size_bytes)
            self._figures.add(answer.outcome, self._clock.monotonic_ns() - began_ns)
            self._count(answer)
            await self._settle(one, answer)
        except TimeballError as error:
            # The lease ends by itself, and the message is sent again.
            logger.warning("push outcome not kept subscription=%s reason=%s", self._name, error)

    async def _post(self, delivery: Delivery) -> Answer:
        now_ms = self._clock.wall_ms()
        try:
            secrets = self._broker.tables.push_subscriptions.secrets(self._name, now_ms)
            return await self._receiver.post(delivery.body, signed(delivery, secrets, now_ms), now_ms)
        except Exception as error:  # of any kind: the message is settled like other failures
            logger.error("push failed subscription=%s reason=%s", self._name, error, exc_info=error)
            return Answer("failed", words=type(error).__name__)

    def _count(self, answer: Answer) -> None:
        """Record the end of a request in the pace and the figures."""
        was_open = self._pace.is_open
        if answer.outcome == "delivered":
            self._pace.succeeded()
        else:
            asks = answer.status in (429, 503)  # the receiver is overloaded, which the message did not cause
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
            group = self._broker.tables.groups.find_group(self._subscription.group)
            policy = group.group_retry_policy if group is not None else None
            # The group's delay is the minimum: a receiver that requests a second would use up all attempts within a
            # minute.
            delay_ms = max(retry_delay_ms(policy, one.delivery.attempt), _bounded(answer.retry_after_ms))
            await consuming.nack(one.receipt, delay_ms, f"push: {answer.outcome}: {answer.words}")


def _bounded(retry_after_ms: int) -> int:
    return min(retry_after_ms, limits.PUSH_RETRY_AFTER_MS_MAX)


# The limits of a subscription: requests at once, a rate, and pauses after failures. No I/O.
#
# in flight   a maximum of requests at once
# rate        a token bucket that holds a tenth of a second's worth, so that a quiet hour is not followed by a burst
# circuit     after FAILURES_MAX failures in a row, one request at a time, each after a pause that doubles, until one
#             succeeds. A receiver that is down then costs few messages an attempt, and the others none
# held        until a time that the receiver has requested (Retry-After)

FAILURES_MAX = 10  # in a row, until the circuit opens
PAUSE_MS_MIN, PAUSE_MS_MAX = 1_000, 60_000
BURST_S = 0.1


class Pace:
    """The pace of one subscription. Belongs to the event loop. Durations use the monotonic clock."""

    def __init__(self, clock: Clock, in_flight_max: int, rate_per_s: float | None) -> None:
        self._clock, self._in_flight_max, self._rate_per_s = clock, in_flight_max, rate_per_s
        self._burst = max(1.0, (rate_per_s or 0) * BURST_S)
        self._tokens, self._filled_ms = self._burst, self._now_ms()
        self._held_until_ms = self._probe_at_ms = self._now_ms()
        self._pause_ms = 0
        self.failures = 0  # failures since the last success
        self.in_flight = 0

    @property
    def is_open(self) -> bool:
        """True while the circuit is open, so that only one request at a time tests the receiver."""
        return self.failures >= FAILURES_MAX

    def held_ms(self) -> int:
        """Compute the time in milliseconds for which no request may begin, regardless of the requests in flight."""
        return max(0, max(self._held_until_ms, self._probe_at_ms) - self._now_ms())

    def room(self) -> int:
        """Compute how many requests may begin now."""
        if self.held_ms():
            return 0
        room = (1 if self.is_open else self._in_flight_max) - self.in_flight
        if self._rate_per_s is not None:
            self._fill()
            room = min(room, int(self._tokens))
        return max(0, room)

    def wait_s(self) -> float | None:
        """Compute the time in seconds until `room` may grow. None means: when a request ends."""
        if held_ms := self.held_ms():
            return held_ms / 1_000
        if self.in_flight >= (1 if self.is_open else self._in_flight_max) or self._rate_per_s is None:
            return None
        self._fill()
        return max(0.001, (1 - self._tokens) / self._rate_per_s)

    def begin(self) -> None:
        """Count a request that begins."""
        self.in_flight += 1
        self._tokens -= 1

    def succeeded(self) -> None:
        """Count a request that succeeded. This closes the circuit."""
        self.in_flight -= 1
        self.failures = self._pause_ms = 0
        self._probe_at_ms = self._now_ms()

    def failed(self, hold_ms: int = 0) -> None:
        """Count a request that failed, and hold further ones for `hold_ms`, which the receiver may have requested."""
        now_ms = self._now_ms()
        self.in_flight -= 1
        self.failures += 1
        self._held_until_ms = max(self._held_until_ms, now_ms + hold_ms)
        # Failures during a pause are of requests that began before it, so they do not lengthen it.
        if self.is_open and now_ms >= self._probe_at_ms:
            self._pause_ms = min(max(PAUSE_MS_MIN, 2 * self._pause_ms), PAUSE_MS_MAX)
            self._probe_at_ms = now_ms + self._pause_ms

    def _fill(self) -> None:
        now_ms = self._now_ms()
        assert self._rate_per_s is not None
        self._tokens = min(self._burst, self._tokens + (now_ms - self._filled_ms) * self._rate_per_s / 1_000)
        self._filled_ms = now_ms

    def _now_ms(self) -> int:
        return self._clock.monotonic_ns() // 1_000_000
