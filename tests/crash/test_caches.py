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
    is_log = name.startswith("log/") and name.endswith(".log")
    return not is_log and not name.startswith("pending/bucket=")


def caches(files: CrashFiles) -> list[str]:
    # What a torn replacement has left goes with the next one of that file.
    return [name for name in names(files) if is_cache(name) and not name.endswith(".new")]


def all_lost(files: CrashFiles) -> CrashFiles:
    for name in caches(files):
        files.remove(name)
    return files


def some_damaged(files: CrashFiles, seed: int) -> CrashFiles:
    """Lose a third of the caches, and flip a bit in another third."""
    rng = np.random.default_rng(seed)
    for name in caches(files):
        way, size = rng.integers(3), written(files, name)
        if way == 0:
            files.remove(name)
        elif way == 1 and size and name != "FORMAT":
            data = bytearray(files.content(name))
            data[int(rng.integers(size))] ^= 1 << int(rng.integers(8))
            files.replace(name, bytes(data))
    return files


# ---- after a clean stop ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=VARIANTS)
def stopped(request: pytest.FixtureRequest) -> tuple[Kept, Look]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "SNAPSHOT_BYTES", SMALL_BYTES)
        kept = lived(request.param)
        return kept, look(kept, kept.copy())


def test_after_a_clean_stop_the_log_and_the_data_files_say_it_all(stopped: tuple[Kept, Look]) -> None:
    kept, expected = stopped
    assert look(kept, all_lost(kept.copy())) == expected


@pytest.mark.parametrize(
    "seed", [SEED, *(pytest.param(SEED + i, marks=pytest.mark.slow) for i in range(1, 4))]
)
def test_after_a_clean_stop_any_caches_may_be_damaged(stopped: tuple[Kept, Look], seed: int) -> None:
    kept, expected = stopped
    assert look(kept, some_damaged(kept.copy(), seed)) == expected


# ---- after a power cut -----------------------------------------------------------------------------------------


def found_after(cut: Cut, image: CrashFiles) -> Look:
    """The state of the next start, and its later effects."""

    async def main() -> Look:
        world = cut.world(image)
        await world.start()
        try:
            await world.settled()
            found = known(world)
            found["watermark"], found["tick"] = (
                world.broker.attach_state.watermark,
                world.broker.scheduling.outcomes.cursor,
            )
            found["moved"] = entries_of(world.broker.scheduling.outcomes.moved).tolist()
            await world.advance(AFTER_MS)
            await world.consume()
            outcome = await world.outcome()
            found["rows"] = sorted((row.place.topic, row.key, row.body) for row in outcome.rows)
            found["settled"] = sorted(outcome.settled)
            found["faults"] = check(world.observed, outcome)
            await world.stop()
        finally:
            await world.abandon()
        return found

    return run(main())


def differences(name: str, calls: int, seed: int) -> list[str]:
    """List the cuts of a scenario after which starts on damaged caches have another state."""
    rng, wrong = np.random.default_rng(seed), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "SNAPSHOT_BYTES", SMALL_BYTES)
        last = live(name).files.calls
        for call in rng.choice(np.arange(1, last + 1), calls, replace=False).tolist():
            cut = live(name, call)
            image = cut.files.crash(int(rng.integers(1 << 30)), "random")
            expected = found_after(cut, image.crash(survival="everything"))
            copies = [image.crash(survival="everything") for _ in range(2)]
            for damaged in (all_lost(copies[0]), some_damaged(copies[1], call)):
                found = found_after(cut, damaged)
                wrong += [
                    f"{name}, {cut.at}: {key}: {expected[key]} became {found[key]}"
                    for key in expected
                    if found[key] != expected[key]
                ]
    return wrong


@pytest.mark.parametrize("name", ["roll", "wheel"])
def test_after_some_cuts_any_caches_may_be_damaged(name: str) -> None:
    assert differences(name, 3, SEED) == []


@pytest.mark.slow
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize("name", SCENARIOS)
def test_after_many_cuts_any_caches_may_be_damaged(name: str) -> None:
    assert differences(name, 12, SEED) == []


# ---- controls: what is no cache must be missed -----------------------------------------------------------------


def test_a_changed_row_and_a_lost_data_file_are_noticed() -> None:
    kept = lived("hour_log")
    expected = look(kept, kept.copy())
    for key in ("offsets/readers@a", "campaign/paused"):
        changed = kept.copy()
        change_value(changed, key)
        assert look(kept, all_lost(changed)) != expected
    lost = kept.copy()
    # The last one: what a resumed campaign has left behind is in no table any more, and may be lost.
    lost.remove(max(name for name in names(lost) if name.startswith("pending/bucket=")))
    with pytest.raises(StorageError, match="is missing"):
        look(kept, all_lost(lost))


def test_a_snapshot_is_what_a_start_needs_once_retention_has_been_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = lived("retained")
    monkeypatch.setattr("timeball.broker.recovery.last_snapshot", lambda *_: None)
    with pytest.raises(StorageError, match="is missing: the log begins with seq"):
        look(kept, all_lost(kept.copy()))
