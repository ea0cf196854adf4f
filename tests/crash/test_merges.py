"""A power cut at every call of merges: no message is lost or doubled, and each is found by its key afterwards.

Files below a quarter of a full one are merged by their size, larger ones by their common due times (conftest.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.crash import lives
from tests.crash.checker import Fault, check
from tests.crash.lives import AFTER_MS, Cut, faults_after, live, report, run
from tests.crash.scenarios import Scenario
from tests.crash.steps import cancel_some
from tests.crash.world import HOUR_MS
from tests.crash_files import CrashFiles

SEED = int(os.environ.get("CUT_SEED", "1"))
SMALL, LARGE = [2 * HOUR_MS, 3 * HOUR_MS], [HOUR_MS, 2 * HOUR_MS, 3 * HOUR_MS, 4 * HOUR_MS]
FILES: Scenario = [
    lambda w: w.start(),
    *[step for delays in (SMALL, SMALL, LARGE, LARGE) for step in (
        lambda w, delays=delays: w.send("a", delays), lambda w: w.compact()
    )],
    cancel_some(1, 5),
    lambda w: w.checkpoint(),
    lambda w: w.node.maintenance.index_keys(),
]  # fmt: skip
MERGES: Scenario = [
    *FILES,
    lambda w: w.merge(),
    lambda w: w.merge(),
    lambda w: w.node.maintenance.index_keys(),
    cancel_some(2, 8),
]


@pytest.fixture(autouse=True)
def _scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the scenarios of this module to those of lives.py."""
    monkeypatch.setitem(lives.SCENARIOS, "files", FILES)
    monkeypatch.setitem(lives.SCENARIOS, "merges", MERGES)


def cuts(step: int = 1, **control: bool) -> Iterator[Cut]:
    """Yield the cuts at every `step`-th call of the merges and of the calls after them."""
    begin, end = live("files").files.calls, live("merges").files.calls
    for call in range(begin + 1 + SEED % step, end + 1, step):
        yield live("merges", call, **control)


async def cancelled_by_key(cut: Cut, image: CrashFiles) -> list[Fault]:
    """Start on the surviving disk, cancel messages of all files, and let the others become due."""
    world = cut.world(image)
    await world.start()
    try:
        await world.cancel(["k00000", "k00003", "k00007", "k00011"])
        answers = [world.observed.verdicts[key][-1] for key in ("k00000", "k00003", "k00007", "k00011")]
        assert answers == ["cancelled"] * 4, cut.at
        await world.advance(AFTER_MS)
        await world.consume()
        outcome = await world.outcome()
        await world.stop()
    finally:
        await world.abandon()
    return check(world.observed, outcome)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_cuts_during_merges_lose_no_row_and_no_key(step: int) -> None:
    wrong = []
    for cut in cuts(step):
        for survival in ("nothing", "everything"):
            faults = faults_after(cut, cut.files.crash(survival=survival))
            wrong += [report(cut, 0, survival, faults)] if faults else []
        faults = run(cancelled_by_key(cut, cut.files.crash(7 * cut.files.calls, "random")))
        wrong += [report(cut, 7 * cut.files.calls, "random", faults)] if faults else []
    assert not wrong, "\n".join(wrong)


def test_small_files_and_overlapping_files_are_merged() -> None:
    cut = live("files")
    world = cut.world(cut.files.crash(survival="everything"))

    async def main() -> list[int]:
        counts = []
        await world.start()
        for _ in range(3):
            counts.append(world.broker.status()["schedule"]["table_files"])
            await world.merge()
        await world.stop()
        return counts

    assert run(main()) == [4, 3, 2]


def test_merged_files_that_are_not_synced_are_noticed() -> None:
    """The control: a disk that ignores syncs loses rows of the merged files."""
    assert any(faults_after(cut, cut.files.crash(survival="nothing")) for cut in cuts(forget_sync=True))
