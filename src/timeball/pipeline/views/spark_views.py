"""What waits and what happened as Spark views: the same names, the same text and the same answers as `timeball sql`.

    from timeball.pipeline.views import spark_views
    version = spark_views.register(spark, "grpc://broker:7400")
    spark.sql("select topic, count(*) from pending group by topic").show()

All views of one `register` are of one version, pinned on the driver: executors read the table's files of that version
and rows of the log below its end, whenever a query runs. Register again to see what has happened since. Retention and
the table's clean-up bound how long that works: then a query fails, and never answers with less.
"""

from __future__ import annotations

import msgspec
import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as f

from timeball.errors import NotFound
from timeball.message import TABLE_SCHEMA, Kind
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.jobs import archive, ledger
from timeball.pipeline.source.schema import spark_schema
from timeball.pipeline.table_store import open_table
from timeball.pipeline.views import view_sql
from timeball.pipeline.views.duckdb_session import Version
from timeball.pipeline.views.snapshot import LEVEL_PROPERTIES, Snapshot, cancelled_before

KEPT = ("waiting_rows", "ledger_events")
COLLECTED_ROWS = (
    1_000_000  # of the kept log: so few settlements are sent to every task instead of being shuffled
)


def waiting_frame(
    spark: SparkSession, endpoint: str, version: int | None = None, *, bodies: bool = True
) -> DataFrame:
    """What waits (see snapshot.py), one row a promise: TABLE_SCHEMA and `place`; without bodies if none are wanted."""
    with Endpoint(endpoint) as broker:
        return _waiting(spark, endpoint, Snapshot.take(broker, version=version), bodies=bodies)


def register(
    spark: SparkSession, endpoint: str, *, version: int | None = None, prefix: str = "", keep: bool = False
) -> Version:
    """Make the views pending, pending_table, promises, ledger, log, and archive if there is one, as temporary views.

    `prefix` stands before their names. `keep`: what waits and the events are read once and kept by Spark, in memory or
    on disk, for many queries; `spark.catalog.clearCache()` lets go of them. Returns what the views show.
    """
    with Endpoint(endpoint) as broker:
        shot = Snapshot.take(broker, version=version)
        shown = Version(now_ms=shot.now_ms, table=shot.version, log_end=shot.end_seq, is_whole=shot.is_whole)
        bases = {
            "waiting_rows": _waiting(spark, endpoint, shot, bodies=True),
            "table_rows": _table(spark, endpoint, shot, TABLE_SCHEMA.names),
            "log_rows": _source(spark, endpoint, shot, shot.first_seq).load(),
        }
    bases["ledger_events"], ledger_version = _events(spark, endpoint, shot)
    passed = _archive(spark, shot)
    shown = msgspec.structs.replace(shown, ledger=ledger_version)
    if passed is not None:
        bases["archive_rows"], archive_version = passed
        shown = msgspec.structs.replace(shown, archive=archive_version)
    for base, frame in bases.items():
        if keep and base in KEPT:
            frame.persist(StorageLevel.MEMORY_AND_DISK)
        frame.createOrReplaceTempView(base)
    texts = view_sql.definitions("spark", {base: frame.columns for base, frame in bases.items()})
    for view, query in texts.items():
        spark.sql(query).createOrReplaceTempView(f"{prefix}{view}")
    for base in bases:  # a view keeps its plan, not these names
        spark.catalog.dropTempView(base)
    return shown


# ---- what waits ---------------------------------------------------------------------------------------------


def _waiting(spark: SparkSession, endpoint: str, shot: Snapshot, *, bodies: bool) -> DataFrame:
    columns = [name for name in TABLE_SCHEMA.names if bodies or name != "body"]
    due = f.col("due_ms") >= shot.due_from_ms
    moved = spark.createDataFrame([(int(seq),) for seq in shot.moved()], "seq bigint")
    table = _table(spark, endpoint, shot, columns).where(due)
    if len(shot.moved()):
        table = table.join(f.broadcast(moved), "seq", "left_anti")
    tail = _tail(spark, endpoint, shot, columns).where(due)
    levels = _levels(spark, endpoint, shot, columns)
    levels = levels.where(due) if shot.only_cancels else levels
    placed = [frame.withColumn("place", f.lit(place)) for place, frame in
              (("table", table), ("tail", tail), ("level", levels))]  # fmt: skip
    there = placed[0].unionByName(placed[1]).unionByName(placed[2])
    return there.join(_settled(spark, endpoint, shot), "seq", "left_anti").select(*columns, "place")


def _source(spark: SparkSession, endpoint: str, shot: Snapshot, from_seq: int) -> DataFrameReader:
    """A read of the log up to the snapshot's end."""
    end = max(shot.end_seq, shot.first_seq)  # an older version may have been made before the log begins
    begin = min(max(from_seq, shot.first_seq), end)
    source = spark.read.format("timeball").option("endpoint", endpoint)
    return source.option("from_seq", str(begin)).option("to_seq", str(end))


def _log(
    spark: SparkSession, endpoint: str, shot: Snapshot, kinds: str, from_seq: int, columns: list[str]
) -> DataFrame:
    source = _source(spark, endpoint, shot, from_seq).option("kinds", kinds)
    return source.option("columns", ",".join(dict.fromkeys(columns))).load()


def _settled(spark: SparkSession, endpoint: str, shot: Snapshot) -> DataFrame:
    kinds = "cancel" if shot.only_cancels else "release,cancel"
    rows = _log(spark, endpoint, shot, kinds, shot.first_seq, ["source_seq"])
    numbers = rows.select(f.col("source_seq").alias("seq"))
    forgotten = cancelled_before(shot.uri, min(shot.first_seq, shot.end_seq))
    if len(forgotten):
        numbers = numbers.unionByName(spark.createDataFrame(pa.table({"seq": forgotten})))
    return f.broadcast(numbers) if shot.end_seq - shot.first_seq <= COLLECTED_ROWS else numbers


def _table(spark: SparkSession, endpoint: str, shot: Snapshot, columns: list[str]) -> DataFrame:
    source = spark.read.format("timeball").option("endpoint", endpoint).option("read", "pending")
    source = source.option("version", str(shot.version)).option("columns", ",".join(columns))
    return source.option("table_uri", shot.uri).load()


def _tail(spark: SparkSession, endpoint: str, shot: Snapshot, columns: list[str]) -> DataFrame:
    """Promises behind the watermark under their own numbers, each once."""
    begin = max(shot.watermark, shot.first_seq)
    kinds = ["kind", "source_seq", "store_ms", *columns]
    is_moved = f.col("kind") == int(Kind.MOVED)
    own = _log(spark, endpoint, shot, "promise", begin, kinds).withColumn("accepted_ms", f.col("store_ms"))
    own = own.select(*columns)
    if not len(shot.moved()):
        return own
    moved = _log(spark, endpoint, shot, "moved", begin, kinds).where(is_moved & (f.col("source_seq") < begin))
    return own.unionByName(
        moved.withColumn("seq", f.col("source_seq")).select(*columns).dropDuplicates(["seq"])
    )


def _levels(spark: SparkSession, endpoint: str, shot: Snapshot, columns: list[str]) -> DataFrame:
    """Promises of delay levels, under the topic and queue they are for."""
    rows = _log(spark, endpoint, shot, "level_promise", shot.first_seq, ["store_ms", "properties", *columns])

    def real(group: int, hidden: str) -> Column:
        text = f.regexp_extract("properties", LEVEL_PROPERTIES.replace("?P<", "?<"), group)
        kind = "int" if hidden == "queue_id" else "string"
        return f.coalesce(f.when(text != "", text).cast(kind), f.col(hidden))

    rows = rows.withColumns(
        {"topic": real(1, "topic"), "queue_id": real(2, "queue_id"), "accepted_ms": f.col("store_ms")}
    )
    return rows.select(*columns)


# ---- what happened ------------------------------------------------------------------------------------------


def _events(spark: SparkSession, endpoint: str, shot: Snapshot) -> tuple[DataFrame, int | None]:
    """The ledger up to where it has come, then the log; and the ledger's version."""
    begin, kept, version = shot.first_seq, None, None
    try:
        table = open_table(ledger.ledger_uri(shot.uri))
    except NotFound:
        table = None
    if table is not None:
        begin, version = max(begin, ledger.bounds(table)[1]), int(table.version())
        kept = ledger.read_ledger(spark, table).where(f.col("event_seq") < shot.end_seq)
    end = max(begin, shot.end_seq)
    fresh = ledger.read_events(spark, endpoint, begin, end)
    started = ledger.read_starts(endpoint, begin, end)
    if started.num_rows:
        fresh = fresh.unionByName(spark.createDataFrame(started, spark_schema(ledger.LEDGER_SCHEMA)))
    return (fresh if kept is None else kept.unionByName(fresh, allowMissingColumns=True)), version


def _archive(spark: SparkSession, shot: Snapshot) -> tuple[DataFrame, int] | None:
    try:
        table = open_table(archive.archive_uri(shot.uri))
    except NotFound:
        return None
    found = archive.read_archive(spark, table)
    return found.where(f.col("seq") < shot.end_seq), int(table.version())
