"""Excluded days: local times without those of some dates, such as holidays, or with these on another date instead.

Days are numbers of days since 1970.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from datetime import date

from timeball.broker.recurring.local_times import DAY_S, EPOCH_ORDINAL, LAST_S, LocalTimes


class ExcludedDays:
    """A set of dates without occurrences. Each date has a target, to which its occurrences move.

    `move` is "skip" (no targets), "before" or "after": the nearest earlier or later date that is not excluded.
    """

    __slots__ = ("days", "targets")

    def __init__(self, dates: Iterable[date], move: str) -> None:
        self.days = frozenset(day.toordinal() - EPOCH_ORDINAL for day in dates)
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


class Excluding:
    """The local times of a rule with excluded days."""

    __slots__ = ("_excluded", "_times", "runs_every_hour")

    def __init__(self, times: LocalTimes, excluded: ExcludedDays) -> None:
        self._times, self._excluded = times, excluded
        self.runs_every_hour = times.runs_every_hour

    def at_or_after(self, local_s: int) -> int | None:
        """Find the first local time that is not earlier."""
        found = self._times.at_or_after(local_s)
        while found is not None and found // DAY_S in self._excluded:
            found = self._times.at_or_after((found // DAY_S + 1) * DAY_S)
        targets = self._excluded.targets
        for target, day in targets[bisect_left(targets, (local_s // DAY_S,)) :]:
            if found is not None and found < target * DAY_S:
                break
            shift_s = (target - day) * DAY_S
            moved = self._times.at_or_after(max(local_s - shift_s, day * DAY_S))
            if moved is not None and moved // DAY_S == day:
                found = moved + shift_s if found is None else min(found, moved + shift_s)
        return found
