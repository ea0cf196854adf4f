"""Schedules as JSON: requests and answers."""

from __future__ import annotations

import msgspec
import pytest
from tests.broker.recurring.schedule_lives import facts_of

from timeball.broker.admin.schedule_changes import Past, Shown
from timeball.broker.recurring.rule import Occurrence
from timeball.broker.registry.schedules import Progress, State
from timeball.edges.http.schedule_codec import (
    preview_after_ms,
    show_history,
    show_schedule,
    show_times,
    to_facts,
)
from timeball.model import limits
from timeball.model.answers import MessagePlace
from timeball.model.errors import InvalidDelay, InvalidMessage
from timeball.model.http_api import Previewing, Schedule, SchedulePut

PROGRESS = Progress(State.ACTIVE, 5, number=7, due_ms=60_000, at_ms=5)


def shown(progress: Progress = PROGRESS, *, may_read: bool = True, **changes: object) -> Schedule:
    return show_schedule(Shown("a", facts_of(**changes), progress, "1970-01-01T00:01:00", may_read))  # type: ignore[arg-type]


def test_a_shown_schedule_is_a_valid_request_for_the_same() -> None:
    stored = facts_of(
        tag="t", keys="k1 k2", properties={"p": "1"}, catch_up_within_ms=90 * limits.MINUTE_MS,
        overlap="skip", group="g",
    )  # fmt: skip
    fields = msgspec.to_builtins(show_schedule(Shown("a", stored, PROGRESS, "", True)))
    again = {name: value for name, value in fields.items() if name in SchedulePut.__struct_fields__}
    assert to_facts(msgspec.convert(again, SchedulePut)) == stored


@pytest.mark.parametrize(
    ("within_ms", "text"),
    [
        (0, "0d"),
        (1, "1ms"),
        (1_500, "1500ms"),
        (90_000, "90s"),
        (limits.HOUR_MS, "1h"),
        (limits.DAY_MS, "1d"),
    ],
)
def test_a_duration_is_shown_in_its_largest_unit(within_ms: int, text: str) -> None:
    found = shown(catch_up_within_ms=within_ms)
    assert found.catch_up_within == text
    assert to_facts(
        SchedulePut(rule=found.rule, topic="t", body="b", catch_up_within=text)
    ).catch_up_within_ms == (within_ms)


def test_the_pending_occurrence_and_the_last_release_are_shown() -> None:
    found = shown()
    assert found.next is not None and (found.next.id, found.next.due) == (
        "a.60000",
        "1970-01-01T00:01:00.000Z",
    )
    assert (found.last, found.last_due, found.state) == (None, None, "active")
    ended = shown(Progress(State.ENDED, 60_000, runs=1, last_due_ms=60_000, last_ms=60_002))
    assert (ended.next, ended.state, ended.last_due) == (None, "ended", "1970-01-01T00:01:00.000Z")
    assert ended.last == "1970-01-01T00:01:00.002Z"
    assert shown(Progress(State.FAILED, 5, error="no zone")).error == "no zone"


def test_a_body_is_shown_only_to_those_who_may_receive() -> None:
    assert (shown().body, shown(body=b"\xff").base64) == ("tick", b"\xff")
    hidden = shown(may_read=False)
    assert (hidden.body, hidden.base64) == (None, None)


def test_invalid_requests_are_refused() -> None:
    with pytest.raises(InvalidDelay):
        to_facts(SchedulePut(rule={}, topic="t", body="b"))
    with pytest.raises(InvalidDelay):
        to_facts(SchedulePut(rule={"every": "1m"}, topic="t", body="b", catch_up_within="soon"))
    with pytest.raises(InvalidMessage):
        to_facts(SchedulePut(rule={"every": "1m"}, topic="t"))
    with pytest.raises(InvalidDelay):
        preview_after_ms(Previewing(rule={}, start="soon"))


def test_times_and_the_history() -> None:
    occurrence = Occurrence(60_000, "1970-01-01T00:01:00Z")
    [time] = show_times([occurrence]).times
    assert (time.due, time.due_ms, time.local) == ("1970-01-01T00:01:00.000Z", 60_000, "1970-01-01T00:01:00Z")
    missed = MessagePlace("cancelled", 7, "t", at_ms=90_000, reason="missed")
    past = [Past(occurrence, "a.60000", [missed]), Past(occurrence, "a.60000", [])]
    first, second = show_history("a", past).occurrences
    assert (first.state, first.at, first.reason) == ("cancelled", "1970-01-01T00:01:30.000Z", "missed")
    assert (second.state, second.at, second.reason) == ("unknown", None, None)
