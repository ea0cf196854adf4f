"""The options of `timeball forecast` as values: a window of time, rates of consumers, an extra load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from timeball.cli.options import parse_duration_ms
from timeball.model.errors import RequestError
from timeball.model.time_parsing import instant_ms

if TYPE_CHECKING:
    from timeball.spark.table_store import Due
    from timeball.spark.views.due_histogram import Load

# Equal to spark/views/forecast.py's, which is not imported here: other commands start sooner.
OTHER_TOPICS = "*"


class Bars(StrEnum):
    """The width of a bar: the units of spark/views/due_histogram.py."""

    AUTO = "auto"
    SECOND = "second"
    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"


@dataclass(frozen=True)
class Moment:
    """A time in ms since 1970, or with `is_relative` a number of ms after the forecast's own time."""

    ms: int
    is_relative: bool = False

    def at_ms(self, now_ms: int) -> int:
        """Compute the time, in milliseconds since 1970."""
        return now_ms + self.ms if self.is_relative else self.ms


def parse_moment(text: str) -> Moment:
    """Parse a time (2030-01-31T09:00:00Z, or milliseconds since 1970), or a duration from now: 36h."""
    if text.strip().isdecimal():
        return Moment(instant_ms(text))
    try:
        return Moment(parse_duration_ms(text), is_relative=True)
    except RequestError:
        pass
    try:
        return Moment(instant_ms(text))
    except RequestError as error:
        raise RequestError(f"{error}; or write a duration from now: 90s, 36h, 7d") from error


def parse_rates(texts: Sequence[str]) -> dict[str, float]:
    """Parse rows per second by topic from N and TOPIC=N. OTHER_TOPICS stands for the topics that are not named.

    Raises RequestError for a rate that is not a finite number above 0, and for two rates of the same topics.
    """
    rates: dict[str, float] = {}
    for text in texts:
        name, equals, number = text.rpartition("=")
        name = name.strip() if equals else OTHER_TOPICS
        try:
            rate = float(number.replace("_", ""))
        except ValueError:
            rate = 0.0
        if not 0 < rate < float("inf") or not name:
            raise RequestError(f"--consumer-rate {text!r}: write rows a second above 0, as 500 or orders=200")
        if name in rates:
            raise RequestError(f"--consumer-rate {text!r}: given twice for the same topics")
        rates[name] = rate
    return rates


@dataclass(frozen=True)
class Window:
    """The scheduled messages to count: due between two moments, as of one version of the table.

    The version is the present one, the one with number `version`, or the newest one at `timestamp_ms`. `is_checked`:
    also compare an older version with the messages that were released since.
    """

    begin: Moment | None = None
    end: Moment | None = None
    version: int | None = None
    timestamp_ms: int | None = None
    is_checked: bool = False

    def check(self) -> None:
        """Raise RequestError for options that exclude or need each other."""
        if self.version is not None and self.timestamp_ms is not None:
            raise RequestError("--version and --timestamp: give one of them")
        if self.is_checked and self.version is None and self.timestamp_ms is None:
            raise RequestError(
                "--check compares an older forecast with the messages released since: name its version with --version"
            )

    def bounds(self, now_ms: int) -> Due:
        """Compute the bounds of from <= due_ms < until, None for no bound. Raises RequestError for an empty window."""
        low = None if self.begin is None else self.begin.at_ms(now_ms)
        high = None if self.end is None else self.end.at_ms(now_ms)
        if high is not None and high <= (now_ms if low is None else low):
            raise RequestError(f"--until lies before {'now' if low is None else '--from'}")
        return low, high


@dataclass(frozen=True)
class Request:
    """The requested content of the answer.

    `by`: the width of a bar. `peaks`: how many peaks. `topics`: count only these; empty for all. `rates`: the rows per
    second that consumers take, by topic. `backlog`: messages that wait for consumers already. `within_ms`: compute the
    rate at which no message waits longer.
    """

    by: str
    peaks: int
    by_topic: bool
    topics: Sequence[str]
    rates: dict[str, float]
    backlog: int = 0
    within_ms: int | None = None


@dataclass(frozen=True)
class Extra:
    """An assumed extra load: a number of rows at one time, the rows of a file, or both."""

    rows: int | None = None
    at: Moment | None = None
    over_ms: int = 0
    topic: str | None = None
    file: Path | None = None
    column: str | None = None

    @property
    def is_none(self) -> bool:
        """True if there is no extra load."""
        return self.rows is None and self.file is None

    def check(self) -> None:
        """Raise RequestError for an option that has no effect without another one. The error names both."""
        if (self.rows is None) != (self.at is None):
            raise RequestError("--extra-rows and --extra-at: give both")
        if self.over_ms and self.rows is None:
            raise RequestError("--extra-over has no effect without --extra-rows and --extra-at")
        if self.topic is not None and self.is_none:
            raise RequestError("--extra-topic has no effect without --extra-rows or --extra")
        if self.column is not None and self.file is None:
            raise RequestError("--extra-column has no effect without --extra")

    def load(self, now_ms: int) -> Load:
        """Build the load of the extra rows: the number of rows by topic and second."""
        from timeball.spark.views.due_histogram import ALL_TOPICS, merge
        from timeball.spark.views.forecast import load_of_file, spread

        loads = []
        if self.rows is not None and self.at is not None:
            loads.append(spread(self.rows, self.at.at_ms(now_ms), self.over_ms, self.topic or ALL_TOPICS))
        if self.file is not None:
            loads.append(load_of_file(self.file, self.column, self.topic))
        return merge(loads)
