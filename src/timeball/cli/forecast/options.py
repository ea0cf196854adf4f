"""What the options of `timeball forecast` ask for, as values: a window of time, rates of consumers, an extra load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from timeball.cli.units import parse_duration_ms
from timeball.errors import RequestError
from timeball.instants import instant_ms

if TYPE_CHECKING:
    from timeball.pipeline.table_store import Due
    from timeball.pipeline.views.due_histogram import Load

THE_OTHERS = (
    "*"  # as in pipeline/views/consumer_model.py: other commands should not wait for the pipeline's modules
)


class Bars(StrEnum):
    """The width of a bar: pipeline/views/due_histogram.py's units."""

    AUTO = "auto"
    SECOND = "second"
    MINUTE = "minute"
    HOUR = "hour"
    DAY = "day"


@dataclass(frozen=True)
class Moment:
    """An instant, or so many milliseconds after the instant that the forecast is of."""

    ms: int
    is_relative: bool = False

    def at_ms(self, now_ms: int) -> int:
        """Return it as an instant."""
        return now_ms + self.ms if self.is_relative else self.ms


def parse_moment(text: str) -> Moment:
    """Parse an instant (2030-01-31T09:00:00Z, or milliseconds since 1970), or how much later than now: 36h."""
    if text.strip().isdecimal():
        return Moment(instant_ms(text))
    try:
        return Moment(parse_duration_ms(text), is_relative=True)
    except RequestError:
        pass
    try:
        return Moment(instant_ms(text))
    except RequestError as error:
        raise RequestError(f"{error}; or how long from now: 90s, 36h, 7d") from error


def parse_rates(texts: Sequence[str]) -> dict[str, float]:
    """Parse rows a second by topic from N and TOPIC=N; THE_OTHERS stands for the topics that are not named."""
    rates: dict[str, float] = {}
    for text in texts:
        name, equals, number = text.rpartition("=")
        name = name.strip() if equals else THE_OTHERS
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
    """A choice of promises: due within two moments, as of now, of a version, or of the version of an instant."""

    begin: Moment | None = None
    end: Moment | None = None
    version: int | None = None
    timestamp_ms: int | None = None
    is_checked: bool = False

    def check(self) -> None:
        """Raise RequestError for options that exclude each other."""
        if self.version is not None and self.timestamp_ms is not None:
            raise RequestError("--version and --timestamp: give one of them")
        if self.is_checked and self.version is None and self.timestamp_ms is None:
            raise RequestError("--check holds an older forecast against what came: name it with --version")

    def bounds(self, now_ms: int) -> Due:
        """Return from <= due_ms < until, None for an open end; RequestError when that holds no instant."""
        low = None if self.begin is None else self.begin.at_ms(now_ms)
        high = None if self.end is None else self.end.at_ms(now_ms)
        if high is not None and high <= (now_ms if low is None else low):
            raise RequestError(f"--until lies before {'now' if low is None else '--from'}")
        return low, high


@dataclass(frozen=True)
class Asked:
    """The questions about the load."""

    by: str
    peaks: int
    by_topic: bool
    topics: Sequence[str]
    rates: dict[str, float]
    backlog: int = 0
    within_ms: int | None = None


@dataclass(frozen=True)
class Extra:
    """A load that is not sent yet, from numbers, from a file, or both."""

    rows: int | None = None
    at: Moment | None = None
    over_ms: int = 0
    topic: str | None = None
    file: Path | None = None
    column: str | None = None

    @property
    def is_none(self) -> bool:
        """Return whether there is no extra load."""
        return self.rows is None and self.file is None

    def check(self) -> None:
        """Refuse options that say nothing without another; RequestError names both."""
        if (self.rows is None) != (self.at is None):
            raise RequestError("--extra-rows and --extra-at: one says nothing without the other")
        if self.over_ms and self.rows is None:
            raise RequestError("--extra-over says nothing without --extra-rows and --extra-at")
        if self.topic is not None and self.is_none:
            raise RequestError("--extra-topic says nothing without --extra-rows or --extra")
        if self.column is not None and self.file is None:
            raise RequestError("--extra-column says nothing without --extra")

    def load(self, now_ms: int) -> Load:
        """Return the rows, each in its second."""
        from timeball.pipeline.views.consumer_model import spread
        from timeball.pipeline.views.due_histogram import ALL_TOPICS, merge
        from timeball.pipeline.views.forecast import load_of_file

        parts = []
        if self.rows is not None and self.at is not None:
            parts.append(spread(self.rows, self.at.at_ms(now_ms), self.over_ms, self.topic or ALL_TOPICS))
        if self.file is not None:
            parts.append(load_of_file(self.file, self.column, self.topic))
        return merge(parts)
