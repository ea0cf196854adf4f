"""Counting for `timeball forecast`: one snapshot of what waits, here with Arrow, or on Spark when a master is named.

Six million promises take Arrow half a second here, a whole one by topic: less than Spark needs to start, and on the
same cores Spark reads no faster. So size alone decides nothing; Spark is for a table that only the cluster reaches, or
that is larger than one machine should read.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from timeball.cli.connection import connect
from timeball.cli.forecast.wishes import Window
from timeball.cli.output import progress_bar
from timeball.pipeline.endpoint import Endpoint
from timeball.pipeline.jobs.campaigns import Campaigns, held
from timeball.pipeline.views.due_histogram import Load
from timeball.pipeline.views.forecast import gather, released_since, version_at
from timeball.pipeline.views.snapshot import Due, Snapshot


@dataclass(frozen=True)
class Counted:
    """What waits within the bounds, as of `now_ms` and one version of the table; see waiting.Snapshot."""

    now_ms: int
    version: int
    is_whole: bool
    due: Due
    load: Load
    came: tuple[Load, int] | None = None  # what came since, and until when
    held: dict[str, int] = field(
        default_factory=dict
    )  # by paused campaign: what would wait if it were resumed


def count(
    endpoint: str, master: str | None, window: Window, *, by_topic: bool = False, quiet: bool = False
) -> Counted:
    """Take the snapshot, and count."""
    with connect(endpoint) as ball:
        ball.status()  # says at once what is wrong; what follows is patient with a broker that restarts
    with Endpoint(endpoint) as broker:
        version = window.version
        if window.timestamp_ms is not None:
            version = version_at(broker.status().table.uri, window.timestamp_ms)
        shot = Snapshot.take(broker, version=version, upcoming=True)
        due = window.bounds(shot.now_ms)
        if master is None:
            load = _count_here(shot, due, by_topic, quiet)
        else:
            load = _count_on(master, endpoint, shot, due, by_topic)
        came = released_since(broker, shot, by_topic=by_topic) if window.is_checked else None
        now = (
            window.version is None and window.timestamp_ms is None
        )  # an older one may be of before the pause
        paused = held(Campaigns(broker.status().table.uri).events()) if now else {}
    return Counted(shot.now_ms, shot.version, shot.is_whole, due, load, came, paused)


def _count_here(shot: Snapshot, due: Due, by_topic: bool, quiet: bool) -> Load:
    total = sum(file.rows for file in shot.files(due))
    with progress_bar(quiet=quiet) as progress:
        task = progress.add_task("reading what waits", total=total or None)
        return gather(shot, by_topic=by_topic, due=due, seen=lambda rows: progress.advance(task, rows))


def _count_on(master: str, endpoint: str, shot: Snapshot, due: Due, by_topic: bool) -> Load:
    from timeball.cli.spark import close_session, open_session

    spark = open_session(master, "timeball-forecast")
    try:
        from timeball.pipeline.views import spark_forecast as job

        return job.gather(spark, endpoint, shot, by_topic=by_topic, due=due)
    finally:
        close_session(spark)
