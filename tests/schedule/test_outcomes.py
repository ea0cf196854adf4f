"""The outcomes of messages, compared with a plain dictionary: only pairs that the mark covers may be forgotten."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from typing import ClassVar

import hypothesis
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from timeball.model.message import Int64Array
from timeball.schedule.outcomes import Outcomes, ReleaseCursor, Settled

Pair = tuple[int, int]

SETTINGS = hypothesis.settings(max_examples=100, stateful_step_count=25, deadline=None)
UNTIL_CAUGHT = hypothesis.settings(
    SETTINGS, max_examples=500, database=None, derandomize=True, report_multiple_bugs=False,
    phases=[hypothesis.Phase.generate],
)  # fmt: skip
# Few instants, so that scheduled messages share one and the mark passes many.
DUES = st.lists(st.integers(0, 12), min_size=1, max_size=8)
AFTER_ALL_MS = 13  # later than all `DUES`
CHOICE = st.integers(0, 1 << 16)
BEGINNING = -(1 << 62)
NONE = np.empty(0, np.int64)


def columns(pairs: Iterable[Pair]) -> tuple[Int64Array, Int64Array]:
    listed = list(pairs)
    return np.array([due for due, _ in listed], np.int64), np.array([seq for _, seq in listed], np.int64)


class Machine(RuleBasedStateMachine):
    """Random steps. Messages are numbered as in a log, and some numbers are reserved for a later bulk attach."""

    new: ClassVar[type[Outcomes]] = Outcomes

    @initialize()
    def open(self) -> None:
        self.outcomes = type(self).new()
        self.next_seq = 1
        self.state: dict[Pair, str] = {}
        self.flights: list[list[Pair]] = []
        self.released_ms: list[int] = []  # the due times of all messages that were released

    def pairs_in(self, *states: str) -> list[Pair]:
        return sorted(pair for pair, state in self.state.items() if state in states)

    # -- messages are added -----------------------------------------------------------------------------------------

    @rule(due_times=DUES)
    def admit(self, due_times: list[int]) -> None:
        self.state.update({(due, self.next_seq + i): "waits" for i, due in enumerate(due_times)})
        self.next_seq += len(due_times)

    @rule(due_times=DUES, marks=st.booleans())
    def attach(self, due_times: list[int], marks: bool) -> None:
        """Numbers are reserved, and the mark may move before the messages with these numbers are added."""
        first_seq = self.next_seq
        self.next_seq += len(due_times)
        if marks:
            self.move_mark(0)
        self.outcomes.exclude_from_mark([(first_seq, len(due_times))])
        self.state.update({(due, first_seq + i): "waits" for i, due in enumerate(due_times)})

    # -- released or cancelled -----------------------------------------------------------------------------------

    @rule(count=st.integers(1, 6))
    def hand_out(self, count: int) -> None:
        flight = self.pairs_in("waits")[:count]
        if flight:
            due_ms, seq = columns(flight)
            self.outcomes.hand_out(due_ms, seq, due_ms)
            self.flights.append(flight)
            self.state.update(dict.fromkeys(flight, "in flight"))

    @rule(count=st.integers(1, 6), missed=st.none() | st.integers(0, 63))
    def release(self, count: int, missed: int | None) -> None:
        """With `missed`, some of the messages have a CANCEL row instead: they are occurrences that were missed."""
        if self.flights:
            flight = self.flights.pop(0)
            done, left = flight[:count], flight[count:]
            is_missed = [bool((missed or 0) >> i & 1) for i in range(len(done))]
            self.outcomes.released(columns(done)[1], None if missed is None else np.array(is_missed))
            self.released_ms += [
                due for (due, _), cancelled in zip(done, is_missed, strict=True) if not cancelled
            ]
            self.state.update(
                {
                    pair: "cancelled" if cancelled else "released"
                    for pair, cancelled in zip(done, is_missed, strict=True)
                }
            )
            if left:
                self.flights.insert(0, left)

    @rule(choice=CHOICE)
    def cancel(self, choice: int) -> None:
        pairs = [pair for i, pair in enumerate(sorted(self.state)) if choice >> i & 1]
        answers = self.outcomes.cancel(*columns(pairs)).tolist()
        assert answers == [self.state[pair] == "waits" for pair in pairs]
        self.state.update(
            {pair: "cancelled" for pair, is_cancelled in zip(pairs, answers, strict=True) if is_cancelled}
        )

    # -- the mark and restarts ----------------------------------------------------------------------------

    @rule(less=st.integers(0, 3))
    def let_the_mark_move(self, less: int) -> None:
        self.move_mark(less)

    def move_mark(self, less: int) -> None:
        unsettled = self.pairs_in("waits", "in flight")
        before_ms = (unsettled[0][0] if unsettled else AFTER_ALL_MS) - less
        self.outcomes.move_mark(before_ms, self.next_seq)
        if before_ms >= AFTER_ALL_MS:
            assert len(self.outcomes) == 0, "the mark covers all messages, so no pair is needed"

    @rule()
    def restart(self) -> None:
        saved, cursor = self.outcomes.settled(), self.outcomes.cursor
        self.outcomes = type(self).new()
        self.outcomes.restore(saved, cursor)
        for flight in self.flights:
            self.state.update(dict.fromkeys(flight, "waits"))
        self.flights = []

    # -- what holds between any two steps ------------------------------------------------------------------

    @invariant()
    def is_settled_agrees_with_the_model(self) -> None:
        pairs = sorted(self.state)
        answers = self.outcomes.is_settled(*columns(pairs)).tolist()
        wanted = [self.state[pair] in ("released", "cancelled") for pair in pairs]
        assert answers == wanted, [p for p, a, w in zip(pairs, answers, wanted, strict=True) if a != w]

    @invariant()
    def only_cancelled_messages_were_cancelled(self) -> None:
        pairs = sorted(self.state)
        was = self.outcomes.was_cancelled(*columns(pairs)).tolist()
        for pair, answer in zip(pairs, was, strict=True):
            assert not answer or self.state[pair] == "cancelled", pair

    @invariant()
    def in_flight_agrees_with_the_model(self) -> None:
        in_flight = self.pairs_in("in flight")
        assert self.outcomes.first_in_flight_ms == (in_flight[0][0] if in_flight else None)
        assert len(in_flight) <= len(self.outcomes) <= len(self.state)
        assert self.outcomes.cancelled_rows <= len(self.pairs_in("cancelled"))

    @invariant()
    def cursor_counts_all_releases(self) -> None:
        assert self.outcomes.cursor == ReleaseCursor().after(np.array(self.released_ms, np.int64))


def run(new: type[Outcomes], settings: hypothesis.settings) -> None:
    run_state_machine_as_test(type("Machine", (Machine,), {"new": new}), settings=settings)


def test_random_steps_give_the_outcomes_of_the_model() -> None:
    run(Outcomes, SETTINGS)


class ForgetsBulk(Outcomes):
    """Wrong outcomes: each message with a number below the mark counts as settled."""

    def exclude_from_mark(self, ranges: Iterable[tuple[int, int]]) -> None:
        pass


class MarksAllNumbers(Outcomes):
    """Wrong outcomes: the mark covers messages that have not arrived yet."""

    def move_mark(self, before_ms: int, next_seq: int) -> None:
        super().move_mark(before_ms, 1 << 62)


class MovesBack(Outcomes):
    """Wrong outcomes: the mark moves back, although pairs that it covered have been removed."""

    def move_mark(self, before_ms: int, next_seq: int) -> None:
        super().move_mark(before_ms, next_seq)
        self._mark = Settled(before_ms, before_seq=next_seq)


class CancelsWhatIsInFlight(Outcomes):
    """Wrong outcomes: a handed-out message can be cancelled."""

    def cancel(self, due_ms: Int64Array, seq: Int64Array) -> npt.NDArray[np.bool_]:
        flights = self._in_flight.copy()
        self._in_flight.clear()
        answers = super().cancel(due_ms, seq)
        self._in_flight.extend(flights)
        return answers


class CountsWhatIsNotDurable(Outcomes):
    """Wrong outcomes: a message counts as released when it is handed out."""

    def hand_out(self, due_ms: Int64Array, seq: Int64Array, recorded_ms: Int64Array) -> None:
        super().hand_out(due_ms, seq, recorded_ms)
        self.cursor = self.cursor.after(due_ms)


class SavesTheMarkAlone(Outcomes):
    """Wrong outcomes: a checkpoint has no settled pairs that the mark does not cover."""

    def settled(self) -> Settled:
        return Settled(self._mark.before_ms, (), self._mark.before_seq, self._mark.late)


WRONG = [
    ForgetsBulk,
    MarksAllNumbers,
    MovesBack,
    CancelsWhatIsInFlight,
    CountsWhatIsNotDurable,
    SavesTheMarkAlone,
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_wrong_outcomes_are_caught(wrong: type[Outcomes]) -> None:
    with pytest.raises(AssertionError) as caught:
        run(wrong, UNTIL_CAUGHT)
    assert caught.traceback[-1].path.name == "test_outcomes.py"


def test_releases_in_another_order_than_handed_out_are_refused() -> None:
    outcomes = Outcomes()
    for pairs in ([(1, 1), (2, 2)], [(3, 3)]):
        due_ms, seq = columns(pairs)
        outcomes.hand_out(due_ms, seq, due_ms)
    with pytest.raises(AssertionError, match="in the order"):
        outcomes.released(np.array([3]))


def test_pairs_that_the_mark_covers_take_no_memory() -> None:
    outcomes = Outcomes()
    pairs = [(due, due + 1) for due in range(1_000)]
    outcomes.cancel(*columns(pairs[::2]))
    outcomes.hand_out(*columns(pairs[1::2]), columns(pairs[1::2])[0])
    outcomes.released(columns(pairs[1::2])[1])
    assert (len(outcomes), outcomes.cancelled_rows) == (1_000, 500)
    outcomes.move_mark(998, 2_000)
    assert (len(outcomes), outcomes.cancelled_rows) == (2, 1)
    assert outcomes.is_settled(*columns(pairs)).all()


def test_settled_pair_does_not_settle_its_number_at_another_due_time() -> None:
    """A message may get another due time, and later its previous one again."""
    outcomes = Outcomes()
    assert outcomes.cancel(*columns([(10, 1), (20, 1), (30, 2)])).all()
    pairs = columns([(10, 1), (20, 1), (30, 1), (10, 2), (30, 2)])
    assert outcomes.is_settled(*pairs).tolist() == [True, True, False, False, True]
    assert outcomes.are_pending(*pairs).tolist() == [False, False, True, True, False]


def test_cursor_uses_the_recorded_due_time_not_the_original_one() -> None:
    """A message of a delay level after a clock was set back. It does not move the cursor into the future."""
    outcomes = Outcomes()
    outcomes.hand_out(*columns([(90_000, 1)]), np.array([5_500]))
    outcomes.released(np.array([1]))
    assert outcomes.cursor == ReleaseCursor(5_000, 1)
    assert outcomes.is_settled(*columns([(90_000, 1)])).all()


def test_new_outcomes_have_nothing_settled() -> None:
    outcomes = Outcomes()
    assert not outcomes.is_settled(*columns([(0, 1), (-(1 << 40), 2)])).any()
    settled = outcomes.settled()
    assert (settled.before_ms, settled.before_seq, len(settled.seq), settled.late) == (BEGINNING, 0, 0, ())


# ---- the cursor, compared with a count of the released messages ------------------------------------------------

# Few seconds, so that many scheduled messages share one; instants in any order, as after a clock that was set back.
CURSOR_DUES = st.lists(st.integers(0, 5_500), max_size=40)


def expected_cursor(due_times: list[int]) -> ReleaseCursor:
    seconds = Counter(due // 1_000 for due in due_times)
    last = max(seconds, default=0)
    return ReleaseCursor(last * 1_000, seconds[last])


def cursor_after(cursor: ReleaseCursor, due_times: list[int]) -> ReleaseCursor:
    return cursor.after(np.array(due_times, np.int64))


@given(CURSOR_DUES, st.lists(st.integers(0, 40), max_size=5))
def test_cursor_is_the_last_second_and_its_count_for_any_split_of_records(
    due_times: list[int], cuts: list[int]
) -> None:
    bounds = [0, *sorted(cuts), len(due_times)]
    cursor = ReleaseCursor()
    for begin, end in pairwise(bounds):
        before, cursor = cursor, cursor_after(cursor, due_times[begin:end])
        assert cursor >= before, "a cursor never moves back"
    assert cursor == expected_cursor(due_times)


@given(CURSOR_DUES, CURSOR_DUES)
def test_cursor_does_not_depend_on_the_order_of_records(first: list[int], then: list[int]) -> None:
    assert cursor_after(cursor_after(ReleaseCursor(), first), then) == cursor_after(
        cursor_after(ReleaseCursor(), then), first
    )


def test_late_message_does_not_change_the_cursor() -> None:
    cursor = cursor_after(ReleaseCursor(), [7_100, 7_200, 8_000, 8_999])
    assert cursor == ReleaseCursor(8_000, 2)
    assert cursor_after(cursor, [7_999, 3]) == cursor
    assert cursor_after(cursor, [7_999, 8_500]) == ReleaseCursor(8_000, 3), (
        "late by milliseconds, it counts in the second of the cursor"
    )


def test_cursor_that_counts_a_record_twice_differs() -> None:
    """The control: the records after a checkpoint must be counted from exactly its row on."""
    due_times = [1_000, 2_000, 2_500, 2_999]
    saved = cursor_after(ReleaseCursor(), due_times[:2])
    assert cursor_after(saved, due_times[2:]) == expected_cursor(due_times)
    assert cursor_after(saved, due_times[1:]) != expected_cursor(due_times)
    assert cursor_after(saved, due_times[3:]) != expected_cursor(due_times)


def test_cursor_is_zero_before_the_first_release() -> None:
    assert cursor_after(ReleaseCursor(), []) == ReleaseCursor(0, 0)
    assert cursor_after(ReleaseCursor(), [0]) == ReleaseCursor(0, 1)
