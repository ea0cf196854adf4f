"""`timeball forecast`: show how many pending messages fall due when, the peaks, and how many would be late.

DuckDB counts in this process. With --master, or under spark-submit, Spark counts instead, for a table that is out of
reach from here or too large. Both produce a load, and the further steps are the same.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from timeball.cli.forecast.options import (
    OTHER_TOPICS,
    Asked,
    Bars,
    Extra,
    Moment,
    Window,
    parse_moment,
    parse_rates,
)
from timeball.cli.options import (
    DEFAULT_ENDPOINT,
    SPARK_AS_IT_IS,
    EndpointOption,
    JsonOption,
    SparkOptions,
    as_parameter,
    spark_options,
)
from timeball.cli.output import print_note, show
from timeball.cli.units import parse_duration_ms
from timeball.model.errors import RequestError
from timeball.model.time_parsing import instant_ms

_MOMENT = {"metavar": "INSTANT|DURATION", "parser": as_parameter(parse_moment)}
_DURATION = {"metavar": "DURATION", "parser": as_parameter(parse_duration_ms)}

ByOption = Annotated[Bars, typer.Option("--by", help="Width of a bar; auto chooses.")]
FromOption = Annotated[
    Moment | None, typer.Option("--from", help="From here on, or so much later than now.", **_MOMENT)
]
UntilOption = Annotated[
    Moment | None, typer.Option("--until", help="Up to here, or so much later than now.", **_MOMENT)
]
ByTopicOption = Annotated[bool, typer.Option("--by-topic", help="Each topic apart as well.")]
TopicOption = Annotated[
    list[str] | None, typer.Option("--topic", metavar="TOPIC", help="Only this one; may be repeated.")
]
VersionOption = Annotated[
    int | None, typer.Option("--version", min=0, metavar="N", help="What waited at this table version.")
]
TimestampOption = Annotated[
    int | None,
    typer.Option(
        "--timestamp",
        metavar="INSTANT",
        parser=as_parameter(instant_ms),
        help="What waited at the table's newest version of then.",
    ),
]
CheckOption = Annotated[
    bool, typer.Option("--check", help="Hold that older forecast against what came since.")
]
PeaksOption = Annotated[int, typer.Option("--peaks", min=0, help="How many of the fullest seconds.")]
RateOption = Annotated[
    list[str] | None,
    typer.Option(
        "--consumer-rate",
        metavar="N|TOPIC=N",
        help="What if consumers take so many a second: all, or this topic's; may be repeated.",
    ),
]
BacklogOption = Annotated[int, typer.Option("--backlog", min=0, help="Rows that wait for consumers already.")]
WithinOption = Annotated[
    int | None,
    typer.Option("--within", help="Which rate is needed so that nothing waits longer?", **_DURATION),
]
ExtraRowsOption = Annotated[
    int | None, typer.Option("--extra-rows", min=1, metavar="N", help="What if so many more were due?")
]
ExtraAtOption = Annotated[Moment | None, typer.Option("--extra-at", help="When these are due.", **_MOMENT)]
ExtraOverOption = Annotated[
    int | None, typer.Option("--extra-over", help="Spread evenly over this time.", **_DURATION)
]
ExtraTopicOption = Annotated[
    str | None, typer.Option("--extra-topic", metavar="TOPIC", help="The topic of all that is extra.")
]
ExtraFileOption = Annotated[
    Path | None, typer.Option("--extra", metavar="FILE", help="What if these were due too? Parquet or CSV.")
]
ExtraColumnOption = Annotated[
    str | None,
    typer.Option("--extra-column", metavar="NAME", help="Its column of instants, if not due_ms or due."),
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
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
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
        raise RequestError("--backlog says nothing without --consumer-rate or --within")
    window = Window(from_, until, version, timestamp_ms, check)
    extra = Extra(extra_rows, extra_at, extra_over_ms or 0, extra_topic, extra_file, extra_column)
    asked = Asked(by, peaks, by_topic, topics or [], rates, backlog, within_ms)
    answer_to(endpoint, counted_by(spark), window, extra, asked, picture, as_json)


def counted_by(spark: SparkOptions) -> SparkOptions | None:
    """Choose Spark's options if Spark counts. None if this process counts."""
    from timeball.spark.run import SUBMITTED

    if spark.master is not None or SUBMITTED in os.environ:
        return spark
    if spark != SparkOptions():
        raise RequestError("--conf, --packages and --name say nothing without --master: this process counts")
    return None


def answer_to(
    endpoint: str,
    spark: SparkOptions | None,
    window: Window,
    extra: Extra,
    asked: Asked,
    picture: Path | None,
    as_json: bool,
) -> None:
    """Check the options, count, print the answer, and draw it if a picture is asked for."""
    from timeball.cli.forecast.picture import check_picture, draw
    from timeball.cli.forecast.report import answer, count, describe

    window.check()
    extra.check()
    if picture is not None:
        check_picture(picture)  # checked before the counting, which may take minutes
    apart = asked.by_topic or bool(asked.topics) or any(name != OTHER_TOPICS for name in asked.rates)
    found = answer(count(endpoint, spark, window, by_topic=apart, quiet=as_json), asked, extra)
    show(found.document, describe(found.document), as_json=as_json)
    if picture is not None:
        draw(found, picture)
        print_note(f"drawn: {picture}")
