"""A forecast as lines for people."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.cli.forecast.days import EXTRA, answered, asked, counted
from tests.cli.forecast.days import NO_EXTRA as NONE

from timeball.cli.forecast.options import Extra, Moment
from timeball.cli.forecast.render import describe, show_span
from timeball.cli.forecast.report import answer


def lines(**more: object) -> list[str]:
    return list(describe(answered(**more).document))  # type: ignore[arg-type]


def test_bars_then_the_sum_then_peaks_and_topics() -> None:
    nine, ten, total, *rest = lines()
    assert nine.startswith("2030-01-31T09  ███") and nine.endswith(" 100")
    assert ten.startswith("2030-01-31T10  ███") and ten.endswith(" 10")
    assert total == "110 due from 2030-01-31T08:00:00Z; version 7, as of 2030-01-31T08:00:00Z"
    assert rest == [
        "peaks:",
        "  2030-01-31T09:00:00Z  100 in the second, 100 in its minute",
        "  2030-01-31T10:00:00Z  1 in the second, 10 in its minute",
        "topics:",
        "  orders  100 rows, 2030-01-31T09:00:00Z to 2030-01-31T09:00:00Z, at most 100 at 2030-01-31T09:00:00Z",
        "  mail    10 rows, 2030-01-31T10:00:00Z to 2030-01-31T10:00:09Z, at most 1 at 2030-01-31T10:00:00Z",
    ]


def test_empty_bars_between_are_shown_unless_they_are_most() -> None:
    minutes = lines(by="minute", by_topic=False, peaks=0)
    assert [line[:16] for line in minutes] == ["2030-01-31T09:00", "2030-01-31T10:00", "110 due from 203"]
    hours = list(describe(answered(Extra(rows=1, at=Moment(1_896_094_800_000)), by_topic=False).document))
    assert [line[:13] for line in hours[:5]] == [f"2030-01-31T{hour:02}" for hour in (9, 10, 11, 12, 13)]
    assert [line.split()[-1] for line in hours[:5]] == ["100", "10", "0", "0", "1"]


def test_what_would_be_late_as_it_is_and_with_more() -> None:
    shown = lines(extra=EXTRA, rates={"orders": 10, "*": 60}, within_ms=2_000, by_topic=False, peaks=0)
    assert shown[2].startswith("110 due from 2030-01-31T08:00:00Z, 60 extra;")
    assert shown[3:] == [
        "consumers of orders at 10 a second, as it is:",
        "  lateness: half within 5.0 s, 99 % within 9.9 s, all within 10.0 s",
        "  backlog: at most 100 at 2030-01-31T09:00:00Z, worked off by 2030-01-31T09:00:10Z",
        "consumers of the other topics at 60 a second, as it is:",
        "  lateness: half within 8 ms, 99 % within 16 ms, all within 17 ms",
        "  backlog: at most 1 at 2030-01-31T10:00:00Z, worked off by 2030-01-31T10:00:00Z",
        "all of these, as it is: half within 4.5 s, 99 % within 9.9 s, all within 10.0 s",
        "consumers of orders at 10 a second, with the extra rows:",
        "  lateness: half within 5.0 s, 99 % within 9.9 s, all within 10.0 s",
        "  backlog: at most 100 at 2030-01-31T09:00:00Z, worked off by 2030-01-31T09:00:10Z",
        "consumers of the other topics at 60 a second, with the extra rows:",
        "  lateness: half within 433 ms, 99 % within 1.0 s, all within 1.0 s",
        "  backlog: at most 61 at 2030-01-31T10:00:00Z, worked off by 2030-01-31T10:00:01Z",
        "all of these, with the extra rows: half within 1.5 s, 99 % within 9.8 s, all within 10.0 s",
        "to keep all within 2s, one queue takes 50.0 a second, 50.0 with the extra rows",
    ]


def test_topics_that_nobody_takes() -> None:
    assert lines(rates={"mail": 5}, by_topic=False)[-1] == "no --consumer-rate for: orders 100"


def test_what_is_not_in_it_is_said() -> None:
    outside = answer(counted(is_whole=False), asked(), Extra(rows=3, at=Moment(0))).document
    shown = list(describe(outside))
    assert any(line.startswith("the log no longer has all of its tail of then") for line in shown)
    assert "3 extra rows lie outside of this time, and are not in it" in shown
    whole = list(describe(answer(counted(), asked(), NONE).document))
    assert not any("no longer" in line or "outside" in line for line in whole)


def test_what_paused_campaigns_hold_is_said() -> None:
    """While a campaign was paused the forecast showed nothing of it, as if nothing were to come."""
    found = replace(counted(), held={"autumn": 1_000, "spring": 20})
    document = answer(found, asked(), NONE).document
    assert document.held == found.held
    told = "1,020 more are held by paused campaigns, and are not in it: autumn, spring"
    assert told in list(describe(document))
    assert not any("paused" in line for line in lines())


def test_an_older_forecast_and_what_came() -> None:
    shown = list(describe(answer(counted(came=90), asked(), NONE).document))
    assert shown[-2:] == [
        "until 2030-01-31T09:59:50Z: 100 were foretold, 90 came",
        "  the same in seconds 94.7%, in minutes 94.7%, in hours 94.7%",
    ]
    assert not any("foretold" in line for line in lines())


@pytest.mark.parametrize(
    ("span_ms", "text"),
    [
        (0, "0 ms"),
        (999, "999 ms"),
        (2_449, "2.4 s"),
        (200_000, "3 min 20 s"),
        (5 * 3_600_000 + 7 * 60_000, "5 h 7 min"),
        (76 * 3_600_000, "3 d 4 h"),
    ],
)
def test_a_lateness_as_people_say_it(span_ms: int, text: str) -> None:
    assert show_span(span_ms) == text
