"""The push edge: a worker for each subscription that is not paused, replaced when the subscription changes.

The import of the HTTP client library takes 200 ms and 9 MB. So the library is imported when the first subscription
exists. The import runs in another thread, because the event loop has messages to release.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import TYPE_CHECKING, NamedTuple

from timeball.broker.filters.compiler import FilterCache
from timeball.broker.registry.push_subscriptions import PushSubscription
from timeball.broker.service import Broker
from timeball.edges.push.worker import Worker
from timeball.edges.shared.shared_limits import MemoryQuota
from timeball.model import limits
from timeball.model.addresses import Allowed
from timeball.model.errors import RequestError
from timeball.monitoring.push_figures import PushFigures

if TYPE_CHECKING:
    from timeball.edges.push.sender import HostResolver, Receiver

logger = logging.getLogger(__name__)

BYTES_MAX = 64 * 1024 * 1024  # of the message bodies in memory, for all subscriptions together
STOP_S = 5.0  # for requests under way when the broker stops


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
    """Starts and stops the workers of the subscriptions. Belongs to the broker's event loop.

    `figures`, by subscription, is filled here and shown by the HTTP API and the metrics.
    """

    def __init__(self, broker: Broker, figures: dict[str, PushFigures]) -> None:
        self._broker, self._figures = broker, figures
        self._allowed = Allowed.parse(broker.settings.push_allow)
        self._workers: dict[str, Worker] = {}  # by subscription
        # tasks that finish the requests of replaced workers
        self._ending_tasks: set[asyncio.Task[None]] = set()
        self._body_quota, self._filters = MemoryQuota(BYTES_MAX, limits.POP_BYTES_MAX), FilterCache()
        # set once a subscription needs the sending library
        self._library_loading: asyncio.Future[_SenderLibrary] | None = None
        # by subscription: the task that creates its worker, while it waits for the library
        self._start_tasks: dict[str, asyncio.Task[None]] = {}

    async def start(self) -> None:
        """Start a worker for each subscription, and follow later changes of subscriptions."""
        self._broker.push.watch(self._replace_worker)
        for name in self._broker.tables.push_subscriptions.all():
            self._replace_worker(name)

    async def close(self) -> None:
        """Stop delivering. Requests have STOP_S to end, then their messages are given back to their groups."""
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
        """Create and start the worker of a subscription, once the sending library is loaded."""
        if self._library_loading is None:
            self._library_loading = asyncio.ensure_future(asyncio.to_thread(_SenderLibrary.load))
        # Shielded, because other subscriptions wait for the same import.
        library = await asyncio.shield(self._library_loading)
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
