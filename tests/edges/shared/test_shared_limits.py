"""SharedLimit: no address or account can keep the others out by being first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.edges.shared.shared_limits import SharedLimit, exceeds_share
from timeball.model.errors import OverLimit


def count_admitted(limit: SharedLimit, address: str, account: str = "") -> int:
    """Return how many calls are admitted until one is refused."""
    for count in range(1_000):
        try:
            limit.admit(address, account)
        except OverLimit:
            return count
    raise AssertionError("none was refused")


def test_one_address_alone_gets_at_most_half() -> None:
    limit = SharedLimit("streams", 60)
    assert count_admitted(limit, "a") == 30
    with pytest.raises(OverLimit, match="30 streams of a are open, its share of 60"):
        limit.admit("a")
    assert count_admitted(limit, "b") == 20
    assert count_admitted(limit, "c") == 10, "the last free ones"
    with pytest.raises(OverLimit, match="60 streams are open"):
        limit.admit("d")
    for _ in range(20):
        limit.give_back("b")
    assert count_admitted(limit, "d") == 15


def test_an_account_is_counted_over_all_its_addresses() -> None:
    limit = SharedLimit("calls", 60)
    assert sum(count_admitted(limit, f"10.0.0.{at}", "shop") for at in range(10)) == 30
    with pytest.raises(OverLimit, match="calls of shop are open"):
        limit.admit("10.0.0.11", "shop")
    limit.admit("10.0.0.11", "other")


def test_an_account_is_counted_once_it_is_known() -> None:
    limit = SharedLimit("calls", 4)
    for at in range(3):
        limit.take(f"10.0.0.{at}")
        limit.count_account("shop")
        assert (limit.excess(f"10.0.0.{at}", "shop") is not None) == (at == 2)
    for at in range(3):
        limit.give_back(f"10.0.0.{at}", "shop")
    assert not limit.taken and not limit.by_address and not limit._by_account


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["", "x", "y"])), max_size=80))
def test_the_limit_is_never_exceeded_and_all_calls_are_given_back(callers: list[tuple[str, str]]) -> None:
    """Callers: pairs of an address and an account."""
    limit, admitted_callers = SharedLimit("calls", 10), list[tuple[str, str]]()
    for caller in callers:
        try:
            limit.admit(*caller)
        except OverLimit:
            continue
        admitted_callers.append(caller)
    assert limit.taken == len(admitted_callers) <= 10
    for caller in admitted_callers:
        limit.give_back(*caller)
    assert (limit.taken, limit.by_address, limit._by_account) == (0, {}, {})


def test_connections_beyond_a_share_are_refused() -> None:
    assert not exceeds_share("a", ["a"] * 4, 10)
    assert exceeds_share("a", ["a"] * 5, 10)
    assert not exceeds_share("b", ["a"] * 5 + ["b"] * 2, 10)
    assert exceeds_share("b", ["a"] * 5 + ["b"] * 3, 10)
    assert exceeds_share("c", ["a"] * 5 + ["b"] * 5, 10)
