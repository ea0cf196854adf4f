"""How much falls due when: rows a second and topic, as three columns of numbers.

A load comes from counts by SQL (DuckDB in this process, Spark on a cluster) or from due instants (a file of rows that
may be sent). It answers a curve in seconds, minutes, hours or days, its peaks, one topic of it, a part of it.

Only seconds in which something is due take room, and there is a bound: a load of more than CELLS_MAX cells (a second
and a topic each) becomes coarser, minutes and then hours. `width_s` says which; every row is counted. Pure
functions on columns, in UTC.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import pyarrow as pa

from timeball.limits import SECOND_MS
from timeball.message import Int64Array, int64

CELLS_MAX = (
    2_000_000  # 24 bytes each, four times that while they are sorted, and some 60 in the engine that counts
)
BARS_MAX = 48  # what a terminal shows without scrolling
WIDTHS_S = (1, 60, 3_600)
ALL_TOPICS = ""  # the only name of a load that was not counted by topic


class Unit(StrEnum):
    """The width of a bar; AUTO is the finest one that gives no more bars than a screen has lines."""

    AUTO = "auto"
    SECOND = "second"
    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"


UNIT_S = {Unit.SECOND: 1, Unit.MINUTE: 60, Unit.HOUR: 3_600, Unit.DAY: 86_400}
_NUMPY_UNIT = {Unit.SECOND: "s", Unit.MINUTE: "m", Unit.HOUR: "h", Unit.DAY: "D"}


@dataclass(frozen=True)
class Peak:
    """The fullest cell of its minute: rows due in the second at `at_ms`, and in its whole minute."""

    at_ms: int
    rows: int
    minute_rows: int


@dataclass(frozen=True)
class Curve:
    """Rows of each bar that is not empty; `start_s` are seconds since 1970, in order."""

    unit: Unit
    start_s: Int64Array
    rows: Int64Array


def bar_name(at_ms: int, unit: Unit) -> str:
    """Return the name of a bar that begins at `at_ms`, in UTC: 2030-01-31T09, for an hour."""
    return str(np.datetime64(at_ms, "ms").astype(f"datetime64[{_NUMPY_UNIT[unit]}]"))


def _no_numbers() -> Int64Array:
    return np.empty(0, np.int64)


@dataclass(frozen=True)
class Load:
    """Rows a second (`width_s` of them) and topic; one entry a cell, sorted by second, then topic.

    `topic` holds positions in `topics`. `second` is the first second of the cell, since 1970.
    """

    topics: tuple[str, ...] = (ALL_TOPICS,)
    topic: Int64Array = field(default_factory=_no_numbers)
    second: Int64Array = field(default_factory=_no_numbers)
    rows: Int64Array = field(default_factory=_no_numbers)
    width_s: int = 1

    @property
    def total(self) -> int:
        """Return all rows."""
        return int(self.rows.sum())

    @property
    def cells(self) -> int:
        """Return seconds and topics with something due."""
        return len(self.rows)

    def per_second(self) -> tuple[Int64Array, Int64Array]:
        """Return (second, rows) with the topics together: each second once, in order."""
        return _summed(self.second, self.rows)

    def curve(self, unit: Unit = Unit.AUTO, bars_max: int = BARS_MAX) -> Curve:
        """Return rows by `unit`, all topics together; a unit finer than the load itself is raised to its width."""
        if unit is Unit.AUTO:
            found = [self.curve(each) for each in UNIT_S if UNIT_S[each] >= self.width_s]
            return next((each for each in found if len(each.rows) <= bars_max), found[-1])
        unit = next(each for each in UNIT_S if UNIT_S[each] >= max(UNIT_S[unit], self.width_s))
        start_s, rows = _summed(self.second // UNIT_S[unit] * UNIT_S[unit], self.rows)
        return Curve(unit, start_s, rows)

    def peaks(self, count: int) -> list[Peak]:
        """Return the `count` fullest seconds, one a minute at most, or they would all be neighbours of the first."""
        second, rows = self.per_second()
        if not len(second):
            return []
        minute = second // 60
        # By minute, its fullest second last, and of equals the earliest.
        order = np.lexsort((-second, rows, minute))
        last = np.flatnonzero(np.append(np.diff(minute[order]), 1))
        best = order[last]
        _, in_minute = _summed(minute, rows)
        first = np.lexsort((second[best], -rows[best]))[:count]
        return [Peak(int(second[best[i]]) * SECOND_MS, int(rows[best[i]]), int(in_minute[i])) for i in first]

    def only(self, names: Iterable[str]) -> Load:
        """Return the load of these topics."""
        wanted = set(names)
        codes = [code for code, name in enumerate(self.topics) if name in wanted]
        return self._kept(np.isin(self.topic, codes))

    def by_topic(self) -> dict[str, Load]:
        """Return the load of each topic with something due, the largest first."""
        sums = np.bincount(self.topic, self.rows, minlength=len(self.topics))
        # Sorted once: a look at all cells for each of a hundred thousand topics would take hours.
        cells = np.argsort(self.topic, kind="stable")
        begins = np.searchsorted(self.topic[cells], np.arange(len(self.topics) + 1))
        return {
            self.topics[code]: self._kept(cells[begins[code] : begins[code + 1]])
            for code in np.argsort(-sums, kind="stable")
            if sums[code]
        }

    def between(self, from_s: int | None = None, until_s: int | None = None) -> Load:
        """Return the cells with from_s <= second < until_s."""
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
    """Build a load from cells in any order, equal ones added; coarser than `width_s` when there are too many."""
    names = tuple(topics) or (ALL_TOPICS,)
    count = len(names)  # a second fits 38 bits, a topic 17: one number sorts faster than two
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
    """Count the rows of the relation `pending` by SQL, coarser when they have too many cells.

    How many there are is estimated first, since an engine that counts holds all of them.
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
    found = run(text).combine_chunks()
    topics = found.column("topic").cast(pa.string()).combine_chunks().dictionary_encode()
    second, rows = (int64(found.column(name).combine_chunks()) for name in ("cell", "rows"))
    codes = int64(topics.indices.cast(pa.int64()))
    return from_cells(topics.dictionary.to_pylist(), codes, second * width_s, rows, width_s)


def from_due_ms(due_ms: Int64Array, topics: pa.Array | None = None) -> Load:
    """Build the load of rows due at these instants (milliseconds), by topic if these are given."""
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
    """Merge loads, as fine as the coarsest of them."""
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
    """A load that grows batch by batch; holds little more than its cells."""

    def __init__(self) -> None:
        self._parts: list[Load] = []
        self._cells = 0

    def add(self, load: Load) -> None:
        """Add a part; parts are joined whenever they have doubled."""
        self._parts.append(load)
        self._cells += load.cells
        if self._cells > max(CELLS_MAX // 4, 2 * self._parts[0].cells):
            self.result()

    def result(self) -> Load:
        """Return all that was added."""
        joined = merge(self._parts)
        self._parts, self._cells = [joined], joined.cells
        return joined


def _summed(keys: Int64Array, values: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return each key once, in order, and the sum of its values."""
    if len(keys) == 0:
        return _no_numbers(), _no_numbers()
    if np.any(keys[1:] < keys[:-1]):
        order = np.argsort(keys, kind="stable")
        keys, values = keys[order], values[order]
    begins = np.concatenate(([0], np.flatnonzero(np.diff(keys)) + 1))
    return keys[begins], np.add.reduceat(values, begins)


def unlike(said: Load, came: Load, unit: Unit) -> float:
    """Return the share of rows, of both, that the two do not have in the same bars: 0 is the same curve, 1 another."""
    all_rows = said.total + came.total
    if not all_rows:
        return 0.0
    unit = max(said.curve(unit).unit, came.curve(unit).unit, key=UNIT_S.__getitem__)
    one, other = said.curve(unit), came.curve(unit)
    _, apart = _summed(np.append(one.start_s, other.start_s), np.append(one.rows, -other.rows))
    return float(np.abs(apart).sum() / all_rows)
