"""`dispatch`: a streaming query that brings due promises of the pending table's files, in place of the broker's wheel.

It is for more executors than one broker process has cores: tasks read and decode the bodies, wait for their own rows
and bring them over Flight; the broker decides and writes the releases. When Spark dies or lags, messages are late by
the broker's `--dispatch-grace-ms` at most, and none is lost: see docs/pipeline/dispatch.md.

A task holds a core while it waits for its rows, for `lead_ms` at most.
"""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from timeball.pipeline.dispatch.due_stream import NAME as FORMAT
from timeball.pipeline.endpoint import Endpoint, Lease
from timeball.pipeline.groups import query_name
from timeball.pipeline.source.spark_api import start_query

NAME = "dispatch"
LEASE_MS = 10_000
RENEW_EVERY_S = 3.0
TRIGGER = "50 milliseconds"


def start(
    spark: SparkSession,
    endpoint: str,
    checkpoint: str,
    *,
    once: bool = False,
    options: dict[str, str] | None = None,
) -> StreamingQuery:
    """Start the query; with `once` it stops when all that was due at the start has been brought."""
    chosen = {**(options or {}), "endpoint": endpoint}
    due = spark.readStream.format(FORMAT).options(**chosen).load()
    writer = due.writeStream.format(FORMAT).options(**chosen)
    return start_query(writer, query_name(NAME, endpoint), checkpoint, None if once else TRIGGER)


def lease(endpoint: str, needed: Callable[[], bool]) -> Lease:
    """Return the lease of a dispatcher, which ends with its need: the broker then brings what is due by itself."""
    return Lease(
        endpoint,
        NAME,
        Endpoint.lease_dispatcher,
        needed,
        lease_ms=LEASE_MS,
        renew_s=RENEW_EVERY_S,
        is_returned=True,
    )
