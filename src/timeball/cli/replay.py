"""`timeball replay`: schedule the messages of a past time window again, later, slower or faster.

The command first shows a plan, computed by a batch query on Spark (spark/jobs/replay.py). It schedules the messages
only after the user confirms the plan. The same arguments identify the same replay, so you can run the command again
after an interruption, or if its outcome is unknown.
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

from timeball.cli.bulk import TableOption
from timeball.cli.options import (
    DEFAULT_FLIGHT,
    SPARK_AS_IT_IS,
    FlightEndpointOption,
    JsonOption,
    SparkOptions,
    as_parameter,
    naming,
    parse_duration_ms,
    reach,
    show_bytes,
    show_ms,
    spark_options,
)
from timeball.cli.output import bars, print_json, print_line, progress_bar, show
from timeball.model.errors import InvalidDelay, RequestError
from timeball.model.time_parsing import instant_ms

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from timeball.spark.jobs.replay import ReplayPlan, ReplayReport, Window

TOPICS_SHOWN = 10

_TIME: dict[str, Any] = {"metavar": "INSTANT", "parser": as_parameter(instant_ms)}


class By(StrEnum):
    """The time of a message that decides whether it is in the window."""

    VISIBLE = "visible"
    DUE = "due"


FromOption = Annotated[int, typer.Option("--from", help="Start of the window.", **_TIME)]
UntilOption = Annotated[int, typer.Option("--until", help="End of the window; not in it.", **_TIME)]
AtOption = Annotated[int | None, typer.Option("--at", help="Due time of the window's first moment.", **_TIME)]
ShiftOption = Annotated[
    int | None,
    typer.Option(
        "--shift",
        metavar="DURATION",
        parser=as_parameter(parse_duration_ms),
        help="Or: how much later than the first time.",
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
    str | None,
    typer.Option(
        "--job-id", metavar="ID", help="Name of this replay; a new name runs the same replay twice."
    ),
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
        By, typer.Option("--by", help="Which time must be in the window: visible or due.")
    ] = By.VISIBLE,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be scheduled.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    late: Annotated[
        bool, typer.Option("--late", help="Also schedule messages that would be due before now: at once.")
    ] = False,
    job_id: NameOption = None,
    archive: ArchiveOption = None,
    table_uri: TableOption = None,
    spark: SparkOptions = SPARK_AS_IT_IS,
    endpoint: FlightEndpointOption = DEFAULT_FLIGHT,
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
    start_ms = find_start_ms(from_ms, at_ms, shift_ms)
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
        show_and_schedule(
            session, endpoint, window, ReplayOptions(archive, table_uri, job_id, dry_run, yes, late, as_json)
        )


@dataclass(frozen=True)
class ReplayOptions:
    """The options of a replay, except for its window. They are described at the command."""

    archive: str | None
    table_uri: str | None
    job_id: str | None
    dry_run: bool
    yes: bool
    late: bool
    as_json: bool


def show_and_schedule(spark: SparkSession, endpoint: str, window: Window, options: ReplayOptions) -> None:
    """Show the plan of a replay, and schedule its messages if the user confirms. With --json, print one document.

    If the replay was done before, only its report is printed. Raises RequestError for an impossible window, and as
    `confirm`.
    """
    from timeball.spark.jobs import replay as job

    window.check()
    tables = {"archive_uri": options.archive, "table_uri": options.table_uri}
    if not options.dry_run:
        earlier = job.groups_done_before(endpoint, options.job_id or window.job_id, options.table_uri)
        if earlier is not None:
            return print_report(earlier, options.as_json)
    with busy("reading past messages", options):
        plan = job.plan_groups(spark, endpoint, window, **tables)
    if options.as_json and (options.dry_run or not plan.rows):
        return print_json(plan)
    if not options.as_json:
        for line in describe_plan(plan):
            print_line(line)
    if options.dry_run or not plan.rows:
        return None
    confirm(plan, late=options.late, yes=options.yes)
    with busy(f"scheduling {plan.rows:,} messages", options):
        report = job.run_groups(spark, endpoint, window, job_id=options.job_id, planned=plan, **tables)
    return print_report(report, options.as_json)


@contextmanager
def busy(activity: str, options: ReplayOptions) -> Iterator[None]:
    """Show on a terminal that a query is running. There is no total, because the duration is unknown."""
    with progress_bar(quiet=options.as_json) as progress:
        progress.add_task(activity, total=None)
        yield


def find_start_ms(from_ms: int, at_ms: int | None, shift_ms: int | None) -> int:
    """Compute the due time of the window's first moment. InvalidDelay unless exactly one of the options is given."""
    if (at_ms is None) == (shift_ms is None):
        raise InvalidDelay("give exactly one of --at (a time) and --shift (such as 7d)")
    return at_ms if at_ms is not None else from_ms + (shift_ms or 0)


def confirm(plan: ReplayPlan, *, late: bool, yes: bool) -> None:
    """Ask the user to confirm the replay, unless `yes`. Aborts the command if the user declines.

    Raises RequestError if messages would be overdue without `late`, or if there is no terminal to ask at.
    """
    if plan.overdue and not late:
        raise RequestError(
            f"{plan.overdue:,} of {plan.rows:,} messages would be due before now, and go out all at once: "
            "choose a later --at or --shift, or add --late if that is wanted"
        )
    if yes:
        return
    if not sys.stdin.isatty():
        raise RequestError("nothing scheduled: add --yes, or --dry-run to see the plan only")
    typer.confirm(f"Schedule {plan.rows:,} messages?", abort=True, err=True)


# ---- for people -------------------------------------------------------------------------------------------


def print_report(report: ReplayReport, as_json: bool) -> None:
    """Print the number of scheduled messages, and whether an earlier run has scheduled them."""
    outcome = f"done before, at {show_time(report.at_ms)}:" if report.repeated else "scheduled"
    show(report, [f"{outcome} {report.rows:,} messages as {report.job_id}"], as_json=as_json)


def describe_plan(plan: ReplayPlan) -> Iterator[str]:
    """Yield the due load of a replay, its topics, and its first and last due time."""
    if plan.first_due_ms is None or plan.last_due_ms is None:
        yield "nothing passed in this window"
        return
    yield from bars({show_time(begin_ms): rows for begin_ms, rows in plan.curve.items()})
    topics_shown = list(plan.topics.items())[:TOPICS_SHOWN]
    hidden = len(plan.topics) - len(topics_shown)
    more = f", and {hidden:,} topics more" if hidden else ""
    yield "from " + ", ".join(f"{topic} {rows:,}" for topic, rows in topics_shown) + more
    begin, end = show_time(plan.first_due_ms), show_time(plan.last_due_ms)
    yield f"{plan.rows:,} messages, {show_bytes(plan.body_bytes)} of bodies, due {begin} to {end}"
    yield f"each bar is {show_ms(plan.width_ms)}"
    if plan.overdue:
        yield f"{plan.overdue:,} of them would be due before now"


def show_time(at_ms: int) -> str:
    """Format a time for people, in UTC: 2026-11-22T13:05:00Z, with milliseconds unless they are 0."""
    unit = "seconds" if at_ms % 1000 == 0 else "milliseconds"
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec=unit).replace("+00:00", "Z")
