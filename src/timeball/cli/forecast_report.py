"""The answer of `timeball forecast`, as a document, as text for people and as a picture.

The scheduled messages are counted on one snapshot, and an assumed extra load is added. With an extra load, every
what-if figure appears twice: without it, and with it. Only the extra rows within the window count. The number of the
others is reported, so that a mistyped time is noticed.

The picture shows the messages due over time, and below it the messages that wait for consumers.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from timeball.cli.forecast_options import OTHER_TOPICS, Extra, Request, Window
from timeball.cli.options import PICTURE, SparkOptions, not_installed, reach, show_ms
from timeball.cli.output import bars, progress_bar
from timeball.model.errors import RequestError, SetupError
from timeball.model.limits import SECOND_MS
from timeball.spark.endpoint import Endpoint, read_groups
from timeball.spark.jobs.campaign import held
from timeball.spark.table_store import Due
from timeball.spark.views.due_histogram import BARS_MAX, UNIT_S, Load, Peak, Unit, bar_name, merge
from timeball.spark.views.forecast import (
    Check,
    FloatArray,
    Outcome,
    Queue,
    Report,
    WhatIf,
    check,
    queues,
    rate_needed,
    recurring_load,
    released_since,
    report,
    serve,
    version_at,
)
from timeball.spark.views.snapshot import Snapshot, check_version

# ---- counting -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CountedLoad:
    """The load of the pending messages within the bounds, as of `now_ms` and one version of the table.

    `came`: the messages released since, and the time up to which they were counted. `held`: by paused campaign, the
    number of messages that would be pending if it were resumed. `versions`: the version of each group if there are
    several, in which case `version` is None. `recurring`: later occurrences of recurring schedules, counted up to
    `recurring_until_ms`.
    """

    now_ms: int
    version: int | None
    is_whole: bool
    due: Due
    load: Load
    came: tuple[Load, int] | None = None
    held: dict[str, int] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    recurring: Load = field(default_factory=Load)
    recurring_until_ms: int | None = None


Count = Callable[[str, Snapshot, Due, bool], Load]  # endpoint, snapshot, due, by_topic


def count(
    endpoint: str, spark: SparkOptions | None, window: Window, *, by_topic: bool = False, quiet: bool = False
) -> CountedLoad:
    """Pin a snapshot in each group, and count its pending messages with DuckDB in this process, or on Spark.

    DuckDB counts millions of scheduled messages in less time than Spark takes to start. Spark is for a table that only
    the cluster can reach, or that is too large for one machine.
    """
    reach(endpoint)  # fails at once without a broker, while the later calls retry
    groups = read_groups(endpoint)
    check_version(window.version, len(groups))
    with _open_engine(spark, quiet) as count_load:
        counts = {group.name: _count_group(group.endpoint, window, count_load, by_topic) for group in groups}
    return merge_counts(counts)


def merge_counts(groups: dict[str, CountedLoad]) -> CountedLoad:
    """Add up the counts of all groups. The times are the earliest ones of the groups. A single group stays as it is."""
    if len(groups) == 1:
        [single] = groups.values()
        return single
    counts = list(groups.values())
    released = [counted.came for counted in counts if counted.came is not None]
    recurring_ends = [
        counted.recurring_until_ms for counted in counts if counted.recurring_until_ms is not None
    ]
    held: dict[str, int] = {}
    for counted in counts:
        for campaign, rows in counted.held.items():
            held[campaign] = held.get(campaign, 0) + rows
    return CountedLoad(
        now_ms=min(counted.now_ms for counted in counts),
        version=None,
        is_whole=all(counted.is_whole for counted in counts),
        due=counts[0].due,
        load=merge(counted.load for counted in counts),
        came=(merge(load for load, _ in released), min(until_ms for _, until_ms in released))
        if released
        else None,
        held=held,
        versions={name: counted.version for name, counted in groups.items() if counted.version is not None},
        recurring=merge(counted.recurring for counted in counts),
        recurring_until_ms=min(recurring_ends, default=None),
    )


def _count_group(endpoint: str, window: Window, count_load: Count, by_topic: bool) -> CountedLoad:
    """Count the messages of one group that are due in a window. `endpoint`: the group's Flight address.

    Counts recurring occurrences and held messages only for the present. Raises RequestError for an empty window.
    """
    with Endpoint(endpoint) as broker:
        version = window.version
        if window.timestamp_ms is not None:
            version = version_at(broker.status().table.uri, window.timestamp_ms)
        snapshot = Snapshot.pin(broker, version=version, upcoming=True)
        due = due_from_ms, due_until_ms = window.bounds(snapshot.now_ms)
        load = count_load(endpoint, snapshot, due, by_topic)
        released = released_since(broker, snapshot, by_topic=by_topic) if window.is_checked else None
        # A pause is known for the present only: an older version may have been made before it.
        is_present = window.version is None and window.timestamp_ms is None
        paused = held(broker) if is_present else {}
        counted = CountedLoad(
            snapshot.now_ms, snapshot.version, snapshot.is_whole, due, load, released, paused
        )
        # Without an end, most schedules have no last occurrence.
        if not is_present or due_until_ms is None:
            return counted
        begin_ms = max(snapshot.now_ms, due_from_ms or 0)
        recurring, until_ms = recurring_load(
            broker, begin_ms, due_until_ms, width_s=load.width_s, by_topic=by_topic
        )
    return replace(counted, recurring=recurring, recurring_until_ms=until_ms)


@contextmanager
def _open_engine(spark: SparkOptions | None, quiet: bool) -> Iterator[Count]:
    """Open DuckDB in this process, or Spark, and yield the function that counts with it."""
    if spark is None:
        from timeball.spark.views.duckdb_session import SqlSession

        def count_with_duckdb(endpoint: str, snapshot: Snapshot, due: Due, by_topic: bool) -> Load:
            with SqlSession(endpoint, snapshot=snapshot, bodies=False, due=due) as session:
                return session.due_load(by_topic=by_topic)

        with progress_bar(quiet=quiet) as progress:
            progress.add_task("counting pending messages", total=None)
            yield count_with_duckdb
        return
    from timeball.cli.spark import spark_session

    with spark_session(spark, "timeball-forecast") as session:
        from timeball.spark.views import spark_views

        def count_on_spark(endpoint: str, snapshot: Snapshot, due: Due, by_topic: bool) -> Load:
            return spark_views.due_load(session, endpoint, snapshot, by_topic=by_topic, due=due)

        yield count_on_spark


# ---- the document ---------------------------------------------------------------------------------------------


class Forecast(msgspec.Struct, kw_only=True, frozen=True):
    """The document that --json prints. Times are in milliseconds since 1970: `from_ms <= due_ms < until_ms`.

    `waiting`, `recurring` and `extra` are rows within the window, and `load` contains them. `recurring`: occurrences of
    recurring schedules that are no messages yet, up to `recurring_until_ms` (None: not counted). `extra_outside`: extra
    rows outside of the window. `held`: by paused campaign, the messages that wait for its resume, which no other figure
    includes. `is_whole` is False when the log no longer has the whole tail of an older version. `versions`: the version
    of each group if there are several.
    """

    now_ms: int
    version: int | None
    is_whole: bool
    from_ms: int
    until_ms: int | None
    waiting: int
    recurring: int
    recurring_until_ms: int | None
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
    recurring: Load
    extra: Load | None
    came: Load | None
    queues: dict[str, Queue]


def show_version(forecast: Forecast) -> str:
    """Format the version of the table that was counted, or of several groups the version of each."""
    if not forecast.versions:
        return f"version {forecast.version}"
    return "versions " + ", ".join(f"{group} {version}" for group, version in forecast.versions.items())


def answer(counted: CountedLoad, request: Request, extra: Extra) -> Answer:
    """Build the answer: filter the load by topic, add the extra load within the window, and compute all figures."""
    from_ms = counted.now_ms if counted.due[0] is None else counted.due[0]
    until_ms = counted.due[1]
    load, recurring = (
        counts.select_topics(request.topics) if request.topics else counts
        for counts in (counted.load, counted.recurring)
    )
    coming = merge([load, recurring]) if recurring.total else load
    whole_extra = None if extra.is_none else extra.load(counted.now_ms)
    extra_in_window = None
    if whole_extra is not None:
        until_s = None if until_ms is None else -(-until_ms // SECOND_MS)
        extra_in_window = whole_extra.between(from_ms // SECOND_MS, until_s)
    total = coming if extra_in_window is None else merge([coming, extra_in_window])
    begin_s = from_ms // SECOND_MS

    def what_if(rows: Load) -> WhatIf | None:
        return serve(rows, request.rates, request.backlog, begin_s) if request.rates else None

    def rate_for(rows: Load) -> float | None:
        if request.within_ms is None:
            return None
        return rate_needed(rows, request.within_ms, request.backlog, begin_s)

    released = None if counted.came is None else counted.came[0]
    if released is not None and request.topics:
        released = released.select_topics(request.topics)
    document = Forecast(
        now_ms=counted.now_ms,
        version=counted.version,
        versions=counted.versions or msgspec.UNSET,
        is_whole=counted.is_whole,
        from_ms=from_ms,
        until_ms=until_ms,
        waiting=load.total,
        recurring=recurring.total,
        recurring_until_ms=counted.recurring_until_ms,
        extra=0 if extra_in_window is None else extra_in_window.total,
        extra_outside=0
        if whole_extra is None or extra_in_window is None
        else whole_extra.total - extra_in_window.total,
        held=counted.held,
        load=report(total, Unit(request.by), peaks=request.peaks, by_topic=request.by_topic),
        what_if=what_if(coming),
        what_if_extra=None if extra_in_window is None else what_if(total),
        within_ms=request.within_ms,
        rate_needed=rate_for(coming),
        rate_needed_extra=None if extra_in_window is None else rate_for(total),
        check=None
        if released is None or counted.came is None
        else check(load, released, (from_ms, until_ms), counted.came[1]),
    )
    return Answer(
        document,
        load,
        recurring,
        extra_in_window,
        released,
        queues(total, request.rates, request.backlog, begin_s),
    )


# ---- for people -----------------------------------------------------------------------------------------------

TOPICS_SHOWN = 20
_CELL_NAMES = {60_000: "minute", 3_600_000: "hour"}


def describe(forecast: Forecast) -> Iterator[str]:
    """Yield the answer for people, line by line."""
    yield from bars(_bars(forecast))
    yield _summary(forecast)
    if not forecast.is_whole:
        yield "the log no longer has all of its tail of then: the counts are of the table and of the rest of the tail"
    if forecast.recurring_until_ms is not None and forecast.recurring_until_ms < (forecast.until_ms or 0):
        yield f"recurring schedules have too many times: counted until {instant(forecast.recurring_until_ms)}"
    if forecast.extra_outside:
        yield f"{forecast.extra_outside:,} extra rows are due outside of this window, and are not counted"
    if forecast.held:
        held, names = sum(forecast.held.values()), ", ".join(forecast.held)
        yield f"{held:,} more are held by paused campaigns, and are not counted: {names}"
    if forecast.load.peaks:
        yield "peaks:"
        yield from (f"  {_peak(peak, forecast.load.resolution_ms)}" for peak in forecast.load.peaks)
    if forecast.load.topics:
        yield "topics:"
        yield from _topic_lines(forecast)
    for name, what_if in (("as it is", forecast.what_if), ("with the extra rows", forecast.what_if_extra)):
        if what_if is not None:
            yield from _what_if_lines(name, what_if)
    yield from _rate_lines(forecast)
    if forecast.check is not None:
        yield from _check_lines(forecast.check)


def _bars(forecast: Forecast) -> dict[str, int]:
    """Count rows by the bar's name. Empty bars are left out if there are over BARS_MAX bars, most of them empty."""
    unit, curve = Unit(forecast.load.by), forecast.load.curve
    rows = {bar.at_ms: bar.rows for bar in curve}
    if curve:
        width_ms = UNIT_S[unit] * 1_000
        all_starts_ms = range(curve[0].at_ms, curve[-1].at_ms + 1, width_ms)
        if len(all_starts_ms) <= max(BARS_MAX, 2 * len(curve)):
            rows = {at_ms: rows.get(at_ms, 0) for at_ms in all_starts_ms}
    return {bar_name(at_ms, unit): count for at_ms, count in rows.items()}


def _summary(forecast: Forecast) -> str:
    """Format the line with the counts, the window, and the version that was counted."""
    until = "" if forecast.until_ms is None else f" until {instant(forecast.until_ms)}"
    recurring = f", {forecast.recurring:,} recurring" if forecast.recurring else ""
    extra = f", {forecast.extra:,} extra" if forecast.extra else ""
    return (
        f"{forecast.waiting:,} due from {instant(forecast.from_ms)}{until}{recurring}{extra}; "
        f"{show_version(forecast)}, as of {instant(forecast.now_ms)}"
    )


def _peak(peak: Peak, resolution_ms: int) -> str:
    """Format a peak: its time and its rows. A peak second also has the rows of its minute."""
    if resolution_ms > 1_000:
        return f"{instant(peak.at_ms)}  {peak.rows:,} in the {_CELL_NAMES[resolution_ms]}"
    return f"{instant(peak.at_ms)}  {peak.rows:,} in the second, {peak.minute_rows:,} in its minute"


def _topic_lines(forecast: Forecast) -> Iterator[str]:
    """Yield a line for each of the first TOPICS_SHOWN topics, and one with the number of further topics."""
    shown = list(forecast.load.topics.items())[:TOPICS_SHOWN]
    width = max(len(name or "(none)") for name, _ in shown)
    for name, topic in shown:
        span = f"{instant(topic.first_ms)} to {instant(topic.last_ms)}"
        yield (
            f"  {name or '(none)':<{width}}  {topic.rows:,} rows, {span}, "
            f"at most {topic.peak.rows:,} at {instant(topic.peak.at_ms)}"
        )
    if len(forecast.load.topics) > len(shown):
        yield f"  and {len(forecast.load.topics) - len(shown):,} more"


def _what_if_lines(name: str, what_if: WhatIf) -> Iterator[str]:
    """Yield the lines about lateness and backlog with the given consumer rates. `name` tells which load was counted."""
    for topic, outcome in what_if.queues.items():
        others = "consumers" if len(what_if.queues) == 1 else "consumers of the other topics"
        whose = others if topic == OTHER_TOPICS else f"consumers of {topic}"
        yield f"{whose} at {outcome.rate:,.10g} a second, {name}:"
        yield from (f"  {line}" for line in _outcome_lines(outcome))
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


def _outcome_lines(outcome: Outcome) -> Iterator[str]:
    """Yield the lines about the lateness and backlog of one queue."""
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


def _rate_lines(forecast: Forecast) -> Iterator[str]:
    """Yield the line with the rate that --within needs. Nothing without --within or without a rate."""
    if forecast.within_ms is None or forecast.rate_needed is None:
        return
    with_extra = (
        ""
        if forecast.rate_needed_extra is None
        else f", {forecast.rate_needed_extra:,.1f} with the extra rows"
    )
    yield (
        f"to keep all within {show_ms(forecast.within_ms)}, one queue takes {forecast.rate_needed:,.1f} a second"
        f"{with_extra}"
    )


def _check_lines(check: Check) -> Iterator[str]:
    """Yield the lines that compare an older forecast with the messages released since."""
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
    for large_s, small_s, large_unit, small_unit in ((86_400, 3_600, "d", "h"), (3_600, 60, "h", "min")):
        if seconds >= large_s:
            return f"{seconds // large_s:,} {large_unit} {seconds % large_s // small_s} {small_unit}"
    return f"{seconds // 60} min {seconds % 60} s"


# ---- the picture ----------------------------------------------------------------------------------------------
# Drawn without a display. The colours can be distinguished by the colour-blind and in grey.

KINDS = (".png", ".svg", ".pdf")
TOPICS_DRAWN = 5
BARS_DRAWN_MAX = 1_500
CORNERS_MAX = 50_000
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#CC79A7", "#F0E442", "#999999")
EXTRA, BACKLOG = "#E69F00", "#222222"
STYLES = ("-", "--", ":", "-.")


def check_picture(file: Path) -> None:
    """Check that the picture can be written. RequestError for a bad suffix, SetupError without folder or matplotlib."""
    if file.suffix.lower() not in KINDS:
        raise RequestError(f"--picture {file}: its name should end in {', '.join(KINDS)}")
    if not file.absolute().parent.is_dir():
        raise SetupError(f"--picture {file}: there is no folder {file.parent}")
    try:
        importlib.import_module("matplotlib")
    except ModuleNotFoundError as error:
        raise not_installed(error, PICTURE) from error


def draw(answer: Answer, file: Path) -> None:
    """Write the picture to the file, in the format of its suffix."""
    from matplotlib.figure import Figure

    has_backlog = bool(answer.queues)
    figure = Figure(figsize=(10, 7.5 if has_backlog else 5), dpi=150, layout="constrained")
    panels = figure.subplots(2 if has_backlog else 1, 1, sharex=True, squeeze=False)[:, 0]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.set_axisbelow(True)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _draw_load(answer, panels[0])
    if has_backlog:
        _draw_backlog(answer, panels[1])
    panels[-1].set_xlabel("UTC")
    figure.savefig(file)


def _draw_load(answer: Answer, axes: Any) -> None:
    """Draw stacked bars of the messages due in each unit of time: pending by topic, recurring, then extra ones."""
    document = answer.document
    unit = _unit(answer)
    loads = _largest_topics(answer.load) if document.load.topics else {"waiting": answer.load}
    styles = [{"color": COLOURS[index % len(COLOURS)]} for index in range(len(loads))]
    if answer.recurring.total:
        loads["recurring"] = answer.recurring
        styles.append({"color": COLOURS[-1], "hatch": "\\\\"})
    if answer.extra is not None:
        loads["extra"] = answer.extra
        styles.append({"color": EXTRA, "hatch": "//"})
    heights: dict[int, int] = {}
    for (name, load), style in zip(loads.items(), styles, strict=True):
        curve = load.curve(unit)
        starts = curve.start_s.tolist()
        axes.bar(
            curve.start_s.astype("datetime64[s]"),
            curve.rows,
            np.timedelta64(UNIT_S[unit], "s"),
            bottom=[heights.get(start, 0) for start in starts],
            align="edge",
            label=f"{name or '(none)'} ({load.total:,})",
            **style,
        )
        for start, rows in zip(starts, curve.rows.tolist(), strict=True):
            heights[start] = heights.get(start, 0) + rows
    highest = max(heights.values(), default=0)
    if answer.came is not None:
        highest = max(highest, _draw_released(answer.came, unit, axes))
    axes.set_ylabel(f"Messages due, a {unit}")
    rows = document.waiting + document.recurring + document.extra
    axes.set_title(f"{rows:,} messages, as of {show_version(document)}")
    if highest:
        axes.set_ylim(0, highest * 1.25)
        axes.legend(loc="upper right", ncols=3, frameon=False)


def _draw_released(released: Load, unit: Unit, axes: Any) -> int:
    """Draw the released messages as an outline over the bars. Returns the height of the outline."""
    curve = released.curve(unit)
    if not len(curve.rows):
        return 0
    begin, end = curve.start_s, curve.start_s + UNIT_S[unit]
    zeros = np.zeros(len(begin), np.int64)
    corners = np.column_stack((begin, begin, end, end)).ravel().astype("datetime64[s]")
    heights = np.column_stack((zeros, curve.rows, curve.rows, zeros)).ravel()
    axes.plot(corners, heights, color=BACKLOG, linewidth=1.2, label=f"came ({released.total:,})")
    return int(curve.rows.max())


def _unit(answer: Answer) -> Unit:
    """Choose the unit of the bars: the document's, or a coarser one if that gives more than BARS_DRAWN_MAX bars."""
    total = merge([answer.load, answer.recurring, *([] if answer.extra is None else [answer.extra])])
    unit = Unit(answer.document.load.by)
    return (
        unit
        if len(answer.document.load.curve) <= BARS_DRAWN_MAX
        else total.curve(bars_max=BARS_DRAWN_MAX).unit
    )


def _largest_topics(load: Load) -> dict[str, Load]:
    """Split a load by topic: the TOPICS_DRAWN largest topics, and one entry for all others."""
    topics = load.by_topic()
    shown = dict(list(topics.items())[:TOPICS_DRAWN])
    if len(topics) > len(shown):
        shown[f"{len(topics) - len(shown)} others"] = load.select_topics(set(topics) - set(shown))
    return shown


def _draw_backlog(answer: Answer, axes: Any) -> None:
    """Draw the backlog of each queue as a line over time."""
    for index, (name, queue) in enumerate(answer.queues.items()):
        seconds, rows = _thin_out(*queue.backlog())
        axes.plot(
            (seconds * 1_000).astype("datetime64[ms]"),
            rows,
            color=BACKLOG if index == 0 else COLOURS[index % len(COLOURS)],
            linestyle=STYLES[index % len(STYLES)],
            linewidth=1.4,
            label=f"{_consumers_label(name, answer)} at {queue.rate:,.10g} a second",
        )
    axes.set_ylabel("Messages that wait for consumers")
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", frameon=False)


def _consumers_label(name: str, answer: Answer) -> str:
    if name != OTHER_TOPICS:
        return name
    return "all topics" if len(answer.queues) == 1 else "the other topics"


def _thin_out(seconds: FloatArray, rows: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Reduce a curve to at most CORNERS_MAX points: the highest of each run of neighbours, so no peak is lost."""
    step = -(-len(rows) // CORNERS_MAX)
    if step <= 1:
        return seconds, rows
    begins = np.arange(0, len(rows), step)
    return seconds[begins], np.maximum.reduceat(rows, begins)
