"""Shares of bytes: never more than all may hold, a share left for the next address, and everybody gets on."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.edges.grpc.edge import UNREAD_BYTES_MAX
from timeball.edges.shared.shared_limits import MemoryQuota
from timeball.model.errors import OverLimit

MAX = 120
HALF = UNREAD_BYTES_MAX // 2


def test_one_address_alone_has_half_and_leaves_the_rest() -> None:
    shares = MemoryQuota(MAX)
    shares.add("a", 50)
    assert shares.fits("a", 10) and not shares.fits("a", 11)
    assert shares.fits("b", 70) and not shares.fits("b", 71)


def test_the_share_is_less_the_more_there_are() -> None:
    shares = MemoryQuota(MAX)
    for address in "abc":
        shares.add(address, 20)
    assert shares.fits("a", 10) and not shares.fits("a", 11)
    shares.remove("b", 20)
    assert shares.fits("a", 20) and not shares.fits("a", 21)


def test_however_many_there_are_each_may_have_one_item() -> None:
    shares = MemoryQuota(MAX, item_bytes_max=40)
    for number in range(20):
        shares.add(str(number), 1)
    assert shares.fits("0", 39) and not shares.fits("0", 40)


def test_something_larger_than_all_gets_on_alone() -> None:
    shares = MemoryQuota(MAX)
    assert shares.reserve("a", 500, lambda: None)
    assert not shares.fits("b", 1)
    shares.remove("a", 500)
    assert (shares.held_bytes, shares.held_by("a")) == (0, 0)
    assert shares.fits("b", 1)


def test_who_waits_is_let_in_by_what_is_given_back_in_turn() -> None:
    shares, order = MemoryQuota(MAX), list[str]()
    assert shares.reserve("a", 60, lambda: None)
    for name in ("a1", "a2"):
        assert not shares.reserve("a", 30, partial(order.append, name))
    assert shares.reserve("b", 60, lambda: None)
    for name in ("b1", "b2"):
        assert not shares.reserve("b", 20, partial(order.append, name))
    shares.remove("a", 60)
    assert order == ["a1"], "an address that holds nothing is first let in once"
    shares.remove("b", 60)
    assert order == ["a1", "b1", "b2"] and shares.held_bytes == 70
    shares.remove("b", 40)
    assert order == ["a1", "b1", "b2", "a2"]


def test_who_waits_no_longer_holds_nobody_up() -> None:
    shares, order = MemoryQuota(MAX), list[str]()
    shares.add("a", 60)
    large = partial(order.append, "large")
    assert not shares.reserve("a", 60, large)
    assert shares.waiting == 1
    assert not shares.reserve("a", 0, partial(order.append, "small"))
    assert shares.withdraw("a", large)
    assert order == ["small"]
    assert not shares.withdraw("a", large)
    shares.remove("a", 60)
    assert order == ["small"] and shares.held_bytes == 0


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 50)), max_size=60), st.randoms())
def test_all_get_on_and_never_hold_more_than_all_may(asked: list[tuple[str, int]], random: object) -> None:
    shares, held = MemoryQuota(MAX), list[tuple[str, int]]()
    served = 0
    for address, size in asked:
        if shares.reserve(address, size, partial(held.append, (address, size))):
            held.append((address, size))
        assert shares.held_bytes == sum(size for _, size in held) <= MAX
    while held:
        address, size = held.pop(random.randrange(len(held)))  # type: ignore[attr-defined]
        served += 1
        shares.remove(address, size)
        assert shares.held_bytes == sum(size for _, size in held) <= MAX
    assert served == len(asked)
    assert not shares._waiting and not shares._of


def test_one_that_goes_as_it_is_let_in_gives_its_room_back() -> None:
    async def work() -> None:
        shares = MemoryQuota(MAX, MAX)
        await shares.room("a", MAX)
        waiting = asyncio.ensure_future(shares.room("b", MAX))
        await asyncio.sleep(0)
        shares.remove("a", MAX)
        waiting.cancel()  # in the same turn of the loop
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not shares.held_bytes

    asyncio.run(work())


def test_one_that_has_gone_when_it_is_let_in_gives_its_room_back() -> None:
    async def work() -> None:
        shares = MemoryQuota(MAX, MAX)
        await shares.room("a", MAX)
        waiting = asyncio.ensure_future(shares.room("b", MAX))
        await asyncio.sleep(0)
        waiting.cancel()
        shares.remove("a", MAX)  # in the same turn of the loop, by a request that is none the wiser
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not shares.held_bytes

    asyncio.run(work())


# ---- answers on their way --------------------------------------------------------------------------------


def test_each_address_has_its_share_of_answers() -> None:
    unread = MemoryQuota(UNREAD_BYTES_MAX)
    with unread.held("a", HALF - 1):
        unread.check("a", 1)
        with pytest.raises(OverLimit, match="not read yet"):
            unread.check("a", 2)
        unread.check("b", HALF)
        with pytest.raises(OverLimit), unread.held("a", 2):
            raise AssertionError("there is no room")
    unread.check("a", HALF)


def test_all_have_a_bound_whoever_asks() -> None:
    """However many addresses do not read: each alone might have been within its own bound."""
    unread, part = MemoryQuota(UNREAD_BYTES_MAX), 32 * 1024 * 1024
    with ExitStack() as held:
        for n in range(100):
            with suppress(OverLimit):
                held.enter_context(unread.held(f"deaf-{n}", part))
        assert UNREAD_BYTES_MAX - part < unread.held_bytes <= UNREAD_BYTES_MAX


def test_a_single_answer_may_have_any_size() -> None:
    with MemoryQuota(UNREAD_BYTES_MAX).held("a", 2 * UNREAD_BYTES_MAX):
        pass


def test_nothing_is_left_over() -> None:
    unread = MemoryQuota(UNREAD_BYTES_MAX)
    for ends_badly in (False, True):
        with ExitStack() as stack:
            if ends_badly:
                stack.enter_context(pytest.raises(ZeroDivisionError))
            with unread.held("a", 10):
                assert unread.held_bytes == 10
                if ends_badly:
                    raise ZeroDivisionError
        assert unread.held_bytes == 0 and not unread.held_by("a")
