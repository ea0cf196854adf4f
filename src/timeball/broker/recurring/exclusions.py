"""Excluded days: dates without occurrences, such as holidays. Their occurrences are left out or move to another date.

Days are numbers of days since 1970.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from datetime import date
from typing import NamedTuple, TypeGuard

from timeball.broker.recurring.local_times import DAY_S, EPOCH_ORDINAL, LAST_S, LocalTimes


class ExcludedDays:
    """A set of dates without occurrences, and the target of each: the date to which its occurrences move.

    `move`: "before" or "after" if the target is the nearest earlier or later date that is not excluded, or "skip" if
    there are no targets. Targets before 1970 and after 9999 are left out.
    """

    __slots__ = ("_ends", "days", "targets")

    def __init__(self, dates: Iterable[date], move: str) -> None:
        """Compute the target and the end of each excluded day."""
        self.days = frozenset(day.toordinal() - EPOCH_ORDINAL for day in dates)
        # By excluded day: the first later day that is not excluded.
        self._ends: dict[int, int] = {}
        for day in sorted(self.days, reverse=True):
            self._ends[day] = self._ends.get(day + 1, day + 1)
        step = {"skip": 0, "before": -1, "after": 1}[move]
        # Pairs of a target and an excluded day, sorted by target.
        self.targets: list[tuple[int, int]] = []
        if step:
            target_by_day: dict[int, int] = {}
            # The day next to its target first. Each other day of a row has the target of its neighbour.
            for day in sorted(self.days, reverse=step > 0):
                target_by_day[day] = target_by_day.get(day + step, day + step)
            pairs = ((target, day) for day, target in target_by_day.items())
            self.targets = sorted(pair for pair in pairs if 0 <= pair[0] <= LAST_S // DAY_S)

    def __contains__(self, day: int) -> bool:
        return day in self.days

    def end(self, day: int) -> int:
        """Find the first day after an excluded day that is not excluded."""
        return self._ends[day]


class _Search(NamedTuple):
    """A search for the first local time that is not earlier than `from_s`."""

    from_s: int
    found_s: int | None  # None: there is none


def _answers(search: _Search | None, local_s: int) -> TypeGuard[_Search]:
    """Check whether a search from `local_s` on has the same result as this one."""
    return (
        search is not None
        and search.from_s <= local_s
        and (search.found_s is None or local_s <= search.found_s)
    )


class Excluding:
    """The local times of a rule with excluded days (`LocalTimes`)."""

    __slots__ = ("_excluded", "_last", "_last_unmoved", "_targets", "_times", "runs_every_hour")

    def __init__(self, times: LocalTimes, excluded: ExcludedDays) -> None:
        """`times`: the local times of the rule, also those on excluded days."""
        self._times, self._excluded = times, excluded
        self.runs_every_hour = times.runs_every_hour
        # Only excluded days on which the rule has times. There may be a thousand other days, which no search should
        # look at.
        self._targets = [pair for pair in excluded.targets if self._has_times(pair[1])]
        # The last search among all times, and the last search among times that did not move.
        self._last: _Search | None = None
        self._last_unmoved: _Search | None = None

    def _has_times(self, day: int) -> bool:
        """Check whether the rule has a local time on a day."""
        first_s = self._times.at_or_after(day * DAY_S)
        return first_s is not None and first_s // DAY_S == day

    def at_or_after(self, local_s: int) -> int | None:
        """Find the first local time that is not earlier than `local_s`. None if there is none."""
        last = self._last  # read once, because another thread may search, too
        if not _answers(last, local_s):
            last = self._last = _Search(local_s, self._search(local_s))
        return last.found_s

    def _search(self, local_s: int) -> int | None:
        """Find the first local time that is not earlier, among unmoved times and times that move to another day."""
        found_s = self._unmoved_at_or_after(local_s)
        targets = self._targets
        for target, day in targets[bisect_left(targets, (local_s // DAY_S,)) :]:
            if found_s is not None and found_s < target * DAY_S:
                break
            shift_s = (target - day) * DAY_S
            moved_s = self._times.at_or_after(max(local_s - shift_s, day * DAY_S))
            if moved_s is not None and moved_s // DAY_S == day:
                found_s = moved_s + shift_s if found_s is None else min(found_s, moved_s + shift_s)
        return found_s

    def _unmoved_at_or_after(self, local_s: int) -> int | None:
        """Find the first time of the rule that is not earlier and on a day that is not excluded."""
        # The result stays in memory, because a search may walk over a thousand excluded days: of a rule for Mondays, a
        # thousand excluded Mondays.
        last = self._last_unmoved
        if _answers(last, local_s):
            return last.found_s
        found_s = self._times.at_or_after(local_s)
        while found_s is not None and (day := found_s // DAY_S) in self._excluded:
            found_s = self._times.at_or_after(self._excluded.end(day) * DAY_S)
        self._last_unmoved = _Search(local_s, found_s)
        return found_s
