"""Pure arithmetic of `hour_log`: what lies before a position, and how far the horizon may move."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from timeball.message import Int64Array
from timeball.table.data_file import Position

FIRST: Position = (-(1 << 62), 0)
NEVER: Position = (1 << 62, 0)


def before(due_ms: Int64Array, seq: Int64Array, position: Position) -> npt.NDArray[np.bool_]:
    """Which of these pairs lie before a position."""
    return np.asarray((due_ms < position[0]) | ((due_ms == position[0]) & (seq < position[1])))


def earliest(*instants_ms: int | None) -> int | None:
    """The first of those that there are."""
    return min((ms for ms in instants_ms if ms is not None), default=None)


def next_horizon(current: Position, now_ms: int, ahead_ms: int) -> Position:
    """Where a gather starting now should take the horizon, bodies permitting; `current` when it is far enough.

    It moves in steps of half the lead: each step costs a pass over the files that are open, and the other
    half is what is left to read them in. It moves at the very instant at which `next_due_ms` asks for it, half
    the lead before the horizon: were it a millisecond later, the ticker would turn in place until then.
    """
    if current[0] > now_ms + ahead_ms // 2:
        return current
    return (now_ms + ahead_ms, 0)


def cut_to_budget(due_ms: Int64Array, seq: Int64Array, high: Position, rows_max: int) -> Position:
    """The largest horizon <= `high` that leaves at most `rows_max` of these sorted pairs below it.

    A million promises for one millisecond are cut within it, by sequence number; hence positions are pairs.
    """
    if len(due_ms) <= rows_max:
        return high
    return int(due_ms[rows_max]), int(seq[rows_max])
