"""`make demo`: Timeball in two minutes, on the flights out of New York in 2013.

In order, each step printed as it ends:

    1  `timeball up` in an empty folder: the broker, and its pipeline behind it
    2  a year of check-in reminders sent through the client; the broker moves them out of the log into the pending
       table, where the strategy lets it (`hour_log`)
    3  a year of departures, as one campaign
    4  another campaign, called off by one call, with a definite count; and the forecast of what is left
    5  one real day, lived in a minute: scheduled, cancelled where it was cancelled, received
    6  a question in SQL, and the counts: accepted = released + cancelled + pending
    7  two tables and two pictures

With `--spark`, Spark compacts, writes the campaigns from DataFrames straight into the pending table, and audits.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date
from pathlib import Path

from examples.flights.show import Work, run_demo

from timeball.cli.output import ExitCode, explain, print_json
from timeball.model.config import STRATEGIES

SECONDS_MIN, SECONDS_MAX = 5, 3_600
EPILOG = """\
Runs a broker in a temporary folder, schedules a year of flights and one day, calls a campaign off, looks
ahead, lives that day in a minute, and counts: about two minutes. Exit code 1 says that something was early,
lost or doubled, or that the counts do not balance.

examples:
  make demo
  make demo ARGS='--day 12-25 --seconds 30'
  make demo ARGS='--strategy timer_wheel'
  make demo ARGS=--spark                  # with Spark, which is fetched once: 1.7 GB in all
  make demo ARGS=--cluster                # three nodes (Debian: etcd-server); the leader is killed at noon
  make demo ARGS='--data ./demo-data'     # keeps the data, for 'timeball dump' and 'timeball up'
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit code."""
    options = _parser().parse_args(arguments)
    # A closed terminal and a plain kill end the demo as Ctrl-C does: no broker and no Java stay behind.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        with _folder(options.data) as folder:
            work = Work(
                options.day,
                options.seconds * 1_000,
                options.flights_max,
                options.strategy,
                on_cluster=options.cluster,
                on_spark=options.spark,
            )
            report = run_demo(folder, work, options.out, quiet=options.json)
    except KeyboardInterrupt:
        print("demo: interrupted; all its processes have stopped", file=sys.stderr)
        return ExitCode.INTERRUPTED
    except Exception as error:  # the end of the line: a person reads a sentence, a script a code
        sentence, code = explain(error)
        print(f"demo: {sentence}", file=sys.stderr)
        return code
    if options.json:
        print_json(asdict(report))
    return ExitCode.OK if report.good else ExitCode.CHECK_FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="make demo", description="Show Timeball at work on 336,776 real flights.", epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--day", type=_day, default="02-08", metavar="MM-DD", help="day of 2013; 8 February was a blizzard")
    add("--seconds", type=_seconds, default=60, help="how long the day takes (default: %(default)s)")
    add("--out", type=Path, default=Path("timeball-demo"), metavar="FOLDER", help="folder of the pictures")
    add("--strategy", choices=STRATEGIES, default="hour_log", help="what keeps the scheduled messages")
    add("--cluster", action="store_true", help="on three nodes, of which the leader is killed in the middle")
    add("--spark", action="store_true", help="with Spark beside the broker: bulk writes, compaction, audit")
    add("--data", type=Path, metavar="FOLDER", help="keep the data in this folder")
    add("--flights-max", type=int, default=1_000_000, help=argparse.SUPPRESS)
    add("--json", action="store_true", help="print one JSON document, and nothing else, on stdout")
    return parser


def _day(text: str) -> date:
    try:
        return date.fromisoformat(f"2013-{text}")
    except ValueError as error:
        raise argparse.ArgumentTypeError("write a day of 2013 as MM-DD, such as 02-08") from error


def _seconds(text: str) -> int:
    if not (text.isdecimal() and SECONDS_MIN <= int(text) <= SECONDS_MAX):
        raise argparse.ArgumentTypeError(f"a number of seconds from {SECONDS_MIN} to {SECONDS_MAX}")
    return int(text)


@contextmanager
def _folder(data: Path | None) -> Iterator[Path]:
    """Yield the folder named, or one that is removed afterwards."""
    if data is not None:
        yield data
        return
    with tempfile.TemporaryDirectory(prefix="timeball-demo-") as folder:
        yield Path(folder) / "data"


if __name__ == "__main__":
    sys.exit(main())
