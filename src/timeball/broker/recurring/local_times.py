"""Local times without a time zone: seconds since 1970, counted as if they were in UTC."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import lru_cache
from typing import Protocol

from timeball.model.time_parsing import local_us

DAY_S = 86_400
EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
# The last second of the year 9999: the last one that a datetime can represent.
LAST_S = (date.max.toordinal() - EPOCH_ORDINAL + 1) * DAY_S - 1
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001 - a local time


class LocalTimes(Protocol):
    """The local times of a rule, in increasing order."""

    @property
    def runs_every_hour(self) -> bool:
        """True if the rule runs in each hour of its days, so that it follows the clock (occurrences.py)."""

    def at_or_after(self, local_s: int) -> int | None:
        """Find the first local time that is not earlier than `local_s`. None if there is none."""


@dataclass(frozen=True, slots=True)
class ListedTimes:
    """Local times in a list."""

    times: tuple[int, ...]  # sorted

    @property
    def runs_every_hour(self) -> bool:
        return False

    def at_or_after(self, local_s: int) -> int | None:
        at = bisect_left(self.times, local_s)
        return self.times[at] if at < len(self.times) else None


def local_seconds(local: datetime) -> int:
    """Convert a datetime in whole seconds to a local time. Its tzinfo is ignored."""
    return local_us(local) // 1_000_000


def local_datetime(local_s: int) -> datetime:
    """Convert a local time of the years 1 to 9999 to a datetime without tzinfo."""
    return _EPOCH + timedelta(seconds=local_s)


# Schedules are often due at the same time.
@lru_cache(1_024)
def local_text(local_s: int) -> str:
    """Format a local time, as in "2026-10-25T02:30:00"."""
    return local_datetime(local_s).isoformat()


def instant_text(instant_ms: int) -> str:
    """Format an instant in UTC, as in "2026-10-25T02:30:00Z", with milliseconds only if there are some."""
    precision = "milliseconds" if instant_ms % 1_000 else "seconds"
    return (_EPOCH + timedelta(milliseconds=instant_ms)).isoformat(timespec=precision) + "Z"
