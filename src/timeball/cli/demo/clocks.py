"""Two ways to put a day of 2013 into the near future. Pure functions on columns.

`CompressedDay` runs one day from midnight to midnight in about a minute: minute m of the day falls due at
start + m * length / 1440. `coming_year` keeps month, day and time and takes the first such instant that lies
ahead, so that every promise waits between an hour and a year.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from timeball.message import Int64Array

MINUTES_A_DAY = 1_440
HOUR_MS = 3_600_000


@dataclass(frozen=True)
class CompressedDay:
    """A day that begins at `start_ms` and takes `length_ms`."""

    start_ms: int
    length_ms: int

    @property
    def end_ms(self) -> int:
        """The instant of the following midnight."""
        return self.start_ms + self.length_ms

    def due_ms(self, minutes: Int64Array) -> Int64Array:
        """Instants of minutes after midnight, 0 to 1439."""
        return self.start_ms + minutes * self.length_ms // MINUTES_A_DAY

    def minutes(self, instants_ms: Int64Array) -> npt.NDArray[np.float64]:
        """Inverse of `due_ms`, with fractions: where instants lie in the day."""
        return np.asarray((instants_ms - self.start_ms) * (MINUTES_A_DAY / self.length_ms), dtype=np.float64)

    def clock(self, now_ms: int) -> str:
        """Time of day at `now_ms`, as HH:MM; stays at the ends of the day outside it."""
        minute = int((now_ms - self.start_ms) * MINUTES_A_DAY / self.length_ms)
        minute = min(max(minute, 0), MINUTES_A_DAY - 1)
        return f"{minute // 60:02}:{minute % 60:02}"


def coming_year(instants_ms: Int64Array, now_ms: int) -> Int64Array:
    """The same month, day and time (UTC) in the year that begins an hour after `now_ms`.

    29 February becomes 1 March in a year that has none.
    """
    old = instants_ms.astype("datetime64[ms]")
    earliest_ms = now_ms + HOUR_MS
    this_year = np.datetime64(earliest_ms, "ms").astype("datetime64[Y]")
    first = _in_year(old, this_year)
    second = _in_year(old, this_year + 1)
    return np.where(first >= earliest_ms, first, second)


def _in_year(instants: npt.NDArray[np.datetime64], year: np.datetime64) -> Int64Array:
    months = instants.astype("datetime64[M]")
    month_number = (months - instants.astype("datetime64[Y]").astype("datetime64[M]")).astype(np.int64)
    within_month = instants - months.astype("datetime64[ms]")
    moved = (year.astype("datetime64[M]") + month_number).astype("datetime64[ms]") + within_month
    return np.asarray(moved, dtype="datetime64[ms]").astype(np.int64, copy=False)
