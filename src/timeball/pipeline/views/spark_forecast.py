"""`forecast` on Spark: the pending table is counted where executors are, and only the counts come back.

For a table of billions of rows, or one that this machine does not reach. The log's tail and the delay levels are
counted here, by forecast.gather: they have the size of what one broker compacts. The result is the same Load.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

from timeball.limits import SECOND_MS
from timeball.message import int64
from timeball.pipeline.spark_errors import spark_errors
from timeball.pipeline.views import due_histogram
from timeball.pipeline.views import forecast as counted_here
from timeball.pipeline.views.due_histogram import ALL_TOPICS, Load, merge
from timeball.pipeline.views.snapshot import ALWAYS, Due, Snapshot


def gather(
    spark: SparkSession, endpoint: str, snapshot: Snapshot, *, by_topic: bool = False, due: Due = ALWAYS
) -> Load:
    """The load of everything that waits and is due within these bounds, as forecast.gather has it."""
    near = counted_here.gather(snapshot, by_topic=by_topic, due=due, among=("tail", "level"))
    with spark_errors():
        return merge([near, count(_table(spark, endpoint, snapshot, by_topic=by_topic, due=due))])


def count(rows: DataFrame) -> Load:
    """The load of rows (due_ms, and topic if they have it), counted by Spark; coarser when it has too many cells."""
    names = ["topic"] if "topic" in rows.columns else []
    found = pa.table({})
    for width_s in due_histogram.WIDTHS_S:
        cell = f.floor(f.col("due_ms") / (width_s * SECOND_MS)).cast("bigint").alias("cell")
        cells = rows.groupBy(cell, *names).count()
        found = cells.limit(due_histogram.CELLS_MAX + 1).toArrow()
        if found.num_rows <= due_histogram.CELLS_MAX:
            break
    topics = found.column("topic").combine_chunks().dictionary_encode() if names else None
    codes = np.zeros(found.num_rows, np.int64) if topics is None else int64(topics.indices.cast(pa.int64()))
    second, counts = (int64(found.column(name).combine_chunks()) for name in ("cell", "count"))
    all_names = (ALL_TOPICS,) if topics is None else topics.dictionary.to_pylist()
    return due_histogram.from_cells(all_names, codes, second * width_s, counts, width_s)


def _table(spark: SparkSession, endpoint: str, snapshot: Snapshot, *, by_topic: bool, due: Due) -> DataFrame:
    """What waits in the table: (seq, due_ms) and topic if it is asked for."""
    columns = ["seq", "due_ms", *(["topic"] if by_topic else [])]
    source = spark.read.format("timeball").option("endpoint", endpoint).option("read", "pending")
    source = source.option("version", str(snapshot.version)).option("columns", ",".join(columns))
    rows = source.option("table_uri", snapshot.uri).load()
    low = snapshot.due_from_ms if due[0] is None else max(due[0], snapshot.due_from_ms)
    rows = rows.where(f.col("due_ms") >= low)
    if due[1] is not None:
        rows = rows.where(f.col("due_ms") < due[1])
    gone = np.union1d(snapshot.settled(), snapshot.moved())
    if not len(gone):
        return rows
    # Spark may send them to every task or shuffle, as their number has it.
    settled = spark.createDataFrame(pa.table({"seq": pa.array(gone)}))
    return rows.join(settled, "seq", "left_anti")
