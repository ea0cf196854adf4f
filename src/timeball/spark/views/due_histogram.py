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
    """The fullest cell of a minute: the rows due in the second that begins at `at_ms`, and in its whole minute."""

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


def _no_numbers() -> Int64Array:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class Load:
    """The rows that fall due per second (or per `width_s` seconds) and topic.

    The arrays have one entry per cell, sorted by second, then topic. Cells without rows are not stored.
    """

    topics: tuple[str, ...] = (ALL_TOPICS,)
    topic: Int64Array = field(default_factory=_no_numbers)  # positions in `topics`
    second: Int64Array = field(default_factory=_no_numbers)  # the first second of the cell, since 1970
    rows: Int64Array = field(default_factory=_no_numbers)
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
        """Return (second, rows), summed over topics: each second once, ascending."""
        return _summed(self.second, self.rows)

    def curve(self, unit: Unit = Unit.AUTO, bars_max: int = BARS_MAX) -> Curve:
        """Compute the rows per `unit`, summed over topics. A unit cannot be finer than the load's own width."""
        if unit is Unit.AUTO:
            found = [self.curve(each) for each in UNIT_S if UNIT_S[each] >= self.width_s]
            return next((each for each in found if len(each.rows) <= bars_max), found[-1])
        unit = next(each for each in UNIT_S if UNIT_S[each] >= max(UNIT_S[unit], self.width_s))
        start_s, rows = _summed(self.second // UNIT_S[unit] * UNIT_S[unit], self.rows)
        return Curve(unit, start_s, rows)

    def peaks(self, count: int) -> list[Peak]:
        """Return the `count` fullest seconds. Each minute has one at most, or all could be neighbours of the first."""
        second, rows = self.per_second()
        if not len(second):
            return []
        minute = second // 60
        # Sort by minute, with each minute's fullest second last. Among equal seconds the earliest is last.
        order = np.lexsort((-second, rows, minute))
        last = np.flatnonzero(np.append(np.diff(minute[order]), 1))
        best = order[last]
        _, in_minute = _summed(minute, rows)
        first = np.lexsort((second[best], -rows[best]))[:count]
        return [Peak(int(second[best[i]]) * SECOND_MS, int(rows[best[i]]), int(in_minute[i])) for i in first]

    def only(self, names: Iterable[str]) -> Load:
        """Return the load of only these topics."""
        wanted = set(names)
        codes = [code for code, name in enumerate(self.topics) if name in wanted]
        return self._kept(np.isin(self.topic, codes))

    def by_topic(self) -> dict[str, Load]:
        """Return the load of each topic with due rows, the largest first."""
        sums = np.bincount(self.topic, self.rows, minlength=len(self.topics))
        # One sort: a pass over all cells for each of 100,000 topics would take hours.
        cells = np.argsort(self.topic, kind="stable")
        begins = np.searchsorted(self.topic[cells], np.arange(len(self.topics) + 1))
        return {
            self.topics[code]: self._kept(cells[begins[code] : begins[code + 1]])
            for code in np.argsort(-sums, kind="stable")
            if sums[code]
        }

    def between(self, from_s: int | None = None, until_s: int | None = None) -> Load:
        """Return the load of the cells with from_s <= second < until_s. None means no bound."""
        low = 0 if from_s is None else int(np.searchsorted(self.second, from_s, side="left"))
        high = self.cells if until_s is None else int(np.searchsorted(self.second, until_s, side="left"))
        return self._kept(slice(low, high))

    def coarser(self, width_s: int) -> Load:
        """Return the same rows in cells of `width_s` seconds."""
        second = self.second // width_s * width_s
        return from_cells(self.topics, self.topic, second, self.rows, max(width_s, self.width_s))

    def _kept(self, where: slice | Int64Array | np.typing.NDArray[np.bool_]) -> Load:
        return Load(self.topics, self.topic[where], self.second[where], self.rows[where], self.width_s)


def from_cells(
    topics: Sequence[str], topic: Int64Array, second: Int64Array, rows: Int64Array, width_s: int = 1
) -> Load:
    """Build a load from cells in any order, and add equal cells. It is coarser than `width_s` if there are too many."""
    names = tuple(topics) or (ALL_TOPICS,)
    # One key sorts faster than two. It fits into 64 bits: a second needs 38 bits, a topic 17.
    count = len(names)
    cell, sums = _summed(second * count + topic, rows)
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
    """Count the rows of the relation `pending` by SQL. `run` runs a query.

    The SQL engine holds all cells while it counts. So their number is estimated first, for each width, and the finest
    width with at most CELLS_MAX cells is used.
    """
    pending = relation("pending")
    texts = [_cell_text(width_s) for width_s in WIDTHS_S]
    cells = [f"concat(topic, ' ', cast({text} AS string))" if by_topic else text for text in texts]
    counts = ", ".join(f"approx_count_distinct({cell}) AS cells_{at}" for at, cell in enumerate(cells))
    (estimates,) = run(_CELLS_TEXT.format(counts=counts, pending=pending)).to_pylist()
    fits = (width_s for width_s, count in zip(WIDTHS_S, estimates.values()) if count <= CELLS_MAX)
    width_s = next(fits, WIDTHS_S[-1])
    topic = "topic" if by_topic else "''"
    text = _COUNT_TEXT.format(topic=topic, cell=_cell_text(width_s), pending=pending)
    # Engines return groups in any order. Sorted, equal loads list their topics alike.
    found = run(text).sort_by("topic").combine_chunks()
    topics = found.column("topic").cast(pa.string()).combine_chunks().dictionary_encode()
    second, rows = (int64(found.column(name).combine_chunks()) for name in ("cell", "rows"))
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
    """Add loads up. The result is as coarse as the coarsest of them."""
    parts = list(loads)
    if len(parts) < 2:
        return parts[0] if parts else Load()
    names = list(dict.fromkeys(name for part in parts for name in part.topics))
    code_of = {name: code for code, name in enumerate(names)}
    width_s = max(part.width_s for part in parts)
    codes = [np.array([code_of[name] for name in part.topics], np.int64)[part.topic] for part in parts]
    seconds = [part.second // width_s * width_s for part in parts]
    rows = [part.rows for part in parts]
    return from_cells(names, np.concatenate(codes), np.concatenate(seconds), np.concatenate(rows), width_s)


class Counting:
    """A load that is built batch by batch. It needs little more memory than its cells."""

    def __init__(self) -> None:
        self._parts: list[Load] = []
        self._cells = 0

    def add(self, load: Load) -> None:
        """Add a part. A merge sorts all cells, so parts are merged only when their cells have doubled."""
        self._parts.append(load)
        self._cells += load.cells
        if self._cells > max(CELLS_MAX // 4, 2 * self._parts[0].cells):
            self.result()

    def result(self) -> Load:
        """Return the sum of all parts."""
        joined = merge(self._parts)
        self._parts, self._cells = [joined], joined.cells
        return joined


def _summed(keys: Int64Array, values: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return each key once, ascending, with the sum of its values."""
    if len(keys) == 0:
        return _no_numbers(), _no_numbers()
    if np.any(keys[1:] < keys[:-1]):
        order = np.argsort(keys, kind="stable")
        keys, values = keys[order], values[order]
    begins = np.concatenate(([0], np.flatnonzero(np.diff(keys)) + 1))
    return keys[begins], np.add.reduceat(values, begins)


def unlike(said: Load, came: Load, unit: Unit) -> float:
    """Compute the share of both loads' rows that are in different bars: 0 for equal curves, 1 for disjoint curves."""
    all_rows = said.total + came.total
    if not all_rows:
        return 0.0
    unit = max(said.curve(unit).unit, came.curve(unit).unit, key=UNIT_S.__getitem__)
    one, other = said.curve(unit), came.curve(unit)
    _, apart = _summed(np.append(one.start_s, other.start_s), np.append(one.rows, -other.rows))
    return float(np.abs(apart).sum() / all_rows)
