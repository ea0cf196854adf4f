"""The due load: the number of messages that fall due per second and topic.

A load is built from counts by SQL (DuckDB in this process, Spark on a cluster) or from due times (a file of rows that
may be sent later). It computes curves by second, minute, hour or day, peaks, the load of a topic, and of a time window.

A load stores one cell for each second and topic with due messages, in three arrays of numbers. A load of more than
CELLS_MAX cells becomes coarser: its cells are minutes, then hours wide (`width_s`). Every row is still counted. All
functions are pure functions on columns. All times are in UTC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import pyarrow as pa

from timeball.model.limits import SECOND_MS
from timeball.model.message import Int64Array, int64

# A cell needs 24 bytes, four times as much while cells are sorted, and about 60 bytes in the SQL engine that counts.
CELLS_MAX = 2_000_000
BARS_MAX = 48  # a terminal shows this many lines without scrolling
WIDTHS_S = (1, 60, 3_600)  # widths of a cell, in seconds
ALL_TOPICS = ""  # the only topic of a load that was not counted by topic


class Unit(StrEnum):
    """The width of a bar. AUTO is the finest width that gives no more bars than a screen has lines."""

    AUTO = "auto"
    SECOND = "second"
    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"


UNIT_S = {Unit.SECOND: 1, Unit.MINUTE: 60, Unit.HOUR: 3_600, Unit.DAY: 86_400}
_NUMPY_UNIT = {Unit.SECOND: "s", Unit.MINUTE: "m", Unit.HOUR: "h", Unit.DAY: "D"}


@dataclass(frozen=True)
class Peak:
    """The second with the most rows of its minute, beginning at `at_ms`: its rows, and those of the whole minute.

    In a coarser load it is a cell of `width_s` seconds.
    """

    at_ms: int
    rows: int
    minute_rows: int


@dataclass(frozen=True)
class Curve:
    """The rows of each bar that is not empty. `start_s` is in seconds since 1970, ascending."""

    unit: Unit
    start_s: Int64Array
    rows: Int64Array


def bar_name(at_ms: int, unit: Unit) -> str:
    """Format the begin of a bar, in UTC, as precisely as its unit. An hour is 2030-01-31T09."""
    return str(np.datetime64(at_ms, "ms").astype(f"datetime64[{_NUMPY_UNIT[unit]}]"))


def _no_values() -> Int64Array:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class Load:
    """The rows that fall due per second (or per `width_s` seconds) and topic.

    The arrays have one entry per cell, sorted by second, then topic. Cells without rows are not stored.
    """

    topics: tuple[str, ...] = (ALL_TOPICS,)
    topic: Int64Array = field(default_factory=_no_values)  # positions in `topics`
    second: Int64Array = field(default_factory=_no_values)  # the first second of the cell, since 1970
    rows: Int64Array = field(default_factory=_no_values)
    width_s: int = 1

    @property
    def total(self) -> int:
        """The number of all rows."""
        return int(self.rows.sum())

    @property
    def cells(self) -> int:
        """The number of cells."""
        return len(self.rows)

    def per_second(self) -> tuple[Int64Array, Int64Array]:
        """Sum the rows over topics. Returns (second, rows), with each second once, ascending."""
        return _sum_by_key(self.second, self.rows)

    def curve(self, unit: Unit = Unit.AUTO, bars_max: int = BARS_MAX) -> Curve:
        """Compute the rows per `unit`, summed over topics. The unit becomes coarser if the load's cells are wider.

        AUTO: the finest unit with at most `bars_max` bars, or days.
        """
        if unit is Unit.AUTO:
            curves = [self.curve(candidate) for candidate in UNIT_S if UNIT_S[candidate] >= self.width_s]
            return next((candidate for candidate in curves if len(candidate.rows) <= bars_max), curves[-1])
        unit = next(candidate for candidate in UNIT_S if UNIT_S[candidate] >= max(UNIT_S[unit], self.width_s))
        start_s, rows = _sum_by_key(self.second // UNIT_S[unit] * UNIT_S[unit], self.rows)
        return Curve(unit, start_s, rows)

    def peaks(self, count: int) -> list[Peak]:
        """Find the `count` seconds with the most rows, at most one per minute, the largest first.

        Without the limit, all of them could be next to the first one.
        """
        second, rows = self.per_second()
        if not len(second):
            return []
        minute = second // 60
        # Sort by minute, so that each minute's largest second is last. Among equal seconds the earliest is last.
        order = np.lexsort((-second, rows, minute))
        last = np.flatnonzero(np.append(np.diff(minute[order]), 1))
        best = order[last]
        _, in_minute = _sum_by_key(minute, rows)
        first = np.lexsort((second[best], -rows[best]))[:count]
        return [Peak(int(second[best[i]]) * SECOND_MS, int(rows[best[i]]), int(in_minute[i])) for i in first]

    def select_topics(self, names: Iterable[str]) -> Load:
        """Select the load of these topics."""
        wanted_topics = set(names)
        codes = [code for code, name in enumerate(self.topics) if name in wanted_topics]
        return self._select_cells(np.isin(self.topic, codes))

    def by_topic(self) -> dict[str, Load]:
        """Split the load by topic, the largest topic first. Topics without rows are left out."""
        sums = np.bincount(self.topic, self.rows, minlength=len(self.topics))
        # One sort: a pass over all cells for each of 100,000 topics would take hours.
        cells = np.argsort(self.topic, kind="stable")
        begins = np.searchsorted(self.topic[cells], np.arange(len(self.topics) + 1))
        return {
            self.topics[code]: self._select_cells(cells[begins[code] : begins[code + 1]])
            for code in np.argsort(-sums, kind="stable")
            if sums[code]
        }

    def between(self, from_s: int | None = None, until_s: int | None = None) -> Load:
        """Select the cells with from_s <= second < until_s. None means no bound."""
        low = 0 if from_s is None else int(np.searchsorted(self.second, from_s, side="left"))
        high = self.cells if until_s is None else int(np.searchsorted(self.second, until_s, side="left"))
        return self._select_cells(slice(low, high))

    def coarser(self, width_s: int) -> Load:
        """Convert to cells of `width_s` seconds, or of the present width if it is larger."""
        second = self.second // width_s * width_s
        return from_cells(self.topics, self.topic, second, self.rows, max(width_s, self.width_s))

    def _select_cells(self, selection: slice | Int64Array | np.typing.NDArray[np.bool_]) -> Load:
        return Load(
            self.topics, self.topic[selection], self.second[selection], self.rows[selection], self.width_s
        )


def from_cells(
    topics: Sequence[str], topic: Int64Array, second: Int64Array, rows: Int64Array, width_s: int = 1
) -> Load:
    """Build a load from cells in any order. Adds equal cells. It becomes coarser if it has more than CELLS_MAX cells.

    The arrays have one entry per cell: `topic` is an index in `topics`, `second` is in seconds since 1970.
    """
    names = tuple(topics) or (ALL_TOPICS,)
    # One key sorts faster than two. It fits into 64 bits: a second needs 38 bits, a topic 17.
    count = len(names)
    cell, sums = _sum_by_key(second * count + topic, rows)
    load = Load(names, cell % count, cell // count, sums, width_s)
    for width in WIDTHS_S:
        if load.cells > CELLS_MAX and width > load.width_s:
            load = load.coarser(width)
    return load


_CELLS_TEXT = "SELECT {counts} FROM {pending}"
_COUNT_TEXT = "SELECT {topic} AS topic, {cell} AS cell, count(*) AS rows FROM {pending} GROUP BY 1, 2"


def _cell_text(width_s: int) -> str:
    return f"cast(floor(due_ms / {width_s * SECOND_MS}) AS bigint)"


def count_due(
    run: Callable[[str], pa.Table], *, by_topic: bool = False, relation: Callable[[str], str] = str
) -> Load:
    """Count the rows of the relation `pending`, with columns due_ms and topic, by SQL.

    `run` runs a query. `relation` converts a relation's name to its form in the engine's SQL. The SQL engine has all
    cells in memory while it counts. So a first query estimates their number for each width, and the finest width with
    at most CELLS_MAX cells is used.
    """
    pending = relation("pending")
    texts = [_cell_text(width_s) for width_s in WIDTHS_S]
    cells = [f"concat(topic, ' ', cast({text} AS string))" if by_topic else text for text in texts]
    counts = ", ".join(f"approx_count_distinct({cell}) AS cells_{index}" for index, cell in enumerate(cells))
    (estimates,) = run(_CELLS_TEXT.format(counts=counts, pending=pending)).to_pylist()
    fits = (width_s for width_s, count in zip(WIDTHS_S, estimates.values()) if count <= CELLS_MAX)
    width_s = next(fits, WIDTHS_S[-1])
    topic = "topic" if by_topic else "''"
    text = _COUNT_TEXT.format(topic=topic, cell=_cell_text(width_s), pending=pending)
    # Engines return the counts in any order. Sorting makes equal loads list their topics in the same order.
    cells_by_topic = run(text).sort_by("topic").combine_chunks()
    topics = cells_by_topic.column("topic").cast(pa.string()).combine_chunks().dictionary_encode()
    second, rows = (int64(cells_by_topic.column(name).combine_chunks()) for name in ("cell", "rows"))
    codes = int64(topics.indices.cast(pa.int64()))
    return from_cells(topics.dictionary.to_pylist(), codes, second * width_s, rows, width_s)


def from_due_ms(due_ms: Int64Array, topics: pa.Array | None = None) -> Load:
    """Build the load of rows with these due times (ms), by topic if topics are given."""
    seconds = np.asarray(due_ms, dtype=np.int64) // SECOND_MS
    ones = np.ones(len(seconds), np.int64)
    if topics is None:
        return from_cells((ALL_TOPICS,), np.zeros(len(seconds), np.int64), seconds, ones)
    if isinstance(topics, pa.ChunkedArray):
        topics = topics.combine_chunks()
    if not pa.types.is_dictionary(topics.type):
        topics = topics.dictionary_encode()
    codes = topics.indices.cast(pa.int64()).to_numpy(zero_copy_only=False)
    return from_cells(topics.dictionary.to_pylist(), codes, seconds, ones)


def merge(loads: Iterable[Load]) -> Load:
    """Add loads. The result is as coarse as the coarsest of them."""
    to_merge = list(loads)
    if len(to_merge) < 2:
        return to_merge[0] if to_merge else Load()
    names = list(dict.fromkeys(name for load in to_merge for name in load.topics))
    code_of = {name: code for code, name in enumerate(names)}
    width_s = max(load.width_s for load in to_merge)
    codes = [np.array([code_of[name] for name in load.topics], np.int64)[load.topic] for load in to_merge]
    seconds = [load.second // width_s * width_s for load in to_merge]
    rows = [load.rows for load in to_merge]
    return from_cells(names, np.concatenate(codes), np.concatenate(seconds), np.concatenate(rows), width_s)


class LoadSum:
    """Adds loads one after the other, with little more memory than the cells of the sum."""

    def __init__(self) -> None:
        self._loads: list[Load] = []
        self._cells = 0

    def add(self, load: Load) -> None:
        """Add a load. A merge sorts all cells, so loads are merged only when their cells have doubled."""
        self._loads.append(load)
        self._cells += load.cells
        if self._cells > max(CELLS_MAX // 4, 2 * self._loads[0].cells):
            self.result()

    def result(self) -> Load:
        """Compute the sum of all loads."""
        total = merge(self._loads)
        self._loads, self._cells = [total], total.cells
        return total


def _sum_by_key(keys: Int64Array, values: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Sum the values of equal keys. Returns (keys, sums), with each key once, ascending."""
    if len(keys) == 0:
        return _no_values(), _no_values()
    if np.any(keys[1:] < keys[:-1]):
        order = np.argsort(keys, kind="stable")
        keys, values = keys[order], values[order]
    begins = np.concatenate(([0], np.flatnonzero(np.diff(keys)) + 1))
    return keys[begins], np.add.reduceat(values, begins)


def share_of_difference(forecast: Load, actual: Load, unit: Unit) -> float:
    """Compute the share of both loads' rows that are in different bars: 0 for equal curves, 1 for disjoint curves."""
    all_rows = forecast.total + actual.total
    if not all_rows:
        return 0.0
    unit = max(forecast.curve(unit).unit, actual.curve(unit).unit, key=UNIT_S.__getitem__)
    forecast_curve, actual_curve = forecast.curve(unit), actual.curve(unit)
    _, differences = _sum_by_key(
        np.append(forecast_curve.start_s, actual_curve.start_s),
        np.append(forecast_curve.rows, -actual_curve.rows),
    )
    return float(np.abs(differences).sum() / all_rows)
