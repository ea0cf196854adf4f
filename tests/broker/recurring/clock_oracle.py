"""The runs of a rule, computed from the definition by watching a clock tick by tick.

A clock is only asked for the local time at an instant (tests/local_time_oracle.py). A rule is a function that checks
whether a local time matches. No cron library, no search, and no other program's rule for gaps or repeated times is
used:

- A rule that follows the clock runs at each tick at which the clock shows a matching time.
- Another rule runs when the clock reaches a matching time for the first time: it shows the time, or it has skipped the
  time since the tick before. With `runs_twice` the rule also runs when the clock shows a matching time again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from tests.local_time_oracle import EPOCH, SECOND, changes, shown

MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
WEEKDAYS = ("MON", "TUE", "WED", "THU", "FRI", "SAT", "SUN")
# Before and after a change, a clock is watched for this time: `cases` names times up to an hour away from the change.
AROUND = 3 * HOUR
# Indexes of some of `cases`.
HOURLY, FIXED_TIME, FIXED_TIME_SKIP_BOTH = 2, 3, 4


@dataclass(frozen=True)
class Case:
    """A rule as Timeball reads it, and the definition of its local times."""

    spec: dict[str, str]
    matches: Callable[[datetime], bool]
    follows_clock: bool = False
    skips_gaps: bool = field(init=False)
    runs_twice: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "skips_gaps", self.spec.get("gap") == "skip")
        object.__setattr__(self, "runs_twice", self.spec.get("fold") == "both")


@dataclass(frozen=True)
class Clock:
    """The ticks of a clock in a zone: from before a change of its offset until after it."""

    zone: str
    ticks: list[tuple[int, datetime]]  # seconds since 1970, and the local time
    step: timedelta
    low: datetime  # the repeated or skipped local times begin here
    high: datetime

    @property
    def from_ms(self) -> int:
        """The instant before the first tick."""
        return self.ticks[0][0] * 1_000 - 1

    @property
    def until_ms(self) -> int:
        return self.ticks[-1][0] * 1_000


def clocks(zone: str, first_year: int = 1970, end_year: int = 2038) -> Iterator[Clock]:
    """Yield a clock for each change of the zone's offset. A clock begins when none changed for 30 hours."""
    begin = datetime.min.replace(tzinfo=UTC)
    for change in changes(zone, first_year, end_year):
        before, after = shown(change - SECOND, zone) + SECOND, shown(change, zone)
        low, high = min(before, after), max(before, after)
        # The offset of Monrovia had half a minute until 1972.
        step = MINUTE if not (low.second or high.second) else timedelta(seconds=30)
        begin = begin if change - begin < 30 * HOUR else change - AROUND
        at, ticks = begin, []
        while at < change + (high - low) + AROUND:
            ticks.append((int((at - EPOCH).total_seconds()), shown(at, zone)))
            at += step
        yield Clock(zone, ticks, step, low, high)


def expected(case: Case, clock: Clock) -> list[tuple[int, str]]:
    """Return the runs of a rule: seconds since 1970, and the local time that the rule names."""
    runs = []
    reached = clock.ticks[0][1]
    for at, local in clock.ticks:
        if case.follows_clock:
            named = [local] if case.matches(local) else []
        elif local >= reached:
            passed = [reached + n * clock.step for n in range((local - reached) // clock.step + 1)]
            named = [time for time in passed if case.matches(time) and (time == local or not case.skips_gaps)]
        else:
            named = [local] if case.runs_twice and case.matches(local) else []
        if named:
            runs.append((at, named[0].isoformat()))
        reached = max(reached, local + clock.step)
    return runs


def at_time(*times: datetime) -> Callable[[datetime], bool]:
    """Return a match of the product of these times' hours and minutes, as cron has it."""
    hours, minutes = {time.hour for time in times}, {time.minute for time in times}
    return lambda local: local.minute in minutes and local.hour in hours and not local.second


def fields(*times: datetime) -> str:
    """Return the minutes and hours of these times as the first two fields of an expression."""
    minutes, hours = ({getattr(time, unit) for time in times} for unit in ("minute", "hour"))
    return " ".join(",".join(str(value) for value in sorted(values)) for values in (minutes, hours))


def cases(clock: Clock) -> list[Case]:
    """Return twelve rules about the local times at which a clock is changed."""
    low, high = clock.low, clock.high
    middle = (low + (high - low) / 2).replace(second=0, microsecond=0)
    on_time, weekday = at_time(middle), middle.weekday()
    around = {(low - HOUR).hour, low.hour, (low + HOUR).hour, high.hour}
    next_day = WEEKDAYS[(weekday + 1) % 7]
    return [
        Case({"cron": "* * * * *"}, lambda local: not local.second, True),
        Case({"cron": "*/30 * * * *"}, lambda local: not local.second and local.minute % 30 == 0, True),
        Case({"cron": "0 * * * *"}, lambda local: not local.second and local.minute == 0, True),
        Case({"cron": f"{fields(middle)} * * *"}, on_time),
        Case({"cron": f"{fields(middle)} * * *", "gap": "skip", "fold": "both"}, on_time),
        Case({"cron": f"{fields(low)} * * *"}, at_time(low)),
        Case({"cron": f"{fields(high)} * * *", "gap": "skip"}, at_time(high)),
        Case({"cron": f"{fields(low, middle)} * * *", "fold": "both"}, at_time(low, middle)),
        Case(
            {"cron": f"*/15 {','.join(map(str, sorted(around)))} * * *"},
            lambda local: not local.second and local.minute % 15 == 0 and local.hour in around,
        ),
        Case(
            {"cron": f"{fields(middle)} * * {WEEKDAYS[weekday]}"},
            lambda local: on_time(local) and local.weekday() == weekday,
        ),
        Case(
            {"cron": f"{fields(middle)} {middle.day} {middle.month} *"},
            lambda local: on_time(local) and (local.day, local.month) == (middle.day, middle.month),
        ),
        Case(
            {"cron": f"{fields(low, high)} * * {next_day}", "gap": "skip"},
            lambda local: at_time(low, high)(local) and local.weekday() == (weekday + 1) % 7,
        ),
    ]
