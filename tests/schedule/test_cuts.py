"""Power cuts notice a keeper that saves what it has not synced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.schedule.cascade_rigs import CascadeRig
from tests.schedule.cuts import calls_of, violations
from tests.schedule.stage import Rig
from tests.schedule.wheel_rigs import DEFAULT, WheelRig

from timeball.files import File
from timeball.schedule.level_cascade.store import LevelCascade
from timeball.schedule.timer_wheel.store import TimerWheel

DISKS = 40  # of a cut: few have a file that looks whole and is not, and any other is noticed by its keeper


class WheelWithoutSync(TimerWheel):
    """Its files reach the disk when the kernel pleases."""

    def take_dirty(self) -> list[tuple[str, list[File]]]:
        super().take_dirty()
        return []


class CascadeWithoutSync(LevelCascade):
    """As the wheel."""

    def take_dirty(self) -> list[tuple[str, list[File]]]:
        super().take_dirty()
        return []


@pytest.mark.slow
@pytest.mark.parametrize(
    "new_rig",
    [lambda: WheelRig(WheelWithoutSync, slots=DEFAULT), lambda: CascadeRig(CascadeWithoutSync)],
    ids=["timer_wheel", "level_cascade"],
)
def test_a_keeper_that_does_not_sync_is_noticed(new_rig: Callable[[], Rig]) -> None:
    first, last = calls_of(new_rig)
    assert violations(new_rig, range(last, first, -10), ["random"] * DISKS, enough=1)
