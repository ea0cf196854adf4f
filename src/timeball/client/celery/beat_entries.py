"""The entries of `beat_schedule` as schedules of the broker.

The message of a schedule is the one that Celery would send now for the entry: with the routes, serializer and defaults
of the app. It does not contain the id of the task. Each worker makes the id from that of the received message
(messages.py). So each occurrence has another task id, and the same one if it is delivered again.

    name        of the app, a dash, and the name of the entry. Other characters are encoded as in a URL
    property    `celery_app`: the app. A schedule of this app whose entry is gone is deleted
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from datetime import date, datetime, timedelta
from itertools import count
from numbers import Real
from typing import Any, TypeAlias

import msgspec
from celery import Celery
from celery.beat import BeatLazyFunc, ScheduleEntry
from celery.schedules import crontab, schedule, solar
from celery.utils.time import maybe_make_aware
from kombu import Connection, Producer

from timeball.client.celery import messages
from timeball.client.celery.transport import TopicChannel, Transport
from timeball.client.schedules import Schedules
from timeball.model import limits
from timeball.model.errors import InvalidDelay, InvalidMessage, NotFound, RequestError, TimeballError

APP = "celery_app"  # the property that names the app of a schedule
CATCH_UP_WITHIN = "1d"
_REFUSED_OPTIONS = {
    "countdown": "write the later time into the schedule",
    "eta": "write the time into the schedule",
    "task_id": "each occurrence has an id of its own",
}
NAME_BYTES_MAX = limits.GROUP_BYTES_MAX  # of a schedule
_DIGEST_CHARACTERS = 16


class BeatSchedule(msgspec.Struct, frozen=True):
    """An entry as a schedule of the broker: the arguments of `Schedules.put`."""

    entry: str
    name: str
    rule: dict[str, object]
    topic: str
    body: str
    tag: str | None
    properties: dict[str, str]
    catch_up_within: str


def read_entries(
    app: Celery, connection: Connection, entries: Mapping[str, ScheduleEntry]
) -> list[BeatSchedule]:
    """Build the schedules of all entries, by name. Nothing is sent.

    `connection`: kombu's connection to a Timeball broker, which need not be open. Raises RequestError for another kind
    of broker, and if the broker cannot store an entry: the text names each such entry and the reason.
    """
    transport = connection.transport
    if not isinstance(transport, Transport):
        raise RequestError(
            f"the broker of the app is {connection.as_uri()}: set broker_url to timeball://host:port, or the "
            "environment variable CELERY_BROKER_URL"
        )
    owner = transport.topic(app.main or "celery")
    channel, schedules, refused = _TemplateChannel(transport), list[BeatSchedule](), list[str]()
    for name, entry in sorted(entries.items()):
        try:
            schedules.append(_read_entry(app, channel, owner, name, entry))
        except Exception as error:  # of any kind, because routes and tasks are code of the app
            kind = "" if isinstance(error, TimeballError) else f"{type(error).__name__}: "
            refused.append(f"entry {name!r}: {kind}{error}")
    channel.close()
    if refused:
        raise RequestError(f"beat_schedule cannot be stored in the broker: {'; '.join(refused)}")
    return schedules


def store_entries(
    schedules: Schedules, owner: str, beat_schedules: list[BeatSchedule]
) -> tuple[list[str], list[str]]:
    """Store the schedules of the app `owner`, and delete its other schedules, whose entries are gone.

    Several processes may do this at the same time, because equal schedules change nothing. Returns the names of the
    schedules that were created or replaced, and of those that were deleted. Raises RequestError, before anything is
    stored, if a schedule of the same name belongs to another app.
    """
    owners = {stored.name: stored.properties.get(APP) for stored in schedules.all()}
    for item in beat_schedules:
        if owners.get(item.name, owner) != owner:
            raise RequestError(
                f"entry {item.entry!r}: there is a schedule {item.name!r} that is none of this app; rename the entry"
            )
    changed = []
    for item in beat_schedules:
        stored = schedules.put(
            item.name, item.rule, topic=item.topic, body=item.body, tag=item.tag, properties=item.properties,
            catch_up_within=item.catch_up_within,
        )  # fmt: skip
        if stored.outcome != "unchanged":
            changed.append(item.name)
    own_names = {name for name, app in owners.items() if app == owner}
    deleted = sorted(own_names - {item.name for item in beat_schedules})
    for name in deleted:
        with suppress(NotFound):  # another beat has deleted it
            schedules.delete(name)
    return changed, deleted


# ---- one entry ------------------------------------------------------------------------------------------------


class _TemplateChannel(TopicChannel):
    """A channel that keeps messages instead of sending them."""

    def __init__(self, connection: Transport, **options: Any) -> None:
        super().__init__(connection, **options)
        # Topic, tag (None: that of the task), and message.
        self.kept_messages: list[tuple[str, str | None, dict[str, Any]]] = []

    def basic_publish(self, message: dict[str, Any], exchange: str, routing_key: str, **options: Any) -> None:
        """Keep a message, once for each topic that it would go to."""
        self._inplace_augment_message(message, exchange, routing_key)
        destinations = self._destinations(message, exchange, routing_key or "")
        self.kept_messages += [(topic, tag, message) for topic, tag in destinations]


def _read_entry(
    app: Celery, channel: _TemplateChannel, owner: str, name: str, entry: ScheduleEntry
) -> BeatSchedule:
    """Build the schedule of one entry. Raises InvalidDelay and InvalidMessage, and any error of the app's code."""
    rule = rule_of(entry.schedule)
    topic, tag, message, expires_s = _make_template(app, channel, entry)
    fields = messages.fields_of(message)
    if (size_bytes := len(fields["body"].encode())) > limits.SCHEDULE_BODY_BYTES_MAX:
        raise InvalidMessage(
            f"a task of {size_bytes} bytes, at most {limits.SCHEDULE_BODY_BYTES_MAX}: store the arguments elsewhere"
        )
    properties = {APP: owner}
    if expires_s is not None:
        properties[messages.EXPIRES] = f"{expires_s:.15g}"
    within_s = app.conf.beat_cron_starting_deadline if isinstance(entry.schedule, crontab) else None
    return BeatSchedule(
        name, _schedule_name(owner, name), rule, topic, fields["body"], fields["tag"] if tag is None else tag,
        properties, CATCH_UP_WITHIN if within_s is None else f"{within_s}s",
    )  # fmt: skip


def _schedule_name(owner: str, entry: str) -> str:
    """Build the name of the schedule of an entry. A name that is too long ends with a part of its SHA-256."""
    name = f"{owner}-{messages.topic_name(entry)}"
    if len(name) <= NAME_BYTES_MAX:
        return name
    # `add_periodic_task` makes such names: they contain a whole signature.
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST_CHARACTERS]
    return f"{name[: NAME_BYTES_MAX - len(digest) - 1]}-{digest}"


def _make_template(
    app: Celery, channel: _TemplateChannel, entry: ScheduleEntry
) -> tuple[str, str | None, dict[str, Any], float | None]:
    """Let Celery make the message of an entry. Returns its topic, tag, content and relative expiry in seconds.

    The message is the same in each process and at each time, so a repeated put changes nothing. Raises InvalidMessage
    for an option that the broker cannot keep, and any error of the app's code.
    """
    if app.conf.task_always_eager:
        raise InvalidMessage("task_always_eager: tasks run where they are sent, and nothing can be stored")
    arguments = [*(entry.args or ()), *(entry.kwargs or {}).values()]
    if any(isinstance(argument, BeatLazyFunc) for argument in arguments):
        raise InvalidMessage(
            "BeatLazyFunc: beat computes the argument when it sends, and the broker cannot; compute it in the task"
        )
    # Celery makes the message here as if it sent it. Options whose value depends on this time are taken out before.
    options, task = dict(entry.options), app.tasks.get(entry.task)
    for name, advice in _REFUSED_OPTIONS.items():
        if options.get(name) is not None:
            raise InvalidMessage(f"option {name}: {advice}")
    expires = options.pop("expires", getattr(task, "expires", None))
    ignores_result = options.pop("ignore_result", getattr(task, "ignore_result", None))
    options |= {
        "headers": {**(options.get("headers") or {}), "celery_beat_task": True}, "expires": None, "retry": False,
        "task_id": "", "producer": Producer(channel, auto_declare=False),
        "ignore_result": True,  # otherwise the result backend is told of a task
    }  # fmt: skip
    channel.kept_messages.clear()
    if task is None:
        app.send_task(entry.task, entry.args, entry.kwargs, **options)
    else:
        task.apply_async(entry.args, entry.kwargs, **options)
    if len(channel.kept_messages) != 1:
        raise InvalidMessage(f"the task goes to {len(channel.kept_messages)} queues; write an entry for each")
    ((topic, tag, message),) = channel.kept_messages
    headers = message["headers"]
    if headers["expires"] is not None:
        raise InvalidMessage("expires in task_routes: write it into the options of the entry")
    headers |= {"id": None, "root_id": None, "origin": "celery beat", "ignore_result": ignores_result}
    # An absolute expiry is part of the message. A relative one counts from each occurrence, so it is a property.
    if isinstance(expires, (datetime, str)):
        at = datetime.fromisoformat(expires) if isinstance(expires, str) else expires
        headers["expires"], expires = maybe_make_aware(at, app.timezone).isoformat(), None
    if isinstance(expires, timedelta):
        expires = expires.total_seconds()
    if expires is not None and not isinstance(expires, Real):
        raise InvalidMessage(f"expires {expires!r}: a number of seconds, or a time")
    sent_properties = message["properties"]
    message["properties"] = {
        **{key: value for key, value in sent_properties.items() if key not in ("delivery_tag", messages.ID)},
        "correlation_id": None, "reply_to": "",
    }  # fmt: skip
    return topic, tag, message, None if expires is None else float(expires)


# ---- rules --------------------------------------------------------------------------------------------------
#
#     crontab                            a cron expression. With a day of the month and a day of the week, both of
#                                        which have to match in Celery, a recurrence rule
#     a number of seconds, a timedelta   an interval, counted from 1970
#     the same with `relative`           a cron expression for round times of the clock
#
# Everything else is refused, with a text that names an alternative.

Rule: TypeAlias = dict[str, object]

_WEEKDAYS = ("SU", "MO", "TU", "WE", "TH", "FR", "SA")
_MINUTE, _HOUR, _DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
_SHORTEST = timedelta(seconds=1)
_MILLISECOND = timedelta(milliseconds=1)


def rule_of(beat: Any) -> Rule:
    """Build the rule of a schedule of celery beat (docs/recurring-rules.md).

    Raises InvalidDelay for a schedule that the broker cannot store. The text names an alternative.
    """
    if isinstance(beat, solar):
        raise InvalidDelay(
            f"solar event {beat.event}: the broker does not know the sun; use a crontab, or run this entry by "
            "Celery's own scheduler in a beat of an app of its own"
        )
    if type(beat) not in (crontab, schedule):  # a subclass may compute its times in any way
        raise InvalidDelay(
            f"{type(beat).__name__}: the broker stores a crontab, a number of seconds and a timedelta"
        )
    if beat.nowfun is not None:
        raise InvalidDelay("nowfun: the clock of the broker counts; leave it out")
    return _crontab_rule(beat) if isinstance(beat, crontab) else _interval_rule(beat)


def _zone(beat: crontab | schedule) -> str:
    """Find the IANA name of the zone of the app. Raises InvalidDelay for a zone without a name."""
    zone = beat.tz
    name = getattr(zone, "key", None) or ("UTC" if str(zone) == "UTC" else None)
    if name is None:
        raise InvalidDelay(
            f"the time zone {zone} has no name: set `timezone` of the app, for example to 'Europe/Berlin'"
        )
    return str(name)


def _crontab_rule(beat: crontab) -> Rule:
    """Build a cron expression, or a recurrence rule if the crontab limits both the day of the month and of the week."""
    if len(beat.day_of_month) < 31 and len(beat.day_of_week) < 7:
        return {"rrule": _both_days(beat), "zone": _zone(beat)}
    fields = (
        _field(beat.minute, 0, 59), _field(beat.hour, 0, 23), _field(beat.day_of_month, 1, 31),
        _field(beat.month_of_year, 1, 12), _field(beat.day_of_week, 0, 6, may_step=False),
    )  # fmt: skip
    return {"cron": " ".join(fields), "zone": _zone(beat)}


def _field(values: Collection[int], low: int, high: int, *, may_step: bool = True) -> str:
    """Write the values of a field of a cron expression: `*`, a step such as `*/15`, or a list with ranges.

    `low` and `high` are the smallest and the largest value of the field.
    """
    ordered = sorted(values)
    if len(ordered) == high - low + 1:
        return "*"
    step = ordered[1] - ordered[0] if len(ordered) > 2 else 0
    if may_step and step > 1 and ordered == list(range(low, high + 1, step)):
        return f"*/{step}"
    runs: list[list[int]] = []  # of consecutive values
    for value in ordered:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else _listed(run) for run in runs)


def _both_days(beat: crontab) -> str:
    """Write a crontab that limits the day of the month and of the week as a recurrence rule with a start.

    In Celery and in a recurrence rule both fields have to match. In a cron expression one of them is enough.
    """
    days = map(date.fromordinal, count(date(1970, 1, 1).toordinal()))
    # A matching day exists, because Celery refuses any other crontab. It is found within 400 years, after which the
    # calendar repeats.
    first = next(
        day
        for day in days
        if day.month in beat.month_of_year
        and day.day in beat.day_of_month
        and day.isoweekday() % 7 in beat.day_of_week
    )
    parts = {
        "FREQ": "MONTHLY",
        "BYMONTH": _listed(beat.month_of_year),
        "BYMONTHDAY": _listed(beat.day_of_month),
        "BYDAY": ",".join(_WEEKDAYS[number] for number in sorted(beat.day_of_week)),
        "BYHOUR": _listed(beat.hour),
        "BYMINUTE": _listed(beat.minute),
    }
    start = f"{first:%Y%m%d}T{min(beat.hour):02}{min(beat.minute):02}00"
    return f"DTSTART:{start}\nRRULE:" + ";".join(f"{name}={value}" for name, value in parts.items())


def _listed(numbers: Collection[int]) -> str:
    return ",".join(map(str, sorted(numbers)))


def _interval_rule(beat: schedule) -> Rule:
    """Build an interval, or with `relative` and at least a minute a rule for round times. Raises InvalidDelay."""
    every: timedelta = beat.run_every
    if every < _SHORTEST:
        raise InvalidDelay(f"an interval of {every.total_seconds():g} s: the shortest of the broker is 1 s")
    if beat.relative and every >= _MINUTE:
        return _round_times(every, _zone(beat))
    whole_s, fraction = divmod(every, _SHORTEST)
    return {"every": f"{whole_s}s" if not fraction else f"{every // _MILLISECOND}ms"}


def _round_times(every: timedelta, zone: str) -> Rule:
    """Write an interval with `relative`: Celery rounds its times down to whole days, hours or minutes.

    Raises InvalidDelay unless these are whole days, hours that divide a day, or minutes that divide an hour.
    """
    rule: Any = None
    if every % _DAY == timedelta(0):
        days = every // _DAY
        rule = {"rrule": f"DTSTART:19700101T000000\nRRULE:FREQ=DAILY;INTERVAL={days}"}
        if days == 1:
            rule = {"cron": "0 0 * * *"}
    elif _DAY % every == timedelta(0) and every % _HOUR == timedelta(0):
        rule = {"cron": f"0 {_step(every // _HOUR)} * * *"}
    elif _HOUR % every == timedelta(0) and every % _MINUTE == timedelta(0):
        rule = {"cron": f"{_step(every // _MINUTE)} * * * *"}
    if rule is None:
        raise InvalidDelay(
            f"relative with an interval of {every}: it has no round times of the clock, because it neither divides an "
            "hour or a day nor is whole days; leave `relative` out, or write a crontab"
        )
    return {**rule, "zone": zone}


def _step(number: int) -> str:
    return "*" if number == 1 else f"*/{number}"
