"""Filter pushdown: turn Spark's filters into bounds on the rows fetched.

Spark offers filters that are joined by AND. Each one reduces the rows fetched or is ignored, and Spark applies all of
them again, so an ignored filter costs time and never a row. Rows that are fetched in vain are filtered in Arrow, before
they reach the JVM. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from timeball.pipeline.source.spark_api import (
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
    """low <= value <= high; None is open."""

    low: int | None = None
    high: int | None = None

    def may_hold(self, least: int | None, most: int | None) -> bool:
        """Return whether a file with values least..most (None: not known) can have a row within the bounds."""
        below = self.high is not None and least is not None and least > self.high
        above = self.low is not None and most is not None and most < self.low
        return not (below or above)

    def clip(self, begin: int, end: int) -> tuple[int, int]:
        """Return the half-open range begin..end, cut to the bounds."""
        begin = begin if self.low is None else max(begin, self.low)
        return begin, end if self.high is None else min(end, self.high + 1)

    def holds(self, column: pa.Array) -> pa.Array:
        """Return for each value whether it lies within; a null does not."""
        inside = column.is_valid()
        if self.low is not None:
            inside = pc.and_(inside, pc.fill_null(pc.greater_equal(column, self.low), False))
        if self.high is not None:
            inside = pc.and_(inside, pc.fill_null(pc.less_equal(column, self.high), False))
        return inside


OPEN = Bounds()


@dataclass(frozen=True)
class Wanted:
    """Rows that a read must yield: those within all `ranges`, of one of `topics` (None: of any)."""

    ranges: tuple[tuple[str, Bounds], ...] = ()
    topics: frozenset[str] | None = None

    @property
    def columns(self) -> list[str]:
        """Return the columns it looks at."""
        return [name for name, _ in self.ranges] + ([] if self.topics is None else ["topic"])

    def range(self, column: str) -> Bounds:
        """Return the bounds of one column."""
        return dict(self.ranges).get(column, OPEN)

    def keep(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Filter a batch to the rows that are wanted."""
        masks = [limits.holds(batch.column(name)) for name, limits in self.ranges]
        if self.topics is not None:
            masks.append(pc.is_in(batch.column("topic"), pa.array(sorted(self.topics), pa.string())))
        for mask in masks[1:]:
            masks[0] = pc.and_(masks[0], mask)
        # Mostly all rows or none: a filter that keeps everything copies everything.
        return batch if not masks or pc.all(masks[0]).as_py() else batch.filter(masks[0])


def wanted(columns: Sequence[str], topic: str | None, filters: Sequence[Filter]) -> Wanted:
    """Return what the option `topic` and the filters leave; of numbers, only these columns are looked at."""
    ranges = ((name, bounds(filters, name)) for name in columns)
    return Wanted(tuple(pair for pair in ranges if pair[1] != OPEN), topics(topic, filters))


def bounds(filters: Sequence[Filter], column: str) -> Bounds:
    """Return the inclusive range that all filters on an integer column together allow."""
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
    """Return the kinds that both the option (None: all) and the filters leave."""
    for values in _listed(filters, "kind"):
        named = tuple(v for v in values if isinstance(v, int))
        wanted = named if wanted is None else tuple(k for k in wanted if k in named)
    return wanted


def topics(wanted: str | None, filters: Sequence[Filter]) -> frozenset[str] | None:
    """Return the topics that both the option (None: all) and the filters leave; None for all."""
    left = None if wanted is None else frozenset([wanted])
    for values in _listed(filters, "topic"):
        named = frozenset(value for value in values if isinstance(value, str))
        left = named if left is None else left & named
    return left


def _listed(filters: Sequence[Filter], name: str) -> Iterator[tuple[object, ...]]:
    """Return what each filter of a column by equality or by a list asks for."""
    for each in filters:
        if getattr(each, "attribute", None) == (name,):
            if isinstance(each, EqualTo):
                yield (each.value,)
            elif isinstance(each, In):
                yield tuple(each.value)


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
