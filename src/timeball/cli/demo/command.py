"""`timeball demo`: the whole of Timeball in some minutes, on real flights.

In order, each step printed as it ends:

    1  `timeball up` in an empty folder: the broker, and Spark behind it
    2  a year of check-in reminders sent through the client; the job `compact` moves them out of the log, where the
       schedule lets it (`hour_log`)
    3  a year of departures written from a Spark DataFrame straight into the pending table, as one campaign
    4  another campaign, called off as one object, with a definite count; and the forecast of what is left
    5  one real day, lived in a minute: scheduled, cancelled where it was cancelled, received
    6  the audit on Spark: accepted = released + cancelled + expired + pending; a question in SQL
    7  two tables and two pictures
"""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Annotated

import typer

from timeball.cli.exit_codes import ExitCode
from timeball.cli.options import JsonOption
from timeball.cli.output import note
from timeball.config import SCHEDULES, Schedule
from timeball.errors import RequestError


def demo(
    day: Annotated[
        str, typer.Option("--day", metavar="MM-DD", help="Which day of 2013; 8 February was a blizzard.")
    ] = "02-08",
    seconds: Annotated[
        int, typer.Option("--seconds", min=5, max=3_600, help="How long the day shall take.")
    ] = 60,
    out_folder: Annotated[
        Path, typer.Option("--out", metavar="FOLDER", help="Where the pictures go.")
    ] = Path("timeball-demo"),
    schedule: Annotated[
        str, typer.Option("--schedule", metavar="NAME", help=f"Who keeps what waits: {', '.join(SCHEDULES)}.")
    ] = "hour_log",
    data: Annotated[
        Path | None, typer.Option("--data", metavar="FOLDER", help="Keep the data in this folder.")
    ] = None,
    flights_max: Annotated[int, typer.Option("--flights-max", hidden=True)] = 1_000_000,
    as_json: JsonOption = False,
) -> None:
    """Show Timeball at work on 336,776 real flights, in about three minutes.

    Runs a broker with Spark in a temporary folder, schedules a year in bulk and one day through the client,
    calls a campaign off, looks ahead, lives that day in a minute, and counts. Exit code 1 says that something was
    early, lost or doubled, or that the audit does not balance.

    \b
    Examples:
      timeball demo
      timeball demo --day 12-25 --seconds 30
      timeball demo --schedule timer_wheel
      timeball demo --data ./demo-data      # keeps the data, for 'timeball dump' and 'timeball up'
    """
    chosen, keeper = _date(day), _schedule(schedule)
    from timeball.cli.demo.show import Work, run_demo

    # Whoever asks it to end, a terminal that closes included, finds no broker and no Java left behind.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with _folder(data) as folder:
            work = Work(chosen, seconds * 1_000, flights_max, keeper)
            report = run_demo(folder, work, out_folder, quiet=as_json)
    except KeyboardInterrupt:
        note("timeball: interrupted; the broker and Spark have stopped")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    if as_json:
        from timeball.cli.output import print_json

        print_json(asdict(report))
    if not report.good:
        raise typer.Exit(ExitCode.CHECK_FAILED)


def _date(text: str) -> date:
    try:
        return date.fromisoformat(f"2013-{text}")
    except ValueError as error:
        raise RequestError(f"--day {text}: write a day of 2013 as MM-DD, such as 02-08") from error


def _schedule(text: str) -> Schedule:
    if text not in SCHEDULES:
        raise RequestError(f"--schedule {text}: one of {', '.join(SCHEDULES)}")
    return text


@contextmanager
def _folder(data: Path | None) -> Iterator[Path]:
    """The folder named, or one that goes away."""
    if data is not None:
        yield data
        return
    with tempfile.TemporaryDirectory(prefix="timeball-demo-") as folder:
        yield Path(folder) / "data"
