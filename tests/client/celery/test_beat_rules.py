"""Rules of celery beat's schedules: their times are those of Celery."""

from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from celery.schedules import crontab, schedule, solar

from timeball.broker.recurring.rule import Rule
from timeball.client.celery.beat_rules import rule_of
from timeball.model.errors import InvalidDelay

APP = Celery("shop", set_as_current=False, timezone="Europe/Berlin")
BEGIN = datetime(2026, 1, 1, 12, 30, tzinfo=UTC)


def bound(each: Any, app: Celery = APP) -> Any:
    """As an entry of beat binds a schedule to its app."""
    each.app = app
    return each


def times_of_celery(each: crontab, number: int) -> list[datetime]:
    """The next times by Celery's own arithmetic, with its clock at the time before each."""
    found, now = [], BEGIN
    for _ in range(number):
        clock = crontab(
            minute=each.minute, hour=each.hour, day_of_week=each.day_of_week, day_of_month=each._orig_day_of_month,
            month_of_year=each._orig_month_of_year, nowfun=lambda now=now: now, app=each.app,
        )  # fmt: skip
        now = now + clock.remaining_estimate(now)
        found.append(now.astimezone(UTC))
    return found


def times_of(rule: dict[str, object], number: int) -> list[datetime]:
    begin_ms = int(BEGIN.timestamp() * 1000)
    return [
        datetime.fromtimestamp(each.due_ms / 1000, UTC) for each in Rule.parse(rule).after(begin_ms, number)
    ]


@pytest.mark.parametrize(
    ("each", "cron"),
    [
        (crontab(), "* * * * *"),
        (crontab(minute=0, hour=4), "0 4 * * *"),
        (crontab(minute="*/15"), "*/15 * * * *"),
        (crontab(minute="5,35", hour="8-17", day_of_week="mon-fri"), "5,35 8-17 * * 1-5"),
        (crontab(minute=0, hour=0, day_of_week="fri-mon"), "0 0 * * 0,1,5,6"),
        (crontab(minute=0, hour=0, day_of_week="*/2"), "0 0 * * 0,2,4,6"),
        (crontab(minute=30, hour=2, day_of_month="1,15"), "30 2 1,15 * *"),
        (crontab(minute=0, hour=0, day_of_month=1, month_of_year="*/3"), "0 0 1 */3 *"),
        (crontab(minute="50-10/5", hour={7}), "0,5,10,50,55 7 * * *"),
        (crontab(minute="*/90"), "0 * * * *"),
    ],
    ids=repr,
)
def test_a_crontab_is_a_cron_expression(each: crontab, cron: str) -> None:
    rule = rule_of(bound(each))
    assert rule["zone"] == "Europe/Berlin"
    assert Rule.parse(rule) == Rule.parse({"cron": cron, "zone": "Europe/Berlin"})
    assert times_of(rule, 5) == times_of_celery(each, 5)


@pytest.mark.parametrize(
    "each",
    [
        crontab(minute=0, hour=9, day_of_month=13, day_of_week="fri"),
        crontab(minute="0,30", hour="8-10", day_of_month="1-7", day_of_week="mon"),
        crontab(minute=0, hour=0, day_of_month=29, month_of_year=2, day_of_week="mon"),
        crontab(minute=0, hour=0, day_of_month="*/2", day_of_week="mon,thu"),
    ],
    ids=repr,
)
def test_both_days_have_to_match_as_in_celery(each: crontab) -> None:
    rule = rule_of(bound(each))
    assert "rrule" in rule
    assert times_of(rule, 3) == times_of_celery(each, 3)


def test_random_crontabs_have_the_times_of_celery() -> None:
    chance = random.Random(5)

    def some(low: int, high: int) -> set[int] | str:
        values = range(low, high + 1)
        return "*" if chance.random() < 0.4 else set(chance.sample(values, chance.randint(1, len(values))))

    for _ in range(60):
        each = bound(
            crontab(
                minute=some(0, 59), hour=some(0, 23), day_of_month=some(1, 28), month_of_year=some(1, 12),
                day_of_week=some(0, 6),
            ),
            Celery(set_as_current=False),  # in UTC: Celery has other times where clocks change
        )  # fmt: skip
        assert times_of(rule_of(each), 4) == times_of_celery(each, 4), each


@pytest.mark.parametrize(
    ("each", "rule"),
    [
        (schedule(30.0), {"every": "30s"}),
        (schedule(timedelta(hours=1, minutes=30)), {"every": "5400s"}),
        (schedule(1.5), {"every": "1500ms"}),
        (schedule(30, relative=True), {"every": "30s"}),
        (schedule(timedelta(minutes=1), relative=True), {"cron": "* * * * *", "zone": "Europe/Berlin"}),
        (schedule(timedelta(minutes=20), relative=True), {"cron": "*/20 * * * *", "zone": "Europe/Berlin"}),
        (schedule(timedelta(hours=1), relative=True), {"cron": "0 * * * *", "zone": "Europe/Berlin"}),
        (schedule(timedelta(hours=6), relative=True), {"cron": "0 */6 * * *", "zone": "Europe/Berlin"}),
        (schedule(timedelta(days=1), relative=True), {"cron": "0 0 * * *", "zone": "Europe/Berlin"}),
        (
            schedule(timedelta(days=3), relative=True),
            {"rrule": "DTSTART:19700101T000000\nRRULE:FREQ=DAILY;INTERVAL=3", "zone": "Europe/Berlin"},
        ),
    ],
    ids=str,
)
def test_an_interval_and_a_relative_one(each: schedule, rule: dict[str, object]) -> None:
    assert rule_of(bound(each)) == rule
    Rule.parse(rule)


def test_the_zone_is_that_of_the_app() -> None:
    assert rule_of(bound(crontab(), Celery(set_as_current=False)))["zone"] == "UTC"
    nameless = Celery(set_as_current=False, timezone=timezone(timedelta(hours=1)))
    with pytest.raises(InvalidDelay, match="has no name: set `timezone`"):
        rule_of(bound(crontab(), nameless))


def sunset() -> solar:
    """A solar schedule. Its constructor needs `ephem`."""
    event: solar = solar.__new__(solar)
    event.event = "sunset"
    return event


class Weekly(crontab):
    """A schedule of the application."""


@pytest.mark.parametrize(
    ("each", "advice"),
    [
        (sunset(), "solar event sunset: the broker does not know the sun; use a crontab"),
        (Weekly(), "Weekly: the broker stores a crontab"),
        (object(), "object: the broker stores a crontab"),
        (crontab(nowfun=lambda: BEGIN), "nowfun: the clock of the broker counts; leave it out"),
        (schedule(0.5), "an interval of 0.5 s: the shortest of the broker is 1 s"),
        (schedule(0), "an interval of 0 s"),
        (schedule(timedelta(minutes=90), relative=True), "leave `relative` out, or write a crontab"),
        (schedule(timedelta(hours=5), relative=True), "leave `relative` out, or write a crontab"),
        (schedule(timedelta(hours=36), relative=True), "leave `relative` out, or write a crontab"),
    ],
    ids=lambda each: type(each).__name__ if not isinstance(each, str) else each[:20],
)
def test_schedules_that_cannot_be_stored_are_refused(each: Any, advice: str) -> None:
    with pytest.raises(InvalidDelay) as refusal:
        rule_of(each if type(each) is object else bound(each))
    assert advice in str(refusal.value)
