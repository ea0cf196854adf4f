"""The log and the data files alone rebuild everything: any of the other files may be lost or damaged.

A run ends in a clean stop or a power cut at a random call. Then a random part of the caches is removed, or gets a bit
flipped, and a start must have the same state as a start on the whole folder: topics, groups, offsets, request modes,
the secret of receipts, leases, open transactions, reserved numbers, campaigns and their held messages, settled,
moved and pending scheduled messages, and all their effects until the last one is due.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from tests.crash.checker import check
from tests.crash.damage import change_value, names, written
from tests.crash.folder import VARIANTS, Kept, Look, known, lived, look
from tests.crash.lives import AFTER_MS, Cut, live, run
from tests.crash_files import CrashFiles
from tests.schedule.test_moved import entries_of

from timeball.log import checkpoint
from timeball.model.errors import StorageError

SEED = int(os.environ.get("CUT_SEED", "1"))
SCENARIOS = ["plain", "compact", "bulk", "roll", "levels", "wheel", "cascade"]
SMALL_BYTES = 150_000  # of log between two snapshots, so that these short lives have some


def is_cache(name: str) -> bool:
    """Check whether a start can rebuild this file."""
    is_log = name.startswith("log/") and name.endswith(".log")
    return not is_log and not name.startswith("pending/bucket=")


def caches(files: CrashFiles) -> list[str]:
    """List the files that a start can rebuild, without those that an interrupted replacement has left (`.new`)."""
    return [name for name in names(files) if is_cache(name) and not name.endswith(".new")]


def without_caches(files: CrashFiles) -> CrashFiles:
    """Remove all caches."""
    for name in caches(files):
        files.remove(name)
    return files


def with_damaged_caches(files: CrashFiles, seed: int) -> CrashFiles:
    """Remove about a third of the caches, flip a bit in another third, and leave the last third as it is."""
    rng = np.random.default_rng(seed)
    for name in caches(files):
        third, size = rng.integers(3), written(files, name)
        if third == 0:
            files.remove(name)
        elif third == 1 and size and name != "FORMAT":
            data = bytearray(files.content(name))
            data[int(rng.integers(size))] ^= 1 << int(rng.integers(8))
            files.replace(name, bytes(data))
    return files


# ---- after a clean stop ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=VARIANTS)
def stopped(request: pytest.FixtureRequest) -> tuple[Kept, Look]:
    """Return a folder after a clean stop, and the look at it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "SNAPSHOT_BYTES", SMALL_BYTES)
        kept = lived(request.param)
        return kept, look(kept, kept.copy())


def test_a_start_without_any_cache_after_a_clean_stop_has_the_same_state(stopped: tuple[Kept, Look]) -> None:
    kept, expected = stopped
    assert look(kept, without_caches(kept.copy())) == expected


@pytest.mark.parametrize(
    "seed", [SEED, *(pytest.param(SEED + offset, marks=pytest.mark.slow) for offset in range(1, 4))]
)
def test_a_start_on_damaged_caches_after_a_clean_stop_has_the_same_state(
    stopped: tuple[Kept, Look], seed: int
) -> None:
    kept, expected = stopped
    assert look(kept, with_damaged_caches(kept.copy(), seed)) == expected


# ---- after a power cut -----------------------------------------------------------------------------------------


def state_after(cut: Cut, image: CrashFiles) -> Look:
    """Start on a disk after a cut, and let everything become due. Returns the state after the start and its effects."""

    async def main() -> Look:
        world = cut.world(image)
        await world.start()
        try:
            await world.settled()
            state, outcomes = known(world), world.broker.scheduling.outcomes
            state["watermark"] = world.broker.attach_state.watermark
            state["tick"] = outcomes.cursor
            state["moved"] = entries_of(outcomes.moved).tolist()
            await world.advance(AFTER_MS)
            await world.consume()
            outcome = await world.outcome()
            state["rows"] = sorted((row.place.topic, row.key, row.body) for row in outcome.rows)
            state["settled"] = sorted(outcome.settled)
            state["faults"] = check(world.observed, outcome)
            await world.stop()
        finally:
            await world.abandon()
        return state

    return run(main())


def differences(name: str, calls: int, seed: int) -> list[str]:
    """Cut a scenario at `calls` random calls. Returns a text for each difference that damaged caches make."""
    rng, texts = np.random.default_rng(seed), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "SNAPSHOT_BYTES", SMALL_BYTES)
        last = live(name).files.calls
        for call in rng.choice(np.arange(1, last + 1), calls, replace=False).tolist():
            cut = live(name, call)
            image = cut.files.crash(int(rng.integers(1 << 30)), "random")
            expected = state_after(cut, image.crash(survival="everything"))
            copies = [image.crash(survival="everything") for _ in range(2)]
            for damaged in (without_caches(copies[0]), with_damaged_caches(copies[1], call)):
                state = state_after(cut, damaged)
                texts += [
                    f"{name}, {cut.at}: {key}: {expected[key]} became {state[key]}"
                    for key in expected
                    if state[key] != expected[key]
                ]
    return texts


@pytest.mark.parametrize("name", ["roll", "wheel"])
def test_starts_on_damaged_caches_after_some_power_cuts_have_the_same_state(name: str) -> None:
    assert differences(name, 3, SEED) == []


@pytest.mark.slow
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("name", SCENARIOS)
def test_starts_on_damaged_caches_after_many_power_cuts_have_the_same_state(name: str) -> None:
    assert differences(name, 12, SEED) == []


# ---- controls: the loss of a file that is no cache is noticed ---------------------------------------------------


def test_a_changed_row_and_a_lost_data_file_are_noticed() -> None:
    kept = lived("hour_log")
    expected = look(kept, kept.copy())
    for key in ("offsets/readers@a", "campaign/paused"):
        changed = kept.copy()
        change_value(changed, key)
        assert look(kept, without_caches(changed)) != expected
    lost = kept.copy()
    # The last file: the files that a resumed campaign has replaced are no longer in a table, and may be lost.
    lost.remove(max(name for name in names(lost) if name.startswith("pending/bucket=")))
    with pytest.raises(StorageError, match="is missing"):
        look(kept, without_caches(lost))


def test_a_start_without_caches_after_retention_needs_the_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = lived("retained")
    monkeypatch.setattr("timeball.broker.recovery.last_snapshot", lambda *_: None)
    with pytest.raises(StorageError, match="is missing: the log begins with seq"):
        look(kept, without_caches(kept.copy()))
