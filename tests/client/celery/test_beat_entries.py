"""Entries of celery beat as schedules: their messages are those of Celery. Nothing is sent."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from celery import Celery
from celery.beat import BeatLazyFunc
from celery.schedules import crontab
from kombu import Connection
from kombu.utils.json import loads

import timeball.client.celery  # the scheme timeball://
from timeball.client.celery import messages
from timeball.client.celery.beat_entries import NAME_BYTES_MAX, BeatSchedule
from timeball.client.celery.schedulers import TimeballScheduler
from timeball.model import limits
from timeball.model.errors import RequestError

assert timeball.client.celery.Control


def app_of(beat_schedule: dict[str, Any], url: str = "timeball://127.0.0.1:1/vh", **settings: Any) -> Celery:
    """An app whose broker does not answer: reading entries needs none."""
    app = Celery("shop", broker=url, set_as_current=False)
    app.conf.update(beat_schedule=beat_schedule, **{"result_expires": None, **settings})

    @app.task(shared=False, name="shop.report", expires=settings.get("expires"))
    def report(kind: str, *, copies: int = 1) -> None:
        pass

    app.finalize()
    return app


def read(app: Celery) -> dict[str, BeatSchedule]:
    return {each.entry: each for each in TimeballScheduler(app).read()}


def entry(schedule: Any = 30.0, args: Any = ("daily",), **more: Any) -> dict[str, Any]:
    return {"task": "shop.report", "schedule": schedule, "args": args, **more}


def content(each: BeatSchedule) -> dict[str, Any]:
    payload: dict[str, Any] = loads(each.body)
    return payload


def test_the_message_of_an_entry_is_that_of_celery() -> None:
    app = app_of({"report": entry(crontab(minute=0, hour=4), kwargs={"copies": 2})})
    each = read(app)["report"]
    assert (each.name, each.topic, each.tag) == ("vh-shop-report", "vh-celery", "shop.report")
    assert each.rule == {"cron": "0 4 * * *", "zone": "UTC"}
    assert each.properties == {"celery_app": "vh-shop"} and each.catch_up_within == "1d"
    connection = Connection("timeball://")
    channel = connection.transport.create_channel(connection.transport)
    payload = content(each)
    assert payload["headers"]["task"] == "shop.report" and payload["headers"]["celery_beat_task"]
    assert payload["headers"]["ignore_result"] is False
    message = channel.Message(
        {**payload, "properties": {**payload["properties"], "delivery_tag": "x"}}, channel=channel
    )
    assert message.decode()[:2] == [["daily"], {"copies": 2}]


def test_a_read_gives_the_same_messages_each_time() -> None:
    beat = {"report": entry(options={"expires": 60}), "unknown": {"task": "other.task", "schedule": 5}}
    first, second = (TimeballScheduler(app_of(beat)).read() for _ in range(2))
    assert first == second and len(first) == 2
    assert not {"id", "root_id"} & {key for key, value in content(first[0])["headers"].items() if value}


def test_options_and_routes_decide_the_queue() -> None:
    app = app_of(
        {
            "option": entry(options={"queue": "mail.high"}),
            "route": {"task": "shop.routed", "schedule": 5, "options": {"headers": {"a": 1}}},
        },
        task_routes={"shop.routed": {"queue": "slow"}},
    )
    found = read(app)
    assert (found["option"].topic, found["route"].topic) == ("vh-mail%2Ehigh", "vh-slow")
    assert content(found["route"])["headers"]["a"] == 1


@pytest.mark.parametrize(
    ("more", "expires_s"),
    [
        ({"options": {"expires": 60}}, "60"),
        ({"options": {"expires": timedelta(hours=1)}}, "3600"),
        ({}, None),
    ],
)
def test_a_relative_expiry_counts_for_each_occurrence(more: dict[str, Any], expires_s: str | None) -> None:
    each = read(app_of({"report": entry(**more)}))["report"]
    assert each.properties.get(messages.EXPIRES) == expires_s
    assert content(each)["headers"]["expires"] is None


def test_the_expiry_of_a_task_and_an_absolute_one() -> None:
    at = datetime(2030, 1, 1, tzinfo=UTC)
    beat = {"task": entry(), "own": entry(options={"expires": at}), "none": entry(options={"expires": None})}
    found = read(app_of(beat, expires=20))
    assert [found[name].properties.get(messages.EXPIRES) for name in ("task", "own", "none")] == [
        "20",
        None,
        None,
    ]
    assert content(found["own"])["headers"]["expires"] == at.isoformat()


def test_the_deadline_of_beat_limits_missed_times_of_crontabs() -> None:
    app = app_of({"cron": entry(crontab()), "interval": entry(30)}, beat_cron_starting_deadline=3_600)
    found = read(app)
    assert (found["cron"].catch_up_within, found["interval"].catch_up_within) == ("3600s", "1d")


def test_names_of_whole_signatures_are_shortened() -> None:
    app = app_of({})
    for number in range(2):
        app.add_periodic_task(10, app.tasks["shop.report"].s("x" * 200 + str(number)))
    names = [each.name for each in TimeballScheduler(app).read()]
    assert len(set(names)) == 2 and {len(name) for name in names} == {NAME_BYTES_MAX}


def test_the_entry_that_celery_adds_is_stored_too() -> None:
    found = read(app_of({}, result_backend="file:///tmp", result_expires=60))
    assert found["celery.backend_cleanup"].name == "vh-shop-celery%2Ebackend_cleanup"
    assert found["celery.backend_cleanup"].properties[messages.EXPIRES] == "43200"


@pytest.mark.parametrize(
    ("beat", "reason"),
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
    ids=lambda each: each[:30] if isinstance(each, str) else "",
)
def test_entries_that_cannot_be_stored_are_refused_by_name(beat: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError) as refusal:
        read(app_of({"fine": entry(), "wrong": beat, "also wrong": entry(0)}))
    text = str(refusal.value)
    assert "entry 'fine'" not in text and "entry 'also wrong': an interval" in text
    assert reason in text.partition("entry 'wrong': ")[2]


def test_an_app_of_another_broker_is_refused() -> None:
    with pytest.raises(RequestError, match="set broker_url to timeball://"):
        read(app_of({"report": entry()}, url="memory://"))


def test_an_app_that_runs_tasks_where_they_are_sent_is_refused() -> None:
    with pytest.raises(RequestError, match="task_always_eager"):
        read(app_of({"report": entry()}, task_always_eager=True))


def test_bodies_are_json() -> None:
    assert json.loads(read(app_of({"report": entry()}))["report"].body)["content-type"] == "application/json"
