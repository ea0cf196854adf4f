"""`compact`: a streaming query that moves waiting promises from the log's tail to the pending table.

Without it the broker compacts by itself. A lease, renewed while the query runs, keeps the broker from doing so at the
same time; if both do, the watermark decides (source/compact_writer.py).

Only promises of the strategy `hour_log` are compacted. Those of a `timer_wheel` or a `level_cascade` wait in the log,
and there is no query to run.

Each compaction costs one table version and some files, and appends a row to the log. So a micro-batch waits for
`compact_rows` new rows, or for `compact_interval_ms` with at least `compact_rows_min`: the broker's own settings.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from timeball.errors import TimeballError
from timeball.pipeline.endpoint import COMPACTED, Endpoint

LOG = logging.getLogger("timeball.pipeline")

NAME = "compact"
LEASE_MS = 30_000
RENEW_EVERY_S = 8.0
TRIGGER = "1 second"
# Rows of the log. One task handles a million: fewer, larger files; more only when the job has fallen behind.
OPTIONS = {
    "rows_per_partition": "1000000",
    "max_rows_per_batch": "4000000",
    "min_rows_per_batch": "1000000",
    "max_trigger_delay_ms": "60000",
    "few_rows": "10000",
}


def start(
    spark: SparkSession,
    endpoint: str,
    checkpoint: str,
    *,
    once: bool = False,
    options: dict[str, str] | None = None,
) -> StreamingQuery:
    """Start the query; with `once` it stops when what is durable now has been compacted."""
    ranges = spark.readStream.format("timeball").options(**{**OPTIONS, **(options or {})})
    ranges = ranges.option("endpoint", endpoint).option("read", "ranges").option("from_seq", "watermark")
    writer = ranges.load().writeStream.format("timeball").queryName(NAME).option("endpoint", endpoint)
    writer = writer.option("checkpointLocation", checkpoint)
    writer = writer.trigger(availableNow=True) if once else writer.trigger(processingTime=TRIGGER)
    return writer.start()


def superfluous(endpoint: str) -> str | None:
    """Return why there is nothing to compact for this broker; None when there is."""
    with Endpoint(endpoint) as broker:
        strategy = broker.status().strategy
    return None if strategy == COMPACTED else nothing_to_compact(strategy)


def nothing_to_compact(strategy: str) -> str:
    """Return the sentence for people."""
    return f"nothing to compact: with the strategy {strategy} messages wait in the log"


class Lease:
    """Tells the broker every few seconds that an outside compactor is at work, for as long as `needed` says so."""

    def __init__(self, endpoint: str, needed: Callable[[], bool], lease_ms: int = LEASE_MS) -> None:
        self._endpoint = endpoint
        self._needed = needed
        self._lease_ms = lease_ms
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="compactor-lease", daemon=True)

    def __enter__(self) -> Lease:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _renew(self) -> None:
        while True:
            if self._needed():
                try:
                    with Endpoint(self._endpoint, patience_s=0) as broker:
                        broker.lease_compactor(self._lease_ms)
                except TimeballError as error:
                    # Harmless: the broker compacts by itself once the lease has run out.
                    LOG.warning("lease not renewed job=compact reason=%s", error)
            if self._stopped.wait(RENEW_EVERY_S):
                return
