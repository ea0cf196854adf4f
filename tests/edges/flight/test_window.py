"""The window of a send stream: the order of answers, the limits, and the callbacks that end a wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.bounds import BOUND_S

from timeball.edges.flight.exchange import Slot, Window
from timeball.edges.shared.shared_limits import MemoryQuota

ONE, OTHER = "10.0.0.1", "10.0.0.2"


class Stream:
    """A window, and the number of calls of its two callbacks."""

    def __init__(self, budget: MemoryQuota, address: str = ONE, **bounds: int) -> None:
        self.capacity_calls = self.answer_calls = 0
        self.window = Window(budget, address, self._on_capacity, self._answer, **bounds)

    def _on_capacity(self) -> None:
        self.capacity_calls += 1

    def _answer(self) -> None:
        self.answer_calls += 1

    def enter(self, size_bytes: int = 1) -> Slot:
        """Enter a batch of this size, which must fit, and return its slot."""
        slot = self.window.enter(size_bytes)
        assert slot is not None
        return slot

    async def has_capacity_call(self) -> bool:
        """Check whether `on_capacity` was called once by the end of this turn of the loop.

        Resets the number of calls.
        """
        await asyncio.sleep(0)
        calls, self.capacity_calls = self.capacity_calls, 0
        return calls == 1


def run(check: Coroutine[Any, Any, None]) -> None:
    """Run a check in a new loop, at most for BOUND_S."""
    asyncio.run(asyncio.wait_for(check, BOUND_S))


@given(st.integers(1, 30).flatmap(lambda count: st.permutations(range(count))))
def test_answers_are_taken_in_the_order_of_the_batches(order: list[int]) -> None:
    budget = MemoryQuota(10_000)
    stream = Stream(budget)
    slots = [stream.enter(size) for size in range(len(order))]
    taken: list[bytes] = []
    for index in order:
        slots[index].settle(b"%d" % index)
        assert (stream.answer_calls > 0) == (index == len(taken)), "called for the slot at the front"
        stream.answer_calls = 0
        while (answer := stream.window.pop_answer()) is not None:
            taken.append(answer)
    assert taken == [b"%d" % index for index in range(len(order))]
    assert not stream.window and budget.held_bytes == 0


def test_a_full_window_waits_until_an_answer_is_taken() -> None:
    async def check() -> None:
        stream = Stream(MemoryQuota(100), batches_max=2)
        first, _ = stream.enter(), stream.enter()
        assert stream.window.enter(1) is None
        first.settle(b"1")
        await stream.has_capacity_call()
        assert stream.window.enter(1) is None, "the slot counts until its answer is taken"
        assert stream.window.pop_answer() == b"1"
        assert await stream.has_capacity_call()
        stream.enter()

    run(check())


def test_settling_a_batch_frees_its_bytes() -> None:
    async def check() -> None:
        stream = Stream(MemoryQuota(100), bytes_max=10)
        _, large = stream.enter(1), stream.enter(9)
        assert stream.window.enter(2) is None
        assert not await stream.has_capacity_call()
        large.settle(b"")
        assert await stream.has_capacity_call()
        stream.enter(2)

    run(check())


def test_a_batch_larger_than_the_window_enters_alone() -> None:
    async def check() -> None:
        budget = MemoryQuota(10, 1_000)
        stream = Stream(budget, bytes_max=10)
        huge = stream.enter(1_000)
        assert stream.window.enter(1) is None
        huge.settle(b"")
        assert await stream.has_capacity_call()
        stream.enter(1)
        assert budget.held_bytes == 1

    run(check())


def test_streams_share_one_budget() -> None:
    async def check() -> None:
        budget = MemoryQuota(10)
        first, other = Stream(budget), Stream(budget, OTHER)
        slot = first.enter(10)
        assert other.window.enter(5) is None
        assert other.window.enter(5) is None, "requests the bytes only once"
        slot.settle(b"")
        assert budget.held_bytes == 5, "the bytes of the waiting stream"
        assert await other.has_capacity_call()
        other.enter(5)
        assert budget.held_bytes == 5

    run(check())


@pytest.mark.parametrize("waits", ["for the window", "for the budget", "with granted bytes"])
def test_abort_returns_all_bytes_and_ends_the_callbacks(waits: str) -> None:
    async def check() -> None:
        budget = MemoryQuota(10)
        stream = Stream(budget, batches_max=1) if waits == "for the window" else Stream(budget)
        other = Stream(budget, OTHER)
        slot = stream.enter(1) if waits == "for the window" else other.enter(10)
        assert stream.window.enter(2) is None
        if waits == "with granted bytes":
            slot.settle(b"")
        emptied = asyncio.ensure_future(stream.window.emptied())
        await asyncio.sleep(0)
        stream.capacity_calls = 0
        stream.window.abort()
        await emptied
        assert stream.window.enter(1) is None and stream.window.pop_answer() is None
        if waits != "with granted bytes":
            slot.settle(b"late")  # the broker still answers the batch
        assert not await stream.has_capacity_call()
        assert budget.held_bytes == 0 and not budget.waiting

    run(check())


def test_emptied_waits_for_the_last_answer() -> None:
    async def check() -> None:
        stream = Stream(MemoryQuota(10))
        slot = stream.enter()
        stream.window.finish()
        emptied = asyncio.ensure_future(stream.window.emptied())
        slot.settle(b"last")
        await asyncio.sleep(0)
        assert not emptied.done()
        assert stream.window.pop_answer() == b"last"
        await emptied
        await stream.window.emptied()  # at once

    run(check())


def test_settling_a_slot_twice_is_an_assertion_error() -> None:
    stream = Stream(MemoryQuota(10))
    slot = stream.enter()
    slot.settle(b"1")
    with pytest.raises(AssertionError, match="once"):
        slot.settle(b"2")
