"""Filter pushdown: convert Spark's filters to bounds on the rows to fetch.

Spark offers a list of filters that all must hold. Each filter either reduces the rows to fetch or is ignored. Spark
applies all filters again, so an ignored filter only costs time. Fetched rows outside the bounds are removed in Arrow,
before they reach the JVM. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import (
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

    def may_hold(self, lowest: int | None, highest: int | None) -> bool:
        """Check whether a file with values lowest..highest (None: unknown) may contain a value within the bounds."""
        is_above = self.high is not None and lowest is not None and lowest > self.high
        is_below = self.low is not None and highest is not None and highest < self.low
        return not (is_above or is_below)

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
class RowFilter:
    """The condition on the rows of a read: within all `ranges` (column, bounds), and in `topics` (None: all topics)."""

    ranges: tuple[tuple[str, Bounds], ...] = ()
    topics: frozenset[str] | None = None

    @property
    def columns(self) -> list[str]:
        """The columns that the condition uses."""
        return [name for name, _ in self.ranges] + ([] if self.topics is None else ["topic"])

    def range(self, column: str) -> Bounds:
        """Get the bounds of a column."""
        return dict(self.ranges).get(column, OPEN)

    def apply(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Filter a batch to the rows that meet the condition."""
        masks = [limits.holds(batch.column(name)) for name, limits in self.ranges]
        if self.topics is not None:
            masks.append(pc.is_in(batch.column("topic"), pa.array(sorted(self.topics), pa.string())))
        for mask in masks[1:]:
            masks[0] = pc.and_(masks[0], mask)
        # Often all rows meet the condition. A filter would copy all of them.
        return batch if not masks or pc.all(masks[0]).as_py() else batch.filter(masks[0])


def row_filter(columns: Sequence[str], topic: str | None, filters: Sequence[Filter]) -> RowFilter:
    """Combine the option `topic` and the filters into one condition. `columns`: the integer columns to bound."""
    ranges = ((name, bounds(filters, name)) for name in columns)
    return RowFilter(tuple(pair for pair in ranges if pair[1] != OPEN), topics(topic, filters))


def bounds(filters: Sequence[Filter], column: str) -> Bounds:
    """Intersect all filters on an integer column. Other filters are ignored."""
    low: list[int] = []
    high: list[int] = []
    for spark_filter in filters:
        if getattr(spark_filter, "attribute", None) != (column,) or not _is_integer(
            getattr(spark_filter, "value", None)
        ):
            continue
        if isinstance(spark_filter, EqualTo):
            low.append(spark_filter.value)
            high.append(spark_filter.value)
        elif isinstance(spark_filter, GreaterThan):
            low.append(spark_filter.value + 1)
        elif isinstance(spark_filter, GreaterThanOrEqual):
            low.append(spark_filter.value)
        elif isinstance(spark_filter, LessThan):
            high.append(spark_filter.value - 1)
        elif isinstance(spark_filter, LessThanOrEqual):
            high.append(spark_filter.value)
    return Bounds(max(low, default=None), min(high, default=None))


def kinds(allowed: tuple[int, ...] | None, filters: Sequence[Filter]) -> tuple[int, ...] | None:
    """Intersect the option `kinds` (None: all kinds) and the filters."""
    for values in _allowed_values(filters, "kind"):
        listed = tuple(v for v in values if isinstance(v, int))
        allowed = listed if allowed is None else tuple(k for k in allowed if k in listed)
    return allowed


def topics(option: str | None, filters: Sequence[Filter]) -> frozenset[str] | None:
    """Intersect the option `topic` (None: all topics) and the filters. Returns None for all topics."""
    allowed = None if option is None else frozenset([option])
    for values in _allowed_values(filters, "topic"):
        listed = frozenset(value for value in values if isinstance(value, str))
        allowed = listed if allowed is None else allowed & listed
    return allowed


def _allowed_values(filters: Sequence[Filter], name: str) -> Iterator[tuple[object, ...]]:
    """Yield the allowed values of each filter on a column by equality or by a list."""
    for spark_filter in filters:
        if getattr(spark_filter, "attribute", None) == (name,):
            if isinstance(spark_filter, EqualTo):
                yield (spark_filter.value,)
            elif isinstance(spark_filter, In):
                yield tuple(spark_filter.value)


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
