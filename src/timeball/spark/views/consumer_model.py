"""A model of consumers: computes how late messages are when consumers of a fixed rate process a given due load.

The model is a fluid queue. The rows of a second enter the queue at the beginning of that second, and consumers take
`rate` rows per second, in order of arrival. Let a(k) rows arrive at second t(k), when P(k) rows are waiting already:

    X(k) = a(0) + … + a(k-1) - rate * (t(k) - t(0))        the rows left if the consumers were never idle
    P(k) = X(k) - min(X(0), …, X(k))                       they were idle wherever X fell below its minimum so far

So one pass over the seconds with due rows is enough, however far apart these seconds are. The waits of the rows of a
second are distributed evenly between P/rate and (P + a)/rate seconds. Quantiles over messages are computed exactly from
the sum of these spans.

The model ignores due times within a second (so each figure is exact to 1 s, or to the width of the load's cells), the
lateness of the broker itself (milliseconds), messages that are not accepted yet, and consumers that become slower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from timeball.model.errors import RequestError
from timeball.model.limits import SECOND_MS
from timeball.model.message import Int64Array
from timeball.spark.views.due_histogram import ALL_TOPICS, CELLS_MAX, Load, from_cells

FloatArray = npt.NDArray[np.float64]

OTHER_TOPICS = "*"  # stands for all topics without their own rate


class Outcome(msgspec.Struct, frozen=True):
    """The figures of one queue, over all its rows. Lateness is in ms, points in time are ms since 1970.

    `rate` is in rows per second. `caught_up_ms` is the time when the largest backlog has been processed. It is None if
    no rows are due.
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
        idle = np.flatnonzero(self.before[worst + 1 :] <= 0)
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
    """Compute quantiles of lateness, in seconds, over all messages of all queues. `shares` are between 0 and 1."""
    low = np.concatenate([q.before / q.rate for q in queues])
    high = np.concatenate([q.after / q.rate for q in queues])
    rates = np.concatenate([np.full(len(q.second), q.rate) for q in queues])
    if len(low) == 0:
        return [0.0 for _ in shares]
    # The density of messages over lateness (messages per second of lateness) is a step function: each span adds its
    # rate at its begin and removes it at its end.
    lateness = np.concatenate((low, high))
    order = np.argsort(lateness, kind="stable")
    lateness, rate_change = lateness[order], np.concatenate((rates, -rates))[order]
    messages_so_far = np.concatenate(([0.0], np.cumsum(np.cumsum(rate_change)[:-1] * np.diff(lateness))))
    return [float(np.interp(share * messages_so_far[-1], messages_so_far, lateness)) for share in shares]


# ---- consumers of several topics --------------------------------------------------------------------------


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
    """Simulate consumers. `rates`: rows per second by topic. OTHER_TOPICS: one rate for all topics without their own.

    `backlog` rows are unread at the start: in the queue of OTHER_TOPICS, or without that rate in the only queue.
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
    """Build one queue for each rate.

    Raises RequestError for a rate that is not above 0, or for a backlog that could belong to several queues.
    """
    for name, rate in rates.items():
        if not rate > 0 or rate == float("inf"):
            raise RequestError(
                f"a consumer rate of {rate:g} for {_named(name)}: it must be above 0 rows a second"
            )
    if backlog and OTHER_TOPICS not in rates and len(rates) != 1:
        raise RequestError(
            "a backlog belongs to one queue: give one consumer rate for all topics, or for one"
        )
    owner = OTHER_TOPICS if OTHER_TOPICS in rates else next(iter(rates), None)
    loads = {name: load.only([name]) for name in rates if name != OTHER_TOPICS}
    if OTHER_TOPICS in rates:
        loads[OTHER_TOPICS] = load.only(set(load.topics) - set(rates))
    return {
        name: queue(queue_load, rates[name], backlog if name == owner else 0, from_s)
        for name, queue_load in loads.items()
    }


def rate_needed(load: Load, lateness_max_ms: int, backlog: int = 0, from_s: int | None = None) -> float:
    """Find the lowest rate (rows per second, to 0.1 %) at which no row waits longer than `lateness_max_ms`."""
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


# ---- a planned load ---------------------------------------------------------------------------------------


def spread(rows: int, at_ms: int, over_ms: int = 0, topic: str = ALL_TOPICS) -> Load:
    """Build the load of `rows` rows that fall due evenly during `over_ms` from `at_ms` on.

    With 0, all are due at once.
    """
    if rows < 0 or over_ms < 0:
        raise RequestError("an extra load has no negative number of rows, and no negative length")
    steps = max(1, min(-(-over_ms // SECOND_MS), rows, CELLS_MAX))
    marks = np.arange(steps + 1, dtype=np.int64)
    # Two terms, because the product marks * rows might not fit into 64 bits.
    upto = (marks * (rows // steps)) + marks * (rows % steps) // steps
    second = (at_ms + over_ms * marks[:-1] // steps) // SECOND_MS
    return from_cells((topic,), np.zeros(steps, np.int64), second, np.diff(upto))


def _round_to_ms(seconds: float) -> int:
    return round(float(seconds) * SECOND_MS)


def _named(name: str) -> str:
    return "all topics" if name == OTHER_TOPICS else f"topic {name}"
