"""Places in a log, and how far two logs agree.

A place is a segment's ordinal and a byte in it; `seq`, the sequence number after the rows before it, comes along. Only
ends of frames are places. A log's `ends` say for each epoch where its last frame ends, in order.

One writer an epoch ships its frames in order (invariant I3). So two logs that both hold frames of an epoch are equal up
to the smaller of its two ends, and the greatest epoch that both know says the most.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple


class Position(NamedTuple):
    """The end of a frame. Compares as places of one log do."""

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
        """Return where the epoch ends."""
        return Position(self.ordinal, self.end, self.seq)


Ends = tuple[EpochEnd, ...]


def last(ends: Ends) -> Position:
    """Return where a log with these ends has its last frame's end."""
    return ends[-1].position if ends else BEGINNING


def knowledge(ends: Ends) -> tuple[int, Position]:
    """Return what logs are compared by: the last epoch first, then the length."""
    return (ends[-1].epoch, ends[-1].position) if ends else (0, BEGINNING)


def are_in_order(ends: Ends) -> bool:
    """Return whether epochs and places both grow, as they do in every log."""
    return all(
        a.epoch < b.epoch and (a.ordinal, a.end) < (b.ordinal, b.end) and a.seq <= b.seq
        for a, b in itertools.pairwise(ends)
    )


def matching(mine: Ends, theirs: Ends) -> Position:
    """Return the place up to which both logs are equal."""
    known = {end.epoch: end.position for end in mine}
    for end in reversed(theirs):
        if end.epoch in known:
            return min(known[end.epoch], end.position)
    return BEGINNING


def continuing(sender: Ends, receiver: Ends, kept_from_seq: int) -> Position:
    """Return where a log goes on from another one, which keeps its rows from `kept_from_seq` on.

    That is where both are equal; or the beginning, when the sender has let go what comes next. Then nothing that the
    receiver has is needed any more: a committed snapshot, which the sender has, says what still counts of it.
    """
    at = matching(sender, receiver)
    return at if at.seq >= kept_from_seq else BEGINNING


def cut(ends: Ends, at: Position) -> Ends:
    """Return the ends of the log that is cut behind `at`."""
    kept = [end for end in ends if end.position <= at]
    if at > last(tuple(kept)):
        # The epoch that crosses `at` ends there now.
        kept.append(EpochEnd(ends[len(kept)].epoch, *at))
    return tuple(kept)


def extend(ends: Ends, epoch: int, position: Position) -> Ends:
    """Return the ends after a frame of `epoch` that ends at `position`."""
    if ends and ends[-1].epoch == epoch:
        return (*ends[:-1], EpochEnd(epoch, *position))
    assert not ends or ends[-1].epoch < epoch, f"a frame of epoch {epoch} behind one of {ends[-1].epoch}"
    return (*ends, EpochEnd(epoch, *position))
