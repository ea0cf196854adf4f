"""`dispatch`: a streaming query that brings what is due in files of the pending table, in place of the broker's wheel.

It is for more executors than one broker process has cores: tasks read and decode the bodies, wait for their own rows
and bring them over Flight; the broker decides and writes the releases. When Spark dies or lags, messages are late by
the broker's `--dispatch-grace-ms` at most, and none is lost: see docs/pipeline/dispatch.md.

A task holds a core while it waits for its rows, for `lead_ms` at most.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from timeball.errors import TimeballError
from timeball.pipeline.dispatch.due_stream import NAME as FORMAT
from timeball.pipeline.endpoint import Endpoint

LOG = logging.getLogger("timeball.pipeline")

NAME = "dispatch"
LEASE_MS = 10_000
RENEW_EVERY_S = 3.0
LOOK_EVERY_S = 0.1
TRIGGER = "50 milliseconds"


def start(
    spark: SparkSession,
    endpoint: str,
    checkpoint: str,
    *,
    once: bool = False,
    options: dict[str, str] | None = None,
) -> StreamingQuery:
    """Start the query; with `once` it stops when what is due now has been brought."""
    chosen = {**(options or {}), "endpoint": endpoint}
    due = spark.readStream.format(FORMAT).options(**chosen).load()
    writer = due.writeStream.format(FORMAT).queryName(NAME).options(**chosen)
    writer = writer.option("checkpointLocation", checkpoint)
    writer = writer.trigger(availableNow=True) if once else writer.trigger(processingTime=TRIGGER)
    return writer.start()


class Lease:
    """Tells the broker every few seconds that a dispatcher is at work, while `needed` says so; and when none is."""

    def __init__(self, endpoint: str, needed: Callable[[], bool], lease_ms: int = LEASE_MS) -> None:
        self._endpoint, self._needed, self._lease_ms = endpoint, needed, lease_ms
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="dispatcher-lease", daemon=True)

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _renew(self) -> None:
        held = False
        while not self._stopped.wait(RENEW_EVERY_S if held else LOOK_EVERY_S):
            needed = self._needed()
            if needed or held:
                held = self._grant(self._lease_ms if needed else 0) and needed
        if held:
            self._grant(0)

    def _grant(self, lease_ms: int) -> bool:
        try:
            with Endpoint(self._endpoint, patience_s=0) as broker:
                broker.lease_dispatcher(lease_ms)
        except TimeballError as error:
            # Harmless: the broker takes everything back once the lease has run out.
            LOG.warning("lease not renewed job=dispatch reason=%s", error)
            return False
        return True
