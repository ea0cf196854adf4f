"""A power cut at every call to the disk: no acknowledged message is lost, early, doubled or delivered after a cancel.

Each scenario runs once to count its calls, and then once for each of them. The disk is left in
several states after a cut: nothing unsynced kept, everything, and mixtures drawn from seeds. The fast part takes some
of the calls, the slow part more, a siege the most. CUT_SEED selects other mixtures, and a failure prints it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tests.crash import dispatch_scenarios, kept_scenarios
from tests.crash.checker import Fault
from tests.crash.lives import Cut, end_of_days, faults_after, live, report, run, until_cut
from tests.crash.scenarios import OPERATE, SCENARIOS
from tests.crash.world import SECOND_MS, CutFiles, World
from tests.crash_files import CrashFiles, Survival
from tests.rounds import rounds

from timeball.broker.registry import selections
from timeball.io.clock import ManualClock

SEED = int(os.environ.get("CUT_SEED", "1"))
EXTREMES: list[tuple[int, Survival]] = [(0, "nothing"), (0, "everything")]

# The scenarios together must use these: (call, beginning of the name).
USED = [
    ("write_at", "log/"), ("sync", "log/"), ("create", "log/0000000002"), ("remove", "log/0000000001.log"),
    ("absorb", "pending"), ("sync_file", "pending/bucket="), ("sync_file", "pending/_delta_log/"),
    ("rename", "checkpoint"), ("rename", "queues/"),
    ("remove", "pending/_keys/"),
]  # fmt: skip


def faults_in_images(cut: Cut, seeds: list[tuple[int, Survival]]) -> Iterator[str]:
    """Describe the faults after each of these crash images (seed and surviving writes) of one cut."""
    for seed, survival in seeds:
        faults = faults_after(cut, cut.files.crash(seed, survival))
        if faults:
            yield report(cut, seed, survival, faults)


def mixtures(call: int, count: int) -> list[tuple[int, Survival]]:
    """Return seeds that differ from call to call, so that a sample of calls is also a sample of mixtures."""
    return [(SEED * 1_000_003 + call * 101 + number, "random") for number in range(count)]


@pytest.mark.slow
def test_scenarios_without_a_cut_have_no_faults_and_use_every_kind_of_call() -> None:
    used: set[tuple[str, str]] = set()
    for name in SCENARIOS:
        cut = live(name)
        assert not list(faults_in_images(cut, [*EXTREMES, *mixtures(0, 2)]))
        used.update(cut.files.trace)
    missing = [
        (call, prefix)
        for call, prefix in USED
        if not any(used_call == call and name.startswith(prefix) for used_call, name in used)
    ]
    assert not missing


# The strategies' own cuts (tests/schedule/cuts.py) cover every call. These test the broker around them.
OF_STRATEGIES = {*kept_scenarios.SCENARIOS, *dispatch_scenarios.SCENARIOS}


# A scenario for each strategy. `test_cuts_at_all_calls_cause_no_faults` takes all scenarios, and more of their calls.
A_STRATEGY_EACH = ["compact", "wheel", "cascade", "levels", "select"]


@pytest.mark.parametrize("name", A_STRATEGY_EACH)
def test_cuts_at_some_calls_cause_no_faults(name: str) -> None:
    calls = live(name).files.calls
    rng = np.random.default_rng(SEED)
    for call in sorted(rng.choice(np.arange(1, calls + 1), 12, replace=False).tolist()):
        cut = live(name, call)
        wrong = list(faults_in_images(cut, mixtures(call, 2)))
        assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.siege
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCENARIOS)
def test_cuts_at_all_calls_cause_no_faults(name: str) -> None:
    # Only every sixth or tenth call of most scenarios: another CUT_SEED takes the others.
    step = (2 if name == "plain" else 10 if name in OF_STRATEGIES else 6) * rounds(12, 1)
    for call in range(1 + SEED % step, live(name).files.calls + 1, step):
        cut = live(name, call)
        wrong = list(faults_in_images(cut, [*EXTREMES, *mixtures(call, 2)]))
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("action", ["shift", "pause", "move", "release", "resume"])
def test_an_operation_without_its_effect_is_noticed(monkeypatch: pytest.MonkeyPatch, action: str) -> None:
    apply = selections._apply

    def forgetful(states: Any, index: int, facts: selections.SelectionFacts, rows: Any) -> None:
        if facts.action != action:
            apply(states, index, facts, rows)

    shift_only = [*OPERATE[:5], lambda world: world.advance(3 * SECOND_MS)]  # the scenario undoes its shift
    monkeypatch.setitem(SCENARIOS, "operate", shift_only if action == "shift" else OPERATE)
    assert not list(faults_in_images(live("operate"), EXTREMES[:1]))
    monkeypatch.setattr(selections, "_apply", forgetful)
    assert list(faults_in_images(live("operate"), EXTREMES[:1]))


def cut_again(cut: Cut, image: CrashFiles, call: int) -> Cut | None:
    """Start on an image and cut the power again `call` calls later. None if the restart makes fewer calls."""
    files = CutFiles(crash_at=call)
    files._root = image._root
    world = cut.world(files)

    async def restart() -> None:
        await world.start()
        await world.settled()
        await world.advance(10_000)
        await world.consume()
        await world.checkpoint()

    run(until_cut(world, files, restart))
    if not files.cut:
        return None
    last_call = "{} {}".format(*files.trace[-1])
    return Cut(
        cut.scenario,
        files,
        world.observed,
        world.clock,
        f"{cut.at}, then call {call} ({last_call})",
        cut.settings,
    )


def double_cuts(name: str, calls: list[int], seed: int, repeats: int) -> list[str]:
    """Cut at these calls, and again during the recovery. Returns texts about the contradictions."""
    rng = np.random.default_rng(seed)
    wrong: list[str] = []
    for call in calls:
        cut = live(name, call)
        for _ in range(repeats):
            second = cut_again(cut, cut.files.crash(seed * 31 + call), int(rng.integers(1, 60)))
            if second is not None:
                wrong += faults_in_images(second, mixtures(call, 1))
    return wrong


def test_second_cuts_during_some_recoveries_cause_no_faults() -> None:
    wrong = double_cuts("compact", list(range(5, live("compact").files.calls, 20)), SEED, 1)
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
@pytest.mark.siege
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SCENARIOS)
def test_second_cuts_during_many_recoveries_cause_no_faults(name: str) -> None:
    step = (18 if name in OF_STRATEGIES else 6) * rounds(6, 1)
    calls = range(1 + SEED % step, live(name).files.calls, step)
    wrong = double_cuts(name, list(calls), SEED, 3)
    assert not wrong, "\n".join(wrong)


# ---- controls: without a sync the same tests must fail --------------------------------------------------------


@pytest.mark.parametrize("control", ["forget_sync", "forget_sync_dir"])
def test_a_disk_that_forgets_to_sync_is_noticed(control: str) -> None:
    faults: list[Fault] = []
    calls = live("plain").files.calls
    for call in range(40, calls, 25):
        cut = live("plain", call, **{control: True})
        faults += faults_after(cut, cut.files.crash(SEED + call, "nothing"))
    assert faults, f"{control} was not noticed"


# ---- durability async: the newest changes may be lost --------------------------------------------------------

MAY_HAPPEN = {"lost", "moved", "misjudged", "offset", "topic", "resurrected"}


@pytest.mark.parametrize(
    "name", ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in ("compact", "roll"))]
)
def test_async_durability_loses_only_the_newest_changes(name: str) -> None:
    kinds: set[str] = set()
    wrong = []
    for call in range(8, live(name, durability="async").files.calls, 5):
        cut = live(name, call, durability="async")
        for seed, survival in [(0, "nothing"), (SEED + call, "random")]:
            faults = faults_after(cut, cut.files.crash(seed, survival))
            kinds.update(fault.kind for fault in faults)
            bad = [fault for fault in faults if fault.kind not in MAY_HAPPEN]
            wrong += [report(cut, seed, survival, bad)] if bad else []
    assert not wrong, "\n".join(wrong)
    assert "lost" in kinds, "an async broker that loses nothing syncs too often"


@pytest.mark.parametrize("strategy", ["timer_wheel", "level_cascade"])
def test_async_durability_keeps_synced_messages_that_are_written_again(strategy: str) -> None:
    """Their new rows are not synced when the power is cut, so each message must still be found in its old row."""
    settings = {"strategy": strategy, "timer_wheel_ms": 60 * SECOND_MS, "durability": "async"}
    world = World(CutFiles(), ManualClock(), **settings)

    async def rewrite() -> None:
        await world.start()
        await world.send("a", [90 * SECOND_MS] * 4)
        await world.broker.log.writer.synced()
        await world.checkpoint()
        world.clock.advance(60 * SECOND_MS)
        world.broker.ticker.wake()
        statistics = world.broker.scheduling.scheduler.statistics
        await world.until(lambda: statistics()["moved_rows"] == 4, "all messages are written again")

    run(until_cut(world, world.files, rewrite))
    cut = Cut("rewrite", world.files, world.observed, world.clock, "the end", settings)
    wrong = list(faults_in_images(cut, [*EXTREMES, *((SEED + offset, "random") for offset in range(6))]))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("strategy", ["timer_wheel", "level_cascade"])
def test_a_state_from_before_the_hour_log_compacted_is_not_used(strategy: str) -> None:
    """The hour log moved these messages to the table, and ended without a checkpoint: they were delivered twice."""

    async def main() -> list[Fault]:
        minute_ms = 60 * SECOND_MS
        world = World(CutFiles(), ManualClock(), strategy=strategy, timer_wheel_ms=minute_ms)
        await world.start()
        await world.send("a", [3 * minute_ms, 5 * minute_ms, 90 * minute_ms])
        await world.restart(strategy="hour_log")
        await world.compact()
        image = world.files.crash(survival="everything")
        await world.abandon()
        second = World(image, world.clock, world.observed, strategy=strategy, timer_wheel_ms=minute_ms)
        await second.start()
        assert second.broker.scheduling.backlog.statistics()["waiting_rows"] == 0
        await second.advance(2 * minute_ms)
        await second.stop()
        # The wheel rolls these and the cascade takes a hop: further rows for the table, if they still had them.
        return await end_of_days(World(image, second.clock, second.observed, strategy="hour_log"))

    assert run(main()) == []
