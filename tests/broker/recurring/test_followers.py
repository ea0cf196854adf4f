"""A follower of the log, and any broker that starts on it, continue a schedule in the same way."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
from tests.broker.recovery.test_applying import applied
from tests.broker.recurring.schedule_lives import EVERY_MS, LIFE, NAME, SETTINGS, Known, OneSchedule, live
from tests.crash.lives import run
from tests.crash_files import CrashFiles

from timeball.broker.registry.meta import MetaLog
from timeball.broker.registry.schedules import Schedules

# The shares of the log at which a follower stops applying rows and continues.
STEPS: dict[str, list[float]] = {
    "one": [],
    "some": [0.2, 0.5, 0.9],
    "many": [step / 40 for step in range(40)],
}
# A life that ends before retention writes a snapshot.
WITHOUT_RETENTION = LIFE[: len(LIFE) - 8]


@functools.cache
def disk(strategy: str, *, is_whole: bool) -> Any:
    """Live through LIFE, or only up to the first snapshot, and return the disk at the end (a `Cut`)."""
    return live(SETTINGS[strategy], steps=LIFE if is_whole else WITHOUT_RETENTION)


@pytest.mark.parametrize("is_whole", [True, False])
@pytest.mark.parametrize("strategy", SETTINGS)
def test_steps_of_any_size_give_the_same_schedule_and_its_pending_occurrence(
    strategy: str, *, is_whole: bool
) -> None:
    files: CrashFiles = disk(strategy, is_whole=is_whole).files
    states = {
        name: applied(
            files.crash(survival="everything"), steps, from_checkpoint=False, resumes=False, tail_after=None
        )
        for name, steps in STEPS.items()
    }
    assert states["one"]["meta"] == states["some"]["meta"] == states["many"]["meta"]
    assert states["one"]["waiting"] == states["some"]["waiting"] == states["many"]["waiting"]
    with_checkpoint = applied(
        files.crash(survival="everything"), [], from_checkpoint=True, resumes=False, tail_after=None
    )
    assert with_checkpoint["meta"] == states["one"]["meta"]
    meta = MetaLog()
    schedules = Schedules(meta)
    meta.restore((key, value) for key, value in states["one"]["meta"].items() if key.startswith("schedules/"))
    progress = schedules.get(NAME)[1]
    _, seqs, _ = states["one"]["waiting"]
    is_in_table = strategy == "hour_log" and not seqs
    assert seqs.count(progress.number) == 1 or is_in_table
    assert states["one"]["waiting_rows"] == 1


def next_rows(strategy: str, *, with_checkpoint: bool) -> list[tuple[Any, ...]]:
    """Start a broker on the disk of a life. Return the rows that it appends in the next hour."""
    cut = disk(strategy, is_whole=True)
    files = cut.files.crash(survival="everything")
    if not with_checkpoint:
        files.remove("checkpoint")
    world = OneSchedule.on(files, replace(cut.clock), Known(), **SETTINGS[strategy])

    async def main() -> list[tuple[Any, ...]]:
        await world.start()
        first_seq = world.broker.log.reader.next_seq
        for _ in range(6):
            await world.advance(EVERY_MS)
        names = ["kind", "topic", "unique_key", "body", "properties", "due_ms", "source_seq", "store_ms"]
        reader = world.broker.log.reader
        rows = [
            row
            for batch in reader.rows(first_seq, reader.next_seq)
            for row in zip(*(batch.column(name).to_pylist() for name in names), strict=True)
        ]
        await world.stop()
        return rows

    return run(main())


@pytest.mark.parametrize("strategy", SETTINGS)
def test_brokers_that_start_on_the_same_log_append_the_same_rows(strategy: str) -> None:
    first = next_rows(strategy, with_checkpoint=True)
    assert len(first) == 18, "each of six times has three rows: a release, a successor and the progress"
    assert next_rows(strategy, with_checkpoint=True) == first
    assert next_rows(strategy, with_checkpoint=False) == first
