"""`compact`: a streaming query that moves waiting promises from the log's tail to the pending table.

Without it the broker compacts by itself. A lease, renewed while the query runs, keeps the broker from doing so at the
same time; if both do, the watermark decides (source/compact_writer.py).

Only promises of the strategy `hour_log` are compacted. Those of a `timer_wheel` or a `level_cascade` wait in the log,
and there is no query to run.

Each group of a cluster has a tail, a table and a watermark of its own, so it has a query of its own, whose endpoint is
confined to it.

Each compaction costs one table version and some files, and appends a row to the log. So a micro-batch waits for
`compact_rows` new rows, or for `compact_interval_ms` with at least `compact_rows_min`: the broker's own settings.
"""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from timeball.pipeline.endpoint import COMPACTED, Endpoint, Lease
from timeball.pipeline.groups import query_name
from timeball.pipeline.source.spark_api import start_query

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
    """Start the query; with `once` it stops when all rows that are durable now have been compacted."""
    ranges = spark.readStream.format("timeball").options(**{**OPTIONS, **(options or {})})
    ranges = ranges.option("endpoint", endpoint).option("read", "ranges").option("from_seq", "watermark")
    writer = ranges.load().writeStream.format("timeball").option("endpoint", endpoint)
    return start_query(writer, query_name(NAME, endpoint), checkpoint, None if once else TRIGGER)


def superfluous(endpoint: str) -> str | None:
    """Return why there is nothing to compact for this broker; None when there is."""
    with Endpoint(endpoint) as broker:
        strategy = broker.status().strategy
    return None if strategy == COMPACTED else nothing_to_compact(strategy)


def nothing_to_compact(strategy: str) -> str:
    """Return the sentence for people."""
    return f"nothing to compact: with the strategy {strategy} messages wait in the log"


def lease(endpoint: str, needed: Callable[[], bool]) -> Lease:
    """Return the lease of a compactor. Not returned: a query that has failed is started again within it."""
    return Lease(endpoint, NAME, Endpoint.lease_compactor, needed, lease_ms=LEASE_MS, renew_s=RENEW_EVERY_S)
