"""The pace of streams: when there are enough rows for a micro-batch, and how rows are divided."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TypeVar

from timeball.io.clock import Clock, SystemClock
from timeball.spark.source.options import ReadOptions

# What has a lag: a queue, a group, or a queue of a group.
Part = TypeVar("Part", int, str, tuple[str, int])


class Pace:
    """Starts a micro-batch at `min_rows_per_batch` new rows, or at `few_rows` after `max_trigger_delay_ms`."""

    def __init__(self, options: ReadOptions, clock: Clock | None = None) -> None:
        self.options = options
        self._clock = clock or SystemClock()
        self._idle_since_ns = self._clock.monotonic_ns()

    def is_worth_a_batch(self, rows: int) -> bool:
        """Check whether this number of new rows is enough for a micro-batch now."""
        options = self.options
        if rows >= min(options.min_rows_per_batch, options.max_rows_per_batch):
            return True
        waited_ms = (self._clock.monotonic_ns() - self._idle_since_ns) // 1_000_000
        return 0 < options.max_trigger_delay_ms <= waited_ms and rows >= options.few_rows

    def begin_batch(self) -> None:
        """Restart the wait of `max_trigger_delay_ms`."""
        self._idle_since_ns = self._clock.monotonic_ns()


def split_range(begin: int, end: int, rows: int) -> list[tuple[int, int]]:
    """Cut a half-open range into even pieces of at most `rows` each. An empty range has no pieces."""
    span = max(0, end - begin)
    pieces = -(-span // rows)
    cuts = [begin + span * i // pieces for i in range(pieces + 1)] if pieces else []
    return list(itertools.pairwise(cuts))


def divide_rows(lag: Mapping[Part, int], rows: int) -> dict[Part, int]:
    """Divide `rows` rows among groups or queues in proportion to their lags, but take no more than the lags.

    `lag`: part -> number of its rows that are not read yet.
    """
    total = sum(lag.values())
    if total <= rows:
        return dict(lag)
    shares: dict[Part, int] = {}
    divided_rows = seen_lag = 0
    # Rounding the running total instead of each share makes the shares add up to exactly `rows`.
    for part in sorted(lag):
        seen_lag += lag[part]
        shares[part] = rows * seen_lag // total - divided_rows
        divided_rows += shares[part]
    return shares
