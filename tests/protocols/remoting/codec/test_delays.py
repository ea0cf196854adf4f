"""When a message is due, from its properties alone: precedence, Java's numbers, and what is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.errors import InvalidDelay
from timeball.protocols.remoting.codec import delays
from timeball.protocols.remoting.codec.delays import AT_ONCE, Plan, plan

NOW = 1_700_000_000_000
DAY = 86_400_000
MAX = 3 * DAY
UTC = "UTC"
REMARK = (
    "timer message illegal, the delay time should not be bigger than the max delay 259200000ms; "
    "or if set del msg, the delay time should be bigger than the current time"
)
NUMBERS = ["TIMER_DELAY_SEC", "TIMER_DELAY_MS", "TIMER_DELIVER_MS", "__STARTDELIVERTIME"]
TIMERS = [*NUMBERS[:3], "TIMING", NUMBERS[3]]
MIDNIGHT = 1_700_006_400_000  # the next in UTC; NOW is 22:13:20


@pytest.mark.parametrize(
    ("properties", "expected"),
    [
        ({}, AT_ONCE),
        ({"KEYS": "a b", "TAGS": "t"}, AT_ONCE),
        ({"DELAY": "3"}, Plan(3, None)),
        ({"DELAY": "+3"}, Plan(3, None)),
        ({"DELAY": "1959"}, Plan(1959, None)),
        ({"DELAY": "0"}, AT_ONCE),
        ({"DELAY": "-1"}, AT_ONCE),
        ({"TIMER_DELAY_SEC": "5"}, Plan(0, NOW + 5_000)),
        ({"TIMER_DELAY_MS": "5"}, Plan(0, NOW + 5)),
        ({"TIMER_DELIVER_MS": str(NOW + 7)}, Plan(0, NOW + 7)),
        ({"__STARTDELIVERTIME": str(NOW + 9)}, Plan(0, NOW + 9)),
        ({"TIMING": "00:00:00"}, Plan(0, MIDNIGHT)),
        ({"TIMING": "22:13:20"}, Plan(0, NOW + DAY)),
        ({"TIMING": "01:00:00 Europe/Berlin"}, Plan(0, MIDNIGHT)),
        ({"TIMING": "01:00:00+01:00", "TIMING-LIST": "1"}, Plan(0, MIDNIGHT)),
        ({"TIMING-LIST": "1"}, AT_ONCE),
        ({"TIMING": "00:00:00", "TIMER_OUT_MS": ""}, AT_ONCE),
        ({"TIMER_DELIVER_MS": str(NOW)}, Plan(0, NOW)),
        ({"TIMER_DELIVER_MS": "1"}, Plan(0, 1)),
        ({"__STARTDELIVERTIME": str(NOW - 7)}, Plan(0, NOW - 7)),
        ({"TIMER_DELIVER_MS": "-1"}, AT_ONCE),
        ({"TIMER_DELIVER_MS": "0"}, AT_ONCE),
        ({"TIMER_DELAY_SEC": "0"}, AT_ONCE),
        ({"TIMER_DELAY_MS": "-5"}, AT_ONCE),
        ({"TIMER_DELAY_SEC": "-9223372036854775808"}, AT_ONCE),
        ({"TIMER_DELIVER_MS": str(NOW + MAX)}, Plan(0, NOW + MAX)),
        ({"TIMER_OUT_MS": str(NOW), "TIMER_DELIVER_MS": str(NOW + 7)}, AT_ONCE),
        ({"TIMER_OUT_MS": "", "TIMER_DELAY_SEC": "x", "__STARTDELIVERTIME": str(NOW + 7)}, AT_ONCE),
    ],
)
def test_what_properties_say(properties: dict[str, str], expected: Plan) -> None:
    assert plan(properties, NOW, MAX, UTC) == expected


def test_a_level_wins_over_every_timer() -> None:
    assert plan(
        {"DELAY": "2", **dict.fromkeys(TIMERS, "no number"), "TIMER_OUT_MS": "1"}, NOW, MAX, UTC
    ) == Plan(2, None)
    assert plan({"DELAY": "0", "TIMER_DELAY_MS": "1"}, NOW, MAX, UTC) == Plan(0, NOW + 1)


@given(present=st.sets(st.sampled_from(TIMERS), min_size=1))
def test_seconds_before_milliseconds_before_an_instant_before_timing_before_aliyun(present: set[str]) -> None:
    values = dict(zip(TIMERS, ["1", "2", str(NOW + 3), "22:13:24", str(NOW + 5)], strict=True))
    due = dict(zip(TIMERS, [NOW + 1_000, NOW + 2, NOW + 3, NOW + 4_000, NOW + 5], strict=True))
    strongest = next(name for name in TIMERS if name in present)
    assert plan({name: values[name] for name in present}, NOW, MAX, UTC) == Plan(0, due[strongest])


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("text", ["", " 5", "5 ", "1_000", "0x5", "five", "5.0", "٥", "9223372036854775808"])
def test_what_is_no_java_number_is_refused(name: str, text: str) -> None:
    with pytest.raises(InvalidDelay) as refused:
        plan({name: text}, NOW, MAX, UTC)
    assert str(refused.value) == REMARK


@pytest.mark.parametrize("text", ["", "x", "2147483648", "1.5"])
def test_a_level_that_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(InvalidDelay, match="DELAY"):
        plan({"DELAY": text}, NOW, MAX, UTC)


def test_a_time_of_day_is_in_the_brokers_zone() -> None:
    assert plan({"TIMING": "01:00:00"}, NOW, MAX, "Europe/Berlin") == Plan(0, MIDNIGHT)


def test_a_time_of_day_that_is_none_is_refused_and_says_how_to_write_it() -> None:
    with pytest.raises(InvalidDelay, match="the property TIMING is '8 am'; write HH:MM:SS"):
        plan({"TIMING": "8 am"}, NOW, MAX, UTC)


def test_a_time_of_day_beyond_the_maximum_is_refused() -> None:
    assert plan({"TIMING": "22:13:19"}, NOW, DAY, UTC) == Plan(0, NOW + DAY - 1_000)
    with pytest.raises(InvalidDelay, match="timer message illegal"):
        plan({"TIMING": "22:13:19"}, NOW, DAY - 1_001, UTC)


@pytest.mark.parametrize(
    "properties",
    [
        {"TIMER_DELIVER_MS": str(NOW + MAX + 1)},
        {"__STARTDELIVERTIME": str(NOW + MAX + 1)},
        {"TIMER_DELAY_MS": str(MAX + 1)},
        {"TIMER_DELAY_SEC": str(MAX // 1000 + 1)},
        {"TIMER_DELAY_SEC": "9223372036854775807"},  # Java's product wraps round; ours does not
        {"TIMER_DEL_UNIQKEY": "t+k", "TIMER_DELIVER_MS": str(NOW)},
    ],
)
def test_beyond_the_maximum_is_refused_with_rocketmqs_remark(properties: dict[str, str]) -> None:
    with pytest.raises(InvalidDelay) as refused:
        plan(properties, NOW, MAX, UTC)
    assert str(refused.value) == REMARK


def test_a_delete_marker_is_never_delivered_as_a_message() -> None:
    with pytest.raises(InvalidDelay, match="recall"):
        plan({delays.TIMER_DELETES: "t+k", "TIMER_DELAY_SEC": "5"}, NOW, MAX, UTC)


@given(properties=st.dictionaries(st.sampled_from(["DELAY", "TIMER_OUT_MS", *TIMERS]), st.text(max_size=24)))
def test_any_text_gives_a_plan_in_range_or_a_refusal(properties: dict[str, str]) -> None:
    try:
        found = plan(properties, NOW, MAX, UTC)
    except InvalidDelay:
        return
    assert found.delay_level >= 0
    assert found.due_ms is None or (found.delay_level == 0 and 0 < found.due_ms <= NOW + MAX)
