"""The four backlogs in the random walk of questions.py, and wrong backlogs that it must catch."""

from __future__ import annotations

from functools import partial

import pytest
from tests.schedule import wrong
from tests.schedule.questions import Questions, walk
from tests.schedule.rigs import DEFAULT, CascadeRig, HourLogRig, LevelsRig, WheelRig

SEEDS_MAX = 60


class TestHourLog(Questions):
    new_rig = HourLogRig


class TestTimerWheel(Questions):
    new_rig = WheelRig


class TestTimerWheelOfThreeDays(Questions):
    new_rig = partial(WheelRig, slots=DEFAULT)


class TestLevelCascade(Questions):
    new_rig = CascadeRig


class TestDelayLevels(Questions):
    new_rig = LevelsRig


@pytest.mark.parametrize(
    ("rig", "backlog"),
    [
        *((WheelRig, backlog) for backlog in (
            wrong.LooseLatch, wrong.OnlyTheLastBatch, wrong.BeginsWithAnEmptyRing, wrong.OpensOnce,
            wrong.KeepsOnlyTheFar, wrong.LeavesItWhereItStood,
        )),
        *((CascadeRig, backlog) for backlog in (wrong.StaysWhereItWas, wrong.ForgetsTheNear, wrong.ForgetsWhatCame)),
        *((LevelsRig, backlog) for backlog in (
            wrong.SavesTheEnd, wrong.SkipsToTheEnd, wrong.TakesQueuesForSorted, wrong.LosesEntries,
        )),
    ],
    ids=lambda value: value.__name__,
)  # fmt: skip
def test_wrong_backlog_is_noticed(rig: type[HourLogRig], backlog: type) -> None:
    for seed in range(SEEDS_MAX):
        try:
            walk(partial(rig, backlog), seed)
        except AssertionError:
            return
    raise AssertionError(f"{backlog.__name__} went unnoticed")
