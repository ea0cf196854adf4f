"""Entries of celery beat as schedules: their messages are those of Celery. Nothing is sent."""

from __future__ import annotations

import json
import random
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from celery.beat import BeatLazyFunc
from celery.schedules import crontab, schedule, solar
from kombu import Connection
from kombu.utils.json import loads

import timeball.client.celery  # the scheme timeball://
from timeball.broker.recurring.rule import Rule
from timeball.client.celery import messages
from timeball.client.celery.beat_entries import NAME_BYTES_MAX, BeatSchedule, rule_of
from timeball.client.celery.schedulers import TimeballScheduler
from timeball.model import limits
from timeball.model.errors import InvalidDelay, RequestError

assert timeball.client.celery.Control  # the import is used


def app_of(beat_schedule: dict[str, Any], url: str = "timeball://127.0.0.1:1/vh", **settings: Any) -> Celery:
    """An app with the task shop.report. No broker runs at its URL: reading entries needs none."""
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.update(beat_schedule=beat_schedule, **{"result_expires": None, **settings})

    @app.task(shared=False, name="shop.report", expires=settings.get("expires"))
    def report(kind: str, *, copies: int = 1) -> None:
        pass

    app.finalize()
    return app


def read(app: Celery) -> dict[str, BeatSchedule]:
    """The schedules that beat would store, by the names of their entries."""
    return {schedule.entry: schedule for schedule in TimeballScheduler(app).read()}


def entry(schedule: Any = 30.0, args: Any = ("daily",), **more: Any) -> dict[str, Any]:
    """An entry of `beat_schedule` for the task shop.report."""
    return {"task": "shop.report", "schedule": schedule, "args": args, **more}


def content(schedule: BeatSchedule) -> dict[str, Any]:
    """The message of kombu in the body of a schedule."""
    payload: dict[str, Any] = loads(schedule.body)
    return payload


def test_the_message_of_an_entry_is_the_one_that_celery_would_send() -> None:
    app = app_of({"report": entry(crontab(minute=0, hour=4), kwargs={"copies": 2})})
    report = read(app)["report"]
    assert (report.name, report.topic, report.tag) == ("vh-shop-report", "vh-celery", "shop.report")
    assert report.rule == {"cron": "0 4 * * *", "zone": "UTC"}
    assert report.properties == {"celery_app": "vh-shop"} and report.catch_up_within == "1d"
    connection = Connection("timeball://")
    channel = connection.transport.create_channel(connection.transport)
    payload = content(report)
    assert payload["headers"]["task"] == "shop.report" and payload["headers"]["celery_beat_task"]
    assert payload["headers"]["ignore_result"] is False
    message = channel.Message(
        {**payload, "properties": {**payload["properties"], "delivery_tag": "x"}}, channel=channel
    )
    assert message.decode()[:2] == [["daily"], {"copies": 2}]


def test_the_messages_of_an_entry_are_the_same_at_each_read() -> None:
    entries = {"report": entry(options={"expires": 60}), "unknown": {"task": "other.task", "schedule": 5}}
    first, second = (TimeballScheduler(app_of(entries)).read() for _ in range(2))
    assert first == second and len(first) == 2
    # The broker sets the ids at each occurrence.
    assert not {"id", "root_id"} & {key for key, value in content(first[0])["headers"].items() if value}


def test_the_queue_of_an_entry_comes_from_its_options_or_from_the_routes() -> None:
    app = app_of(
        {
            "option": entry(options={"queue": "mail.high"}),
            "route": {"task": "shop.routed", "schedule": 5, "options": {"headers": {"a": 1}}},
        },
        task_routes={"shop.routed": {"queue": "slow"}},
    )
    schedules = read(app)
    assert (schedules["option"].topic, schedules["route"].topic) == ("vh-mail%2Ehigh", "vh-slow")
    assert content(schedules["route"])["headers"]["a"] == 1


@pytest.mark.parametrize(
    ("more", "expires_s"),
    [
        ({"options": {"expires": 60}}, "60"),
        ({"options": {"expires": timedelta(hours=1)}}, "3600"),
        ({}, None),
    ],
)
def test_a_relative_expiry_is_a_property_and_no_part_of_the_message(
    more: dict[str, Any], expires_s: str | None
) -> None:
    report = read(app_of({"report": entry(**more)}))["report"]
    assert report.properties.get(messages.EXPIRES) == expires_s
    assert content(report)["headers"]["expires"] is None


def test_the_expiry_of_an_entry_overrides_that_of_its_task() -> None:
    expires_at = datetime(2030, 1, 1, tzinfo=UTC)
    entries = {
        "task": entry(),
        "own": entry(options={"expires": expires_at}),
        "none": entry(options={"expires": None}),
    }
    schedules = read(app_of(entries, expires=20))
    expiries = {name: schedule.properties.get(messages.EXPIRES) for name, schedule in schedules.items()}
    assert expiries == {"task": "20", "own": None, "none": None}
    assert content(schedules["own"])["headers"]["expires"] == expires_at.isoformat()


def test_the_deadline_of_beat_limits_the_missed_times_of_crontabs_only() -> None:
    app = app_of({"cron": entry(crontab()), "interval": entry(30)}, beat_cron_starting_deadline=3_600)
    schedules = read(app)
    assert (schedules["cron"].catch_up_within, schedules["interval"].catch_up_within) == ("3600s", "1d")


def test_names_that_are_too_long_are_shortened_and_stay_distinct() -> None:
    app = app_of({})
    for number in range(2):
        app.add_periodic_task(10, app.tasks["shop.report"].s("x" * 200 + str(number)))
    names = [schedule.name for schedule in TimeballScheduler(app).read()]
    assert len(set(names)) == 2 and {len(name) for name in names} == {NAME_BYTES_MAX}


def test_the_cleanup_entry_that_celery_adds_is_read_too() -> None:
    schedules = read(app_of({}, result_backend="file:///tmp", result_expires=60))
    assert schedules["celery.backend_cleanup"].name == "vh-shop-celery%2Ebackend_cleanup"
    assert schedules["celery.backend_cleanup"].properties[messages.EXPIRES] == "43200"


@pytest.mark.parametrize(
    ("wrong_entry", "reason"),
    [
        (entry(0.1), "an interval of 0.1 s: the shortest of the broker is 1 s"),
        (entry(options={"countdown": 5}), "option countdown: write the later time into the schedule"),
        (entry(options={"eta": datetime(2030, 1, 1, tzinfo=UTC)}), "option eta"),
        (entry(options={"task_id": "x"}), "option task_id: each occurrence has an id of its own"),
        (entry(options={"priority": 5}), "priority 5: Timeball has no priorities"),
        (entry(options={"expires": "soon"}), "ValueError"),
        (entry(args=(BeatLazyFunc(datetime.now),)), "BeatLazyFunc: beat computes the argument when it sends"),
        (entry(args=()), "TypeError: "),
        (entry(args=("x" * limits.SCHEDULE_BODY_BYTES_MAX,)), "at most 65536: store the arguments elsewhere"),
        (entry(options={"exchange": "nowhere", "routing_key": "x"}), "no queue is known here"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_entries_that_cannot_be_stored_are_refused_by_name(wrong_entry: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError) as refusal:
        read(app_of({"fine": entry(), "wrong": wrong_entry, "also wrong": entry(0)}))
    text = str(refusal.value)
    assert "entry 'fine'" not in text and "entry 'also wrong': an interval" in text
    assert reason in text.partition("entry 'wrong': ")[2]


def test_an_app_with_another_kind_of_broker_is_refused() -> None:
    with pytest.raises(RequestError, match="set broker_url to timeball://"):
        read(app_of({"report": entry()}, url="memory://"))


def test_an_app_with_task_always_eager_is_refused() -> None:
    with pytest.raises(RequestError, match="task_always_eager"):
        read(app_of({"report": entry()}, task_always_eager=True))


def test_the_body_of_an_entry_is_json() -> None:
    assert json.loads(read(app_of({"report": entry()}))["report"].body)["content-type"] == "application/json"


# ---- rules --------------------------------------------------------------------------------------------------

APP = Celery("shop", set_as_current=False, timezone="Europe/Berlin")
BEGIN = datetime(2026, 1, 1, 12, 30, tzinfo=UTC)


def bind(celery_schedule: Any, app: Celery = APP) -> Any:
    """Bind a schedule to an app, as an entry of beat does. Returns the schedule."""
    celery_schedule.app = app
    return celery_schedule


def celery_times(cron: crontab, number: int) -> list[datetime]:
    """The next times after BEGIN by Celery. Each time is computed with a clock that shows the time before it."""
    times, now = [], BEGIN
    for _ in range(number):
        clock = crontab(
            minute=cron.minute, hour=cron.hour, day_of_week=cron.day_of_week, day_of_month=cron._orig_day_of_month,
            month_of_year=cron._orig_month_of_year, nowfun=lambda now=now: now, app=cron.app,
        )  # fmt: skip
        now = now + clock.remaining_estimate(now)
        times.append(now.astimezone(UTC))
    return times


def rule_times(rule: dict[str, object], number: int) -> list[datetime]:
    """The next times after BEGIN by the broker."""
    begin_ms = int(BEGIN.timestamp() * 1000)
    return [
        datetime.fromtimestamp(time.due_ms / 1000, UTC) for time in Rule.parse(rule).after(begin_ms, number)
    ]


@pytest.mark.parametrize(
    ("celery_schedule", "cron"),
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
def test_a_crontab_becomes_a_cron_expression_with_the_same_times(celery_schedule: crontab, cron: str) -> None:
    rule = rule_of(bind(celery_schedule))
    assert rule["zone"] == "Europe/Berlin"
    assert Rule.parse(rule) == Rule.parse({"cron": cron, "zone": "Europe/Berlin"})
    assert rule_times(rule, 5) == celery_times(celery_schedule, 5)


@pytest.mark.parametrize(
    "celery_schedule",
    [
        crontab(minute=0, hour=9, day_of_month=13, day_of_week="fri"),
        crontab(minute="0,30", hour="8-10", day_of_month="1-7", day_of_week="mon"),
        crontab(minute=0, hour=0, day_of_month=29, month_of_year=2, day_of_week="mon"),
        crontab(minute=0, hour=0, day_of_month="*/2", day_of_week="mon,thu"),
    ],
    ids=repr,
)
def test_a_crontab_with_both_kinds_of_days_becomes_a_recurrence_rule_with_the_same_times(
    celery_schedule: crontab,
) -> None:
    rule = rule_of(bind(celery_schedule))
    assert "rrule" in rule
    assert rule_times(rule, 3) == celery_times(celery_schedule, 3)


def test_random_crontabs_have_the_times_of_celery() -> None:
    chance = random.Random(5)

    def pick(low: int, high: int) -> set[int] | str:
        """All values as "*", or a random set of them."""
        values = range(low, high + 1)
        return "*" if chance.random() < 0.4 else set(chance.sample(values, chance.randint(1, len(values))))

    for _ in range(60):
        celery_schedule = bind(
            crontab(
                minute=pick(0, 59), hour=pick(0, 23), day_of_month=pick(1, 28), month_of_year=pick(1, 12),
                day_of_week=pick(0, 6),
            ),
            Celery(set_as_current=False),  # in UTC, because Celery computes other times where clocks change
        )  # fmt: skip
        assert rule_times(rule_of(celery_schedule), 4) == celery_times(celery_schedule, 4), celery_schedule


@pytest.mark.parametrize(
    ("celery_schedule", "rule"),
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
def test_an_interval_stays_one_and_a_relative_interval_of_round_times_becomes_a_calendar_rule(
    celery_schedule: schedule, rule: dict[str, object]
) -> None:
    assert rule_of(bind(celery_schedule)) == rule
    Rule.parse(rule)


def test_a_rule_has_the_zone_of_the_app_which_needs_a_name() -> None:
    assert rule_of(bind(crontab(), Celery(set_as_current=False)))["zone"] == "UTC"
    nameless = Celery(set_as_current=False, timezone=timezone(timedelta(hours=1)))
    with pytest.raises(InvalidDelay, match="has no name: set `timezone`"):
        rule_of(bind(crontab(), nameless))


def sunset() -> solar:
    """A solar schedule, made without its constructor, which needs the package `ephem`."""
    event: solar = solar.__new__(solar)
    event.event = "sunset"
    return event


class OwnCrontab(crontab):
    """A kind of schedule that the application defines."""


@pytest.mark.parametrize(
    ("celery_schedule", "advice"),
    [
        (sunset(), "solar event sunset: the broker does not know the sun; use a crontab"),
        (OwnCrontab(), "OwnCrontab: the broker stores a crontab"),
        (object(), "object: the broker stores a crontab"),
        (crontab(nowfun=lambda: BEGIN), "nowfun: the clock of the broker counts; leave it out"),
        (schedule(0.5), "an interval of 0.5 s: the shortest of the broker is 1 s"),
        (schedule(0), "an interval of 0 s"),
        (schedule(timedelta(minutes=90), relative=True), "leave `relative` out, or write a crontab"),
        (schedule(timedelta(hours=5), relative=True), "leave `relative` out, or write a crontab"),
        (schedule(timedelta(hours=36), relative=True), "leave `relative` out, or write a crontab"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value[:20],
)
def test_schedules_that_cannot_be_stored_are_refused_with_advice(celery_schedule: Any, advice: str) -> None:
    with pytest.raises(InvalidDelay) as refusal:
        rule_of(celery_schedule if type(celery_schedule) is object else bind(celery_schedule))
    assert advice in str(refusal.value)
