"""Excluded dates: left out, or moved to the nearest date before or after that is not excluded."""

from __future__ import annotations

from datetime import date, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.broker.recurring.exclusions import ExcludedDays, Excluding
from timeball.broker.recurring.local_times import DAY_S, ListedTimes
from timeball.broker.recurring.rule import Rule
from timeball.model.time_parsing import instant_ms

# 2026-12-24 is a Thursday.
CHRISTMAS = ["2026-12-24", "2026-12-25", "2026-12-26"]


def local_times(spec: dict[str, object], after: str, number: int) -> list[str]:
    """List the first local times later than `after`, as month, day, hour and minute."""
    rule = Rule.parse({"zone": "Europe/Berlin", "exclude": CHRISTMAS, **spec})
    return [run.local[5:16] for run in rule.after(instant_ms(after), number)]


@pytest.mark.parametrize(
    ("move", "expected"),
    [
        ("skip", ["12-23T09:00", "12-28T09:00"]),
        ("before", ["12-23T09:00", "12-28T09:00"]),
        ("after", ["12-23T09:00", "12-27T09:00"]),
    ],
)
def test_a_time_that_moves_to_another_time_of_the_rule_runs_once(move: str, expected: list[str]) -> None:
    assert local_times({"cron": "0 9 * * MON-FRI", "move": move}, "2026-12-22T12:00:00Z", 2) == expected


@pytest.mark.parametrize(
    ("move", "expected"),
    [
        ("skip", ["2027"]),
        ("before", ["2026-12-23T09:00:00", "2027"]),
        ("after", ["2026-12-27T09:00:00", "2027"]),
    ],
)
def test_a_yearly_run_on_an_excluded_date_is_left_out_or_moves(move: str, expected: list[str]) -> None:
    spec = {"cron": "0 9 25 12 *", "zone": "UTC", "exclude": CHRISTMAS, "move": move}
    runs = Rule.parse(spec).after(instant_ms("2026-12-01T00:00:00Z"), len(expected))
    assert all(run.local.startswith(text) for run, text in zip(runs, expected, strict=True))


def test_times_of_rrule_and_at_move() -> None:
    rrule = {"rrule": "DTSTART:20261224T090000\nRRULE:FREQ=DAILY;INTERVAL=3", "move": "after"}
    assert local_times(rrule, "2026-12-01T00:00:00Z", 2) == ["12-27T09:00", "12-30T09:00"]
    listed = {"at": ["2026-12-25T08:00", "2026-12-27T10:00"], "move": "before"}
    assert local_times(listed, "2026-12-01T00:00:00Z", 5) == ["12-23T08:00", "12-27T10:00"]


def test_a_time_that_moves_into_a_gap_runs_after_the_gap() -> None:
    spec = {"cron": "30 2 28 3 *", "zone": "Europe/Berlin", "exclude": ["2026-03-28"], "move": "after"}
    (run,) = Rule.parse(spec).after(instant_ms("2026-03-01T00:00:00Z"))
    assert (run.local, run.due_ms) == ("2026-03-29T02:30:00", instant_ms("2026-03-29T01:00:00Z"))


def test_a_count_does_not_include_excluded_occurrences() -> None:
    spec = {"cron": "0 9 * * *", "starts_at": "2026-12-23T00:00", "count": 3}
    assert local_times(spec, "2026-01-01T00:00:00Z", 9) == ["12-23T09:00", "12-27T09:00", "12-28T09:00"]


DAYS = st.integers(0, 12)
TIMES = st.sets(st.tuples(DAYS, st.integers(0, 3)), max_size=20)


@given(times=TIMES, excluded=st.sets(DAYS, max_size=8), move=st.sampled_from(["skip", "before", "after"]))
def test_local_times_match_their_definition(
    times: set[tuple[int, int]], excluded: set[int], move: str
) -> None:
    """`times`: pairs of a day and an hour. The days are counted from day 100 since 1970."""
    expected = set()
    for day, hour in times:
        step = {"skip": 0, "before": -1, "after": 1}[move]
        if day in excluded and not step:
            continue
        while day in excluded:
            day += step
        expected.add((100 + day) * DAY_S + hour * 3_600)
    listed = ListedTimes(tuple(sorted((100 + day) * DAY_S + hour * 3_600 for day, hour in times)))
    days = ExcludedDays([date(1970, 1, 1) + timedelta(days=100 + day) for day in excluded], move)
    # A new object for each search has no results of earlier searches.
    times_found, local_s = [], Excluding(listed, days).at_or_after(0)
    while local_s is not None:
        times_found.append(local_s)
        local_s = Excluding(listed, days).at_or_after(local_s + 1)
    assert times_found == sorted(expected)
    # One object gives the same results in any order of searches.
    rule = Excluding(listed, days)
    searches = sorted(expected, reverse=True) + sorted(expected)
    assert [rule.at_or_after(local_s) for local_s in searches] == searches
    next_times = [next((later for later in sorted(expected) if later > each), None) for each in searches]
    assert [rule.at_or_after(local_s + 1) for local_s in searches] == next_times


class CountedMondays:
    """The midnights of all Mondays, and the number of searches for them."""

    runs_every_hour, searches = False, 0

    def at_or_after(self, local_s: int) -> int | None:
        self.searches += 1
        days = -(-local_s // DAY_S)
        return (days + (4 - days) % 7) * DAY_S  # 1970-01-05 was a Monday


@pytest.mark.parametrize("move", ["skip", "before", "after"])
@pytest.mark.parametrize("step", [1, 7])
def test_a_thousand_excluded_days_are_searched_once(move: str, step: int) -> None:
    times, first = CountedMondays(), date(2026, 1, 5)
    days = ExcludedDays([first + timedelta(days=step * day) for day in range(1_000)], move)
    rule = Excluding(times, days)
    start_s = (first - date(1970, 1, 1)).days * DAY_S
    rule.at_or_after(start_s)
    before = times.searches
    for day in range(10):
        rule.at_or_after(start_s + day * DAY_S)
    assert times.searches - before <= 40, "ten more searches do not walk over the thousand days again"
