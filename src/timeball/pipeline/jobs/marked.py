"""A streaming query whose sink knows its own mark: Spark's offset says only how far a micro-batch goes.

`extend` brings the sink's table from its own mark up to that row, in a batch query of its own. So a repeated
micro-batch adds nothing, and a checkpoint that was lost, or is older than the table, opens no hole. A mark behind the
log's end belongs to another log: such a table is refused, or this log's rows would be skipped up to the mark.

Of a cluster one stream reads the ranges of all groups, and each group has a table of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from timeball.errors import OutOfRange, SetupError, TimeballError
from timeball.pipeline.endpoint import group_statuses
from timeball.pipeline.groups import GROUP, place_of
from timeball.pipeline.source.spark_api import start_query
from timeball.pipeline.spark_errors import spark_errors
from timeball.pipeline.table_store import sibling
from timeball.wire import LogStatus

LOG = logging.getLogger("timeball.pipeline")
TRIGGER = "5 seconds"
RANGES = f"from_seq,to_seq,{GROUP}"

# Group (None: of a broker that is in no cluster) -> its endpoint, and the URI of its table.
Places = dict[str | None, tuple[str, str]]
Extend = Callable[[SparkSession, str, str, int], int]  # (session, endpoint, uri, to_seq) -> rows of the log


def start(
    spark: SparkSession,
    endpoint: str,
    checkpoint: str,
    name: str,
    extend: Extend,
    *,
    uri: str | None,
    once: bool,
    options: Mapping[str, str],
) -> StreamingQuery:
    """Start the query that keeps the table `name` up; `uri`: where it lies if not beside the pending table."""
    where = partial(places, name, endpoint, uri)
    where()  # a place that is none is said before a query fails
    ranges = spark.readStream.format("timeball").options(**options)
    ranges = ranges.option("endpoint", endpoint).option("read", "ranges").option("columns", RANGES)
    writer = ranges.load().writeStream.foreachBatch(epoch_writer(name, extend, where))
    return start_query(writer, name, checkpoint, None if once else TRIGGER)


def places(name: str, endpoint: str, uri: str | None) -> Places:
    """Return the endpoint and the URI of the table `name` by group."""
    found = group_statuses(endpoint)
    return {
        group.name or None: (
            group.endpoint,
            place_of(f"--{name}", uri, group.name, len(found)) or sibling(status.table.uri, name),
        )
        for group, status in found
    }


def check_mark(name: str, uri: str, mark: int, log: LogStatus, to_seq: int) -> None:
    """Raise unless a table that ends at row `mark` can go on with this log up to `to_seq`."""
    if mark < log.first_seq < to_seq:
        raise OutOfRange(
            f"the {name} ends at row {mark} but retention has removed the log up to {log.first_seq}: rows are missing; "
            f"move the {name} at {uri} away to start a new one"
        )
    if mark > log.durable_seq:
        raise SetupError(
            f"the {name} at {uri} has come to row {mark} but the broker's log ends at {log.durable_seq}: it belongs to "
            f"another log; name another with --{name}, or move it away"
        )


def epoch_writer(name: str, extend: Extend, where: Callable[[], Places]) -> Callable[[DataFrame, int], None]:
    """Return the function that Spark calls for each micro-batch; it asks `where` the groups have their tables now."""

    def write(ranges: DataFrame, batch_id: int) -> None:
        ends: dict[str | None, int] = {}
        for row in ranges.collect():
            ends[row[GROUP]] = max(row["to_seq"], ends.get(row[GROUP], 0))
        there = where() if ends else {}
        for group, end in sorted(ends.items(), key=lambda each: each[0] or ""):
            try:
                with spark_errors():
                    rows = extend(ranges.sparkSession, *there[group], end)
            except TimeballError as error:
                # Spark wraps this once more, into text; the two stacks below it would bury the sentence.
                raise type(error)(str(error)) from None
            job = f"{name}-{group}" if len(there) > 1 else name
            LOG.info("epoch done job=%s epoch=%d to_seq=%d log_rows=%d", job, batch_id, end, rows)

    return write
