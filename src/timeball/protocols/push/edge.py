"""The edge for push: a worker for each subscription that is not paused, exchanged when the subscription changes.

The library that sends costs a broker a fifth of a second and 9 MB, so it is imported with the first subscription: in
another thread, since the event loop has messages to release.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import TYPE_CHECKING, NamedTuple

from timeball import limits
from timeball.addresses import Allowed
from timeball.broker.filters.compiler import FiltersKept
from timeball.broker.registry.push_subscriptions import PushSubscription
from timeball.broker.service import Broker
from timeball.errors import RequestError
from timeball.monitoring.push_figures import PushFigures
from timeball.protocols.push.worker import Worker
from timeball.protocols.shared_limits import ByteShares

if TYPE_CHECKING:
    from timeball.protocols.push.sender import Names, Receiver

logger = logging.getLogger(__name__)

BYTES_MAX = 64 * 1024 * 1024  # bodies that are being sent, of all subscriptions
STOP_S = 5.0  # for requests under way when the broker stops


class _Library(NamedTuple):
    """What sends, made once. `trust`: all roots of the system, which take 30 ms to read."""

    receiver: type[Receiver]
    trust: ssl.SSLContext
    names: Names

    @classmethod
    def load(cls) -> _Library:
        """Import and make it (any thread)."""
        from timeball.protocols.push import sender

        return cls(sender.Receiver, ssl.create_default_context(), sender.Names())


class PushEdge:
    """Starts and stops the workers. Belongs to the broker's event loop; `figures` are shown by others."""

    def __init__(self, broker: Broker, figures: dict[str, PushFigures]) -> None:
        self._broker, self._figures = broker, figures
        self._allowed = Allowed.parse(broker.parts.settings.push_allow)
        self._workers: dict[str, Worker] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._bytes_held, self._filters = ByteShares(BYTES_MAX, limits.POP_BYTES_MAX), FiltersKept()
        self._loading: asyncio.Future[_Library] | None = None
        self._starting: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Begin to deliver."""
        self._broker.push.watch(self._exchange)
        for name in self._broker.parts.push_subscriptions.all():
            self._exchange(name)

    async def close(self) -> None:
        """Deliver nothing more; give back what does not end soon."""
        for starting in self._starting.values():
            starting.cancel()
        workers = list(self._workers.values())
        self._workers.clear()
        for worker in workers:
            worker.halt()
        late = [asyncio.create_task(worker.end(STOP_S)) for worker in workers]
        if self._ending:
            # Of subscriptions that were changed: they have had their time.
            await asyncio.wait(self._ending, timeout=STOP_S)
            for task in self._ending:
                task.cancel()
        await asyncio.gather(*late, *self._ending, return_exceptions=True)
        if self._loading is not None:
            (await self._loading).names.close()

    def _exchange(self, name: str) -> None:
        """End the worker of a subscription, and start one by what the subscription is now."""
        if (starting := self._starting.pop(name, None)) is not None:
            starting.cancel()
        before = self._workers.pop(name, None)
        if before is not None:
            before.halt()
            # Its requests end by themselves, beside those of its successor.
            task = asyncio.create_task(before.end(None))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)
        subscription = self._broker.parts.push_subscriptions.find(name)
        if subscription is None:
            self._figures.pop(name, None)
            return
        figures = self._figures.setdefault(name, PushFigures(self._broker.parts.clock.clock))
        figures.failures, figures.is_held, figures.last_failure = 0, False, ""
        if not subscription.paused:
            self._starting[name] = asyncio.create_task(self._start(name, subscription, figures))

    async def _start(self, name: str, subscription: PushSubscription, figures: PushFigures) -> None:
        if self._loading is None:
            self._loading = asyncio.ensure_future(asyncio.to_thread(_Library.load))
        # Shielded: others wait for it too.
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
            # It was allowed when it was put, by settings that have been changed since.
            figures.last_failure = str(error)
            logger.warning("push not started subscription=%s reason=%s", name, error)
            return
        worker = Worker(
            name, subscription, self._broker, receiver, figures, self._bytes_held, self._filters
        )  # fmt: skip
        self._workers[name] = worker
        worker.start()
