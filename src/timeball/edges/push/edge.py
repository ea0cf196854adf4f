"""The push edge: a worker for each subscription that is not paused, replaced when the subscription changes.

The HTTP client library takes a fifth of a second and 9 MB. So it is imported when the first subscription exists, and in
another thread, because the event loop has messages to release.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import TYPE_CHECKING, NamedTuple

from timeball.broker.filters.compiler import FiltersKept
from timeball.broker.registry.push_subscriptions import PushSubscription
from timeball.broker.service import Broker
from timeball.edges.push.worker import Worker
from timeball.edges.shared.shared_limits import MemoryQuota
from timeball.model import limits
from timeball.model.addresses import Allowed
from timeball.model.errors import RequestError
from timeball.monitoring.push_figures import PushFigures

if TYPE_CHECKING:
    from timeball.edges.push.sender import Names, Receiver

logger = logging.getLogger(__name__)

BYTES_MAX = 64 * 1024 * 1024  # bodies that are being sent, of all subscriptions
STOP_S = 5.0  # for requests under way when the broker stops


class _Library(NamedTuple):
    """The objects of the sending library, made once. `trust` has the system's roots, which take 30 ms to read."""

    receiver: type[Receiver]
    trust: ssl.SSLContext
    names: Names

    @classmethod
    def load(cls) -> _Library:
        """Import the library and make its objects. Runs in any thread."""
        from timeball.edges.push import sender

        return cls(sender.Receiver, ssl.create_default_context(), sender.Names())


class PushEdge:
    """Starts and stops the workers. Belongs to the broker's event loop. Other parts show the `figures`."""

    def __init__(self, broker: Broker, figures: dict[str, PushFigures]) -> None:
        self._broker, self._figures = broker, figures
        self._allowed = Allowed.parse(broker.settings.push_allow)
        self._workers: dict[str, Worker] = {}  # by subscription
        self._ending: set[asyncio.Task[None]] = set()  # the ends of workers that were replaced
        self._bytes_held, self._filters = MemoryQuota(BYTES_MAX, limits.POP_BYTES_MAX), FiltersKept()
        # of the sending library, once a subscription needs it
        self._loading: asyncio.Future[_Library] | None = None
        # by subscription: workers that wait for the library
        self._starting: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Begin to deliver."""
        self._broker.push.watch(self._exchange)
        for name in self._broker.tables.push_subscriptions.all():
            self._exchange(name)

    async def close(self) -> None:
        """Stop delivering. Messages whose requests do not end soon are given back."""
        for starting in self._starting.values():
            starting.cancel()
        workers = list(self._workers.values())
        self._workers.clear()
        for worker in workers:
            worker.halt()
        late = [asyncio.create_task(worker.end(STOP_S)) for worker in workers]
        if self._ending:
            # Workers of changed subscriptions have had time to finish already.
            await asyncio.wait(self._ending, timeout=STOP_S)
            for task in self._ending:
                task.cancel()
        await asyncio.gather(*late, *self._ending, return_exceptions=True)
        if self._loading is not None:
            (await self._loading).names.close()

    def _exchange(self, name: str) -> None:
        """End the worker of a subscription, and start one for the current state of the subscription."""
        if (starting := self._starting.pop(name, None)) is not None:
            starting.cancel()
        before = self._workers.pop(name, None)
        if before is not None:
            before.halt()
            # Its requests finish by themselves, in parallel to those of the new worker.
            task = asyncio.create_task(before.end(None))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        subscription = self._broker.tables.push_subscriptions.find(name)
        if subscription is None:
            self._figures.pop(name, None)
            return
        figures = self._figures.setdefault(name, PushFigures(self._broker.clock.clock))
        figures.failures, figures.is_held, figures.last_failure = 0, False, ""
        if not subscription.paused:
            self._starting[name] = asyncio.create_task(self._start(name, subscription, figures))

    async def _start(self, name: str, subscription: PushSubscription, figures: PushFigures) -> None:
        if self._loading is None:
            self._loading = asyncio.ensure_future(asyncio.to_thread(_Library.load))
        # Shielded, because other subscriptions wait for the same import.
        library = await asyncio.shield(self._loading)
        del self._starting[name]
        try:
            receiver = library.receiver(
                subscription.url,
                self._allowed,
                library.names.look_up,
                library.trust,
                connections=subscription.in_flight_max,
                timeout_ms=subscription.timeout_ms,
            )
        except RequestError as error:
            # The URL was allowed when the subscription was made, but the settings have changed since.
            figures.last_failure = str(error)
            logger.warning("push not started subscription=%s reason=%s", name, error)
            return
        worker = Worker(
            name, subscription, self._broker, receiver, figures, self._bytes_held, self._filters
        )  # fmt: skip
        self._workers[name] = worker
        worker.start()
