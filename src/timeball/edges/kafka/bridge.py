"""Both directions of a bridge, each in a thread. A direction is restarted while Kafka or Timeball is away."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from confluent_kafka import KafkaException

from timeball.client.calls import Calls
from timeball.client.source import Source
from timeball.edges.kafka.delivery import Delivery
from timeball.edges.kafka.intake import Intake
from timeball.edges.kafka.options import BridgeOptions, Counts
from timeball.edges.kafka.waiting import WaitingQueue
from timeball.io.clock import Clock
from timeball.model.errors import Conflict, OverLimit, StorageError, Unavailable

logger = logging.getLogger(__name__)

TIMEOUT_MS = 30_000  # of one try of a call
PATIENCE_S = 10.0  # for each call, while the broker restarts
AGAIN_S = 1.0  # before a direction is restarted


class Bridge:
    """One bridge. `counts` may be read at any time."""

    def __init__(self, options: BridgeOptions, endpoint: str, clock: Clock) -> None:
        self.counts = Counts()
        self.options, self._clock = options, clock
        self._calls = Calls(endpoint, TIMEOUT_MS, patience_s=PATIENCE_S, clock=clock)
        self._queue = WaitingQueue(self._calls, options.topic)

    def run(self, stop: threading.Event, on_ready: Callable[[], None]) -> None:
        """Copy records in both directions until `stop` is set. Raises errors that a restart does not resolve.

        `on_ready` is called once, when both directions are open.
        """
        is_open = threading.Event()

        def deliver() -> None:
            self._queue.ensure()
            delivery = Delivery(self.options, self._queue, self.counts, self._clock)
            delivery.open(stop)
            if not is_open.is_set():
                is_open.set()
                on_ready()
            delivery.run(stop)

        def take() -> None:
            # Kafka is read only after `Delivery.open` has stored a first position there. Without one, a restart would
            # refuse to start.
            while not is_open.wait(AGAIN_S):
                if stop.is_set():
                    return
            source = Source(self._calls, self.options.name)
            Intake(self.options, self._queue, source, self.counts, self._clock).run(stop)

        with ThreadPoolExecutor(2, "kafka") as threads:
            ways = [threads.submit(self._again, way, stop) for way in (deliver, take)]
            try:
                stop.wait()
            finally:
                stop.set()
                self._calls.close()  # ends calls that are being retried
        for way in ways:
            way.result()

    def _again(self, way: Callable[[], None], stop: threading.Event) -> None:
        """Run one direction, and restart it after a temporary error. Any other error stops both directions."""
        try:
            while not stop.is_set():
                try:
                    way()
                except (KafkaException, Unavailable, OverLimit, StorageError, Conflict) as error:
                    if stop.is_set():
                        return
                    logger.warning("begun anew way=%s reason=%s", way.__name__, error)
                    stop.wait(AGAIN_S)
        finally:
            stop.set()
