"""Positions in a log, and the comparison of two logs.

A position is the ordinal of a segment and a byte in it, together with `seq`, the sequence number after the rows
before it. Only ends of frames are positions. The `ends` of a log are the positions at which its epochs end, in order.

Each epoch has one writer, which ships its frames in order (invariant I3). So two logs that both hold frames of an
epoch are equal up to the smaller of the two ends of this epoch. The greatest epoch that both logs have determines the
common part.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple


class Position(NamedTuple):
    """The end of a frame. Positions of the same log are compared like tuples."""

    ordinal: int
    end: int
    seq: int


BEGINNING = Position(0, 0, 0)  # before the first frame


class EpochEnd(NamedTuple):
    """The end of an epoch's last frame."""

    epoch: int
    ordinal: int
    end: int
    seq: int

    @property
    def position(self) -> Position:
        """The end of the epoch as a position."""
        return Position(self.ordinal, self.end, self.seq)


Ends = tuple[EpochEnd, ...]


def last_position(ends: Ends) -> Position:
    """Find the end of the last frame in a log with these ends."""
    return ends[-1].position if ends else BEGINNING


def log_order_key(ends: Ends) -> tuple[int, Position]:
    """Build the key by which logs are compared. The log with the later last epoch is greater, then the longer one."""
    return (ends[-1].epoch, ends[-1].position) if ends else (0, BEGINNING)


def are_in_order(ends: Ends) -> bool:
    """Check that epochs and positions both grow, as they do in every log."""
    return all(
        a.epoch < b.epoch and (a.ordinal, a.end) < (b.ordinal, b.end) and a.seq <= b.seq
        for a, b in itertools.pairwise(ends)
    )


def common_end(mine: Ends, theirs: Ends) -> Position:
    """Find the position up to which both logs are equal."""
    own_ends = {end.epoch: end.position for end in mine}
    for end in reversed(theirs):
        if end.epoch in own_ends:
            return min(own_ends[end.epoch], end.position)
    return BEGINNING


def find_resume_position(sender: Ends, receiver: Ends, sender_first_seq: int) -> Position:
    """Find the position from which the sender's log continues the receiver's log.

    The position is the end of the common log, or BEGINNING if the sender has deleted the next rows (its log begins with
    row `sender_first_seq`). In the second case the receiver's rows are not needed any more: the sender has a committed
    snapshot that contains all of their state that still counts.
    """
    end = common_end(sender, receiver)
    return end if end.seq >= sender_first_seq else BEGINNING


def cut(ends: Ends, at: Position) -> Ends:
    """Compute the ends of the log after a cut at `at`."""
    remaining = [end for end in ends if end.position <= at]
    if at > last_position(tuple(remaining)):
        # `at` lies within this epoch, which now ends there.
        remaining.append(EpochEnd(ends[len(remaining)].epoch, *at))
    return tuple(remaining)


def extend(ends: Ends, epoch: int, position: Position) -> Ends:
    """Compute the ends of the log after a frame of `epoch` was added, which ends at `position`."""
    if ends and ends[-1].epoch == epoch:
        return (*ends[:-1], EpochEnd(epoch, *position))
    assert not ends or ends[-1].epoch < epoch, f"a frame of epoch {epoch} behind one of {ends[-1].epoch}"
    return (*ends, EpochEnd(epoch, *position))
