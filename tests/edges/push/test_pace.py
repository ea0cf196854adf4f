"""The pace of a subscription, on a manual clock."""

from __future__ import annotations

import random

from timeball.edges.push.worker import FAILURES_MAX, PAUSE_MS_MAX, PAUSE_MS_MIN, Pace
from timeball.io.clock import ManualClock


def begin(pace: Pace, requests: int) -> None:
    """Begin this many requests."""
    for _ in range(requests):
        pace.begin()


def pace_with_open_circuit(clock: ManualClock, in_flight_max: int = 16) -> Pace:
    pace = Pace(clock, in_flight_max, None)
    for _ in range(FAILURES_MAX):
        begin(pace, 1)
        pace.record_failure()
    return pace


def test_capacity_is_in_flight_max_minus_the_requests_in_flight() -> None:
    pace = Pace(ManualClock(), 3, None)
    assert pace.capacity() == 3
    begin(pace, 3)
    assert pace.capacity() == 0 and pace.wait_s() is None
    pace.record_success()
    assert pace.capacity() == 1


def test_no_second_has_more_requests_than_the_rate_and_its_burst() -> None:
    clock, rate = ManualClock(), 50.0
    pace, begun_ms = Pace(clock, 1_000, rate), list[int]()
    rng = random.Random(7)
    pauses, pause_ms = 3, 900
    for step in range(3_000):
        clock.advance(pause_ms if step % (3_000 // pauses) == 0 else rng.choice([0, 1, 3, 20]))
        for _ in range(pace.capacity()):
            pace.begin()
            begun_ms.append(clock.monotonic)
    for from_ms in begun_ms:
        assert sum(from_ms <= each_ms < from_ms + 1_000 for each_ms in begun_ms) <= rate * 1.1 + 1
    elapsed_ms = clock.monotonic - ManualClock().monotonic
    assert len(begun_ms) > 0.8 * rate * (elapsed_ms - pauses * pause_ms) / 1_000, "most of the rate is used"


def test_a_rate_below_one_per_second_is_kept() -> None:
    clock = ManualClock()
    pace = Pace(clock, 4, 0.5)
    assert pace.capacity() == 1
    begin(pace, 1)
    assert pace.capacity() == 0 and pace.wait_s() == 2.0
    clock.advance(1_999)
    assert pace.capacity() == 0
    clock.advance(1)
    assert pace.capacity() == 1


def test_an_open_circuit_allows_single_requests_with_doubling_pauses() -> None:
    clock = ManualClock()
    pace, pauses = pace_with_open_circuit(clock), list[int]()
    assert pace.is_circuit_open
    for _ in range(9):
        assert pace.capacity() == 0
        pauses.append(pace.held_ms())
        assert pace.wait_s() == pauses[-1] / 1_000
        clock.advance(pauses[-1])
        assert pace.capacity() == 1
        begin(pace, 1)
        assert pace.capacity() == 0
        pace.record_failure()
    assert pauses == [PAUSE_MS_MIN << at for at in range(6)] + [PAUSE_MS_MAX] * 3


def test_a_success_closes_the_circuit() -> None:
    clock = ManualClock()
    pace = pace_with_open_circuit(clock)
    clock.advance(PAUSE_MS_MIN)
    begin(pace, 1)
    pace.record_success()
    assert not pace.is_circuit_open and pace.capacity() == 16
    # The pauses of the next open circuit begin with the shortest one.
    for _ in range(FAILURES_MAX):
        begin(pace, 1)
        pace.record_failure()
    assert pace.held_ms() == PAUSE_MS_MIN


def test_failures_interrupted_by_successes_do_not_open_the_circuit() -> None:
    pace = Pace(ManualClock(), 16, None)
    for _ in range(100):
        begin(pace, FAILURES_MAX)
        for _ in range(FAILURES_MAX - 1):
            pace.record_failure()
        pace.record_success()
    assert not pace.is_circuit_open and pace.capacity() == 16


def test_requests_in_flight_when_the_circuit_opens_do_not_lengthen_its_pause() -> None:
    clock = ManualClock()
    pace = Pace(clock, 100, None)
    begin(pace, 100)
    for _ in range(99):
        pace.record_failure()
    assert pace.held_ms() == PAUSE_MS_MIN
    clock.advance(PAUSE_MS_MIN)
    assert pace.capacity() == 0 and pace.wait_s() is None
    pace.record_failure()
    clock.advance(2 * PAUSE_MS_MIN)
    assert pace.capacity() == 1


def test_a_requested_pause_holds_even_if_other_requests_succeed() -> None:
    clock = ManualClock()
    pace = Pace(clock, 16, None)
    begin(pace, 2)
    pace.record_failure(retry_after_ms=30_000)
    pace.record_success()
    assert pace.capacity() == 0 and pace.wait_s() == 30.0
    clock.advance(29_999)
    assert pace.capacity() == 0
    clock.advance(1)
    assert pace.capacity() == 16
