"""A power cut or a kill at every disk call of a run of the log, with recovery after each."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import pytest
from tests.crash_files import CrashFiles, PowerCut, Survival
from tests.log.crash_loop import Witness, problems_after_an_append, run_scenario, scenario, violations
from tests.log.small_log import read_all, reopened

from timeball.model.errors import StorageError, TimeballError

# ---- the crash loop --------------------------------------------------------------------------------------


class Image(NamedTuple):
    """A disk after the power cut: the writes without a sync that have reached it, and the start's knowledge."""

    seed: int
    survival: Survival
    has_checkpoint: bool  # a checkpoint states up to which row the log is durable


IMAGES = [
    Image(0, "nothing", True),
    Image(0, "everything", True),
    Image(1, "random", False),
    Image(2, "random", True),
]


def calls_of_a_whole_run(**forgotten: bool) -> int:
    """Count the disk calls of the scenario without a power cut."""
    files = CrashFiles(**forgotten)
    run_scenario(files)
    return files.calls


def test_power_cut_loses_no_acknowledged_row() -> None:
    calls, acknowledged = calls_of_a_whole_run(), 0
    for cut in range(1, calls + 1):
        files = CrashFiles(crash_at=cut)
        witness = run_scenario(files)
        for image in IMAGES:
            durable_before_seq = witness.acknowledged_to if image.has_checkpoint else 0
            after = files.crash(cut + image.seed, image.survival)
            assert violations(after, witness, durable_before_seq=durable_before_seq) == [], (cut, image)
            assert problems_after_an_append(after) == [], (cut, image)
        acknowledged += len(witness.acknowledged)
    assert acknowledged > calls, "the scenario acknowledges too few rows"


def test_power_cut_during_recovery_does_not_change_its_result() -> None:
    for first_cut in range(1, calls_of_a_whole_run() + 1):
        files = CrashFiles(crash_at=first_cut)
        witness = run_scenario(files)
        second_cut = 1  # a call of the recovery
        while True:
            image = files.crash(first_cut, crash_at=second_cut)
            try:
                reopened(image)
            except PowerCut:
                assert violations(image.crash(second_cut), witness) == [], (first_cut, second_cut)
                second_cut += 1
            else:
                break
        assert second_cut > 2, "recovery makes calls of its own"


@pytest.mark.parametrize("forgotten", [{"forget_sync": True}, {"forget_sync_dir": True}], ids=str)
def test_disk_that_ignores_fsync_is_noticed(forgotten: dict[str, bool]) -> None:
    """The control: a disk that loses synced bytes, or synced names, loses acknowledged rows."""
    losses = 0
    for cut in range(1, calls_of_a_whole_run(**forgotten) + 1, 5):
        files = CrashFiles(crash_at=cut, **forgotten)
        witness = run_scenario(files)
        problems = violations(files.crash(cut, "nothing"), witness, durable_before_seq=0)
        losses += any(problem.startswith("acknowledged") for problem in problems)
    assert losses > 0


def test_the_checker_notices_a_changed_a_missing_and_an_unasked_row() -> None:
    files = CrashFiles()
    witness = run_scenario(files)
    assert violations(files, witness) == []
    last_seq = max(witness.appended)
    witness.appended[last_seq][0] = b"another"
    assert any(problem.startswith(f"acknowledged {last_seq}") for problem in violations(files, witness)), (
        "changed"
    )
    del witness.appended[last_seq]
    assert any("nobody appended" in problem for problem in violations(files, witness)), "unasked"
    missing_seq = last_seq + 100
    witness.appended[missing_seq] = [b"x"]
    witness.acknowledged.add(missing_seq)
    assert any(problem.startswith(f"acknowledged {missing_seq}") for problem in violations(files, witness)), (
        "missing"
    )


# ---- a kill of the process, then a power cut -------------------------------------------------------------


class Killed(BaseException):
    """The process has been killed. The machine continues to run."""


class KillFiles(CrashFiles):
    """Files whose process is killed at call `kill_at`. Bytes without a sync stay in the page cache, not on the disk."""

    def __init__(self, kill_at: int) -> None:
        super().__init__()
        self.kill_at = kill_at
        self.killed = False

    def end(self) -> None:
        super().end()
        if self.calls == self.kill_at:
            self.killed = True
            self.check_power()

    def check_power(self) -> None:
        super().check_power()
        if self.killed:
            raise Killed

    def start_again(self) -> None:
        """Let the next process call."""
        self.killed = False


def run_until_killed(kill_at: int) -> tuple[KillFiles, Witness]:
    """Run the scenario until its process is killed at this call. The files are ready for the next process."""
    files, witness = KillFiles(kill_at), Witness()
    try:
        asyncio.run(scenario(files, witness))
    except (Killed, StorageError):
        assert files.killed
    files.start_again()
    return files, witness


def test_rows_shown_after_a_restart_survive_a_power_cut() -> None:
    """After a kill, bytes in the page cache look like bytes on the disk until the power is cut."""
    for kill_at in range(1, calls_of_a_whole_run() + 1):
        files, witness = run_until_killed(kill_at)
        shown = read_all(reopened(files).segments)
        after = files.crash(survival="nothing")
        assert violations(after, witness) == [], kill_at
        assert read_all(reopened(after).segments) == shown, kill_at


def test_a_power_cut_in_the_first_commit_after_a_kill_is_no_damage() -> None:
    for kill_at in range(1, 14):
        for cut in range(1, 12):
            files, _ = run_until_killed(kill_at)
            files.crash_at = files.calls + cut
            try:
                problems_after_an_append(files)
            except (PowerCut, StorageError):
                assert files.cut
            for seed in range(3):
                try:
                    reopened(files.crash(seed))
                except TimeballError as error:
                    pytest.fail(f"killed at {kill_at}, cut {cut} calls later, seed {seed}: {error}")
