"""The window of a send stream: order, bounds, and that nobody is left waiting."""

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.protocols.flight.window import Budget, Slot, Window

BOUND_S = 30


class Waiting:
    """A call in a thread of its own, that may wait."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.outcome: object = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], object]) -> None:
        self.outcome = call()

    def ended(self, within_s: float = BOUND_S) -> bool:
        self._thread.join(within_s)
        return not self._thread.is_alive()


def entered(window: Window, size_bytes: int = 1) -> Slot:
    slot = window.enter(size_bytes)
    assert slot is not None
    return slot


@given(st.integers(1, 30).flatmap(lambda count: st.permutations(range(count))))
def test_answers_come_in_the_order_of_the_batches(order: list[int]) -> None:
    budget = Budget()
    window = Window(budget)
    slots = [entered(window, size) for size in range(len(order))]
    taken: list[bytes] = []
    for index in order:
        slots[index].settle(b"%d" % index)
        if slots and not any(slot.answer is None for slot in slots[: len(taken) + 1]):
            taken += window.pop_answers()
    assert taken == [b"%d" % index for index in range(len(order))]
    window.finish()
    assert window.pop_answers() == []
    assert budget.held_bytes == 0


def test_a_full_window_waits_until_an_answer_is_taken() -> None:
    window = Window(Budget(), batches_max=2)
    first, _ = entered(window), entered(window)
    third = Waiting(lambda: window.enter(1))
    assert not third.ended(0.05)
    first.settle(b"1")
    assert not third.ended(0.05)  # settled, but its client has not had the answer
    assert window.pop_answers() == [b"1"]
    assert third.ended() and isinstance(third.outcome, Slot)


def test_bytes_are_free_when_a_batch_is_settled() -> None:
    window = Window(Budget(), bytes_max=10)
    _, big = entered(window, 1), entered(window, 9)
    small = Waiting(lambda: window.enter(2))
    assert not small.ended(0.05)
    big.settle(b"")
    assert small.ended() and isinstance(small.outcome, Slot)


def test_a_batch_larger_than_the_window_goes_alone() -> None:
    budget = Budget(bytes_max=10)
    window = Window(budget, bytes_max=10)
    huge = entered(window, 1_000)
    next_one = Waiting(lambda: window.enter(1))
    assert not next_one.ended(0.05)
    huge.settle(b"")
    assert next_one.ended()
    assert budget.held_bytes == 1


def test_streams_share_one_budget() -> None:
    budget = Budget(bytes_max=10)
    one, other = Window(budget), Window(budget)
    slot = entered(one, 10)
    waiting = Waiting(lambda: other.enter(5))
    assert not waiting.ended(0.05)
    slot.settle(b"")
    assert waiting.ended() and isinstance(waiting.outcome, Slot)


@pytest.mark.parametrize("blocked_by", ["window", "budget"])
def test_abort_frees_everyone(blocked_by: str) -> None:
    budget = Budget(bytes_max=10)
    window = Window(budget, batches_max=1) if blocked_by == "window" else Window(budget)
    slot = entered(window, 10 if blocked_by == "budget" else 1)
    entering, taking = Waiting(lambda: window.enter(1)), Waiting(window.pop_answers)
    emptying = Waiting(lambda: window.wait_empty(BOUND_S))
    assert not entering.ended(0.05) and not taking.ended(0.05)
    window.abort()
    assert entering.ended() and entering.outcome is None
    assert taking.ended() and taking.outcome == []
    assert emptying.ended() and emptying.outcome is True
    slot.settle(b"late")  # the broker decides it all the same
    assert budget.held_bytes == 0


def test_finish_lets_the_last_answers_out() -> None:
    window = Window(Budget())
    slot = entered(window)
    window.finish()
    assert not window.wait_empty(0.01)
    slot.settle(b"last")
    assert window.pop_answers() == [b"last"]
    assert window.pop_answers() == []
    assert window.wait_empty(0.01)


def test_settling_twice_is_a_bug_of_ours() -> None:
    window = Window(Budget())
    slot = entered(window)
    slot.settle(b"1")
    with pytest.raises(AssertionError, match="once"):
        slot.settle(b"2")
