"""Filter pushdown: convert Spark's filters to bounds on the rows to fetch.

Spark offers a list of filters that all must hold. Each filter either reduces the rows to fetch or is ignored. Spark
applies all of them again, so an ignored filter costs only time. Fetched rows outside of the bounds are removed in
Arrow, before they reach the JVM. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from timeball.spark.source.spark_api import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)


@dataclass(frozen=True)
class Bounds:
    """An inclusive range low <= value <= high. None means no bound."""

    low: int | None = None
    high: int | None = None

    def may_hold(self, least: int | None, most: int | None) -> bool:
        """Check whether a file with values least..most (None: unknown) can contain a value within the bounds."""
        below = self.high is not None and least is not None and least > self.high
        above = self.low is not None and most is not None and most < self.low
        return not (below or above)

    def clip(self, begin: int, end: int) -> tuple[int, int]:
        """Cut the half-open range begin <= value < end to the bounds."""
        begin = begin if self.low is None else max(begin, self.low)
        return begin, end if self.high is None else min(end, self.high + 1)

    def holds(self, column: pa.Array) -> pa.Array:
        """Build the mask of the values within the bounds. A null is outside."""
        inside = column.is_valid()
        if self.low is not None:
            inside = pc.and_(inside, pc.fill_null(pc.greater_equal(column, self.low), False))
        if self.high is not None:
            inside = pc.and_(inside, pc.fill_null(pc.less_equal(column, self.high), False))
        return inside


OPEN = Bounds()


@dataclass(frozen=True)
class Wanted:
    """The condition on the rows of a read: within all `ranges` (column, bounds), and in `topics` (None: any topic)."""

    ranges: tuple[tuple[str, Bounds], ...] = ()
    topics: frozenset[str] | None = None

    @property
    def columns(self) -> list[str]:
        """The columns that the condition uses."""
        return [name for name, _ in self.ranges] + ([] if self.topics is None else ["topic"])

    def range(self, column: str) -> Bounds:
        """Return the bounds of one column."""
        return dict(self.ranges).get(column, OPEN)

    def keep(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Filter a batch to the rows that meet the condition."""
        masks = [limits.holds(batch.column(name)) for name, limits in self.ranges]
        if self.topics is not None:
            masks.append(pc.is_in(batch.column("topic"), pa.array(sorted(self.topics), pa.string())))
        for mask in masks[1:]:
            masks[0] = pc.and_(masks[0], mask)
        # Often all rows meet the condition. Arrow's filter would copy them all.
        return batch if not masks or pc.all(masks[0]).as_py() else batch.filter(masks[0])


def wanted(columns: Sequence[str], topic: str | None, filters: Sequence[Filter]) -> Wanted:
    """Combine the option `topic` and the filters to one condition. Of number columns, only `columns` are used."""
    ranges = ((name, bounds(filters, name)) for name in columns)
    return Wanted(tuple(pair for pair in ranges if pair[1] != OPEN), topics(topic, filters))


def bounds(filters: Sequence[Filter], column: str) -> Bounds:
    """Intersect all filters on an integer column. Other filters are ignored."""
    low: list[int] = []
    high: list[int] = []
    for each in filters:
        if getattr(each, "attribute", None) != (column,) or not _whole(getattr(each, "value", None)):
            continue
        if isinstance(each, EqualTo):
            low.append(each.value)
            high.append(each.value)
        elif isinstance(each, GreaterThan):
            low.append(each.value + 1)
        elif isinstance(each, GreaterThanOrEqual):
            low.append(each.value)
        elif isinstance(each, LessThan):
            high.append(each.value - 1)
        elif isinstance(each, LessThanOrEqual):
            high.append(each.value)
    return Bounds(max(low, default=None), min(high, default=None))


def kinds(wanted: tuple[int, ...] | None, filters: Sequence[Filter]) -> tuple[int, ...] | None:
    """Intersect the option `kinds` (None: all kinds) and the filters."""
    for values in _listed(filters, "kind"):
        named = tuple(v for v in values if isinstance(v, int))
        wanted = named if wanted is None else tuple(k for k in wanted if k in named)
    return wanted


def topics(wanted: str | None, filters: Sequence[Filter]) -> frozenset[str] | None:
    """Intersect the option `topic` (None: all topics) and the filters. Returns None for all topics."""
    left = None if wanted is None else frozenset([wanted])
    for values in _listed(filters, "topic"):
        named = frozenset(value for value in values if isinstance(value, str))
        left = named if left is None else left & named
    return left


def _listed(filters: Sequence[Filter], name: str) -> Iterator[tuple[object, ...]]:
    """Yield the allowed values of each filter on a column by equality or by a list."""
    for each in filters:
        if getattr(each, "attribute", None) == (name,):
            if isinstance(each, EqualTo):
                yield (each.value,)
            elif isinstance(each, In):
                yield tuple(each.value)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
