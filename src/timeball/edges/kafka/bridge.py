"""Runs both directions of a bridge, each in a thread: `Intake` reads from Kafka, and `Delivery` writes to it.

A direction is restarted, with new objects, after each error in RESTART_ERRORS.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from confluent_kafka import KafkaException

from timeball.client.calls import Calls
from timeball.client.exchange import Source
from timeball.client.http_calls import HttpCalls
from timeball.edges.kafka.delivery import Delivery
from timeball.edges.kafka.intake import Intake
from timeball.edges.kafka.options import BridgeOptions, BridgeQueue, Counts
from timeball.io.clock import Clock
from timeball.model.errors import Conflict, OverLimit, StorageError, Unavailable

logger = logging.getLogger(__name__)

# Errors that new objects may resolve: Kafka or Timeball cannot be reached, or accepts nothing now. Conflict: another
# process has continued the source, or this one did not get the answer to a send. New objects read the positions again.
RESTART_ERRORS = (KafkaException, Unavailable, OverLimit, StorageError, Conflict)
CALL_TIMEOUT_MS = 30_000  # of one attempt of a call to Timeball
PATIENCE_S = 10.0  # time for which a call is repeated while the broker restarts
RESTART_DELAY_S = 1.0  # before a direction is restarted


class Bridge:
    """One bridge between a topic of Kafka and a topic of Timeball. `counts` may be read at any time."""

    def __init__(self, options: BridgeOptions, endpoint: str, flight: str, clock: Clock) -> None:
        """Prepare a bridge. `endpoint` is the address of the HTTP API, and `flight` that of the Flight port."""
        self.counts = Counts()
        self.options, self._clock = options, clock
        self._operations = HttpCalls(endpoint, CALL_TIMEOUT_MS, patience_s=PATIENCE_S, clock=clock)
        self._columns = Calls(flight, CALL_TIMEOUT_MS, patience_s=PATIENCE_S, clock=clock)
        self._queue = BridgeQueue(self._operations, self._columns, options.topic)

    def run(self, stop: threading.Event, on_ready: Callable[[], None]) -> None:
        """Copy records in both directions until `stop` is set. Raises errors that are not in RESTART_ERRORS.

        `on_ready` is called once, when the delivery has opened and so the intake begins.
        """
        is_delivery_open = threading.Event()

        def deliver() -> None:
            """Open a delivery, and run it until `stop` is set or an error occurs."""
            self._queue.ensure()
            delivery = Delivery(self.options, self._queue, self.counts, self._clock)
            delivery.open(stop)
            if not is_delivery_open.is_set():
                is_delivery_open.set()
                on_ready()
            delivery.run(stop)

        def take() -> None:
            """Wait until a delivery has opened, then run an intake until `stop` is set or an error occurs."""
            # Kafka is read only after `Delivery.open` has stored a first position there. Without one, a restart would
            # refuse to start.
            while not is_delivery_open.wait(RESTART_DELAY_S):
                if stop.is_set():
                    return
            source = Source(self._columns, self.options.name)
            Intake(self.options, self._queue, source, self.counts, self._clock).run(stop)

        with ThreadPoolExecutor(2, "kafka") as threads:
            directions = [
                threads.submit(self._run_direction, direction, stop) for direction in (deliver, take)
            ]
            try:
                stop.wait()
            finally:
                stop.set()
                for calls in (self._operations, self._columns):
                    calls.close()  # ends calls that are being retried
        for direction in directions:
            direction.result()

    def _run_direction(self, direction: Callable[[], None], stop: threading.Event) -> None:
        """Run one direction, and restart it after an error in RESTART_ERRORS. Any other error stops both directions."""
        try:
            while not stop.is_set():
                try:
                    direction()
                except RESTART_ERRORS as error:
                    if stop.is_set():
                        return
                    logger.warning("direction restarts direction=%s reason=%s", direction.__name__, error)
                    stop.wait(RESTART_DELAY_S)
        finally:
            stop.set()
