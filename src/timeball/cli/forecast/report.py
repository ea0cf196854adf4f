"""The answer of `timeball forecast`: scheduled messages counted on one snapshot, and an assumed extra load.

With an extra load, every what-if figure appears twice: without it, and with it. The extra rows are cut to the window.
Those outside are counted, so that a mistyped time is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime

import msgspec

from timeball.cli.forecast.options import OTHER_TOPICS, Asked, Extra, Window
from timeball.cli.options import SparkOptions, reach
from timeball.cli.output import bars, progress_bar
from timeball.cli.units import show_ms
from timeball.model.limits import SECOND_MS
from timeball.spark.endpoint import Endpoint, read_groups
from timeball.spark.jobs.campaign import held
from timeball.spark.table_store import Due
from timeball.spark.views.consumer_model import Outcome, Queue, WhatIf, queues, rate_needed, serve
from timeball.spark.views.due_histogram import BARS_MAX, UNIT_S, Load, Peak, Unit, bar_name, merge
from timeball.spark.views.forecast import Check, Report, check, released_since, report, version_at
from timeball.spark.views.snapshot import Snapshot, check_version

# ---- counting -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """A load: the pending messages within the bounds, as of `now_ms` and one version of the table.

    `came`: the messages released since, and the time up to which they were counted. `held`: by paused campaign, the
    number of messages that would be pending if it were resumed. `versions`: the version of each group if there are
    several, in which case `version` is None.
    """

    now_ms: int
    version: int | None
    is_whole: bool
    due: Due
    load: Load
    came: tuple[Load, int] | None = None
    held: dict[str, int] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)


Count = Callable[[str, Snapshot, Due, bool], Load]  # endpoint, snapshot, due, by_topic


def count(
    endpoint: str, spark: SparkOptions | None, window: Window, *, by_topic: bool = False, quiet: bool = False
) -> Counted:
    """Pin a snapshot and count with SQL: with DuckDB in this process, or on Spark when a master is named.

    DuckDB counts millions of scheduled messages in less time than Spark takes to start. Spark is for a table that only
    the cluster can reach, or that is too large for one machine.
    """
    reach(endpoint)  # fails at once without a broker, while the later calls retry
    groups = read_groups(endpoint)
    check_version(window.version, len(groups))
    with _counting(spark, quiet) as counting:
        found = {each.name: _count_group(each.endpoint, window, counting, by_topic) for each in groups}
    return add_up(found)


def add_up(groups: dict[str, Counted]) -> Counted:
    """Add up the counts of all groups."""
    if len(groups) == 1:
        [only] = groups.values()
        return only
    parts = list(groups.values())
    came = [each.came for each in parts if each.came is not None]
    held: dict[str, int] = {}
    for part in parts:
        for campaign, rows in part.held.items():
            held[campaign] = held.get(campaign, 0) + rows
    return Counted(
        min(each.now_ms for each in parts),
        None,
        all(each.is_whole for each in parts),
        parts[0].due,
        merge(each.load for each in parts),
        (merge(load for load, _ in came), min(until_ms for _, until_ms in came)) if came else None,
        held,
        {name: each.version for name, each in groups.items() if each.version is not None},
    )


def _count_group(endpoint: str, window: Window, counting: Count, by_topic: bool) -> Counted:
    with Endpoint(endpoint) as broker:
        version = window.version
        if window.timestamp_ms is not None:
            version = version_at(broker.status().table.uri, window.timestamp_ms)
        shot = Snapshot.pin(broker, version=version, upcoming=True)
        due = window.bounds(shot.now_ms)
        load = counting(endpoint, shot, due, by_topic)
        came = released_since(broker, shot, by_topic=by_topic) if window.is_checked else None
        # A pause is known for the present only: an older version may have been made before it.
        is_now = window.version is None and window.timestamp_ms is None
        paused = held(broker) if is_now else {}
    return Counted(shot.now_ms, shot.version, shot.is_whole, due, load, came, paused)


@contextmanager
def _counting(spark: SparkOptions | None, quiet: bool) -> Iterator[Count]:
    """Open the engine that counts: DuckDB in this process, or Spark."""
    if spark is None:
        from timeball.spark.views.duckdb_session import SqlSession

        def count_here(endpoint: str, shot: Snapshot, due: Due, by_topic: bool) -> Load:
            with SqlSession(endpoint, snapshot=shot, bodies=False, due=due) as session:
                return session.due_load(by_topic=by_topic)

        with progress_bar(quiet=quiet) as progress:
            progress.add_task("reading what waits", total=None)
            yield count_here
        return
    from timeball.cli.spark import spark_session

    with spark_session(spark, "timeball-forecast") as session:
        from timeball.spark.views import spark_views

        def count_there(endpoint: str, shot: Snapshot, due: Due, by_topic: bool) -> Load:
            return spark_views.due_load(session, endpoint, shot, by_topic=by_topic, due=due)

        yield count_there


# ---- the document -------------------------------------------------------------------------------------------


class Forecast(msgspec.Struct, kw_only=True, frozen=True):
    """The document that --json prints. Times are in milliseconds since 1970: `from_ms <= due_ms < until_ms`.

    `waiting` and `extra` are rows within the window, and `load` contains both. `extra_outside`: extra rows outside of
    the window. `held`: by paused campaign, the messages that wait for its resume, which no other figure includes.
    `is_whole` is False when the log no longer has the whole tail of an older version. `versions`: the version of each
    group if there are several.
    """

    now_ms: int
    version: int | None
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
    versions: dict[str, int] | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True)
class Answer:
    """The document, and the loads from which it was made, for a picture."""

    document: Forecast
    load: Load
    extra: Load | None
    came: Load | None
    queues: dict[str, Queue]


def show_version(found: Forecast) -> str:
    """Format the version of the table that was counted, or of several groups the version of each."""
    if not found.versions:
        return f"version {found.version}"
    return "versions " + ", ".join(f"{group} {version}" for group, version in found.versions.items())


def answer(counted: Counted, asked: Asked, extra: Extra) -> Answer:
    """Build the whole answer: filter the load by topic, add the extra load, and compute all figures."""
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
        versions=counted.versions or msgspec.UNSET,
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


# ---- for people -----------------------------------------------------------------------------------------------

TOPICS_SHOWN = 20
_A_CELL = {60_000: "minute", 3_600_000: "hour"}


def describe(found: Forecast) -> Iterator[str]:
    """Yield the answer for people, line by line."""
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
    """Count rows by the bar's name. Empty bars are included, unless they are the majority of over BARS_MAX bars."""
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
        f"{show_version(found)}, as of {instant(found.now_ms)}"
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
        whose = others if topic == OTHER_TOPICS else f"consumers of {topic}"
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
    """Format a time in UTC, to the second: 2030-01-31T09:00:00Z."""
    return datetime.fromtimestamp(at_ms // 1_000, UTC).isoformat().replace("+00:00", "Z")


def show_span(span_ms: int) -> str:
    """Format a length of time: 40 ms, 2.4 s, 3 min 20 s, 5 h 7 min, 3 d 4 h."""
    if span_ms < 1_000:
        return f"{span_ms} ms"
    if span_ms < 60_000:
        return f"{span_ms / 1_000:.1f} s"
    seconds = round(span_ms / 1_000)
    for whole, part, large, small in ((86_400, 3_600, "d", "h"), (3_600, 60, "h", "min")):
        if seconds >= whole:
            return f"{seconds // whole:,} {large} {seconds % whole // part} {small}"
    return f"{seconds // 60} min {seconds % 60} s"
