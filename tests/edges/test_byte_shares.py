"""MemoryQuota: never more bytes than the total, a share left for the next address, and progress of each address."""

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

BYTES_MAX = 120
HALF_BYTES = UNREAD_BYTES_MAX // 2


def test_one_address_alone_gets_at_most_half_of_the_quota() -> None:
    quota = MemoryQuota(BYTES_MAX)
    quota.add("a", 50)
    assert quota.fits("a", 10) and not quota.fits("a", 11)
    assert quota.fits("b", 70) and not quota.fits("b", 71)


def test_a_share_shrinks_with_the_number_of_addresses() -> None:
    quota = MemoryQuota(BYTES_MAX)
    for address in "abc":
        quota.add(address, 20)
    assert quota.fits("a", 10) and not quota.fits("a", 11)
    quota.remove("b", 20)
    assert quota.fits("a", 20) and not quota.fits("a", 21)


def test_each_address_may_hold_one_item_of_the_largest_size() -> None:
    quota = MemoryQuota(BYTES_MAX, item_bytes_max=40)
    for number in range(20):
        quota.add(str(number), 1)
    assert quota.fits("0", 39) and not quota.fits("0", 40)


def test_a_request_larger_than_the_quota_is_granted_alone() -> None:
    quota = MemoryQuota(BYTES_MAX)
    assert quota.reserve("a", 500, lambda: None)
    assert not quota.fits("b", 1)
    quota.remove("a", 500)
    assert (quota.held_bytes, quota.held_by("a")) == (0, 0)
    assert quota.fits("b", 1)


def test_waiting_requests_are_granted_in_turn_between_addresses() -> None:
    quota, order = MemoryQuota(BYTES_MAX), list[str]()
    assert quota.reserve("a", 60, lambda: None)
    for name in ("a1", "a2"):
        assert not quota.reserve("a", 30, partial(order.append, name))
    assert quota.reserve("b", 60, lambda: None)
    for name in ("b1", "b2"):
        assert not quota.reserve("b", 20, partial(order.append, name))
    quota.remove("a", 60)
    assert order == ["a1"], "an address that holds nothing gets memory for one request first"
    quota.remove("b", 60)
    assert order == ["a1", "b1", "b2"] and quota.held_bytes == 70
    quota.remove("b", 40)
    assert order == ["a1", "b1", "b2", "a2"]


def test_a_withdrawn_request_does_not_block_requests_behind_it() -> None:
    quota, order = MemoryQuota(BYTES_MAX), list[str]()
    quota.add("a", 60)
    large = partial(order.append, "large")
    assert not quota.reserve("a", 60, large)
    assert quota.waiting == 1
    assert not quota.reserve("a", 0, partial(order.append, "small"))
    assert quota.withdraw("a", large)
    assert order == ["small"]
    assert not quota.withdraw("a", large)
    quota.remove("a", 60)
    assert order == ["small"] and quota.held_bytes == 0


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 50)), max_size=60), st.randoms())
def test_all_requests_are_granted_within_the_total(requests: list[tuple[str, int]], random: object) -> None:
    quota, held = MemoryQuota(BYTES_MAX), list[tuple[str, int]]()
    served = 0
    for address, size in requests:
        if quota.reserve(address, size, partial(held.append, (address, size))):
            held.append((address, size))
        assert quota.held_bytes == sum(size for _, size in held) <= BYTES_MAX
    while held:
        address, size = held.pop(random.randrange(len(held)))  # type: ignore[attr-defined]
        served += 1
        quota.remove(address, size)
        assert quota.held_bytes == sum(size for _, size in held) <= BYTES_MAX
    assert served == len(requests)
    assert not quota._waiting and not quota._bytes_by_address


def test_a_request_cancelled_after_its_grant_gives_memory_back() -> None:
    async def work() -> None:
        quota = MemoryQuota(BYTES_MAX, BYTES_MAX)
        await quota.add_when_fits("a", BYTES_MAX)
        waiting = asyncio.ensure_future(quota.add_when_fits("b", BYTES_MAX))
        await asyncio.sleep(0)
        quota.remove("a", BYTES_MAX)
        waiting.cancel()  # in the same turn of the loop
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not quota.held_bytes

    asyncio.run(work())


def test_a_request_cancelled_before_its_grant_gives_memory_back() -> None:
    async def work() -> None:
        quota = MemoryQuota(BYTES_MAX, BYTES_MAX)
        await quota.add_when_fits("a", BYTES_MAX)
        waiting = asyncio.ensure_future(quota.add_when_fits("b", BYTES_MAX))
        await asyncio.sleep(0)
        waiting.cancel()
        quota.remove("a", BYTES_MAX)  # in the same turn of the loop
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not quota.held_bytes

    asyncio.run(work())


# ---- unread answers --------------------------------------------------------------------------------------


def test_unread_answers_of_one_address_are_limited_to_its_share() -> None:
    unread = MemoryQuota(UNREAD_BYTES_MAX)
    with unread.held("a", HALF_BYTES - 1):
        unread.check("a", 1)
        with pytest.raises(OverLimit, match="not read yet"):
            unread.check("a", 2)
        unread.check("b", HALF_BYTES)
        with pytest.raises(OverLimit), unread.held("a", 2):
            raise AssertionError("the quota must refuse this")
    unread.check("a", HALF_BYTES)


def test_unread_answers_of_many_addresses_are_limited_together() -> None:
    """Many addresses that do not read stay within the total, although each is within its own share."""
    unread, part = MemoryQuota(UNREAD_BYTES_MAX), 32 * 1024 * 1024
    with ExitStack() as held:
        for n in range(100):
            with suppress(OverLimit):
                held.enter_context(unread.held(f"deaf-{n}", part))
        assert UNREAD_BYTES_MAX - part < unread.held_bytes <= UNREAD_BYTES_MAX


def test_a_single_answer_may_have_any_size() -> None:
    with MemoryQuota(UNREAD_BYTES_MAX).held("a", 2 * UNREAD_BYTES_MAX):
        pass


def test_held_gives_the_bytes_back_also_after_an_error() -> None:
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
