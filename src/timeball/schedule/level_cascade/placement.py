"""Where a promise waits next: the pure arithmetic between an instant, a list of levels and a queue.

    queue 0            its turn is near: no hop any more
    queue 2·level - 1  this hop, and more behind it
    queue 2·level      this hop is the last that matters: what is left when it is over is near

A hop begins when the promise is entered and is over one level's duration later, so that each queue is sorted by
itself. Whatever makes hops begin late - a scan every tenth of a second, a commit, a restart - adds up, and is not
made good on the way: the list stays what it was as long as its next level ends at most `DRIFT_MS` behind the
instant. Otherwise the list is made anew of what remains. The last hop is opened `lead_ms` early, so that no drift is
ever seen in a delivery.

    more behind it:  end of the hop <  due - lead          opened at its end
    last:            end of the hop <= due + DRIFT_MS      opened lead_ms before its end
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from timeball.limits import SECOND_MS
from timeball.message import Int64Array
from timeball.schedule.level_cascade.levels import DURATION_MS, LEVELS, first, plan, rest

DRIFT_MS = SECOND_MS  # eight hops, each a scan and a commit late
LEAD_MS_MIN = 4 * DRIFT_MS  # half of it, when queues are opened at the latest, is still twice the drift
NEAR = 0
QUEUES = 1 + 2 * LEVELS
SCAN_MS = 100  # RocketMQ's


def lead_ms_of(ahead_ms: int) -> int:
    """Return how long before its instant a promise is near, for bodies loaded this long ahead."""
    return max(ahead_ms, LEAD_MS_MIN)


def is_last(queue: int) -> bool:
    """Return whether a hop in this queue is the last."""
    return queue % 2 == 0


def opens_ms(queue: int, head_ms: int, lead_ms: int) -> int:
    """Return when a queue is opened whose first hop ends at `head_ms`: in a batch, or the whole lead before."""
    return head_ms - DRIFT_MS - lead_ms // 2 if is_last(queue) else -(-head_ms // SCAN_MS) * SCAN_MS


def first_due_ms(queue: int, head_ms: int, lead_ms: int) -> int:
    """Return a lower bound of the instants in a queue, half the lead behind its opening."""
    return opens_ms(queue, head_ms, lead_ms) + lead_ms // 2


@dataclass(frozen=True, slots=True)
class Entered:
    """The queue that each promise enters, the end of its hop, and the levels left when that is over."""

    queue: Int64Array
    hop_end_ms: Int64Array
    left: Int64Array


def following(due_ms: Int64Array, left: Int64Array, now_ms: int) -> Int64Array:
    """Return the list to go on with when a hop is over: what is left of it, or a new one where that does not fit."""
    level = first(left)
    fits = (level > 0) & (now_ms + DURATION_MS[level] <= due_ms + DRIFT_MS)
    return left if fits.all() else np.where(fits, left, plan(due_ms - now_ms))


def enter(due_ms: Int64Array, hops: Int64Array, entry_ms: int, lead_ms: int) -> Entered:
    """Begin with the first level of each list, or of a new one where it does not fit; what is near has no hop."""
    near = due_ms - entry_ms <= lead_ms
    hops = following(due_ms, hops, entry_ms)
    level = np.where(near, 0, first(hops))
    hop_end = entry_ms + DURATION_MS[level]
    last = hop_end >= due_ms - lead_ms
    return Entered(np.where(near, NEAR, 2 * level - 1 + last), hop_end, rest(hops))
