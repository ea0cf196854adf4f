"""What `timeball forecast` answers: what waits, counted on one snapshot, and what is only thought of.

Everything is said twice where there is an extra load: as it is, and with it. The extra rows are cut to the window, and
those outside are counted, so that a mistyped instant is seen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from timeball.cli.connection import connect
from timeball.cli.forecast.options import Asked, Extra, Window
from timeball.cli.output import progress_bar
from timeball.limits import SECOND_MS
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.jobs.campaigns import Campaigns, held
from timeball.pipeline.table_store import Due
from timeball.pipeline.views.consumer_model import Queue, WhatIf, queues, rate_needed, serve
from timeball.pipeline.views.due_histogram import Load, Unit, merge
from timeball.pipeline.views.forecast import Check, Report, check, released_since, report, version_at
from timeball.pipeline.views.snapshot import Snapshot

# ---- counting -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """A load: what waits within the bounds, as of `now_ms` and one version of the table.

    `came`: what came since, and until when. `held`: by paused campaign, what would wait if it were resumed.
    """

    now_ms: int
    version: int
    is_whole: bool
    due: Due
    load: Load
    came: tuple[Load, int] | None = None
    held: dict[str, int] = field(default_factory=dict)


def count(
    endpoint: str, master: str | None, window: Window, *, by_topic: bool = False, quiet: bool = False
) -> Counted:
    """Pin a snapshot, and count by SQL: in this process with DuckDB, or on Spark when a master is named.

    DuckDB counts millions of promises in less time than Spark needs to start. Spark is for a table that only the
    cluster reaches, or that is larger than one machine should read.
    """
    with connect(endpoint) as ball:
        ball.status()  # says at once what is wrong; what follows is patient with a broker that restarts
    with Endpoint(endpoint) as broker:
        version = window.version
        if window.timestamp_ms is not None:
            version = version_at(broker.status().table.uri, window.timestamp_ms)
        shot = Snapshot.pin(broker, version=version, upcoming=True)
        due = window.bounds(shot.now_ms)
        if master is None:
            load = _count_here(endpoint, shot, due, by_topic, quiet)
        else:
            load = _count_on(master, endpoint, shot, due, by_topic)
        came = released_since(broker, shot, by_topic=by_topic) if window.is_checked else None
        # A pause is of now; an older version may have been made before it.
        is_now = window.version is None and window.timestamp_ms is None
        paused = held(Campaigns(broker.status().table.uri).events()) if is_now else {}
    return Counted(shot.now_ms, shot.version, shot.is_whole, due, load, came, paused)


def _count_here(endpoint: str, shot: Snapshot, due: Due, by_topic: bool, quiet: bool) -> Load:
    from timeball.pipeline.views.duckdb_session import SqlSession

    with progress_bar(quiet=quiet) as progress:
        progress.add_task("reading what waits", total=None)
        with SqlSession(endpoint, snapshot=shot, bodies=False, due=due) as session:
            return session.due_load(by_topic=by_topic)


def _count_on(master: str, endpoint: str, shot: Snapshot, due: Due, by_topic: bool) -> Load:
    from timeball.cli.spark import close_session, open_session

    spark = open_session(master, "timeball-forecast")
    try:
        from timeball.pipeline.views import spark_views

        return spark_views.due_load(spark, endpoint, shot, by_topic=by_topic, due=due)
    finally:
        close_session(spark)


# ---- the document -------------------------------------------------------------------------------------------


class Forecast(msgspec.Struct, kw_only=True, frozen=True):
    """The document that --json prints. Instants in milliseconds since 1970; `from_ms` is included, `until_ms` is not.

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
    """Build the whole answer."""
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
