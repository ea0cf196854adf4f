"""`timer_wheel`: the contract, for rings of several shapes, and what it promises besides."""

from __future__ import annotations

import functools

from tests.schedule.contract import Contract
from tests.schedule.wheel_rigs import DEFAULT, MINUTE, TINY, WheelRig

from timeball import limits


class TestTimerWheel(Contract):
    """The ring as it is configured, with little memory."""

    new_rig = functools.partial(WheelRig, slots=DEFAULT)


class ShortRing(Contract):
    """A ring so short that all but the nearest is rolled, often.

    Where the suite sleeps from instant to instant for weeks, such a ring would turn some ten thousand times; it sleeps
    for `far_ms` instead. Where the suite lets weeks pass at once, they pass.
    """


class TestTimerWheelOfAMinute(ShortRing):
    new_rig = functools.partial(WheelRig, slots=MINUTE)
    far_ms = limits.HOUR_MS


class TestTimerWheelOfMilliseconds(ShortRing):
    new_rig = functools.partial(WheelRig, slots=TINY)
    far_ms = 2 * limits.MINUTE_MS
