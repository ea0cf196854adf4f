"""`make versus`: run the rounds, write docs/versus.md. `python -m benchmarks.versus --help` says the options."""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType

from tests.interop.environments import Missing

import benchmarks.versus as package
from benchmarks.versus import machine
from benchmarks.versus.delivery import GROUP_NAME
from benchmarks.versus.load import Generator
from benchmarks.versus.page_cache import PageCache
from benchmarks.versus.rounds import GROUPS, WORK, run, say, working_folder
from benchmarks.versus.table import Figures, page
from benchmarks.versus.work import Bench

PAGE = Path(__file__).parents[2] / "docs" / "versus.md"
WAITING, WAITING_SMALL = 200_000, 2_000


def main(arguments: Sequence[str]) -> int:
    """Return the exit code: 0 measured, 1 something failed, 2 a tool is missing."""
    options = _options(arguments)
    signal.signal(signal.SIGTERM, _end)
    try:
        figures = _measure(options)
    except Missing as error:
        say(f"cannot run: {error}")
        return 2
    except KeyboardInterrupt:
        say("interrupted; the brokers are ended")
        return 130
    if options.json:
        print(json.dumps(figures.as_dict()))
    else:
        tables = [figures.table(), figures.at_consumer.table()]
        print("\n\n".join("\n".join(table) for table in tables if table))
    if options.page:
        path = Path(options.page)
        path.write_text(page(figures, path.read_text("utf-8") if path.exists() else ""), "utf-8")
        say(f"written: {options.page}")
    return 0


def _measure(options: argparse.Namespace) -> Figures:
    work = [each for each in WORK if each.group in options.rows]
    waiting = options.waiting or (WAITING_SMALL if options.small else WAITING)
    before = machine.load_average()
    with working_folder() as folder:
        load, page_cache = Generator(folder), None if options.small else PageCache(folder)
        bench = Bench(load, options.small, waiting, page_cache)
        not_measured = (package.__doc__ or "").partition("Not measured: ")[2]
        figures = Figures(
            machine.describe(), f"{datetime.now(UTC):%Y-%m-%d}", options.rounds, options.small, waiting,
            machine.is_busy(before), (before, before), f"Not measured: {' '.join(not_measured.split())}",
        )  # fmt: skip
        try:
            run(figures, bench, folder, options.flush, work, delivers=GROUP_NAME in options.rows)
        except BaseException:
            if figures.rows or figures.at_consumer.rows:
                say("measured so far:\n" + "\n".join(figures.table() + figures.at_consumer.table()))
            raise
        finally:
            if page_cache is not None:
                page_cache.close()
    figures.load_averages = before, machine.load_average()
    return figures


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make versus", description="RocketMQ and Timeball, side by side")
    parser.add_argument("--rounds", type=int, default=3, help="how often each measures each row (3)")
    parser.add_argument(
        "--rows", type=_groups, default=GROUPS, help=f"some of {','.join(GROUPS)}, with commas between"
    )
    parser.add_argument(
        "--flush", choices=("sync", "async"), default="sync",
        help="sync (the default): acknowledge what the disk has; async: both without waiting for the disk",
    )  # fmt: skip
    parser.add_argument("--waiting", type=int, help=f"scheduled messages that wait ({WAITING})")
    parser.add_argument("--small", action="store_true", help="only show that it runs; writes no page")
    parser.add_argument("--json", action="store_true", help="print one JSON document in place of the table")
    parser.add_argument(
        "--page",
        help="where the page goes (of a whole table: docs/versus.md; of some rows: nowhere)",
    )
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be 1 at least")
    tables = {GROUP_NAME}, set(GROUPS) - {GROUP_NAME}, set(GROUPS)
    if options.page is None and not options.small and set(options.rows) in tables:
        options.page = PAGE
    return options


def _groups(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in GROUPS]:
        raise argparse.ArgumentTypeError(f"no rows named {', '.join(unknown)}: there are {', '.join(GROUPS)}")
    return names


def _end(_: int, __: FrameType | None) -> None:
    raise KeyboardInterrupt  # a run that is asked to end ends its brokers first, as at Ctrl-C


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
