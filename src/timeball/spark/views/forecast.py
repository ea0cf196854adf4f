"""The forecast: build a load of due messages, report on it, check it later, and model how late its consumers are.

    check      compare an older forecast with the actual releases
    load       read the load of a file of rows that may be sent later
    recurring  build the load of the recurring schedules
    report     the curve of a load and its peaks
    model      compute how late messages are when consumers of a fixed rate process a load
    spread     build a planned load

Pending messages are counted by SQL on one snapshot (due_histogram.count_due), with DuckDB in this process or Spark on a
cluster. So all counts are of one version. Messages that are already due are not part of a forecast. The functions work
on loads, so they serve scheduled messages as well as a file.

This module does not use Spark: a forecast of some million scheduled messages should not wait for the start of a JVM.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
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
    CELLS_MAX,
    Curve,
    Load,
    LoadSum,
    Peak,
    Unit,
    from_cells,
    from_due_ms,
    merge,
    share_of_difference,
)
from timeball.spark.views.snapshot import Snapshot

# ---- the parts of a report ------------------------------------------------------------------------------------

DUE_COLUMNS = ("due_ms", "due")  # columns of a file that may contain the due time, if the user names none
TOPIC_COLUMN = "topic"
FORMATS = {".parquet": "parquet", ".csv": "csv"}


class Bar(msgspec.Struct, frozen=True):
    """The rows that fall due within one unit of the curve from `at_ms` on."""

    at_ms: int
    rows: int


class TopicLoad(msgspec.Struct, frozen=True):
    """The load of one topic: its rows, their first and last second, the second with the most rows, its curve."""

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


# ---- the version of a time ------------------------------------------------------------------------------------


def version_at(uri: str, time_ms: int) -> int:
    """Find the version of the pending table that was current at `time_ms`. Raises NotFound if no version is so old."""
    return int(load_version_at(open_version(uri), time_ms).version())


# ---- recurring schedules --------------------------------------------------------------------------------------


def recurring_load(
    broker: Endpoint, from_ms: int, until_ms: int, *, width_s: int = 1, by_topic: bool = False
) -> tuple[Load, int]:
    """Count the occurrences of recurring schedules that are no messages yet and due from `from_ms` until `until_ms`.

    The broker counts them, in cells of `width_s`. Returns the load, and the time (ms) up to which they are counted:
    earlier than `until_ms` if there are too many.
    """
    width_ms = width_s * SECOND_MS
    counts = broker.occurrences(from_ms - from_ms % width_ms, until_ms + -until_ms % width_ms, width_ms)
    loads = [Load()]
    for name, (starts_ms, rows) in counts.topics.items():
        second, zeros = np.array(starts_ms, np.int64) // SECOND_MS, np.zeros(len(rows), np.int64)
        topics = (name,) if by_topic else (ALL_TOPICS,)
        loads.append(from_cells(topics, zeros, second, np.array(rows, np.int64), width_s))
    return merge(loads), min(until_ms, counts.to_ms)


# ---- comparing a forecast with the releases -------------------------------------------------------------------


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
    """Count the releases after `snapshot` by the time at which each message was in its queue.

    Returns this load and the broker's current time (ms since 1970). Raises OutOfRange if retention has removed some of
    these RELEASE rows: without them, the forecast would look wrong.
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
    """Compare a forecast (`said`) with the actual releases (`came`) until now, or until the end of its window `due`."""
    until_ms = now_ms if due[1] is None else min(due[1], now_ms)
    begin_s = None if due[0] is None else due[0] // SECOND_MS
    said, came = (load.between(begin_s, until_ms // SECOND_MS) for load in (said, came))
    equal_shares = (
        1 - share_of_difference(said, came, unit) for unit in (Unit.SECOND, Unit.MINUTE, Unit.HOUR)
    )
    return Check(until_ms // SECOND_MS * SECOND_MS, said.total, came.total, *equal_shares)


# ---- from a file to a load ------------------------------------------------------------------------------------


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
    """Choose the column of due times among the columns `names` of a file. Raises InvalidMessage if there is none."""
    candidates = DUE_COLUMNS if column is None else (column,)
    name = next((name for name in candidates if name in names), None)
    if name is None:
        raise InvalidMessage(
            f"{path}: no column {' or '.join(candidates)}; name the one that holds the instants: {', '.join(names)}"
        )
    return name


def _topics(batch: pa.RecordBatch, has_topic: bool, topic: str | None) -> pa.Array | None:
    """Get the topic of each row: from the column of the file, or else `topic` for all. None for no topics."""
    if has_topic:
        return batch.column(TOPIC_COLUMN).cast(pa.string()).fill_null(ALL_TOPICS)
    return None if topic is None else pa.repeat(pa.scalar(topic), batch.num_rows)


def _due_times_ms(column: pa.Array, label: str) -> Int64Array:
    """Convert a column to due times in ms since 1970, rounded up as in a write. Raises InvalidMessage."""
    if column.null_count:
        raise InvalidMessage(f"{label}: {column.null_count:,} rows have no instant")
    if pa.types.is_timestamp(column.type) and column.type.tz is not None:
        due_us = int64(pc.cast(column, pa.timestamp("us", "UTC"), safe=False).cast(pa.int64()))
        due_ms = -(-due_us // 1_000)
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


# ---- reports on a load ----------------------------------------------------------------------------------------


def report(load: Load, by: Unit = Unit.AUTO, *, peaks: int = 5, by_topic: bool = False) -> Report:
    """Build the report on a load: its curve in bars of `by`, its highest `peaks`, and the same for each topic."""
    curve = load.curve(by)
    topics = (
        {name: _topic_report(topic_load, curve.unit) for name, topic_load in load.by_topic().items()}
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


def _topic_report(load: Load, by: Unit) -> TopicLoad:
    """Build the report on the load of one topic, which has rows."""
    [peak] = load.peaks(1)
    first, last = int(load.second[0]), int(load.second[-1])
    return TopicLoad(load.total, first * SECOND_MS, last * SECOND_MS, peak, list(_bars(load.curve(by))))


def _bars(curve: Curve) -> Iterator[Bar]:
    for start_s, rows in zip(curve.start_s.tolist(), curve.rows.tolist(), strict=True):
        yield Bar(start_s * SECOND_MS, rows)


# ---- a model of consumers: how late messages are --------------------------------------------------------------
# The model is a fluid queue. The rows of a second enter the queue at the beginning of that second, and consumers take
# `rate` rows per second, in order of arrival. The model ignores due times within a second (so each figure is exact to
# 1 s, or to the width of the load's cells), the lateness of the broker itself (milliseconds), messages that are not
# accepted yet, and consumers that become slower.

FloatArray = npt.NDArray[np.float64]

OTHER_TOPICS = "*"  # stands for all topics without their own rate


class Outcome(msgspec.Struct, frozen=True):
    """The figures of one queue, over all its rows. Lateness is in ms, points in time are ms since 1970.

    `rate` is in rows per second. `backlog_max` is the largest number of waiting rows. `caught_up_ms` is the time at
    which the queue is empty for the first time after that. Times are None if no rows are due.
    """

    rate: float
    rows: int
    backlog_max: int
    backlog_max_at_ms: int | None
    lateness_max_ms: int
    lateness_p50_ms: int
    lateness_p99_ms: int
    caught_up_ms: int | None


@dataclass(frozen=True)
class Queue:
    """The state of a queue at each second with due rows: `before` rows wait, then `rows` arrive."""

    rate: float
    second: Int64Array
    rows: Int64Array
    before: FloatArray

    @property
    def after(self) -> FloatArray:
        """The waiting rows just after the rows of each second have arrived."""
        return np.asarray(self.before + self.rows, dtype=np.float64)

    def outcome(self) -> Outcome:
        """Compute the figures of the queue."""
        if len(self.second) == 0:
            return Outcome(self.rate, 0, 0, None, 0, 0, 0, None)
        after = self.after
        worst = int(np.argmax(after))
        half, nearly_all = quantiles([self], (0.5, 0.99))
        return Outcome(
            rate=self.rate,
            rows=int(self.rows.sum()),
            backlog_max=round(float(after[worst])),
            backlog_max_at_ms=int(self.second[worst]) * SECOND_MS,
            lateness_max_ms=_round_to_ms(after[worst] / self.rate),
            lateness_p50_ms=_round_to_ms(half),
            lateness_p99_ms=_round_to_ms(nearly_all),
            caught_up_ms=self._caught_up_ms(worst),
        )

    def _caught_up_ms(self, worst: int) -> int:
        """Compute the time at which the queue is empty after the entry `worst`, which has the largest backlog."""
        idle = np.flatnonzero(self.before[worst + 1 :] <= 0)
        # The last entry before the queue is empty.
        last = worst + int(idle[0]) if len(idle) else len(self.second) - 1
        return int(self.second[last]) * SECOND_MS + _round_to_ms(float(self.after[last]) / self.rate)

    def backlog(self) -> tuple[FloatArray, FloatArray]:
        """Compute the corners of the backlog's curve as (seconds, rows), to draw it."""
        if len(self.second) == 0:
            return np.empty(0), np.empty(0)
        after = self.after
        begin = self.second.astype(np.float64)
        empty_at = begin + after / self.rate
        end = np.minimum(empty_at, np.append(begin[1:], np.inf))
        rows_at_end = np.maximum(after - self.rate * (end - begin), 0.0)
        return (
            np.column_stack((begin, begin, end)).ravel(),
            np.column_stack((self.before, after, rows_at_end)).ravel(),
        )


def queue(load: Load, rate: float, backlog: int = 0, from_s: int | None = None) -> Queue:
    """Model one queue: all rows of `load`, and consumers that take `rate` rows per second.

    `backlog` rows are in the queue at second `from_s` already, by default when the first row is due.

    Let a(k) rows arrive at second t(k), when P(k) rows are waiting already:

        X(k) = a(0) + … + a(k-1) - rate * (t(k) - t(0))        the rows left if the consumers were never idle
        P(k) = X(k) - min(X(0), …, X(k))                       they were idle wherever X fell below its minimum so far

    So one pass over the seconds with due rows is enough, however far apart these seconds are.
    """
    second, rows = load.per_second()
    if backlog:
        begin = int(second[0]) if from_s is None and len(second) else from_s or 0
        initial = Load(second=np.array([begin]), rows=np.array([backlog], np.int64))
        combined = from_cells(
            (ALL_TOPICS,),
            np.zeros(len(second) + 1, np.int64),
            np.append(initial.second, second),
            np.append(initial.rows, rows),
            load.width_s,
        )
        second, rows = combined.second, combined.rows
    if len(second) == 0:
        return Queue(rate, second, rows, np.empty(0))
    arrived_before = np.concatenate(([0], np.cumsum(rows)[:-1]))
    never_idle_rows = arrived_before - rate * (second - second[0])
    return Queue(rate, second, rows, never_idle_rows - np.minimum.accumulate(never_idle_rows))


def quantiles(queues: Sequence[Queue], shares: Sequence[float]) -> list[float]:
    """Compute quantiles of lateness, in seconds, over all messages of all queues. `shares` are between 0 and 1.

    The waits of the rows of a second are distributed evenly between before/rate and after/rate seconds. The result is
    exact, because it is computed from the sum of these spans.
    """
    low = np.concatenate([queue.before / queue.rate for queue in queues])
    high = np.concatenate([queue.after / queue.rate for queue in queues])
    rates = np.concatenate([np.full(len(queue.second), queue.rate) for queue in queues])
    if len(low) == 0:
        return [0.0 for _ in shares]
    # The density of messages over lateness (messages per second of lateness) is a step function: each span adds its
    # rate at its begin and removes it at its end.
    lateness = np.concatenate((low, high))
    order = np.argsort(lateness, kind="stable")
    lateness, rate_change = lateness[order], np.concatenate((rates, -rates))[order]
    messages_so_far = np.concatenate(([0.0], np.cumsum(np.cumsum(rate_change)[:-1] * np.diff(lateness))))
    return [float(np.interp(share * messages_so_far[-1], messages_so_far, lateness)) for share in shares]


# ---- consumers of several topics ------------------------------------------------------------------------------


class WhatIf(msgspec.Struct, frozen=True):
    """The outcome of each queue, by its name (a topic, or OTHER_TOPICS), and quantiles over the messages of all queues.

    `unserved`: the topics without consumers in this model, with their rows.
    """

    queues: dict[str, Outcome]
    lateness_max_ms: int
    lateness_p50_ms: int
    lateness_p99_ms: int
    unserved: dict[str, int]


def serve(load: Load, rates: Mapping[str, float], backlog: int = 0, from_s: int | None = None) -> WhatIf:
    """Model consumers. `rates`: topic -> rows per second. OTHER_TOPICS is one rate for all topics without their own.

    `backlog` rows are unread at second `from_s`: in the queue of OTHER_TOPICS, or without that rate in the only queue.
    Raises the errors of `queues`.
    """
    queue_by_name = queues(load, rates, backlog, from_s)
    half, nearly_all = quantiles(list(queue_by_name.values()), (0.5, 0.99)) if queue_by_name else (0.0, 0.0)
    outcomes = {name: served_queue.outcome() for name, served_queue in queue_by_name.items()}
    unserved = (
        {}
        if OTHER_TOPICS in rates
        else {topic: topic_load.total for topic, topic_load in load.by_topic().items() if topic not in rates}
    )
    return WhatIf(
        queues=outcomes,
        lateness_max_ms=max((served_queue.lateness_max_ms for served_queue in outcomes.values()), default=0),
        lateness_p50_ms=_round_to_ms(half),
        lateness_p99_ms=_round_to_ms(nearly_all),
        unserved=unserved,
    )


def queues(
    load: Load, rates: Mapping[str, float], backlog: int = 0, from_s: int | None = None
) -> dict[str, Queue]:
    """Model one queue for each rate. Returns them by the name of the rate: a topic, or OTHER_TOPICS.

    The arguments are those of `serve`. Raises RequestError for a rate that is not above 0 or infinite, or for a backlog
    that could belong to several queues.
    """
    for name, rate in rates.items():
        if not rate > 0 or rate == float("inf"):
            raise RequestError(
                f"a consumer rate of {rate:g} for {_topic_text(name)}: it must be above 0 rows a second"
            )
    if backlog and OTHER_TOPICS not in rates and len(rates) != 1:
        raise RequestError(
            "a backlog belongs to one queue: give one consumer rate for all topics, or for one"
        )
    owner = OTHER_TOPICS if OTHER_TOPICS in rates else next(iter(rates), None)
    loads = {name: load.select_topics([name]) for name in rates if name != OTHER_TOPICS}
    if OTHER_TOPICS in rates:
        loads[OTHER_TOPICS] = load.select_topics(set(load.topics) - set(rates))
    return {
        name: queue(queue_load, rates[name], backlog if name == owner else 0, from_s)
        for name, queue_load in loads.items()
    }


def rate_needed(load: Load, lateness_max_ms: int, backlog: int = 0, from_s: int | None = None) -> float:
    """Find the lowest rate (rows per second, to 0.1 %) at which no row waits longer than `lateness_max_ms`.

    `load`, `backlog`, `from_s`: of one queue, as in `queue`. Raises RequestError unless `lateness_max_ms` is above 0.
    """
    if not lateness_max_ms > 0:
        raise RequestError("the largest lateness must be above 0 ms")
    if load.total + backlog == 0:
        return 0.0
    max_wait_s = lateness_max_ms / SECOND_MS

    def is_enough(rate: float) -> bool:
        queue_at_rate = queue(load, rate, backlog, from_s)
        return bool(np.max(queue_at_rate.after) / rate <= max_wait_s)

    high = (load.total + backlog) / max_wait_s  # enough even if all rows were due at once
    low = 0.0
    while high - low > high * 0.001:
        middle = (low + high) / 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


# ---- a planned load -------------------------------------------------------------------------------------------


def spread(rows: int, at_ms: int, over_ms: int = 0, topic: str = ALL_TOPICS) -> Load:
    """Build the load of `rows` rows that fall due evenly during `over_ms` from `at_ms` on. With 0, all are due at once.

    Raises RequestError for negative `rows` or `over_ms`.
    """
    if rows < 0 or over_ms < 0:
        raise RequestError("an extra load has no negative number of rows, and no negative length")
    steps = max(1, min(-(-over_ms // SECOND_MS), rows, CELLS_MAX))
    step = np.arange(steps + 1, dtype=np.int64)
    # Two terms, because the product step * rows might not fit into 64 bits.
    rows_before = (step * (rows // steps)) + step * (rows % steps) // steps
    second = (at_ms + over_ms * step[:-1] // steps) // SECOND_MS
    return from_cells((topic,), np.zeros(steps, np.int64), second, np.diff(rows_before))


def _round_to_ms(seconds: float) -> int:
    return round(float(seconds) * SECOND_MS)


def _topic_text(name: str) -> str:
    return "all topics" if name == OTHER_TOPICS else f"topic {name}"
