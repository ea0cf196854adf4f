"""`ledger`: one row for every event in a promise's life, in an append-only Delta table beside the pending table.

    event       one row for                                          first_seq, rows
    accepted    a PROMISE or LEVEL_PROMISE row, or one range of a    its own numbers; a range may be long
                bulk attach
    released    a RELEASE row                                        the promise it keeps, 1
    cancelled   a CANCEL row                                         the promise it ends, 1
    started     the log was taken up again; lateness_ms: for how     its first row of that life, 0
                long nobody had written

A promise that is written again (a MOVED row) is the same promise and has no event: it was accepted once, and waits.

A promise's number is its sequence number in the log. Rows of a bulk attach never pass through the log one by one,
so their topic and due instant are known here only once they are released; until then the pending table has them.

The stream carries only ranges of the log; each epoch is a batch query from the ledger's own mark (the Delta table's
application version) to the end of the range. So the table alone says what is in it: a repeated epoch adds nothing,
and neither a lost checkpoint nor a lost table leaves a hole that nobody notices.
"""

from __future__ import annotations

import logging

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.streaming.query import StreamingQuery

from timeball.errors import NotFound, StorageError
from timeball.message import SCHEDULE_TOPIC, Kind
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.jobs import marked
from timeball.pipeline.source.delta_writer import app_version
from timeball.pipeline.source.schema import spark_schema
from timeball.pipeline.table_store import open_table, sibling
from timeball.pipeline.views.log_events import EVENT_SCHEMA
from timeball.pipeline.views.promise_view import promises_sql

LOG = logging.getLogger("timeball.pipeline")

NAME = "ledger"
APP_ID = "timeball-ledger"
SINCE = "timeball.since"  # table property: the first row of the log that the ledger has seen
TRIGGER = "5 seconds"
EPOCH_ROWS = 1_000_000
TIDY_EVERY = 100  # versions; each left a file or two, which are then joined

LEDGER_SCHEMA = EVENT_SCHEMA
EVENT_KINDS = (Kind.PROMISE, Kind.LEVEL_PROMISE, Kind.RELEASE, Kind.CANCEL, Kind.TABLE)
_LOG_COLUMNS = (
    "seq,kind,topic,unique_key,due_ms,store_ms,source_seq,queue_id,queue_offset,reconsume_times,body"
)
_ATTACH_JSON = "job string, ranges array<array<bigint>>"
_SPANS = "array<struct<first_seq:bigint,rows:bigint>>"


# ---- from the log to events -------------------------------------------------------------------------------


def read_events(spark: SparkSession, endpoint: str, from_seq: int, to_seq: int) -> DataFrame:
    """The events that rows from_seq <= seq < to_seq of the log stand for, in LEDGER_SCHEMA."""
    log = spark.read.format("timeball").option("endpoint", endpoint).option("columns", _LOG_COLUMNS)
    log = log.option("kinds", ",".join(str(int(kind)) for kind in EVENT_KINDS)).option("body_kinds", "table")
    return events(log.option("from_seq", str(from_seq)).option("to_seq", str(to_seq)).load())


def events(log: DataFrame) -> DataFrame:
    """Rows of the log as events. One pass: a TABLE row explodes into its ranges, every other row into itself.

    Rows of other kinds are no events.
    """
    kind = f.col("kind")
    attach = f.from_json(f.col("body").cast("string"), _ATTACH_JSON)
    ranges = f.when(attach["job"] == "bulk", f.transform(attach["ranges"], _span))
    own = f.when(kind.isin(int(Kind.PROMISE), int(Kind.LEVEL_PROMISE)), f.col("seq")).otherwise(
        f.col("source_seq")
    )
    one = f.array(f.struct(own.alias("first_seq"), f.lit(1).cast("bigint").alias("rows")))
    spans = f.when(kind == int(Kind.TABLE), ranges).otherwise(one).cast(_SPANS)
    event = (
        f.when(kind == int(Kind.RELEASE), "released")
        .when(kind == int(Kind.CANCEL), "cancelled")
        .otherwise("accepted")
    )
    released = kind == int(Kind.RELEASE)
    log = log.where(kind.isin(*[int(each) for each in EVENT_KINDS]))
    exploded = log.select("*", event.alias("event"), f.inline(spans))
    return exploded.select(
        "event",
        "first_seq",
        "rows",
        "topic",
        "unique_key",
        "due_ms",
        f.col("store_ms").alias("at_ms"),
        f.when(released, f.col("store_ms") - f.col("due_ms")).alias("lateness_ms"),
        f.when(released, f.col("queue_id")).alias("queue_id"),
        f.when(released, f.col("queue_offset")).alias("queue_offset"),
        (f.coalesce(f.col("reconsume_times"), f.lit(0)) + 1).cast("int").alias("attempt"),
        f.col("seq").alias("event_seq"),
    )


def _span(pair: Column) -> Column:
    return f.struct(f.element_at(pair, 1).alias("first_seq"), f.element_at(pair, 2).alias("rows"))


def read_starts(endpoint: str, from_seq: int, to_seq: int) -> pa.Table:
    """Each start of the broker whose first row lies in [from_seq, to_seq), as an event in LEDGER_SCHEMA."""
    with Endpoint(endpoint) as broker:
        starts = broker.starts(from_seq, to_seq)
    rows = [
        {
            "event": "started",
            "first_seq": start.first_seq,
            "rows": 0,
            "at_ms": start.at_ms,
            "lateness_ms": max(0, start.at_ms - start.before_ms),
            "event_seq": start.first_seq,
        }
        for start in starts
    ]
    return pa.Table.from_pylist(rows, LEDGER_SCHEMA)


# ---- the table --------------------------------------------------------------------------------------------


def ledger_uri(table_uri: str) -> str:
    """Where the ledger of a pending table lies unless it is said otherwise."""
    return sibling(table_uri, NAME)


def open_ledger(uri: str, since: int) -> DeltaTable:
    """The ledger at `uri`; created empty, for events from row `since` on, when there is none."""
    try:
        return open_table(uri)
    except NotFound:
        return DeltaTable.create(
            uri,
            LEDGER_SCHEMA,
            name=NAME,
            description="Events of promises: accepted, released, cancelled",
            configuration={SINCE: str(since)},
            raise_if_key_not_exists=False,
            commit_properties=CommitProperties(app_transactions=[Transaction(APP_ID, since)]),
        )


def bounds(table: DeltaTable) -> tuple[int, int]:
    """(since, watermark): the ledger holds the events of rows since <= seq < watermark."""
    since = table.metadata().configuration.get(SINCE)
    watermark = app_version(table, APP_ID)
    if since is None or watermark is None:
        raise StorageError(
            f"the Delta table at {table.table_uri} is not a ledger; name another with --ledger"
        )
    return int(since), watermark


def read_ledger(spark: SparkSession, table: DeltaTable) -> DataFrame:
    """All events of one version of the ledger."""
    uris = table.file_uris()
    schema = spark_schema(LEDGER_SCHEMA)
    return spark.read.schema(schema).parquet(*uris) if uris else spark.createDataFrame([], schema)


def extend(spark: SparkSession, endpoint: str, uri: str, to_seq: int) -> int:
    """Bring the ledger up to row `to_seq`, in steps of EPOCH_ROWS; returns how many rows of the log that took."""
    with Endpoint(endpoint) as broker:
        log = broker.status().log
    _, begin = bounds(open_ledger(uri, log.first_seq))
    marked.check_mark(NAME, uri, begin, log, to_seq)
    for low in range(begin, to_seq, EPOCH_ROWS):
        high = min(low + EPOCH_ROWS, to_seq)
        frame = read_events(spark, endpoint, low, high)
        started = read_starts(endpoint, low, high)
        if started.num_rows:
            frame = frame.unionByName(spark.createDataFrame(started, spark_schema(LEDGER_SCHEMA)))
        writer = frame.write.format("timeball_delta").option("uri", uri).option("app_id", APP_ID)
        # Two ledgers that began at the same row must not both add what lies behind it.
        writer = writer.option("app_since", str(low)).option("app_version", str(high))
        writer.mode("append").save()
    _tidy(uri)
    return max(0, to_seq - begin)


def _tidy(uri: str) -> None:
    table = open_table(uri)
    if table.version() % TIDY_EVERY == TIDY_EVERY - 1:
        table.optimize.compact()
        table.create_checkpoint()


# ---- the stream -------------------------------------------------------------------------------------------


def start(
    spark: SparkSession,
    endpoint: str,
    checkpoint: str,
    *,
    uri: str | None = None,
    once: bool = False,
    options: dict[str, str] | None = None,
) -> StreamingQuery:
    """Start the query; with `once` it stops when what is durable now is in the ledger."""
    if uri is None:
        with Endpoint(endpoint) as broker:
            uri = ledger_uri(broker.status().table.uri)
    ranges = spark.readStream.format("timeball").option("endpoint", endpoint).option("read", "ranges")
    ranges = ranges.option("max_rows_per_batch", str(EPOCH_ROWS)).option(
        "rows_per_partition", str(EPOCH_ROWS)
    )
    write = marked.epoch_writer(NAME, extend, endpoint, uri)
    return marked.start(
        ranges.options(**(options or {})).load(), write, NAME, checkpoint, None if once else TRIGGER
    )


# ---- the view ---------------------------------------------------------------------------------------------


def promises(spark: SparkSession, endpoint: str, uri: str | None = None) -> DataFrame:
    """One row a promise, with the causes of its lateness: promise_view.COLUMNS.

    From the ledger as far as it reaches; the due instants of bulk promises that still wait come from the pending table.
    """
    with Endpoint(endpoint) as broker:
        table_uri = broker.status().table.uri
    history = read_ledger(spark, open_table(uri or ledger_uri(table_uri)))
    table = spark.read.format("timeball").option("endpoint", endpoint).option("read", "pending")
    return one_row_each(spark, history, table.option("columns", "seq,due_ms,topic,unique_key").load())


def one_row_each(spark: SparkSession, history: DataFrame, waiting: DataFrame) -> DataFrame:
    """Events in LEDGER_SCHEMA, and rows (seq, due_ms, topic, unique_key) that fill gaps, as promise_view has them."""
    text = promises_sql("spark", events="{history}", waiting="{waiting}")
    return spark.sql(text, history=history, waiting=waiting)


def real_topic() -> Column:
    """The topic of some events of a promise: while it waits for a level it stands in another, until it is settled."""
    topic = f.col("topic")
    return f.coalesce(f.max(f.when(topic != SCHEDULE_TOPIC, topic)), f.max(topic))
