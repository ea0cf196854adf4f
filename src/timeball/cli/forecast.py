"""`timeball forecast`: show how many pending messages fall due when, the peaks, and how many would be late.

DuckDB counts in this process. With --master, or under spark-submit, Spark counts instead: for a table that is too large
for this machine, or that only the Spark cluster can read. Both produce a `Load`, so all further steps are the same.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from timeball.cli.forecast_options import (
    OTHER_TOPICS,
    Bars,
    Extra,
    Moment,
    Request,
    Window,
    parse_moment,
    parse_rates,
)
from timeball.cli.options import (
    DEFAULT_FLIGHT,
    SPARK_AS_IT_IS,
    FlightEndpointOption,
    JsonOption,
    SparkOptions,
    as_parameter,
    parse_duration_ms,
    spark_options,
)
from timeball.cli.output import print_note, show
from timeball.model.errors import RequestError
from timeball.model.time_parsing import instant_ms

_MOMENT = {"metavar": "INSTANT|DURATION", "parser": as_parameter(parse_moment)}
_DURATION = {"metavar": "DURATION", "parser": as_parameter(parse_duration_ms)}

ByOption = Annotated[Bars, typer.Option("--by", help="Width of a bar; auto chooses.")]
FromOption = Annotated[
    Moment | None,
    typer.Option("--from", help="Start of the window: a time, or a duration from now.", **_MOMENT),
]
UntilOption = Annotated[
    Moment | None,
    typer.Option("--until", help="End of the window: a time, or a duration from now.", **_MOMENT),
]
ByTopicOption = Annotated[bool, typer.Option("--by-topic", help="Also show each topic separately.")]
TopicOption = Annotated[
    list[str] | None, typer.Option("--topic", metavar="TOPIC", help="Only this one; may be repeated.")
]
VersionOption = Annotated[
    int | None,
    typer.Option("--version", min=0, metavar="N", help="Messages pending at this version of the table."),
]
TimestampOption = Annotated[
    int | None,
    typer.Option(
        "--timestamp",
        metavar="INSTANT",
        parser=as_parameter(instant_ms),
        help="Messages pending at this time, by the newest table version of then.",
    ),
]
CheckOption = Annotated[
    bool, typer.Option("--check", help="Compare that older forecast with the messages released since.")
]
PeaksOption = Annotated[int, typer.Option("--peaks", min=0, help="Number of peak seconds to show.")]
RateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--consumer-rate",
        metavar="N|TOPIC=N",
        help="Assume that consumers take N a second, of all topics or of TOPIC; may be repeated.",
    ),
]
BacklogOption = Annotated[
    int, typer.Option("--backlog", min=0, help="Messages that wait for consumers already.")
]
WithinOption = Annotated[
    int | None,
    typer.Option("--within", help="Compute the rate at which no message waits longer.", **_DURATION),
]
ExtraRowsOption = Annotated[
    int | None, typer.Option("--extra-rows", min=1, metavar="N", help="Assume N more messages.")
]
ExtraAtOption = Annotated[
    Moment | None, typer.Option("--extra-at", help="Due time of the extra messages.", **_MOMENT)
]
ExtraOverOption = Annotated[
    int | None,
    typer.Option("--extra-over", help="Spread the extra messages evenly over this time.", **_DURATION),
]
ExtraTopicOption = Annotated[
    str | None, typer.Option("--extra-topic", metavar="TOPIC", help="The topic of all extra messages.")
]
ExtraFileOption = Annotated[
    Path | None,
    typer.Option("--extra", metavar="FILE", help="Assume the messages of this file, too (Parquet or CSV)."),
]
ExtraColumnOption = Annotated[
    str | None,
    typer.Option("--extra-column", metavar="NAME", help="Its column of due times, if not due_ms or due."),
]
PictureOption = Annotated[Path | None, typer.Option("--picture", metavar="FILE", help="Draw it (PNG, SVG).")]


@spark_options
def forecast(
    by: ByOption = Bars.AUTO,
    from_: FromOption = None,
    until: UntilOption = None,
    by_topic: ByTopicOption = False,
    topics: TopicOption = None,
    version: VersionOption = None,
    timestamp_ms: TimestampOption = None,
    check: CheckOption = False,
    peaks: PeaksOption = 5,
    consumer_rates: RateOption = None,
    backlog: BacklogOption = 0,
    within_ms: WithinOption = None,
    extra_rows: ExtraRowsOption = None,
    extra_at: ExtraAtOption = None,
    extra_over_ms: ExtraOverOption = None,
    extra_topic: ExtraTopicOption = None,
    extra_file: ExtraFileOption = None,
    extra_column: ExtraColumnOption = None,
    picture: PictureOption = None,
    spark: SparkOptions = SPARK_AS_IT_IS,
    endpoint: FlightEndpointOption = DEFAULT_FLIGHT,
    as_json: JsonOption = False,
) -> None:
    """Show how many pending messages fall due when, the peaks, and how many would be late, in UTC.

    The command reads the pending table where the broker keeps it, so run it
    where that folder can be read.

    \b
    Examples:
      timeball forecast
      timeball forecast --by minute --from 2030-01-31T08:00:00Z --until 2030-01-31T10:00:00Z --by-topic
      timeball forecast --until 24h --consumer-rate 500
      timeball forecast --consumer-rate 500 --extra-rows 1000000 --extra-at 36h --extra-over 1h
      timeball forecast --extra campaign.csv --within 1m --picture load.png
      timeball forecast --timestamp 2030-01-30T00:00:00Z --check --json | jq .check
    """
    rates = parse_rates(consumer_rates or [])
    if backlog and not rates and within_ms is None:
        raise RequestError("--backlog has no effect without --consumer-rate or --within")
    window = Window(from_, until, version, timestamp_ms, check)
    extra = Extra(extra_rows, extra_at, extra_over_ms or 0, extra_topic, extra_file, extra_column)
    request = Request(by, peaks, by_topic, topics or [], rates, backlog, within_ms)
    run_forecast(endpoint, choose_engine(spark), window, extra, request, picture, as_json)


def choose_engine(spark: SparkOptions) -> SparkOptions | None:
    """Decide which engine counts. Returns the options of Spark, or None for DuckDB in this process.

    Raises RequestError for options of Spark without --master.
    """
    from timeball.spark.run import SUBMITTED

    if spark.master is not None or SUBMITTED in os.environ:
        return spark
    if spark != SparkOptions():
        raise RequestError(
            "--conf, --packages and --name have no effect without --master: this process counts"
        )
    return None


def run_forecast(
    endpoint: str,
    spark: SparkOptions | None,
    window: Window,
    extra: Extra,
    request: Request,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Check the options, count, print the answer, and draw it if `picture` names a file."""
    from timeball.cli.forecast_report import answer, check_picture, count, describe, draw

    window.check()
    extra.check()
    if picture is not None:
        check_picture(picture)  # checked before the counting, which may take minutes
    by_topic = request.by_topic or bool(request.topics) or any(name != OTHER_TOPICS for name in request.rates)
    result = answer(count(endpoint, spark, window, by_topic=by_topic, quiet=as_json), request, extra)
    show(result.document, describe(result.document), as_json=as_json)
    if picture is not None:
        draw(result, picture)
        print_note(f"drawn: {picture}")
