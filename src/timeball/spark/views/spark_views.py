"""The views in Spark: the same names, the same SQL text and the same results as `timeball sql`.

    from timeball.spark.views import spark_views
    version = spark_views.register(spark, "grpc://broker:7400")
    spark.sql("select topic, count(*) from pending group by topic").show()

In a cluster, the views have the rows of all groups. With several groups they have a column `group`.

All views of one `register` show one version, which is fixed on the driver. When a query runs, executors read the
table's files of that version, and rows of the log before its end. Register again to see later changes. Views work until
retention or the table's clean-up removes their data. After that, queries fail. They never return incomplete results.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa
from pyspark import StorageLevel
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql import functions as f

from timeball.model.message import TABLE_SCHEMA
from timeball.spark.endpoint import Endpoint, Group, read_groups
from timeball.spark.log_events import ARCHIVE_SCHEMA, EVENT_SCHEMA
from timeball.spark.source.spark_api import described, spark_errors, spark_schema, union_groups
from timeball.spark.source.table_reader import read_delta
from timeball.spark.table_store import ANY_DUE_TIME, Due
from timeball.spark.views import broker_state, view_sql
from timeball.spark.views.due_histogram import Load, count_due
from timeball.spark.views.snapshot import Snapshot, Version, all_versions, check_version

CACHED_RELATIONS = ("waiting_rows", "ledger_events")  # the relations that `register(keep=True)` caches
# If the kept log has at most this many rows, its RELEASE and CANCEL rows are broadcast to every task, not shuffled.
BROADCAST_ROWS = 1_000_000


def waiting_frame(
    spark: SparkSession, endpoint: str, version: int | None = None, *, bodies: bool = True
) -> DataFrame:
    """Read the pending messages, one row per message: PENDING_COLUMNS (`body` only with `bodies`) and `place`."""
    pinned = pin_groups(endpoint, version)
    return union_groups(
        {
            group.name or None: pending_in_snapshot(spark, group.endpoint, shot, bodies=bodies)
            for group, shot in pinned
        }
    )


def pin_groups(endpoint: str, version: int | None = None) -> list[tuple[Group, Snapshot]]:
    """Take one snapshot of each group. Raises RequestError for a version number with several groups."""
    groups, pinned = read_groups(endpoint), []
    check_version(version, len(groups))
    for group in groups:
        with Endpoint(group.endpoint) as broker:
            pinned.append((group, Snapshot.pin(broker, version=version)))
    return pinned


def pending_in_snapshot(
    spark: SparkSession, endpoint: str, shot: Snapshot, *, due: Due = ANY_DUE_TIME, bodies: bool = True
) -> DataFrame:
    """Read the messages that are pending in a snapshot and due within `due`: PENDING_COLUMNS and `place`."""
    columns = [name for name in view_sql.PENDING_COLUMNS if bodies or name != "body"]
    frames = {name: _log_relation(spark, endpoint, shot, name, columns) for name in view_sql.LOG_RELATIONS}
    frames["ledger_rows"] = _ledger(spark, shot)
    frames["waiting_table_rows"] = _table(spark, endpoint, shot, [*columns, "number"])
    is_small_log = shot.end_seq - shot.first_seq <= BROADCAST_ROWS
    hint = "/*+ BROADCAST(gone) */" if is_small_log else ""
    effect = _register_effect(spark, shot.selections)
    text = view_sql.pending_sql(
        shot, columns, due, relation=view_sql.SPARK_RELATION, hint=hint, effect=effect
    )
    return _run(spark, text, frames)


def _register_effect(spark: SparkSession, selections: bytes) -> str:
    """Register the SQL function for the effect of bulk operations. Returns its name, or "" if there are none."""
    if not selections:
        return ""
    function = f.arrow_udf(  # type: ignore[attr-defined]  # the stubs lack it
        broker_state.effect_of(selections), broker_state.EFFECT_SQL["spark"]
    )
    # The plan of a query contains the function itself, so another snapshot may use the name again.
    spark.udf.register("timeball_effect", function)
    return "timeball_effect"


def due_load(
    spark: SparkSession, endpoint: str, shot: Snapshot, *, by_topic: bool = False, due: Due = ANY_DUE_TIME
) -> Load:
    """Count the messages that are pending in a snapshot and due within `due`, on the executors."""
    frame = pending_in_snapshot(spark, endpoint, shot, due=due, bodies=False)
    return count_on_spark(frame, by_topic=by_topic)


def count_on_spark(frame: DataFrame, *, by_topic: bool = False) -> Load:
    """Count the rows of a frame with the columns due_ms and topic, on the executors (due_histogram.count_due)."""
    with spark_errors(), described(frame.sparkSession, "forecast: what waits, by the instant it is due"):
        return count_due(
            lambda text: _run(frame.sparkSession, text, {"pending": frame}).toArrow(),
            by_topic=by_topic,
            relation=view_sql.SPARK_RELATION,
        )


def register(
    spark: SparkSession, endpoint: str, *, version: int | None = None, prefix: str = "", keep: bool = False
) -> Version:
    """Make the temporary views: all of view_sql.VIEWS, `archive` only if there is one in each group.

    `version`: of the pending table, by default the current one. `prefix` is prepended to the names of the views.
    `keep`: Spark reads pending messages and events only once, and caches them in memory or on disk for many queries.
    `spark.catalog.clearCache()` frees this cache. Returns the version of the views. Raises the errors of Snapshot.pin.
    """
    views: dict[str | None, dict[str, DataFrame]] = {}
    versions: dict[str, Version] = {}
    for number, (group, shot) in enumerate(pin_groups(endpoint, version)):
        frames, versions[group.name] = _frames(spark, group.endpoint, shot)
        for relation in CACHED_RELATIONS if keep else ():
            frames[relation].persist(StorageLevel.MEMORY_AND_DISK)
        views[group.name or None] = _views(spark, frames, number)
    # A group may have no archive yet.
    names = set.intersection(*(set(group_views) for group_views in views.values()))
    for view in names:
        rows = union_groups({group: group_views[view] for group, group_views in views.items()})
        rows.createOrReplaceTempView(f"{prefix}{view}")
    return all_versions(versions)


def _frames(spark: SparkSession, endpoint: str, shot: Snapshot) -> tuple[dict[str, DataFrame], Version]:
    """Build the base relations of one group at one snapshot. Returns ({relation: rows}, their version)."""
    events, ledger_version = _events(spark, endpoint, shot)
    frames = {
        "waiting_rows": pending_in_snapshot(spark, endpoint, shot),
        "table_rows": _table(spark, endpoint, shot, TABLE_SCHEMA.names),
        "ledger_events": events,
        "log_rows": _source(spark, endpoint, shot, 0).load(),
        **_state_of_broker(spark, endpoint),
    }
    version = msgspec.structs.replace(shot.describe_version(), ledger=ledger_version)
    archive_table = shot.open_ledger_or_archive("archive")
    if archive_table is not None:
        frames["archive_rows"] = read_delta(spark, archive_table, ARCHIVE_SCHEMA).where(
            f"seq < {shot.end_seq}"
        )
        version = msgspec.structs.replace(version, archive=int(archive_table.version()))
    return frames, version


def _state_of_broker(spark: SparkSession, endpoint: str) -> dict[str, DataFrame]:
    """Read the relations of recurring schedules and bulk operations from the broker."""
    with Endpoint(endpoint) as broker:
        schedules = pa.Table.from_batches(
            broker_state.schedule_rows(broker.schedules()), broker_state.SCHEDULE_SCHEMA
        )
        selections = pa.Table.from_batches([broker_state.selection_rows(broker.selections())])
    return {
        # Spark 4.2 drops rows behind an empty chunk.
        "schedule_rows": spark.createDataFrame(schedules.combine_chunks()),
        "selection_rows": spark.createDataFrame(selections),
    }


def _views(spark: SparkSession, frames: dict[str, DataFrame], number: int) -> dict[str, DataFrame]:
    """Build {view: rows} of one group from its base relations.

    Meanwhile the relations are temporary views, whose names end in the group's `number`.
    """
    names = {base: f"{base}_{number}" for base in frames}
    for base, frame in frames.items():
        frame.createOrReplaceTempView(names[base])
    columns = {base: frame.columns for base, frame in frames.items()}
    views = {
        view: spark.sql(query)
        for view, query in view_sql.definitions("spark", columns, names.__getitem__).items()
    }
    for name in names.values():  # the views have resolved plans, and no longer need these names
        spark.catalog.dropTempView(name)
    return views


# ---- the relations ------------------------------------------------------------------------------------------


def read_events(spark: SparkSession, endpoint: str, from_seq: int, to_seq: int) -> DataFrame:
    """Read the events of rows from_seq <= seq < to_seq of the log, in EVENT_SCHEMA."""
    source = spark.read.format("timeball").option("endpoint", endpoint).option("read", "events")
    return source.option("from_seq", str(from_seq)).option("to_seq", str(to_seq)).load()


def _events(spark: SparkSession, endpoint: str, shot: Snapshot) -> tuple[DataFrame, int | None]:
    """Unite the events in the ledger's table with newer ones from the log.

    Also returns the ledger's version, None without a ledger.
    """
    table = shot.open_ledger_or_archive("ledger")
    fresh = read_events(spark, endpoint, *shot.fresh_events_range(table))
    if table is None:
        return fresh, None
    recorded = read_delta(spark, table, EVENT_SCHEMA).where(f"event_seq < {shot.end_seq}")
    return recorded.unionByName(fresh, allowMissingColumns=True), int(table.version())


def _run(spark: SparkSession, text: str, frames: dict[str, DataFrame]) -> DataFrame:
    """Plan a query on these relations, by the names in its text."""
    named: dict[str, Any] = frames
    return spark.sql(text, **named)


def _log_relation(
    spark: SparkSession, endpoint: str, shot: Snapshot, name: str, columns: Sequence[str]
) -> DataFrame:
    """Read a relation of view_sql.LOG_RELATIONS. `columns`: the columns of messages that the query needs."""
    relation = view_sql.LOG_RELATIONS[name]
    source = _source(spark, endpoint, shot, 0 if relation.begin == "first" else shot.watermark)
    source = source.option("kinds", ",".join(str(int(kind)) for kind in relation.kinds))
    if relation.placed is not None:
        source = source.option("placed", str(relation.placed).lower())
    return source.option("columns", ",".join(view_sql.log_columns(name, columns))).load()


def _source(spark: SparkSession, endpoint: str, shot: Snapshot, from_seq: int) -> DataFrameReader:
    """Configure a read of the log from `from_seq` up to the snapshot's end."""
    begin, end = shot.log_range(from_seq)
    source = spark.read.format("timeball").option("endpoint", endpoint)
    return source.option("from_seq", str(begin)).option("to_seq", str(end))


def _table(spark: SparkSession, endpoint: str, shot: Snapshot, columns: Sequence[str]) -> DataFrame:
    """Read these columns of the pending table, at the version of the snapshot."""
    source = spark.read.format("timeball").option("endpoint", endpoint).option("read", "pending")
    source = source.option("version", str(shot.version)).option("columns", ",".join(columns))
    return source.option("table_uri", shot.uri).load()


def _ledger(spark: SparkSession, shot: Snapshot) -> DataFrame:
    """Read the events in the ledger. Without a ledger, or if retention has never removed rows, there are none."""
    table = shot.open_ledger_or_archive("ledger") if shot.first_seq > 1 else None
    if table is None:
        return spark.createDataFrame([], spark_schema(EVENT_SCHEMA))
    return read_delta(spark, table, EVENT_SCHEMA)
