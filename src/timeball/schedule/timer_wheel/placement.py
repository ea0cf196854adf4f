"""Pure arithmetic of `timer_wheel`: which slot an instant belongs to, and where one waits that is out of reach.

Slots are numbered for ever, instant // precision; the ring holds slot n at index n mod `count`. Counted from `bound`,
the first slot that has not been opened:

    … | low … handed out, not all durable … | bound … in reach … | bound + reach
    <------------------------------ count ------------------------------------>

The reach is a length of *time*: a finer precision makes more slots and not a shorter ring. (RocketMQ's number of
slots is fixed, so that at 100 ms its seven days are 17 hours.) What `count` has beyond the reach is for slots that
are opened and not settled yet: their records stay readable for a restart until the delivery lags by `MARGIN_MS`.

What is due out of reach waits in a slot within it, and is rolled when that is opened: written again, placed anew.
A roll must not be urgent. So what is due just beyond waits in the middle, not at the end (RocketMQ does the same),
and a roll is never made less than a third of the ring before its promise is due.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from timeball import limits
from timeball.message import Int64Array

MARGIN_MS = limits.MINUTE_MS


@dataclass(frozen=True, slots=True)
class Slots:
    """The numbers of a ring: a slot's width, how many slots ahead are in reach, and how many there are."""

    precision_ms: int
    reach: int
    count: int

    @classmethod
    def of(cls, precision_ms: int, wheel_ms: int, ahead_ms: int) -> Slots:
        """Return those of a ring that reaches `wheel_ms` from what is opened `ahead_ms` ahead of its time."""
        reach = max(4, -(-wheel_ms // precision_ms) + 1)
        count = reach + -(-(ahead_ms + MARGIN_MS) // precision_ms) + 1
        # A record has 32 bits for its lap: with a ring of a minute they last until the year 9999.
        assert limits.INSTANT_MS_MAX // precision_ms // count < 1 << 32
        return cls(precision_ms, reach, count)

    @property
    def margin(self) -> int:
        """Return how many slots before `bound` keep their records."""
        return self.count - self.reach

    def of_instant(self, ms: int) -> int:
        """Return the slot of an instant."""
        return ms // self.precision_ms

    def of_instants(self, ms: Int64Array) -> Int64Array:
        """Return the slot of each instant."""
        return np.asarray(ms // self.precision_ms)

    def begin_ms(self, slot: int) -> int:
        """Return the first instant of a slot."""
        return slot * self.precision_ms

    def index(self, slots: Int64Array) -> Int64Array:
        """Return where these stand in the ring."""
        return np.asarray(slots % self.count)

    def place(self, slots: Int64Array, bound: int) -> Int64Array:
        """Return where promises wait that are due in these slots, none of them before `bound`."""
        last = bound + self.reach - 1
        beyond = slots - last
        if not (beyond > 0).any():
            return slots
        elsewhere = np.where(beyond < self.reach // 3, bound + self.reach // 2, last)
        return np.where(beyond > 0, elsewhere, slots)
