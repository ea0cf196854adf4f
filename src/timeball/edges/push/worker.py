"""The push edge and its workers: a worker delivers the messages of one subscription, as fast as its `Pace` allows.

The edge has a worker for each subscription that is not paused, and replaces it when the subscription changes. A worker
receives messages as a member of the consumer group, sends them to the receiver, and ends each lease by the receiver's
answer:

    2xx                            acknowledged
    410                            returned without counting an attempt. The subscription is paused
    anything else, or no answer    a failed attempt: the message is delivered again by the group's retry policy, or
                                   later if the receiver requests that. After the last attempt it is a dead letter

A lease lasts longer than a request may take plus LEASE_SLACK_MS for storing the outcome, so it is never extended.
After a crash, leases end by themselves, and the messages are sent again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
from collections.abc import Awaitable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from timeball.broker.admin.campaign_changes import EXPRESSION_TYPES
from timeball.broker.consuming.requests import Receipt, ReceiveRequest
from timeball.broker.filters.compiler import FilterCache
from timeball.broker.registry.groups import retry_delay_ms
from timeball.broker.registry.push_subscriptions import PushSubscription
from timeball.broker.service import Broker
from timeball.edges.push.codec import Answer, Delivery, build_deliveries, signed_headers
from timeball.edges.shared.shared_limits import MemoryQuota
from timeball.io.clock import Clock
from timeball.model import limits
from timeball.model.access import ANONYMOUS
from timeball.model.addresses import Allowed
from timeball.model.errors import NotFound, RequestError, TimeballError
from timeball.monitoring.figures import PushFigures

# ---- the push edge -------------------------------------------------------------------------------------------
# The import of the HTTP client library takes 200 ms and 9 MB. So the library is imported when the first subscription
# exists. The import runs in another thread, because the event loop has messages to release.

if TYPE_CHECKING:
    from timeball.edges.push.sender import HostResolver, Receiver

T = TypeVar("T")

logger = logging.getLogger(__name__)


BYTES_MAX = 64 * 1024 * 1024  # of the message bodies in memory, for all subscriptions together
STOP_S = 5.0  # longest wait for requests under way when the broker stops


class _SenderLibrary(NamedTuple):
    """The sending code and the objects that all receivers share.

    They are created once: `tls_context` has the system's root certificates, which take 30 ms to read.
    """

    receiver: type[Receiver]
    tls_context: ssl.SSLContext
    resolver: HostResolver

    @classmethod
    def load(cls) -> _SenderLibrary:
        """Import the HTTP client and create the shared objects. Runs in any thread."""
        from timeball.edges.push import sender

        return cls(sender.Receiver, ssl.create_default_context(), sender.HostResolver())


class PushEdge:
    """Starts and stops the workers of the subscriptions. Belongs to the broker's event loop."""

    def __init__(self, broker: Broker, figures: dict[str, PushFigures]) -> None:
        """`figures`: by subscription, changed here and read by the HTTP API and the metrics."""
        self._broker, self._figures = broker, figures
        self._allowed = Allowed.parse(broker.settings.push_allow)
        self._workers: dict[str, Worker] = {}  # by subscription
        # Tasks that finish the requests of replaced workers.
        self._ending_tasks: set[asyncio.Task[None]] = set()
        self._body_quota, self._filters = MemoryQuota(BYTES_MAX, limits.POP_BYTES_MAX), FilterCache()
        # The import of the sending library. None until a subscription needs it.
        self._library_loading: asyncio.Future[_SenderLibrary] | None = None
        # By subscription: the task that creates its worker, while it waits for the library.
        self._start_tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Start a worker for each subscription, and follow later changes of subscriptions."""
        if self._broker.virtual_time is not None:
            self._broker.virtual_time.activities.append(self)
        self._broker.push.watch(self._replace_worker)
        for name in self._broker.tables.push_subscriptions.all():
            self._replace_worker(name)

    async def close(self) -> None:
        """Stop delivering. Requests are cancelled after STOP_S, and their messages return to the groups."""
        for start_task in self._start_tasks.values():
            start_task.cancel()
        workers = list(self._workers.values())
        self._workers.clear()
        for worker in workers:
            worker.halt()
        end_tasks = [asyncio.create_task(worker.end(STOP_S)) for worker in workers]
        if self._ending_tasks:
            # Workers of changed subscriptions have had time to finish already.
            await asyncio.wait(self._ending_tasks, timeout=STOP_S)
            for task in self._ending_tasks:
                task.cancel()
        await asyncio.gather(*end_tasks, *self._ending_tasks, return_exceptions=True)
        if self._library_loading is not None:
            (await self._library_loading).resolver.close()

    # -- a manual clock (broker/virtual_time.py) ---------------------------------------------------------------

    @property
    def is_busy(self) -> bool:
        """True while a worker starts or is busy (`Worker.is_busy`)."""
        return bool(self._start_tasks) or any(worker.is_busy for worker in self._workers.values())

    def wait_ms(self) -> int | None:
        """Compute the time until the pace of a worker allows its next request. None if no worker waits for that."""
        waits_ms = [worker.wait_ms() for worker in self._workers.values()]
        return min((wait_ms for wait_ms in waits_ms if wait_ms is not None), default=None)

    def wake(self) -> None:
        """Let all workers compute again how many requests may begin."""
        for worker in self._workers.values():
            worker.wake()

    def _replace_worker(self, name: str) -> None:
        """End the worker of a subscription, and start a new one unless the subscription is paused or deleted."""
        if (start_task := self._start_tasks.pop(name, None)) is not None:
            start_task.cancel()
        old_worker = self._workers.pop(name, None)
        if old_worker is not None:
            old_worker.halt()
            # Its requests finish in the background, in parallel to those of the new worker.
            end_task = asyncio.create_task(old_worker.end(None))
            self._ending_tasks.add(end_task)
            end_task.add_done_callback(self._ending_tasks.discard)
        subscription = self._broker.tables.push_subscriptions.find(name)
        if subscription is None:
            self._figures.pop(name, None)
            return
        figures = self._figures.setdefault(name, PushFigures(self._broker.clock.clock))
        figures.failures, figures.is_held, figures.last_failure = 0, False, ""
        if not subscription.paused:
            self._start_tasks[name] = asyncio.create_task(self._start(name, subscription, figures))

    async def _start(self, name: str, subscription: PushSubscription, figures: PushFigures) -> None:
        """Create and start the worker of a subscription, once the sending library is loaded. Errors are logged."""
        if self._library_loading is None:
            self._library_loading = asyncio.ensure_future(asyncio.to_thread(_SenderLibrary.load))
        loading = self._library_loading
        try:
            # Shielded, because other subscriptions wait for the same import.
            library = await asyncio.shield(loading)
        except Exception as error:  # any error, such as a file of root certificates that cannot be read
            if self._library_loading is loading:
                self._library_loading = None  # the next change of a subscription tries again
            figures.last_failure = f"{type(error).__name__}; the broker's log says more"
            logger.error("push not started subscription=%s reason=%s", name, error, exc_info=error)
            return
        finally:
            # If this task was cancelled, the entry belongs to the task that has replaced it.
            if self._start_tasks.get(name) is asyncio.current_task():
                del self._start_tasks[name]
        try:
            receiver = library.receiver(
                subscription.url,
                self._allowed,
                library.resolver.look_up,
                library.tls_context,
                connections=subscription.in_flight_max,
                timeout_ms=subscription.timeout_ms,
            )
        except RequestError as error:
            # The URL was allowed when the subscription was created, but --push-allow has changed since.
            figures.last_failure = str(error)
            logger.warning("push not started subscription=%s reason=%s", name, error)
            return
        worker = Worker(
            name, subscription, self._broker, receiver, figures, self._body_quota, self._filters
        )  # fmt: skip
        self._workers[name] = worker
        worker.start()


# ---- the worker of one subscription --------------------------------------------------------------------------


LEASE_SLACK_MS = 30_000  # added to a request's time limit to get its lease; for storing the outcome
WAIT_MS = 30_000  # the longest wait for messages before the group's permission is checked again
ROWS_MAX = 256  # received at once
RETRY_S = 2.0  # the pause after a refusal by this broker, for example when the topic does not exist yet
# The pause after a receive that returned no messages although some are available: another member was faster, or all are
# leased. It avoids a busy loop.
EMPTY_RECEIVE_PAUSE_S = 0.01


class _PushRequest(NamedTuple):
    """A message that is being sent."""

    delivery: Delivery
    receipt: Receipt
    size_bytes: int  # counted in the quota for bodies in memory


class Worker:
    """Delivers the messages of one subscription, from `start` to `halt`. Belongs to the event loop."""

    def __init__(
        self,
        name: str,
        subscription: PushSubscription,
        broker: Broker,
        receiver: Receiver,
        figures: PushFigures,
        body_quota: MemoryQuota,
        filters: FilterCache,
    ) -> None:
        """`name`: of the subscription. `receiver`, which the worker closes, sends its requests.

        `figures` is changed here. `body_quota` and `filters` are shared by all workers.
        """
        self._name, self._subscription, self._broker = name, subscription, broker
        self._receiver, self._figures, self._body_quota = receiver, figures, body_quota
        self._filters, self._clock = filters, broker.clock.clock
        self._pace = Pace(self._clock, subscription.in_flight_max, subscription.rate_per_s)
        self._pace_changed = asyncio.Event()  # set when a request ends
        self._request_tasks: set[asyncio.Task[None]] = set()  # requests under way
        self._receive_task: asyncio.Task[None] | None = None
        self._is_idle = False  # the receive task waits: for messages, for the pace or after an error

    def start(self) -> None:
        """Start to receive and send."""
        self._receive_task = asyncio.create_task(self._run())

    @property
    def is_busy(self) -> bool:
        """True while a request is under way, or messages are received."""
        return bool(self._request_tasks) or not self._is_idle

    def wait_ms(self) -> int | None:
        """Compute the time until the pace allows a request. None if it allows one now, or if requests must end."""
        wait_s = None if self._pace.capacity() else self._pace.wait_s()
        return None if wait_s is None else math.ceil(wait_s * 1_000)

    def wake(self) -> None:
        """Compute again how many requests may begin."""
        self._pace_changed.set()

    async def _wait_idle(self, awaitable: Awaitable[T]) -> T:
        """Await, and return the result. Meanwhile the receive task does not make this worker busy (`is_busy`)."""
        self._is_idle = True
        try:
            return await awaitable
        finally:
            self._is_idle = False

    def halt(self) -> None:
        """Stop receiving. Requests under way go on."""
        if self._receive_task is not None:
            self._receive_task.cancel()

    async def end(self, wait_s: float | None) -> None:
        """Wait up to `wait_s` seconds (None: without limit) for the requests to end. Then cancel them.

        The messages of cancelled requests return to the group. Call `halt` first.
        """
        if self._receive_task is not None:
            # The receive ends first: a cancelled receive gives back the messages that it has leased.
            await asyncio.gather(self._receive_task, return_exceptions=True)
        if self._request_tasks:
            _, late_requests = await asyncio.wait(self._request_tasks, timeout=wait_s)
            for request in late_requests:
                request.cancel()
            await asyncio.gather(*late_requests, return_exceptions=True)
        await self._receiver.close()

    # -- receiving -----------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        """Receive until cancelled. Errors are logged, and followed by a pause."""
        while True:
            try:
                await self._receive()
            except TimeballError as error:
                self._figures.last_failure = str(error)
                logger.info("push waits subscription=%s reason=%s", self._name, error)
                await self._wait_idle(asyncio.sleep(RETRY_S))
            except Exception as error:  # any error: it must end neither this subscription nor the broker
                self._figures.last_failure = f"{type(error).__name__}; the broker's log says more"
                logger.error("push failed subscription=%s reason=%s", self._name, error, exc_info=error)
                await self._wait_idle(asyncio.sleep(RETRY_S))

    async def _receive(self) -> None:
        """Wait for messages, receive as many as may be sent now, and start their requests. Raises TimeballError.

        Does nothing if no message arrives within WAIT_MS, or if the topic does not exist.
        """
        consuming, capacity = self._broker.consuming, await self._wait_for_capacity()
        try:
            request = self._receive_request(capacity)
        except NotFound as error:
            # The first message creates the topic and ends this wait. An operator may create it too, which wakes no
            # consumer, so the wait has a time limit.
            self._figures.last_failure = str(error)
            await self._wait_idle(self._broker.waiters.wait(self._subscription.topic, RETRY_S))
            return
        if not await self._wait_idle(consuming.wait_for_rows(request, WAIT_MS)):
            return
        # Reserve the bytes before receiving, because there is a limit for the bodies of all subscriptions together.
        await self._body_quota.add_when_fits(self._name, limits.POP_BYTES_MAX)
        capacity = self._pace.capacity()
        try:
            if not capacity:
                return
            received = await consuming.receive(self._receive_request(capacity), 0)
            deliveries = build_deliveries(received.rows, self._name, self._subscription.topic)
            begun_count, free_bytes = 0, limits.POP_BYTES_MAX
            for delivery, receipt in zip(deliveries, received.receipts, strict=True):
                self._begin_request(_PushRequest(delivery, receipt, len(delivery.body) + 1))
                begun_count, free_bytes = begun_count + 1, free_bytes - len(delivery.body)
                # Compressed bodies may exceed the bytes, because only their compressed size was limited.
                if free_bytes < 0:
                    consuming.return_unseen(received.receipts[begun_count:])
                    break
        finally:
            self._body_quota.remove(self._name, limits.POP_BYTES_MAX)
        # No pause after messages that the filter leaves out: with a manual clock, the next ones would be late.
        if not received.receipts and await consuming.wait_for_rows(request, 0):
            await self._wait_idle(asyncio.sleep(EMPTY_RECEIVE_PAUSE_S))

    async def _wait_for_capacity(self) -> int:
        """Wait until requests may begin. Returns the number of requests that may begin, at least one."""
        while not (capacity := self._pace.capacity()):
            self._pace_changed.clear()
            try:
                async with asyncio.timeout(self._pace.wait_s()):
                    await self._wait_idle(self._pace_changed.wait())
            except TimeoutError:
                pass
        return capacity

    def _receive_request(self, rows_max: int) -> ReceiveRequest:
        """Build the request for at most `rows_max` messages. Raises NotFound if the topic does not exist."""
        subscription, consuming = self._subscription, self._broker.consuming
        # Looked up each time: the topic may have been created, or the group disabled or made ordered.
        membership = consuming.join(subscription.group, subscription.topic, ANONYMOUS)
        bit_mask = membership.topic.filter_type == "MULTI_TAG"
        in_order = membership.group.consume_message_orderly
        return ReceiveRequest(
            subscription.group,
            subscription.topic,
            # For an ordered group, a queue hands out nothing while one of its messages is leased.
            rows=1 if in_order else min(rows_max, ROWS_MAX),
            invisible_ms=subscription.timeout_ms + LEASE_SLACK_MS,
            wanted=self._filters.get(
                subscription.filter, EXPRESSION_TYPES[subscription.filter_type], bit_mask=bit_mask
            ),
            in_order=in_order,
            counts_times=True,
        )

    # -- sending -------------------------------------------------------------------------------------------------

    def _begin_request(self, request: _PushRequest) -> None:
        """Start the request for a message, and count it."""
        self._body_quota.add(self._name, request.size_bytes)
        self._pace.begin()
        self._figures.in_flight += 1
        task = asyncio.create_task(self._deliver(request))
        self._request_tasks.add(task)
        task.add_done_callback(self._request_tasks.discard)

    async def _deliver(self, request: _PushRequest) -> None:
        """Send one message, and end its lease by the outcome. If the broker cannot, the lease ends by itself."""
        began_ns = self._clock.monotonic_ns()
        try:
            try:
                answer = await self._post(request.delivery)
            except asyncio.CancelledError:
                # It is unknown whether the receiver has the message. The broker is stopping, so the attempt does not
                # count.
                self._broker.consuming.return_unseen([request.receipt])
                raise
            finally:
                self._figures.in_flight -= 1
                self._body_quota.remove(self._name, request.size_bytes)
            self._figures.add(answer.outcome, self._clock.monotonic_ns() - began_ns)
            self._record_outcome(answer)
            await self._settle(request, answer)
        except TimeballError as error:
            # The lease ends by itself, and the message is sent again.
            logger.warning("push outcome not kept subscription=%s reason=%s", self._name, error)

    async def _post(self, delivery: Delivery) -> Answer:
        """Sign and send a request. An unexpected error gives the outcome `failed`."""
        now_ms = self._clock.wall_ms()
        try:
            secrets = self._broker.tables.push_subscriptions.secrets(self._name, now_ms)
            return await self._receiver.post(delivery.body, signed_headers(delivery, secrets, now_ms), now_ms)
        except Exception as error:  # any error: the message is handled as after other failures
            logger.error("push failed subscription=%s reason=%s", self._name, error, exc_info=error)
            return Answer("failed", detail=type(error).__name__)

    def _record_outcome(self, answer: Answer) -> None:
        """Record the outcome of a request in the pace and the figures, and log when the circuit opens or closes."""
        was_circuit_open = self._pace.is_circuit_open
        if answer.outcome == "delivered":
            self._pace.record_success()
        else:
            is_overloaded = answer.status in (429, 503)  # so its Retry-After holds all messages
            self._pace.record_failure(_limit_pause(answer.retry_after_ms) if is_overloaded else 0)
            self._figures.last_failure = f"{answer.outcome}: {answer.detail}"[:300]
        self._figures.failures, self._figures.is_held = self._pace.failures, self._pace.is_circuit_open
        if self._pace.is_circuit_open and not was_circuit_open:
            logger.warning(
                "push receiver fails subscription=%s failures=%d reason=%s",
                self._name, self._pace.failures, self._figures.last_failure,
            )  # fmt: skip
        elif was_circuit_open and not self._pace.is_circuit_open:
            logger.warning("push receiver works again subscription=%s", self._name)
        self._pace_changed.set()

    async def _settle(self, request: _PushRequest, answer: Answer) -> None:
        """Acknowledge a delivered message, or return it to its group for a retry. Raises TimeballError.

        The answer 410 pauses the subscription, and does not count as an attempt.
        """
        consuming = self._broker.consuming
        if answer.outcome == "delivered":
            if not all(await consuming.acknowledge([request.receipt])):
                self._figures.late_acks += 1
        elif answer.is_gone:
            consuming.return_unseen([request.receipt])
            logger.warning("push paused by its receiver subscription=%s", self._name)
            await self._broker.push.pause(self._name, ANONYMOUS, by="receiver")
        else:
            group = self._broker.tables.groups.find_group(self._subscription.group)
            policy = group.group_retry_policy if group is not None else None
            # The group's retry delay is the minimum. Otherwise a receiver that requests one second would use up all
            # attempts within a minute.
            delay_ms = max(
                retry_delay_ms(policy, request.delivery.attempt), _limit_pause(answer.retry_after_ms)
            )
            await consuming.nack(request.receipt, delay_ms, f"push: {answer.outcome}: {answer.detail}")


def _limit_pause(retry_after_ms: int) -> int:
    """Limit the pause in ms that a receiver has requested."""
    return min(retry_after_ms, limits.PUSH_RETRY_AFTER_MS_MAX)


# ---- the pace of a subscription's requests -------------------------------------------------------------------
# A request may begin if all four conditions allow it:
#
# in flight   there are fewer than a maximum of requests at the same time
# rate        a token bucket has a token. It has at most the tokens of BURST_S, so that no burst follows a quiet hour
# circuit     the circuit breaker is closed. After FAILURES_MAX failures in a row it is open: one request at a time is
#             sent, each after a pause that doubles, until one succeeds. So while a receiver is down, few messages lose
#             an attempt
# held        the time has come that the receiver has requested (Retry-After)

FAILURES_MAX = 10  # in a row, until the circuit opens
PAUSE_MS_MIN, PAUSE_MS_MAX = 1_000, 60_000
BURST_S = 0.1


class Pace:
    """Decides when a subscription may begin requests. Belongs to the event loop. Uses the monotonic clock."""

    def __init__(self, clock: Clock, in_flight_max: int, rate_per_s: float | None) -> None:
        """`rate_per_s` None: without a limit."""
        self._clock, self._in_flight_max, self._rate_per_s = clock, in_flight_max, rate_per_s
        self._burst = max(1.0, (rate_per_s or 0) * BURST_S)
        self._tokens, self._filled_ms = self._burst, self._now_ms()
        self._held_until_ms = self._probe_at_ms = self._now_ms()
        self._pause_ms = 0
        self.failures = 0  # failures since the last success
        self.in_flight = 0

    @property
    def is_circuit_open(self) -> bool:
        """True after FAILURES_MAX failures in a row. Then only one request at a time tests the receiver."""
        return self.failures >= FAILURES_MAX

    def held_ms(self) -> int:
        """Compute for how many ms Retry-After or the open circuit allow no request. 0 if they allow one now."""
        return max(0, max(self._held_until_ms, self._probe_at_ms) - self._now_ms())

    def capacity(self) -> int:
        """Compute how many requests may begin now."""
        if self.held_ms():
            return 0
        capacity = (1 if self.is_circuit_open else self._in_flight_max) - self.in_flight
        if self._rate_per_s is not None:
            self._fill()
            capacity = min(capacity, int(self._tokens))
        return max(0, capacity)

    def wait_s(self) -> float | None:
        """Compute the time in seconds until `capacity` may grow. None means that it grows when a request ends."""
        if held_ms := self.held_ms():
            return held_ms / 1_000
        if self.in_flight >= (1 if self.is_circuit_open else self._in_flight_max) or self._rate_per_s is None:
            return None
        self._fill()
        return max(0.001, (1 - self._tokens) / self._rate_per_s)

    def begin(self) -> None:
        """Count a request that begins."""
        self.in_flight += 1
        self._tokens -= 1

    def record_success(self) -> None:
        """Count a request that succeeded. This closes the circuit."""
        self.in_flight -= 1
        self.failures = self._pause_ms = 0
        self._probe_at_ms = self._now_ms()

    def record_failure(self, retry_after_ms: int = 0) -> None:
        """Count a request that failed. No request begins for `retry_after_ms`, as the receiver has asked."""
        now_ms = self._now_ms()
        self.in_flight -= 1
        self.failures += 1
        self._held_until_ms = max(self._held_until_ms, now_ms + retry_after_ms)
        # A request that fails before `_probe_at_ms` began before the circuit's pause, so it does not double that pause.
        if self.is_circuit_open and now_ms >= self._probe_at_ms:
            self._pause_ms = min(max(PAUSE_MS_MIN, 2 * self._pause_ms), PAUSE_MS_MAX)
            self._probe_at_ms = now_ms + self._pause_ms

    def _fill(self) -> None:
        """Add the tokens for the time since the last call."""
        now_ms = self._now_ms()
        assert self._rate_per_s is not None
        self._tokens = min(self._burst, self._tokens + (now_ms - self._filled_ms) * self._rate_per_s / 1_000)
        self._filled_ms = now_ms

    def _now_ms(self) -> int:
        return self._clock.monotonic_ns() // 1_000_000
