"""`timeball replay`: schedule the messages of a past window again, later, slower or faster.

The command first shows the outcome (a batch query on Spark, spark/jobs/replay.py), and schedules only when that is
confirmed. The same arguments identify the same replay: run the command again after an interruption, or if its outcome
is unknown.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from timeball.cli.campaign import TableOption
from timeball.cli.options import (
    DEFAULT_ENDPOINT,
    SPARK_AS_IT_IS,
    EndpointOption,
    JsonOption,
    SparkOptions,
    as_parameter,
    naming,
    reach,
    spark_options,
)
from timeball.cli.output import bars, print_json, print_line, progress_bar, show
from timeball.cli.units import parse_duration_ms, show_bytes, show_ms
from timeball.model.errors import InvalidDelay, RequestError
from timeball.model.time_parsing import instant_ms

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from timeball.spark.jobs.replay import ReplayPlan, ReplayReport, Window

TOPICS_SHOWN = 10

_INSTANT: dict[str, Any] = {"metavar": "INSTANT", "parser": as_parameter(instant_ms)}


class By(StrEnum):
    """The time of a message that decides whether it is in the window."""

    VISIBLE = "visible"
    DUE = "due"


FromOption = Annotated[int, typer.Option("--from", help="First instant of the window.", **_INSTANT)]
UntilOption = Annotated[int, typer.Option("--until", help="First instant behind it.", **_INSTANT)]
AtOption = Annotated[
    int | None, typer.Option("--at", help="Instant at which the window begins again.", **_INSTANT)
]
ShiftOption = Annotated[
    int | None,
    typer.Option(
        "--shift", metavar="DURATION", parser=as_parameter(parse_duration_ms), help="Or by how much later."
    ),
]
StretchOption = Annotated[
    float, typer.Option("--stretch", min=0, help="2 is half as fast, 0.5 twice as fast, 0 all at once.")
]
ArchiveOption = Annotated[
    str | None,
    typer.Option(
        "--archive", metavar="URI", help="The archive's table; by default beside the pending table."
    ),
]
NameOption = Annotated[
    str | None, typer.Option("--job-id", metavar="ID", help="Name of this replay, to do one twice.")
]


@spark_options
def replay(
    from_ms: FromOption,
    until_ms: UntilOption,
    at_ms: AtOption = None,
    shift_ms: ShiftOption = None,
    stretch: StretchOption = 1.0,
    topics: Annotated[
        list[str] | None, typer.Option("--topic", help="Only this topic; may be repeated.")
    ] = None,
    to_topic: Annotated[str | None, typer.Option("--to-topic", help="Into this topic instead.")] = None,
    by: Annotated[
        By, typer.Option("--by", help="Instant that counts: became visible, or was due.")
    ] = By.VISIBLE,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be scheduled.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    late: Annotated[bool, typer.Option("--late", help="Also what would be due before now: at once.")] = False,
    job_id: NameOption = None,
    archive: ArchiveOption = None,
    table_uri: TableOption = None,
    spark: SparkOptions = SPARK_AS_IT_IS,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    as_json: JsonOption = False,
) -> None:
    """Schedule a past window of messages again, after showing the plan.

    Messages come from the archive (timeball pipeline run archive) and from the
    log. Times need a time zone. The same arguments identify the same replay:
    run again, it changes nothing. A replay is a campaign: timeball campaign can
    count, pause and cancel it.

    \b
    Examples:
      timeball replay --from 2026-11-20T09:00Z --until 2026-11-20T10:00Z --at 2026-11-27T09:00Z --dry-run
      timeball replay --from 2026-11-20T09:00Z --until 2026-11-20T10:00Z --shift 7d --topic orders --yes
      timeball replay --from 2026-11-20T00:00Z --until 2026-11-21T00:00Z --at 2026-12-01T00:00Z \\
          --stretch 0.1 --to-topic load-test
    """
    start_ms = beginning(from_ms, at_ms, shift_ms)
    from timeball.cli.spark import spark_session
    from timeball.model.rules import check_campaign

    if job_id is not None:
        with naming("--job-id"):
            check_campaign(job_id)
    reach(endpoint)
    with spark_session(spark, "timeball-replay") as session:
        from timeball.spark.jobs import replay as job

        window = job.Window(
            from_ms=from_ms,
            until_ms=until_ms,
            start_ms=start_ms,
            stretch=stretch,
            topics=tuple(sorted(set(topics or ()))),
            to_topic=to_topic,
            by=by.value,
        )
        carry_out(session, endpoint, window, Wish(archive, table_uri, job_id, dry_run, yes, late, as_json))


@dataclass(frozen=True)
class Wish:
    """The options of a replay, except for its window. They are described at the command."""

    archive: str | None
    table_uri: str | None
    job_id: str | None
    dry_run: bool
    yes: bool
    late: bool
    as_json: bool


def carry_out(spark: SparkSession, endpoint: str, window: Window, wish: Wish) -> None:
    """Show the plan of a replay and, if it is confirmed, carry it out. With --json, print one document."""
    from timeball.spark.jobs import replay_groups as job

    window.check()
    places = {"archive_uri": wish.archive, "table_uri": wish.table_uri}
    if not wish.dry_run:
        done = job.done_before(endpoint, wish.job_id or window.job_id, wish.table_uri)
        if done is not None:
            return print_report(done, wish.as_json)
    with working("reading what passed", wish):
        plan = job.plan(spark, endpoint, window, **places)
    if wish.as_json and (wish.dry_run or not plan.rows):
        return print_json(plan)
    if not wish.as_json:
        for line in describe_plan(plan):
            print_line(line)
    if wish.dry_run or not plan.rows:
        return None
    agree(plan, late=wish.late, yes=wish.yes)
    with working(f"scheduling {plan.rows:,} messages", wish):
        report = job.run(spark, endpoint, window, job_id=wish.job_id, planned=plan, **places)
    return print_report(report, wish.as_json)


@contextmanager
def working(what: str, wish: Wish) -> Iterator[None]:
    """Show on a terminal that a query is running, without a total: its length is not known in advance."""
    with progress_bar(quiet=wish.as_json) as progress:
        progress.add_task(what, total=None)
        yield


def beginning(from_ms: int, at_ms: int | None, shift_ms: int | None) -> int:
    """Find the time at which the window begins again. InvalidDelay unless exactly one of the options is given."""
    if (at_ms is None) == (shift_ms is None):
        raise InvalidDelay("say when: exactly one of --at (an instant) and --shift (such as 7d)")
    return at_ms if at_ms is not None else from_ms + (shift_ms or 0)


def agree(plan: ReplayPlan, *, late: bool, yes: bool) -> None:
    """Return if the replay is confirmed. Otherwise raise RequestError, or abort the command."""
    if plan.overdue and not late:
        raise RequestError(
            f"{plan.overdue:,} of {plan.rows:,} messages would be due before now, and go out all at once: "
            "choose a later --at or --shift, or add --late if that is wanted"
        )
    if yes:
        return
    if not sys.stdin.isatty():
        raise RequestError("nothing scheduled: add --yes, or --dry-run to look only")
    typer.confirm(f"Schedule {plan.rows:,} messages?", abort=True, err=True)


# ---- for people -------------------------------------------------------------------------------------------


def print_report(report: ReplayReport, as_json: bool) -> None:
    """Print the number of messages that were scheduled, now or by an earlier run."""
    said = f"done before, at {instant(report.at_ms)}:" if report.repeated else "scheduled"
    show(report, [f"{said} {report.rows:,} messages as {report.job_id}"], as_json=as_json)


def describe_plan(plan: ReplayPlan) -> Iterator[str]:
    """Yield the due load of a replay, its topics, and its first and last due time."""
    if plan.first_due_ms is None or plan.last_due_ms is None:
        yield "nothing passed in this window"
        return
    yield from bars({instant(begin_ms): rows for begin_ms, rows in plan.curve.items()})
    shown = list(plan.topics.items())[:TOPICS_SHOWN]
    more = f", and {len(plan.topics) - len(shown):,} topics more" if len(plan.topics) > len(shown) else ""
    yield "from " + ", ".join(f"{topic} {rows:,}" for topic, rows in shown) + more
    begin, end = instant(plan.first_due_ms), instant(plan.last_due_ms)
    yield f"{plan.rows:,} messages, {show_bytes(plan.body_bytes)} of bodies, due {begin} to {end}"
    yield f"each bar is {show_ms(plan.width_ms)}"
    if plan.overdue:
        yield f"{plan.overdue:,} of them would be due before now"


def instant(at_ms: int) -> str:
    """Format a time for people, in UTC: 2026-11-22T13:05:00Z, with milliseconds unless they are 0."""
    unit = "seconds" if at_ms % 1000 == 0 else "milliseconds"
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec=unit).replace("+00:00", "Z")
