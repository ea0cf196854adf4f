"""The job `dispatch`: a streaming query that reads due messages from the pending table and sends them to the broker.

Without it, the broker reads them itself. The job is for clusters with more cores than one broker process can use. Its
tasks read and decode the message bodies, wait until their rows are due and send them to the broker over Flight. The
broker decides which rows are released, and writes the release records. If Spark dies or lags, no message is lost, and
messages are at most `--dispatch-grace-ms` (a setting of the broker) late. See docs/pipeline/dispatch.md.

A task occupies a core while it waits for its rows, which takes at most `lead_ms`.
"""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from timeball.spark.dispatch.due_stream import NAME
from timeball.spark.endpoint import Endpoint, Lease
from timeball.spark.groups import query_name
from timeball.spark.source.spark_api import start_query

JOB_NAME = "dispatch"
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
    """Start the query. With `once` it ends after the messages that were due at its start."""
    stream_options = {**(options or {}), "endpoint": endpoint}
    due = spark.readStream.format(NAME).options(**stream_options).load()
    writer = due.writeStream.format(NAME).options(**stream_options)
    return start_query(writer, query_name(JOB_NAME, endpoint), checkpoint, None if once else TRIGGER)


def lease(endpoint: str, needed: Callable[[], bool]) -> Lease:
    """Make the lease of a dispatcher. While `needed` returns True, the broker leaves due rows in files to the job.

    The lease ends as soon as it is not needed. Then the broker loads due messages by itself again.
    """
    return Lease(
        endpoint,
        JOB_NAME,
        Endpoint.lease_dispatcher,
        needed,
        lease_ms=LEASE_MS,
        renew_s=RENEW_EVERY_S,
        ends_when_unneeded=True,
    )
