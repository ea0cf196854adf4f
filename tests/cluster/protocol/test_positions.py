"""Positions in a log: where its epochs end, where two logs part, and which of two logs is more complete."""

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

# A log, written as the epoch of each of its frames.
Frames = list[int]


def end_of(count: int) -> Position:
    """Return the end of a log of `count` frames: of 64 bytes and one row each, four in a segment after its header."""
    return Position((count - 1) // 4 + 1, 64 * ((count - 1) % 4 + 2), count + 1) if count else BEGINNING


def ends_of(frames: Frames) -> Ends:
    """Return where each epoch of a log ends."""
    ends: Ends = ()
    for count, epoch in enumerate(frames, 1):
        ends = extend(ends, epoch, end_of(count))
    return ends


logs = st.lists(st.integers(1, 5), max_size=12).map(sorted)


@given(logs, st.integers(0, 12))
def test_a_cut_log_has_the_ends_of_its_frames(frames: Frames, count: int) -> None:
    count = min(count, len(frames))
    assert cut(ends_of(frames), end_of(count)) == ends_of(frames[:count])
    assert last_position(ends_of(frames)) == end_of(len(frames))


@given(logs)
def test_the_ends_of_a_log_are_in_order_and_reversed_are_not(frames: Frames) -> None:
    ends = ends_of(frames)
    assert are_in_order(ends)
    assert len(ends) < 2 or not are_in_order(ends[::-1])


def test_ends_with_equal_epochs_or_equal_positions_are_not_in_order() -> None:
    first = EpochEnd(1, 1, 128, 2)
    assert not are_in_order((first, first))
    assert not are_in_order((first, EpochEnd(2, 1, 128, 2)))
    assert not are_in_order((first, EpochEnd(1, 1, 192, 3)))


@pytest.mark.parametrize(
    ("own", "other", "equal_frames"),
    [
        ([], [1], 0),
        ([1, 1, 1], [1, 1], 2),
        ([1, 1, 2, 2], [1, 1, 1], 2),  # the other log has a frame of epoch 1 that no leader after it had
        ([1, 1, 2, 2, 4], [1, 1, 2, 2, 2, 3], 4),
        ([2, 2], [1, 1], 0),  # no epoch in common: one of the two lacks its beginning
    ],
)
def test_two_logs_are_equal_up_to_the_end_of_the_last_epoch_they_share(
    own: Frames, other: Frames, equal_frames: int
) -> None:
    assert common_end(ends_of(own), ends_of(other)) == end_of(equal_frames)
    assert common_end(ends_of(other), ends_of(own)) == end_of(equal_frames)


def test_log_order_compares_the_last_epoch_before_the_length() -> None:
    assert log_order_key(ends_of([1, 2])) > log_order_key(ends_of([1, 1, 1]))
    assert log_order_key(ends_of([1, 1])) > log_order_key(ends_of([1]))
    assert log_order_key(()) == (0, BEGINNING)


def test_frames_of_an_earlier_epoch_than_the_last_are_not_appended() -> None:
    with pytest.raises(AssertionError):
        extend(ends_of([2]), 1, end_of(2))
