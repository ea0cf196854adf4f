"""Results of rules are cached, and the results of long rules do not fill the memory."""

from __future__ import annotations

import sys
import threading
import tracemalloc
from collections.abc import Callable
from datetime import date, timedelta
from itertools import count

import pytest

from timeball.broker.recurring.kept_results import cached
from timeball.broker.recurring.rule import Rule
from timeball.broker.recurring.successors import first_after
from timeball.model import limits

DATES = 300  # 4 KB of text
CALLS = count()  # a number for each call, so that a repeated test finds no results of the first run


def days_from(first: int) -> list[str]:
    return [(date(2026, 1, 1) + timedelta(days=first + day)).isoformat() for day in range(DATES)]


def ask_for_one_rule(call: int) -> None:
    # Encoded and decoded, because each release decodes the text of its rule.
    text = Rule.parse({"every": "1s", "exclude": days_from(0)}).text.encode().decode()
    first_after(text, 1_860_000_000_000 + call * 1_000)


def parse_another_rule(call: int) -> None:
    Rule.parse({"every": "1h", "exclude": days_from(call)})


@pytest.mark.parametrize("use", [ask_for_one_rule, parse_another_rule])
def test_long_rules_do_not_fill_the_memory(use: Callable[[int], None]) -> None:
    for _ in range(limits.LONG_RULES_KEPT):
        use(next(CALLS))
    tracemalloc.start()
    try:
        # From here on, tracemalloc sees the memory of all results in the cache.
        for _ in range(limits.LONG_RULES_KEPT):
            use(next(CALLS))
        before_bytes = tracemalloc.get_traced_memory()[0]
        for _ in range(50):
            use(next(CALLS))
        assert tracemalloc.get_traced_memory()[0] - before_bytes < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("length", [1, limits.LONG_RULE_CHARACTERS + 1])
def test_a_result_is_computed_once(length: int) -> None:
    calls = []
    function = cached()(lambda text, number: calls.append(number) or number)
    assert [function("x" * length, number) for number in (1, 2, 1, 2)] == [1, 2, 1, 2]
    assert calls == [1, 2]


def test_simultaneous_calls_in_several_threads_raise_no_error() -> None:
    """The broker would take an error for one of the rule, and end its schedule."""
    function, errors = cached(long_results=2)(lambda text, number: number), list[Exception]()
    text, interval_s = "x" * (limits.LONG_RULE_CHARACTERS + 1), sys.getswitchinterval()

    def use_many(thread: int) -> None:
        for number in range(30_000):
            try:
                assert function(text, (thread, number)) == (thread, number)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=use_many, args=[number]) for number in range(4)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval_s)
    assert not errors
