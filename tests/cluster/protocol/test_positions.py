from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from timeball.cluster.protocol.messages import (
    BEGINNING,
    Ends,
    EpochEnd,
    Position,
    are_in_order,
    common_end,
    cut,
    extend,
    last_position,
    log_order_key,
)

# A log as its frames' epochs; the n-th frame (from 0) ends at byte 64 * (n + 2), four frames a segment.
Frames = list[int]


def place(count: int) -> Position:
    return Position((count - 1) // 4 + 1, 64 * ((count - 1) % 4 + 2), count + 1) if count else BEGINNING


def ends_of(frames: Frames) -> Ends:
    ends: Ends = ()
    for count, epoch in enumerate(frames, 1):
        ends = extend(ends, epoch, place(count))
    return ends


logs = st.lists(st.integers(1, 5), max_size=12).map(sorted)


@given(logs, st.integers(0, 12))
def test_a_cut_log_has_the_ends_of_what_is_left(frames: Frames, count: int) -> None:
    count = min(count, len(frames))
    assert cut(ends_of(frames), place(count)) == ends_of(frames[:count])
    assert last_position(ends_of(frames)) == place(len(frames))


@given(logs)
def test_ends_are_in_order(frames: Frames) -> None:
    ends = ends_of(frames)
    assert are_in_order(ends)
    assert len(ends) < 2 or not are_in_order(ends[::-1])


def test_equal_epochs_or_places_are_not_in_order() -> None:
    first = EpochEnd(1, 1, 128, 2)
    assert not are_in_order((first, first))
    assert not are_in_order((first, EpochEnd(2, 1, 128, 2)))
    assert not are_in_order((first, EpochEnd(1, 1, 192, 3)))


@pytest.mark.parametrize(
    ("mine", "theirs", "equal"),
    [
        ([], [1], 0),
        ([1, 1, 1], [1, 1], 2),
        ([1, 1, 2, 2], [1, 1, 1], 2),  # theirs went on in an epoch that was lost
        ([1, 1, 2, 2, 4], [1, 1, 2, 2, 2, 3], 4),
        ([2, 2], [1, 1], 0),  # no epoch in common: one of the two lacks its beginning
    ],
)
def test_two_logs_are_equal_up_to_the_end_of_the_last_epoch_they_share(
    mine: Frames, theirs: Frames, equal: int
) -> None:
    assert common_end(ends_of(mine), ends_of(theirs)) == place(equal)
    assert common_end(ends_of(theirs), ends_of(mine)) == place(equal)


def test_the_later_epoch_knows_more_than_the_longer_log() -> None:
    assert log_order_key(ends_of([1, 2])) > log_order_key(ends_of([1, 1, 1]))
    assert log_order_key(ends_of([1, 1])) > log_order_key(ends_of([1]))
    assert log_order_key(()) == (0, BEGINNING)


def test_an_epoch_never_follows_a_later_one() -> None:
    with pytest.raises(AssertionError):
        extend(ends_of([2]), 1, place(2))
