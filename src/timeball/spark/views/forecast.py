"""The forecast: reports on a due load, compares an older forecast with the actual releases, and reads loads from files.

Pending messages are counted by SQL on one snapshot (due_histogram.count_due), with DuckDB in this process or Spark on a
cluster. So all counts are of one version. Messages that are already due are not part of a forecast. The functions work
on loads, so they serve scheduled messages as well as a file of rows that may be sent later.

This module does not use Spark: a forecast of some million scheduled messages should not wait for the start of a JVM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from timeball.model.errors import InvalidMessage, OutOfRange, RequestError, SetupError
from timeball.model.limits import INSTANT_MS_MAX, SECOND_MS
from timeball.model.message import Int64Array, Kind, int64
from timeball.spark.endpoint import Endpoint
from timeball.spark.table_store import Due, load_version_at, open_version
from timeball.spark.views.due_histogram import (
    ALL_TOPICS,
    Curve,
    Load,
    LoadSum,
    Peak,
    Unit,
    from_due_ms,
    share_of_difference,
)
from timeball.spark.views.snapshot import Snapshot

DUE_COLUMNS = ("due_ms", "due")  # columns of a file that may contain the due time, if the user names none
TOPIC_COLUMN = "topic"
FORMATS = {".parquet": "parquet", ".csv": "csv"}


class Bar(msgspec.Struct, frozen=True):
    """The rows that fall due within one unit of the curve from `at_ms` on."""

    at_ms: int
    rows: int


class TopicLoad(msgspec.Struct, frozen=True):
    """The load of one topic: its rows, their first and last second, its fullest second, its curve."""

    rows: int
    first_ms: int
    last_ms: int
    peak: Peak
    curve: list[Bar]


class Report(msgspec.Struct, frozen=True):
    """The report on a load. Peaks and consumer models are exact to `resolution_ms`. Bars begin at full units in UTC."""

    rows: int
    by: str
    resolution_ms: int
    curve: list[Bar]
    peaks: list[Peak]
    topics: dict[str, TopicLoad]


# ---- the version of a time --------------------------------------------------------------------------------


def version_at(uri: str, time_ms: int) -> int:
    """Find the version of the pending table that was current at `time_ms`. Raises NotFound if no version is so old."""
    return int(load_version_at(open_version(uri), time_ms).version())


# ---- comparing a forecast with the releases ---------------------------------------------------------------


class Check(msgspec.Struct, frozen=True):
    """The comparison of a forecast (`said`) with the actual releases (`came`) in the same time, up to `until_ms`.

    `said` and `came` are numbers of rows. The other three fields are the share of these rows that both have in the same
    seconds, minutes and hours: 1 for equal curves.
    """

    until_ms: int
    said: int
    came: int
    same_second: float
    same_minute: float
    same_hour: float


def released_since(broker: Endpoint, snapshot: Snapshot, *, by_topic: bool = False) -> tuple[Load, int]:
    """Count the releases after `snapshot` by the time at which each row was in its queue.

    Returns this load and the broker's current time (ms since 1970). Raises OutOfRange if retention has removed a part
    of these rows: without them, the forecast would look wrong.
    """
    status = broker.status()
    if status.log.first_seq > snapshot.end_seq:
        raise OutOfRange(
            f"retention has removed what came after version {snapshot.version}: the log begins at row "
            f"{status.log.first_seq:,}, that version ends at {snapshot.end_seq:,}"
        )
    counting = LoadSum()
    columns = ["store_ms", TOPIC_COLUMN] if by_topic else ["store_ms"]
    end = max(status.log.durable_seq, snapshot.end_seq)
    for rows in broker.read_log(snapshot.end_seq, end, [Kind.RELEASE], columns=columns):
        topics = rows.column(TOPIC_COLUMN) if by_topic else None
        counting.add(from_due_ms(int64(rows.column("store_ms")), topics))
    return counting.result(), status.now_ms


def check(said: Load, came: Load, due: Due, now_ms: int) -> Check:
    """Compare a forecast with the actual releases until now, or until the end of its window `due`."""
    until_ms = now_ms if due[1] is None else min(due[1], now_ms)
    begin_s = None if due[0] is None else due[0] // SECOND_MS
    said, came = (load.between(begin_s, until_ms // SECOND_MS) for load in (said, came))
    equal_shares = (
        1 - share_of_difference(said, came, unit) for unit in (Unit.SECOND, Unit.MINUTE, Unit.HOUR)
    )
    return Check(until_ms // SECOND_MS * SECOND_MS, said.total, came.total, *equal_shares)


# ---- from a file to a load --------------------------------------------------------------------------------


def load_of_file(path: Path, column: str | None = None, topic: str | None = None) -> Load:
    """Build the load of a Parquet or CSV file, from the due times in `column` (by default `due_ms` or `due`).

    All rows count for `topic` if it is given, otherwise each for the topic in the file's column `topic`. Raises
    RequestError, InvalidMessage and SetupError, which name the file.
    """
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise RequestError(f"{path}: a file of Parquet or CSV, named so: {', '.join(FORMATS)}")
    counting = LoadSum()
    try:
        rows = ds.dataset(path, format=kind)
        name = _due_column(rows.schema.names, column, path)
        has_topic = topic is None and TOPIC_COLUMN in rows.schema.names
        for batch in rows.to_batches(columns=[name, TOPIC_COLUMN] if has_topic else [name]):
            topics = _topics(batch, has_topic, topic)
            counting.add(from_due_ms(_due_times_ms(batch.column(name), f"{path}: column {name}"), topics))
    except (OSError, pa.ArrowException) as error:
        raise SetupError(f"cannot read {path}: {str(error).splitlines()[0]}") from error
    return counting.result()


def _due_column(names: Sequence[str], column: str | None, path: Path) -> str:
    candidates = DUE_COLUMNS if column is None else (column,)
    name = next((name for name in candidates if name in names), None)
    if name is None:
        raise InvalidMessage(
            f"{path}: no column {' or '.join(candidates)}; name the one that holds the instants: {', '.join(names)}"
        )
    return name


def _topics(batch: pa.RecordBatch, has_topic: bool, topic: str | None) -> pa.Array | None:
    if has_topic:
        return batch.column(TOPIC_COLUMN).cast(pa.string()).fill_null(ALL_TOPICS)
    return None if topic is None else pa.repeat(pa.scalar(topic), batch.num_rows)


def _due_times_ms(column: pa.Array, label: str) -> Int64Array:
    """Convert a column to due times in ms since 1970, rounded up as in a write. Raises InvalidMessage."""
    if column.null_count:
        raise InvalidMessage(f"{label}: {column.null_count:,} rows have no instant")
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        micro_s = int64(pc.cast(column, pa.timestamp("us", "UTC"), safe=False).cast(pa.int64()))
        due_ms = -(-micro_s // 1_000)
    elif pa.types.is_integer(column.type):
        due_ms = int64(column.cast(pa.int64()))
    else:
        hint = "; a time without a zone names no instant" if pa.types.is_temporal(column.type) else ""
        raise InvalidMessage(
            f"{label}: {column.type}, wanted instants with a zone (2030-01-31T09:00:00Z) or milliseconds{hint}"
        )
    if len(due_ms) and not 0 <= due_ms.min() <= due_ms.max() <= INSTANT_MS_MAX:
        raise InvalidMessage(f"{label}: instants before 1970, or beyond the year 9999")
    return np.asarray(due_ms, dtype=np.int64)


# ---- reports on a load ------------------------------------------------------------------------------------


def report(load: Load, by: Unit = Unit.AUTO, *, peaks: int = 5, by_topic: bool = False) -> Report:
    """Build the report on a load: its curve in bars of `by`, its highest `peaks`, and the same for each topic."""
    curve = load.curve(by)
    topics = (
        {name: _topic(topic_load, curve.unit) for name, topic_load in load.by_topic().items()}
        if by_topic
        else {}
    )
    return Report(
        rows=load.total,
        by=str(curve.unit),
        resolution_ms=load.width_s * SECOND_MS,
        curve=list(_bars(curve)),
        peaks=load.peaks(peaks),
        topics=topics,
    )


def _topic(load: Load, by: Unit) -> TopicLoad:
    [peak] = load.peaks(1)
    first, last = int(load.second[0]), int(load.second[-1])
    return TopicLoad(load.total, first * SECOND_MS, last * SECOND_MS, peak, list(_bars(load.curve(by))))


def _bars(curve: Curve) -> Iterator[Bar]:
    for start_s, rows in zip(curve.start_s.tolist(), curve.rows.tolist(), strict=True):
        yield Bar(start_s * SECOND_MS, rows)
