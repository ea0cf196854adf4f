"""Excluded days: local times without those of some dates, such as holidays, or with these on another date instead.

Days are numbers of days since 1970.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from datetime import date
from typing import TypeGuard

from timeball.broker.recurring.local_times import DAY_S, EPOCH_ORDINAL, LAST_S, LocalTimes


class ExcludedDays:
    """A set of dates without occurrences. Each date has a target, to which its occurrences move.

    `move` is "skip" (no targets), "before" or "after": the nearest earlier or later date that is not excluded.
    """

    __slots__ = ("_ends", "days", "targets")

    def __init__(self, dates: Iterable[date], move: str) -> None:
        self.days = frozenset(day.toordinal() - EPOCH_ORDINAL for day in dates)
        self._ends: dict[int, int] = {}  # the first day after each excluded one that is not excluded
        for day in sorted(self.days, reverse=True):
            self._ends[day] = self._ends.get(day + 1, day + 1)
        step = {"skip": 0, "before": -1, "after": 1}[move]
        # Pairs of a target and the excluded day that moves there, by target.
        self.targets: list[tuple[int, int]] = []
        if step:
            target_by_day: dict[int, int] = {}
            # Those nearest to their target first, so that a thousand days in a row take no search each.
            for day in sorted(self.days, reverse=step > 0):
                target_by_day[day] = target_by_day.get(day + step, day + step)
            pairs = ((target, day) for day, target in target_by_day.items())
            self.targets = sorted(pair for pair in pairs if 0 <= pair[0] <= LAST_S // DAY_S)

    def __contains__(self, day: int) -> bool:
        return day in self.days

    def end(self, day: int) -> int:
        """Return the first day after an excluded one that is not excluded."""
        return self._ends[day]


_Search = tuple[int, int | None]


def _has(search: _Search | None, local_s: int) -> TypeGuard[_Search]:
    """Check whether a search would have the same result if it began at `local_s`."""
    return search is not None and search[0] <= local_s and (search[1] is None or local_s <= search[1])


class Excluding:
    """The local times of a rule with excluded days."""

    __slots__ = ("_excluded", "_found", "_last", "_targets", "_times", "runs_every_hour")

    def __init__(self, times: LocalTimes, excluded: ExcludedDays) -> None:
        self._times, self._excluded = times, excluded
        self.runs_every_hour = times.runs_every_hour
        # Once: without them, a search would ask for each of a thousand days on which the rule has no time.
        self._targets = [pair for pair in excluded.targets if self._has_times(pair[1])]
        # The last searches, as their beginning and result: of all times, and of those on days that are not excluded.
        self._last: _Search | None = None
        self._found: _Search | None = None

    def _has_times(self, day: int) -> bool:
        found = self._times.at_or_after(day * DAY_S)
        return found is not None and found // DAY_S == day

    def at_or_after(self, local_s: int) -> int | None:
        """Find the first local time that is not earlier."""
        last = self._last  # read once, because another thread may search, too
        if not _has(last, local_s):
            last = self._last = local_s, self._search(local_s)
        return last[1]

    def _search(self, local_s: int) -> int | None:
        found = self._not_excluded(local_s)
        targets = self._targets
        for target, day in targets[bisect_left(targets, (local_s // DAY_S,)) :]:
            if found is not None and found < target * DAY_S:
                break
            shift_s = (target - day) * DAY_S
            moved = self._times.at_or_after(max(local_s - shift_s, day * DAY_S))
            if moved is not None and moved // DAY_S == day:
                found = moved + shift_s if found is None else min(found, moved + shift_s)
        return found

    def _not_excluded(self, local_s: int) -> int | None:
        """Find the first time of the rule that is not earlier, on a day that is not excluded."""
        # A rule for Mondays without a thousand of them walks over all of these, once.
        last = self._found
        if _has(last, local_s):
            return last[1]
        found = self._times.at_or_after(local_s)
        while found is not None and (day := found // DAY_S) in self._excluded:
            found = self._times.at_or_after(self._excluded.end(day) * DAY_S)
        self._found = local_s, found
        return found
