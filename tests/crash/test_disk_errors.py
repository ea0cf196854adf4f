"""Runs with a failing disk call: no message is lost, early, doubled or resurrected. A fatal error ends with code 5."""

from __future__ import annotations

import os

import msgspec
import pytest
from tests.crash.disk_errors import IN_DELTA, SCENARIOS, Injected, Life, calls_of, drawn, lived
from tests.crash.world import CutFiles
from tests.rounds import rounds

from timeball.log import checkpoint
from timeball.model.errors import DiskFailed

ERRORS = rounds(40, 100)
SEED = int(os.environ.get("CUT_SEED", "1"))


def wrong(lives: list[Life]) -> list[str]:
    """Describe the lives with contradictions."""
    return [
        f"{life.injected}, ended by {life.ended_by!r}: {life.faults[:3]}" for life in lives if life.faults
    ]


def test_some_failing_disk_calls_lose_nothing() -> None:
    lives = [lived(injected) for injected in drawn(6, SEED, ["compact", "bulk", "roll"])]
    assert wrong(lives) == []


@pytest.mark.slow
@pytest.mark.siege
@pytest.mark.timeout(900)
def test_many_failing_disk_calls_lose_nothing() -> None:
    lives = [lived(injected) for injected in drawn(ERRORS, SEED, list(SCENARIOS))]
    assert wrong(lives) == []
    assert sum(life.ended_by is not None for life in lives) > ERRORS // 3, (
        "errors that no step meets prove nothing"
    )


@pytest.mark.parametrize("error", IN_DELTA)
def test_a_failed_delta_commit_ends_the_broker_with_the_name_of_the_folder(error: str) -> None:
    _, library_calls = calls_of("compact")
    errors = []
    for call in range(3, library_calls + 1, 4):
        life = lived(Injected("compact", error, call, forever=False))
        assert life.faults == []
        errors.append(life.ended_by)
    texts = [str(error) for error in errors if isinstance(error, DiskFailed)]
    assert texts and all("pending/_delta_log" in text for text in texts)


def forget_files(files: CutFiles) -> None:
    """Remove the first live file from the checkpoint, as if it had never been attached."""
    stored = checkpoint.load(files)
    if stored is not None and stored.facts.files:
        spoiled = msgspec.structs.replace(stored.facts, files=stored.facts.files[1:])
        checkpoint.save(files, checkpoint.encode(msgspec.structs.replace(stored, facts=spoiled)))


def test_a_checkpoint_that_forgets_an_attach_is_noticed() -> None:
    """The control: an earlier fault, by which a failed commit left such a checkpoint."""
    calls, _ = calls_of("bulk")
    lives = (
        lived(Injected("bulk", "EIO", call, False), forget_files) for call in range(calls // 2, calls, 9)
    )
    assert any(fault.kind == "lost" for life in lives for fault in life.faults)
