"""The scheduler under the contract, with each backlog."""

from __future__ import annotations

from typing import ClassVar

from tests.schedule.contract import Contract, Variant
from tests.schedule.rigs import DEFAULT, TINY, CascadeRig, HourLogRig, LevelsRig, WheelRig

from timeball.model import limits


class TestHourLog(Contract):
    new_rig = HourLogRig


class TestRoomyHourLog(Variant):
    """`hour_log` with memory for all bodies."""

    new_rig = staticmethod(lambda: HourLogRig(gather_bytes=1 << 26))


class TestTimerWheel(Variant):
    """A ring of three days."""

    new_rig = staticmethod(lambda: WheelRig(slots=DEFAULT))


class TestTimerWheelOfAMinute(Variant):
    far_ms: ClassVar[int] = 40 * limits.MINUTE_MS
    new_rig = WheelRig


class TestTimerWheelOfMilliseconds(Variant):
    far_ms: ClassVar[int] = 10 * limits.MINUTE_MS
    new_rig = staticmethod(lambda: WheelRig(slots=TINY))


class TestLevelCascade(Variant):
    new_rig = CascadeRig


class TestDelayLevels(Variant):
    new_rig = LevelsRig
