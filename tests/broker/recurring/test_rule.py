"""Rules: their canonical form, properties of all rules, and refused rules with the advice of their errors."""

from __future__ import annotations

import re
from datetime import datetime
from itertools import pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from timeball.broker.recurring.rule import Rule
from timeball.model import limits
from timeball.model.errors import InvalidDelay
from timeball.model.time_parsing import instant_ms

naive = datetime.fromisoformat
ZONES = [
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",
    "Africa/Cairo",
    "Antarctica/Troll",
    "UTC",
    "Pacific/Apia",
]


def ms(text: str) -> int:
    return instant_ms(text)


# ---- properties of all rules ------------------------------------------------------------------------------------

NUMBERS = st.sets(st.integers(0, 23), min_size=1, max_size=4).map(
    lambda numbers: ",".join(map(str, sorted(numbers)))
)
CRON = st.builds(
    "{} {} {}".format,
    st.sampled_from(["*", "*/15", "0", "30"]) | NUMBERS,
    st.sampled_from(["*", "*/2", "1-3"]) | NUMBERS,
    st.sampled_from(
        ["* * *", "L * *", "1,15 */3 *", "* * MON-FRI", "* * SUN#2", "29 2 *", "15W * *", "13 * FRI"]
    ),
)
# Minutes since 1970.
MINUTES = st.integers(ms("2008-01-01T00:00:00Z") // 60_000, ms("2030-01-01T00:00:00Z") // 60_000)
LOCAL = st.datetimes(naive("2008-01-01"), naive("2030-01-01"))
RRULES = st.builds(
    "DTSTART:{:%Y%m%dT%H%M%S}\nRRULE:FREQ={}".format,
    LOCAL,
    st.sampled_from(
        ["DAILY", "WEEKLY;INTERVAL=2", "HOURLY", "HOURLY;INTERVAL=5", "MONTHLY", "MINUTELY;INTERVAL=20"]
    ),
)
KINDS = (
    st.fixed_dictionaries({"cron": CRON})
    | st.fixed_dictionaries({"rrule": RRULES})
    | st.fixed_dictionaries(
        {"at": st.lists(LOCAL.map(lambda t: t.strftime("%Y-%m-%dT%H:%M:%S")), min_size=1, max_size=5)}
    )
    | st.fixed_dictionaries({"every": st.sampled_from(["7m", "15m", "1h30m", "26h", "PT90S", "3w"])})
)
OPTIONS = st.fixed_dictionaries(
    {"zone": st.sampled_from(ZONES)},
    optional={
        "starts_at": LOCAL.map(lambda t: t.strftime("%Y-%m-%dT%H:%M")),
        "ends_at": st.just("2032-01-01T00:00:00+02:00"),
        "exclude": st.lists(LOCAL.map(lambda t: t.date().isoformat()), max_size=4),
    },
)
GAP_AND_FOLD = st.fixed_dictionaries(
    {}, optional={"gap": st.sampled_from(["after", "skip"]), "fold": st.sampled_from(["first", "both"])}
)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    """Draw a rule of any kind, with options that may be combined."""
    spec = {**draw(KINDS), **draw(OPTIONS)}
    if "every" not in spec:
        spec |= draw(GAP_AND_FOLD)
        if spec.get("exclude"):
            spec["move"] = draw(st.sampled_from(["skip", "before", "after"]))
    if "starts_at" in spec and draw(st.booleans()):
        spec["count"] = draw(st.integers(1, 20))
    return Rule.parse(spec)


@given(rules())
def test_the_canonical_form_is_the_same_rule(rule: Rule) -> None:
    assert Rule.parse(rule.spec()) == rule == Rule.from_text(rule.text)
    assert hash(Rule.parse(rule.spec())) == hash(rule)
    assert Rule.parse(rule.spec()).text == rule.text


@given(rule=rules(), minute=MINUTES)
def test_occurrences_are_later_and_increasing(rule: Rule, minute: int) -> None:
    runs = rule.after(minute * 60_000, 30)
    dues = [minute * 60_000, *(run.due_ms for run in runs)]
    assert all(earlier < later for earlier, later in pairwise(dues))


@given(rule=rules(), minute=MINUTES)
def test_occurrences_are_the_same_one_by_one_all_at_once_and_up_to_an_end(rule: Rule, minute: int) -> None:
    at = minute * 60_000
    runs = rule.after(at, 12)
    one_by_one = []
    while len(one_by_one) < 12 and (next_runs := rule.after(one_by_one[-1].due_ms if one_by_one else at)):
        one_by_one += next_runs
    assert one_by_one == runs
    assume(runs)
    assert rule.between(at, runs[-1].due_ms, 100) == runs
    assert rule.between(at, runs[-1].due_ms - 1, 100) == runs[:-1]
    assert rule.between(at, runs[-1].due_ms, 1) == runs[:1]
    assert rule.between(runs[0].due_ms - 1, runs[0].due_ms, 9) == runs[:1]


# ---- the canonical form -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_spec", "canonical"),
    [
        (
            {
                "zone": "Europe/Berlin",
                "cron": " 0  9 * * mon-fri ",
                "gap": "after",
                "fold": "first",
                "seconds": False,
            },
            {"cron": "0 9 * * MON-FRI", "zone": "Europe/Berlin"},
        ),
        ({"every": "90m"}, {"every": "90m"}),
        (
            {"every": "PT2H", "anchor": "2026-01-01T01:00:00+01:00", "zone": None},
            {"every": "2h", "anchor": "2026-01-01T00:00:00Z"},
        ),
        ({"every": "14d"}, {"every": "2w"}),
        ({"every": "1.5s"}, {"every": "1500ms"}),
        (
            {"at": ["2030-02-01T09:00", "2030-01-31T09:00:00", "2030-02-01T09:00"], "zone": "UTC"},
            {"at": ["2030-01-31T09:00:00", "2030-02-01T09:00:00"], "zone": "UTC"},
        ),
        (
            {"rrule": "RRULE:COUNT=2;FREQ=DAILY\nDTSTART:20300131T090000", "zone": "UTC"},
            {"rrule": "DTSTART:20300131T090000\nRRULE:FREQ=DAILY;COUNT=2", "zone": "UTC"},
        ),
        (
            {
                "cron": "@daily",
                "zone": "UTC",
                "exclude": ["2030-12-26", "2030-12-25", "2030-12-25"],
                "move": "before",
            },
            {"cron": "@daily", "zone": "UTC", "exclude": ["2030-12-25", "2030-12-26"], "move": "before"},
        ),
        (
            {
                "cron": "@daily",
                "zone": "UTC",
                "starts_at": "2030-01-01T00:00",
                "ends_at": "2031-01-01T00:00:00-05:00",
                "count": 3,
                "exclude": [],
            },
            {
                "cron": "@daily",
                "zone": "UTC",
                "starts_at": "2030-01-01T00:00:00",
                "ends_at": "2031-01-01T05:00:00Z",
                "count": 3,
            },
        ),
    ],
)
def test_specs_have_one_canonical_form(given_spec: dict[str, object], canonical: dict[str, object]) -> None:
    rule = Rule.parse(given_spec)
    assert rule.spec() == canonical
    assert list(rule.spec()) == list(canonical)
    assert rule == Rule.parse(canonical)
    assert rule != Rule.parse({"every": "1h"})


def test_the_text_of_an_ordinary_rule_is_short() -> None:
    """A broker may have a million rules in memory."""
    assert len(Rule.parse({"cron": "0 9 * * MON-FRI", "zone": "Europe/Berlin"}).text) < 60


def test_a_text_that_is_no_rule_is_refused() -> None:
    for text in ("", "[]", "{", '{"cron": 5}', '"\ud800"', '{"cron": ' + "[" * 3_000):
        with pytest.raises(InvalidDelay):
            Rule.from_text(text)
    assert Rule.from_text('{"zone": "UTC", "cron": "@daily"}') == Rule.parse(
        {"cron": "@daily", "zone": "UTC"}
    )


# ---- starts, ends, counts ---------------------------------------------------------------------------------------


def local_times(spec: dict[str, object], after: str = "2026-01-01T00:00:00Z", number: int = 9) -> list[str]:
    """List the first local times of a rule later than `after`, to the minute."""
    return [run.local[:16] for run in Rule.parse(spec).after(ms(after), number)]


def test_an_occurrence_at_starts_at_or_ends_at_is_included() -> None:
    spec = {
        "cron": "0 9 * * *",
        "zone": "Europe/Berlin",
        "starts_at": "2026-03-28T09:00",
        "ends_at": "2026-03-30T09:00",
    }
    assert local_times(spec) == ["2026-03-28T09:00", "2026-03-29T09:00", "2026-03-30T09:00"]
    spec |= {"starts_at": "2026-03-28T08:00:00.001Z", "ends_at": "2026-03-30T06:59:59Z"}
    assert local_times(spec) == ["2026-03-29T09:00"]
    daily = {"every": "1d", "starts_at": "2026-03-28T00:00:00Z", "ends_at": "2026-03-29T12:00:00Z"}
    assert local_times(daily) == ["2026-03-28T00:00", "2026-03-29T00:00"]


def test_a_count_begins_at_the_start() -> None:
    spec: dict[str, object] = {
        "cron": "0 9 * * *",
        "zone": "UTC",
        "starts_at": "2026-03-28T00:00",
        "count": 2,
    }
    assert local_times(spec) == ["2026-03-28T09:00", "2026-03-29T09:00"]
    assert local_times(spec, "2026-03-28T12:00:00Z") == ["2026-03-29T09:00"]
    assert local_times(spec, "2026-03-29T09:00:00Z") == []
    assert local_times({"every": "1h", "anchor": "2026-03-28T00:30:00Z", "count": 2}) == [
        "2026-03-28T00:30",
        "2026-03-28T01:30",
    ]
    assert local_times({"at": ["2026-02-01T00:00", "2026-02-02T00:00"], "zone": "UTC", "count": 1}) == [
        "2026-02-01T00:00"
    ]
    rrule = {"rrule": "DTSTART:20260201T090000\nRRULE:FREQ=DAILY;COUNT=5", "zone": "UTC"}
    assert len(local_times({**rrule, "count": 3})) == 3
    assert len(local_times({**rrule, "count": 7})) == 5


# ---- refused rules ----------------------------------------------------------------------------------------------

DAILY = {"cron": "0 9 * * *", "zone": "Europe/Berlin"}


@pytest.mark.parametrize(
    ("spec", "advice"),
    [
        ({}, "exactly one of cron, every, rrule and at is needed; given: none"),
        ({"cron": "@daily", "every": "1h", "zone": "UTC"}, "given: cron, every"),
        ({"crom": "@daily"}, "did you mean 'cron'?"),
        ({"cron": 5, "zone": "UTC"}, "must be text"),
        ({"cron": "@daily"}, "cron needs the zone of its local times, such as Europe/Berlin"),
        ({"at": ["2030-01-01T00:00"]}, "at needs the zone"),
        ({"cron": "@daily", "zone": "CEST"}, "write it as Europe/Berlin"),
        ({"cron": "@daily", "zone": 1}, "must be text"),
        ({"cron": "x" * 20_001, "zone": "UTC"}, "at most 20000"),
        ({**DAILY, "seconds": 1}, "true or false"),
        ({"every": "1h", "seconds": True}, "belongs to cron"),
        ({**DAILY, "anchor": "2026-01-01T00:00:00Z"}, "belongs to every"),
        ({"every": "1h", "gap": "skip"}, "belongs to cron, rrule, at"),
        ({**DAILY, "gap": "before"}, "valid: after, skip"),
        ({**DAILY, "fold": "second"}, "valid: first, both"),
        ({**DAILY, "move": "next", "exclude": ["2030-12-25"]}, "valid: skip, before, after"),
        ({**DAILY, "move": "before"}, "needs exclude"),
        ({"every": "1d", "exclude": ["2030-12-25"], "move": "before"}, "write the rule as cron"),
        ({"every": "5"}, "numbers with units"),
        ({"every": "10ms"}, "at least 1s"),
        ({"every": "10000d"}, "further away than 3653 days"),
        ({"every": "1h", "anchor": "2026-01-01T00:00"}, "2030-01-31T09:00:00Z"),
        ({**DAILY, "starts_at": "tomorrow"}, "or '2030-01-31T09:00' for a local time"),
        ({**DAILY, "starts_at": "2030-01-31"}, "or '2030-01-31T09:00' for a local time"),
        ({**DAILY, "starts_at": "2030-01-31T09:00:00.5"}, "whole seconds"),
        ({**DAILY, "starts_at": "1969-01-31T09:00:00Z"}, "from 1970 to 9999"),
        ({**DAILY, "starts_at": "0001-01-01T00:00:00+23:59"}, "from 1970 to 9999"),
        ({**DAILY, "ends_at": "9999-12-31T23:59:59-23:59"}, "from 1970 to 9999"),
        ({"every": "1h", "anchor": "9999-12-31T23:59:59-23:59"}, "from 1970 to 9999"),
        ({**DAILY, "starts_at": 1_800_000_000_000}, "must be text"),
        ({**DAILY, "starts_at": "2030-01-02T00:00", "ends_at": "2030-01-01T00:00"}, "earlier than starts_at"),
        ({**DAILY, "count": 3}, "needs starts_at"),
        ({"every": "1h", "count": 3}, "needs starts_at"),
        (
            {"every": "1h", "count": 0, "anchor": "2026-01-01T00:00:00Z"},
            "from 1 to 1000; for more, write ends_at",
        ),
        ({**DAILY, "count": True, "starts_at": "2026-01-01T00:00"}, "from 1 to 1000"),
        ({**DAILY, "exclude": "2030-12-25"}, "a list such as"),
        ({**DAILY, "exclude": ["25.12.2030"]}, "a date such as '2030-12-25'"),
        ({**DAILY, "exclude": [20301225]}, "text such as '2030-12-25'"),
        ({**DAILY, "exclude": ["2030-12-25"] * 1_001}, "at most 1000"),
        ({"at": [], "zone": "UTC"}, "list local times"),
        ({"at": "2030-01-01T00:00", "zone": "UTC"}, "a list such as"),
        ({"at": ["2030-01-01T00:00Z"], "zone": "UTC"}, "its offset follows from zone"),
        ({"at": ["2030-01-01"], "zone": "UTC"}, "a local time such as"),
        ({"at": ["2030-01-01T00:00:00.5"], "zone": "UTC"}, "whole seconds"),
        ({"cron": "0 0 * * */3", "zone": "UTC"}, "SUN,WED,SAT"),
        ({"rrule": "RRULE:FREQ=DAILY", "zone": "UTC"}, "needs a line DTSTART"),
    ],
)
def test_the_error_of_a_refused_rule_has_advice(spec: dict[str, object], advice: str) -> None:
    with pytest.raises(InvalidDelay, match=re.escape(advice)):
        Rule.parse(spec)


def test_the_limits_have_the_values_that_the_tests_above_assume() -> None:
    assert (limits.RULE_CHARACTERS_MAX, limits.RULE_LISTED_MAX, limits.RULE_COUNT_MAX) == (
        20_000,
        1_000,
        1_000,
    )
