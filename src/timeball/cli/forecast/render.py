"""A forecast for people: bars, peaks, topics, and what would be late."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from timeball.cli.forecast.options import THE_OTHERS
from timeball.cli.forecast.report import Forecast
from timeball.cli.output import bars
from timeball.cli.units import show_ms
from timeball.pipeline.views.consumer_model import Outcome, WhatIf
from timeball.pipeline.views.due_histogram import BARS_MAX, UNIT_S, Peak, Unit, bar_name
from timeball.pipeline.views.forecast import Check

TOPICS_SHOWN = 20
_A_CELL = {60_000: "minute", 3_600_000: "hour"}


def describe(found: Forecast) -> Iterator[str]:
    """Yield the answer line by line."""
    yield from bars(_bars(found))
    yield _summary(found)
    if not found.is_whole:
        yield "the log no longer has all of its tail of then: this is what the table alone held, and what is left"
    if found.extra_outside:
        yield f"{found.extra_outside:,} extra rows lie outside of this time, and are not in it"
    if found.held:
        held, names = sum(found.held.values()), ", ".join(found.held)
        yield f"{held:,} more are held by paused campaigns, and are not in it: {names}"
    if found.load.peaks:
        yield "peaks:"
        yield from (f"  {_peak(peak, found.load.resolution_ms)}" for peak in found.load.peaks)
    if found.load.topics:
        yield "topics:"
        yield from _topics(found)
    for name, what_if in (("as it is", found.what_if), ("with the extra rows", found.what_if_extra)):
        if what_if is not None:
            yield from _what_if(name, what_if)
    yield from _needed(found)
    if found.check is not None:
        yield from _check(found.check)


def _bars(found: Forecast) -> dict[str, int]:
    """Return rows by the name of the bar; with the empty ones between them, unless these are most."""
    unit, curve = Unit(found.load.by), found.load.curve
    rows = {bar.at_ms: bar.rows for bar in curve}
    if curve:
        width_ms = UNIT_S[unit] * 1_000
        every = range(curve[0].at_ms, curve[-1].at_ms + 1, width_ms)
        if len(every) <= max(BARS_MAX, 2 * len(curve)):
            rows = {at_ms: rows.get(at_ms, 0) for at_ms in every}
    return {bar_name(at_ms, unit): count for at_ms, count in rows.items()}


def _summary(found: Forecast) -> str:
    until = "" if found.until_ms is None else f" until {instant(found.until_ms)}"
    extra = f", {found.extra:,} extra" if found.extra else ""
    return (
        f"{found.waiting:,} due from {instant(found.from_ms)}{until}{extra}; "
        f"version {found.version}, as of {instant(found.now_ms)}"
    )


def _peak(peak: Peak, resolution_ms: int) -> str:
    if resolution_ms > 1_000:
        return f"{instant(peak.at_ms)}  {peak.rows:,} in the {_A_CELL[resolution_ms]}"
    return f"{instant(peak.at_ms)}  {peak.rows:,} in the second, {peak.minute_rows:,} in its minute"


def _topics(found: Forecast) -> Iterator[str]:
    shown = list(found.load.topics.items())[:TOPICS_SHOWN]
    width = max(len(name or "(none)") for name, _ in shown)
    for name, topic in shown:
        span = f"{instant(topic.first_ms)} to {instant(topic.last_ms)}"
        yield (
            f"  {name or '(none)':<{width}}  {topic.rows:,} rows, {span}, "
            f"at most {topic.peak.rows:,} at {instant(topic.peak.at_ms)}"
        )
    if len(found.load.topics) > len(shown):
        yield f"  and {len(found.load.topics) - len(shown):,} more"


def _what_if(name: str, what_if: WhatIf) -> Iterator[str]:
    for topic, outcome in what_if.queues.items():
        others = "consumers" if len(what_if.queues) == 1 else "consumers of the other topics"
        whose = others if topic == THE_OTHERS else f"consumers of {topic}"
        yield f"{whose} at {outcome.rate:,.10g} a second, {name}:"
        yield from (f"  {line}" for line in _outcome(outcome))
    if len(what_if.queues) > 1:
        yield (
            f"all of these, {name}: half within {show_span(what_if.lateness_p50_ms)}, "
            f"99 % within {show_span(what_if.lateness_p99_ms)}, all within {show_span(what_if.lateness_max_ms)}"
        )
    if what_if.unserved:
        names = ", ".join(
            f"{name or '(none)'} {rows:,}" for name, rows in list(what_if.unserved.items())[:TOPICS_SHOWN]
        )
        yield f"no --consumer-rate for: {names}"


def _outcome(outcome: Outcome) -> Iterator[str]:
    if outcome.backlog_max_at_ms is None or outcome.caught_up_ms is None:
        yield "nothing is due"
        return
    yield (
        f"lateness: half within {show_span(outcome.lateness_p50_ms)}, "
        f"99 % within {show_span(outcome.lateness_p99_ms)}, all within {show_span(outcome.lateness_max_ms)}"
    )
    yield (
        f"backlog: at most {outcome.backlog_max:,} at {instant(outcome.backlog_max_at_ms)}, "
        f"worked off by {instant(outcome.caught_up_ms)}"
    )


def _needed(found: Forecast) -> Iterator[str]:
    if found.within_ms is None or found.rate_needed is None:
        return
    with_extra = (
        "" if found.rate_needed_extra is None else f", {found.rate_needed_extra:,.1f} with the extra rows"
    )
    yield (
        f"to keep all within {show_ms(found.within_ms)}, one queue takes {found.rate_needed:,.1f} a second{with_extra}"
    )


def _check(check: Check) -> Iterator[str]:
    yield f"until {instant(check.until_ms)}: {check.said:,} were foretold, {check.came:,} came"
    if check.said or check.came:
        yield (
            f"  the same in seconds {check.same_second:.1%}, in minutes {check.same_minute:.1%}, "
            f"in hours {check.same_hour:.1%}"
        )


def instant(at_ms: int) -> str:
    """Return an instant as text, to the second in UTC: 2030-01-31T09:00:00Z."""
    return datetime.fromtimestamp(at_ms // 1_000, UTC).isoformat().replace("+00:00", "Z")


def show_span(span_ms: int) -> str:
    """Return a span as text: 40 ms, 2.4 s, 3 min 20 s, 5 h 7 min, 3 d 4 h."""
    if span_ms < 1_000:
        return f"{span_ms} ms"
    if span_ms < 60_000:
        return f"{span_ms / 1_000:.1f} s"
    seconds = round(span_ms / 1_000)
    for whole, part, large, small in ((86_400, 3_600, "d", "h"), (3_600, 60, "h", "min")):
        if seconds >= whole:
            return f"{seconds // whole:,} {large} {seconds % whole // part} {small}"
    return f"{seconds // 60} min {seconds % 60} s"
