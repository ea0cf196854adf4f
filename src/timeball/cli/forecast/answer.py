"""The answer of `timeball forecast`: what was counted and what is only thought of, as one document.

Everything is said twice where there is an extra load: as it is, and with it. The extra rows are cut to the window, and
those outside are counted, so that a mistyped instant is seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from timeball.cli.forecast.counting import Counted
from timeball.cli.forecast.wishes import Asked, Extra
from timeball.limits import SECOND_MS
from timeball.pipeline.views.consumer_model import Queue, WhatIf, queues, rate_needed, serve
from timeball.pipeline.views.due_histogram import Load, Unit, merge
from timeball.pipeline.views.forecast import Check, Report, check, report


class Forecast(msgspec.Struct, kw_only=True, frozen=True):
    """What --json prints. Instants in milliseconds since 1970; `from_ms` is included, `until_ms` is not.

    `waiting` and `extra` are rows within the window; the report holds both. `extra_outside`: extra rows that are not
    within it. `held`: by paused campaign, promises that wait for its resume, and are in nothing else here. `is_whole`
    is False when the log no longer has all of what stood in its tail at an older version.
    """

    now_ms: int
    version: int
    is_whole: bool
    from_ms: int
    until_ms: int | None
    waiting: int
    extra: int
    extra_outside: int
    held: dict[str, int]
    load: Report
    what_if: WhatIf | None
    what_if_extra: WhatIf | None
    within_ms: int | None
    rate_needed: float | None
    rate_needed_extra: float | None
    check: Check | None


@dataclass(frozen=True)
class Answer:
    """The document, and the loads it was made of, for a picture."""

    document: Forecast
    load: Load
    extra: Load | None
    came: Load | None
    queues: dict[str, Queue]


def answer(counted: Counted, asked: Asked, extra: Extra) -> Answer:
    """Everything that was asked."""
    from_ms = counted.now_ms if counted.due[0] is None else counted.due[0]
    until_ms = counted.due[1]
    load = counted.load.only(asked.topics) if asked.topics else counted.load
    wished = None if extra.is_none else extra.load(counted.now_ms)
    more = None
    if wished is not None:
        until_s = None if until_ms is None else -(-until_ms // SECOND_MS)
        more = wished.between(from_ms // SECOND_MS, until_s)
    both = load if more is None else merge([load, more])
    begin_s = from_ms // SECOND_MS

    def what_if(rows: Load) -> WhatIf | None:
        return serve(rows, asked.rates, asked.backlog, begin_s) if asked.rates else None

    def needed(rows: Load) -> float | None:
        if asked.within_ms is None:
            return None
        return rate_needed(rows, asked.within_ms, asked.backlog, begin_s)

    came = None if counted.came is None else counted.came[0]
    if came is not None and asked.topics:
        came = came.only(asked.topics)
    document = Forecast(
        now_ms=counted.now_ms,
        version=counted.version,
        is_whole=counted.is_whole,
        from_ms=from_ms,
        until_ms=until_ms,
        waiting=load.total,
        extra=0 if more is None else more.total,
        extra_outside=0 if wished is None or more is None else wished.total - more.total,
        held=counted.held,
        load=report(both, Unit(asked.by), peaks=asked.peaks, by_topic=asked.by_topic),
        what_if=what_if(load),
        what_if_extra=None if more is None else what_if(both),
        within_ms=asked.within_ms,
        rate_needed=needed(load),
        rate_needed_extra=None if more is None else needed(both),
        check=None
        if came is None or counted.came is None
        else check(load, came, (from_ms, until_ms), counted.came[1]),
    )
    return Answer(document, load, more, came, queues(both, asked.rates, asked.backlog, begin_s))
