"""How much may be sent: by a clock that moves when told."""

from __future__ import annotations

import random

from timeball.edges.push.worker import FAILURES_MAX, PAUSE_MS_MAX, PAUSE_MS_MIN, Pace
from timeball.io.clock import ManualClock


def begin(pace: Pace, requests: int) -> None:
    for _ in range(requests):
        pace.begin()


def opened(clock: ManualClock, in_flight_max: int = 16) -> Pace:
    pace = Pace(clock, in_flight_max, None)
    for _ in range(FAILURES_MAX):
        begin(pace, 1)
        pace.failed()
    return pace


def test_requests_at_once_are_bounded() -> None:
    pace = Pace(ManualClock(), 3, None)
    assert pace.room() == 3
    begin(pace, 3)
    assert pace.room() == 0 and pace.wait_s() is None
    pace.succeeded()
    assert pace.room() == 1


def test_a_rate_is_kept_in_every_second() -> None:
    clock, rate = ManualClock(), 50.0
    pace, sent = Pace(clock, 1_000, rate), list[int]()
    rng = random.Random(7)
    for at in range(3_000):
        clock.advance(900 if at % 1_000 == 0 else rng.choice([0, 1, 3, 20]))
        for _ in range(pace.room()):
            pace.begin()
            sent.append(clock.monotonic)
    for at in sent:
        assert sum(at <= each < at + 1_000 for each in sent) <= rate * 1.1 + 1
    busy_ms = clock.monotonic - ManualClock().monotonic
    assert len(sent) > 0.8 * rate * (busy_ms - 2_700) / 1_000


def test_a_rate_below_one_a_second() -> None:
    clock = ManualClock()
    pace = Pace(clock, 4, 0.5)
    assert pace.room() == 1
    begin(pace, 1)
    assert pace.room() == 0 and pace.wait_s() == 2.0
    clock.advance(1_999)
    assert pace.room() == 0
    clock.advance(1)
    assert pace.room() == 1


def test_after_failures_in_a_row_one_request_at_a_time_with_pauses_that_double() -> None:
    clock = ManualClock()
    pace, pauses = opened(clock), list[int]()
    assert pace.is_open
    for _ in range(9):
        assert pace.room() == 0
        pauses.append(pace.held_ms())
        assert pace.wait_s() == pauses[-1] / 1_000
        clock.advance(pauses[-1])
        assert pace.room() == 1
        begin(pace, 1)
        assert pace.room() == 0
        pace.failed()
    assert pauses == [PAUSE_MS_MIN << at for at in range(6)] + [PAUSE_MS_MAX] * 3


def test_one_success_ends_it() -> None:
    clock = ManualClock()
    pace = opened(clock)
    clock.advance(PAUSE_MS_MIN)
    begin(pace, 1)
    pace.succeeded()
    assert not pace.is_open and pace.room() == 16
    # And the pauses begin anew.
    for _ in range(FAILURES_MAX):
        begin(pace, 1)
        pace.failed()
    assert pace.held_ms() == PAUSE_MS_MIN


def test_failures_between_which_some_succeed_open_nothing() -> None:
    pace = Pace(ManualClock(), 16, None)
    for _ in range(100):
        begin(pace, FAILURES_MAX)
        for _ in range(FAILURES_MAX - 1):
            pace.failed()
        pace.succeeded()
    assert not pace.is_open and pace.room() == 16


def test_those_in_flight_when_it_opens_lengthen_no_pause_and_are_waited_for() -> None:
    clock = ManualClock()
    pace = Pace(clock, 100, None)
    begin(pace, 100)
    for _ in range(99):
        pace.failed()
    assert pace.held_ms() == PAUSE_MS_MIN
    clock.advance(PAUSE_MS_MIN)
    assert pace.room() == 0 and pace.wait_s() is None
    pace.failed()
    clock.advance(2 * PAUSE_MS_MIN)
    assert pace.room() == 1


def test_a_receiver_that_asks_for_a_pause_gets_it_whatever_else_succeeds() -> None:
    clock = ManualClock()
    pace = Pace(clock, 16, None)
    begin(pace, 2)
    pace.failed(hold_ms=30_000)
    pace.succeeded()
    assert pace.room() == 0 and pace.wait_s() == 30.0
    clock.advance(29_999)
    assert pace.room() == 0
    clock.advance(1)
    assert pace.room() == 16
