"""What a filter says about the range to fetch.

Spark offers filters that are joined by AND. Each either narrows what is fetched or is ignored; none is ever taken off
Spark's hands, so forgetting one costs time and never a row. All functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """low <= value <= high; None is open."""

    low: int | None = None
    high: int | None = None

    def may_hold(self, least: int | None, most: int | None) -> bool:
        """Whether a file with values least..most (None: not known) can have a row within the bounds."""
        below = self.high is not None and least is not None and least > self.high
        above = self.low is not None and most is not None and most < self.low
        return not (below or above)

    def clip(self, begin: int, end: int) -> tuple[int, int]:
        """The half-open range begin..end, cut to the bounds."""
        begin = begin if self.low is None else max(begin, self.low)
        return begin, end if self.high is None else min(end, self.high + 1)


def bounds(filters: Sequence[Filter], column: str) -> Bounds:
    """The inclusive range that all filters on an integer column together allow."""
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
    """The kinds that both the option (None: all) and the filters leave."""
    for each in filters:
        if getattr(each, "attribute", None) != ("kind",):
            continue
        if isinstance(each, EqualTo):
            values: tuple[object, ...] = (each.value,)
        elif isinstance(each, In):
            values = tuple(each.value)
        else:
            continue
        named = tuple(v for v in values if isinstance(v, int))
        wanted = named if wanted is None else tuple(k for k in wanted if k in named)
    return wanted


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
