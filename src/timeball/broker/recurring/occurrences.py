"""Occurrences: the instants at which clocks in a time zone show the local times of a rule.

A rule names local times. `LocalTimes` computes them without a time zone, and `ClockTimetable` converts them:

    local time                                   instants
    shown once by clocks in the zone             that instant
    never shown (clocks are put forward)         the first instant after the gap, or with `skips_gaps` none
    shown twice (clocks are put back)            the first, or with `runs_twice` both

Rules that run in every hour of the day are an exception: they run each time that a clock shows one of their local
times. So they also run while an hour is repeated, and they have no additional run after a gap.

Several local times can become one instant: 02:00 and 02:30 in a gap, or 02:30 and the 03:00 with which the gap ends.
They are one occurrence, with the earliest of them as its local time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import Protocol

import numpy as np

from timeball.broker.recurring.exclusions import ExcludedDays
from timeball.broker.recurring.local_times import DAY_S, LocalTimes, instant_text, local_text
from timeball.model.message import Int64Array
from timeball.model.time_parsing import Zone, local_us

_SECOND_US = 1_000_000


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One occurrence of a rule.

    `due_ms` is its instant in ms since 1970 UTC. `local` is the local time that the rule names, in ISO format without
    an offset, such as "2026-10-25T02:30:00". In a gap it differs from the time that clocks show at `due_ms`. For a rule
    with `every` it is the instant in UTC, and ends with Z.
    """

    due_ms: int
    local: str


class Timetable(Protocol):
    """The occurrences of a rule."""

    def occurrences(self, after_ms: int, until_ms: int, limit: int) -> list[Occurrence]:
        """Compute the first occurrences later than `after_ms` and not later than `until_ms`, at most `limit`."""

    def instants(self, after_ms: int, until_ms: int, limit: int) -> Int64Array:
        """Compute the instants (ms since 1970) of the occurrences that `occurrences` would return."""

    def ending_after(self, count: int) -> Timetable:
        """Build a timetable of the first `count` occurrences. The same timetable if it has fewer."""

    def resumes_after_ms(self, local: str, after_ms: int) -> int:
        """Find a time (ms) after which the first occurrence is the one at this local time (`Rule.resumes_after_ms`)."""


@dataclass(frozen=True, slots=True)
class ClockTimetable:
    """Occurrences at the local times of a rule in a time zone."""

    times: LocalTimes
    zone: Zone
    starts_ms: int  # no occurrence is earlier
    ends_ms: int  # no occurrence is later
    skips_gaps: bool = False
    runs_twice: bool = False

    def occurrences(self, after_ms: int, until_ms: int, limit: int) -> list[Occurrence]:
        """Compute occurrences (see Timetable): for each period of the zone, the local times that clocks show in it."""
        first_ms = max(after_ms + 1, self.starts_ms, 0)
        at_s, until_s = -(-first_ms // 1_000), min(until_ms, self.ends_ms) // 1_000
        follows_clock = self.times.runs_every_hour
        at_or_after = self.times.at_or_after
        result: list[Occurrence] = []
        # One round for each period with one offset from UTC.
        while at_s <= until_s and len(result) < limit:
            period = self.zone.period(at_s * _SECOND_US)
            end_s, offset_s = period.end_us // _SECOND_US, period.offset_us // _SECOND_US
            # All local times before this one have been shown, or skipped, before the period.
            reached_s = period.reached_us // _SECOND_US
            local_s = at_s + offset_s
            # The period begins with a gap: the first skipped local time runs at its first instant.
            if not follows_clock and at_s * _SECOND_US == period.start_us and reached_s < local_s:
                skipped_s = None if self.skips_gaps else at_or_after(reached_s)
                if skipped_s is not None and skipped_s < local_s:
                    result.append(Occurrence(at_s * 1_000, local_text(skipped_s)))
                    local_s += 1  # the first instant has its occurrence
            # In a repeated hour: local times that were shown before the period do not run again.
            elif not follows_clock and not self.runs_twice:
                local_s = max(local_s, reached_s)
            while len(result) < limit:
                next_s = at_or_after(local_s)
                if next_s is None or next_s - offset_s >= end_s:
                    break
                if next_s - offset_s > until_s:
                    return result
                result.append(Occurrence((next_s - offset_s) * 1_000, local_text(next_s)))
                local_s = next_s + 1
            else:
                return result
            at_s = end_s
            # Go on with the period of `next_s`, and not with the next one, if no period between them can show an
            # earlier local time. No offset is a day or more, so this is true if the period ends a day later than
            # `local_s`.
            if end_s + offset_s - DAY_S >= local_s:
                if next_s is None:
                    break
                at_s = max(at_s, next_s - DAY_S)
        return result

    def instants(self, after_ms: int, until_ms: int, limit: int) -> Int64Array:
        return np.array([each.due_ms for each in self.occurrences(after_ms, until_ms, limit)], np.int64)

    def ending_after(self, count: int) -> ClockTimetable:
        """Build a timetable of the first `count` occurrences (see Timetable)."""
        first_occurrences = self.occurrences(-1, self.ends_ms, count)
        return (
            replace(self, ends_ms=first_occurrences[-1].due_ms) if len(first_occurrences) == count else self
        )

    def resumes_after_ms(self, local: str, after_ms: int) -> int:
        """Find a time just before the instant of `local`, or `after_ms` (see Timetable)."""
        # One local time may have two instants, so `local` does not tell which one is meant.
        if self.times.runs_every_hour or self.runs_twice:
            return after_ms
        # Just before this local time. `after_ms` is no safe result, because new rules of the zone may have moved the
        # preceding occurrence to a later instant.
        return self.zone.instant_us(local_us(datetime.fromisoformat(local))) // 1_000 - 1


@dataclass(frozen=True, slots=True)
class IntervalTimetable:
    """Occurrences at equal distances in elapsed time, from an anchor on. Only `excluded` depends on the zone."""

    interval_ms: int
    anchor_ms: int
    starts_ms: int  # no occurrence is earlier
    ends_ms: int  # no occurrence is later
    zone: Zone  # of the excluded days
    excluded: ExcludedDays

    def occurrences(self, after_ms: int, until_ms: int, limit: int) -> list[Occurrence]:
        """Compute occurrences (see Timetable), one after another."""
        due_ms = self._at_or_after(max(after_ms + 1, self.starts_ms, 0))
        until_ms = min(until_ms, self.ends_ms)
        result: list[Occurrence] = []
        while due_ms <= until_ms and len(result) < limit:
            if self.excluded.days:
                shown_us = due_ms * 1_000 + self.zone.offset_us(due_ms * 1_000)
                day = shown_us // (DAY_S * _SECOND_US)
                if day in self.excluded:
                    next_day_us = self.zone.instant_us((day + 1) * DAY_S * _SECOND_US)
                    # Clocks that are put back across midnight show the excluded day again after the first instant of
                    # the next day. `next_day_us` has passed then, so the search goes on after `due_ms`.
                    due_ms = self._at_or_after(max(due_ms + 1, -(-next_day_us // 1_000)))
                    continue
            result.append(Occurrence(due_ms, instant_text(due_ms)))
            due_ms += self.interval_ms
        return result

    def instants(self, after_ms: int, until_ms: int, limit: int) -> Int64Array:
        """Compute the instants (see Timetable), all at once if no day is excluded."""
        if self.excluded.days:
            return np.array([each.due_ms for each in self.occurrences(after_ms, until_ms, limit)], np.int64)
        first_ms = self._at_or_after(max(after_ms + 1, self.starts_ms, 0))
        count = (min(until_ms, self.ends_ms) - first_ms) // self.interval_ms + 1
        return first_ms + np.arange(max(0, min(count, limit)), dtype=np.int64) * self.interval_ms

    def ending_after(self, count: int) -> IntervalTimetable:
        """Build a timetable of the first `count` occurrences (see Timetable)."""
        first_occurrences = self.occurrences(-1, self.ends_ms, count)
        return (
            replace(self, ends_ms=first_occurrences[-1].due_ms) if len(first_occurrences) == count else self
        )

    def resumes_after_ms(self, local: str, after_ms: int) -> int:
        return after_ms

    def _at_or_after(self, instant_ms: int) -> int:
        """Find the first time of the interval, from the anchor on, that is not earlier than an instant."""
        intervals = max(0, -((self.anchor_ms - instant_ms) // self.interval_ms))
        return self.anchor_ms + intervals * self.interval_ms
