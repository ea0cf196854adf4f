"""A power cut or a kill at every disk call of a run of the log, with recovery after each."""

from __future__ import annotations

import asyncio

import pytest
from tests.crash_files import CrashFiles, PowerCut, Survival
from tests.log.crash_loop import Witness, goes_on, live, scenario, violations
from tests.log.small_log import read_all, reopened

from timeball.model.errors import StorageError, TimeballError

# ---- the crash loop --------------------------------------------------------------------------------------

IMAGES: list[tuple[int, Survival]] = [(0, "nothing"), (0, "everything"), (1, "random"), (2, "random")]


def test_power_cut_loses_no_acknowledged_row() -> None:
    whole = CrashFiles()
    live(whole)
    kept = 0
    for cut in range(1, whole.calls + 1):
        files = CrashFiles(crash_at=cut)
        witness = live(files)
        for seed, survival in IMAGES:
            known = witness.acknowledged_to if seed != 1 else 0
            after = files.crash(cut + seed, survival)
            assert violations(after, witness, durable_before_seq=known) == [], (cut, seed, survival)
            assert goes_on(after) == [], (cut, seed, survival)
        kept += len(witness.acknowledged)
    assert kept > whole.calls, "the loop has acknowledged next to nothing"


def test_power_cut_during_recovery_does_not_change_its_result() -> None:
    whole = CrashFiles()
    live(whole)
    for cut in range(1, whole.calls + 1):
        files = CrashFiles(crash_at=cut)
        witness = live(files)
        again = 1
        while True:
            image = files.crash(cut, crash_at=again)
            try:
                reopened(image)
            except PowerCut:
                assert violations(image.crash(again), witness) == [], (cut, again)
                again += 1
            else:
                break
        assert again > 2, "recovery makes calls of its own"


@pytest.mark.parametrize("forgotten", [{"forget_sync": True}, {"forget_sync_dir": True}], ids=str)
def test_disk_that_ignores_fsync_is_noticed(forgotten: dict[str, bool]) -> None:
    whole = CrashFiles(**forgotten)
    live(whole)
    lost = 0
    for cut in range(1, whole.calls + 1, 5):
        files = CrashFiles(crash_at=cut, **forgotten)
        witness = live(files)
        wrong = violations(files.crash(cut, "nothing"), witness, durable_before_seq=0)
        lost += any("acknowledged" in line for line in wrong)
    assert lost > 0


def test_the_checker_notices_a_changed_a_missing_and_an_unasked_row() -> None:
    files = CrashFiles()
    witness = live(files)
    assert violations(files, witness) == []
    last = max(witness.asked)
    witness.asked[last][0] = b"another"
    assert violations(files, witness) != []
    del witness.asked[last]
    assert any("nobody appended" in line for line in violations(files, witness))
    witness.asked[last + 100] = [b"x"]
    witness.acknowledged.add(last + 100)
    assert any(line.startswith("acknowledged") for line in violations(files, witness))


# ---- killed, and only then without power -----------------------------------------------------------------


class Killed(BaseException):
    """The process has been killed. The machine runs on."""


class KillFiles(CrashFiles):
    """A CrashFiles whose process can be killed: written bytes stay in memory, and no more reach the disk."""

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
        self.killed = False


def test_rows_shown_after_a_restart_survive_a_power_cut() -> None:
    """After a kill, bytes in the page cache look like bytes on the disk until the power is cut."""
    whole = CrashFiles()
    live(whole)
    for kill_at in range(1, whole.calls + 1):
        files = KillFiles(kill_at)
        witness = Witness()
        try:
            asyncio.run(scenario(files, witness))
        except (Killed, StorageError):
            assert files.killed
        files.start_again()
        shown = read_all(reopened(files).segments)
        after = files.crash(survival="nothing")
        assert violations(after, witness) == [], kill_at
        assert read_all(reopened(after).segments) == shown, kill_at


def test_a_power_cut_in_the_first_commit_after_a_kill_is_no_damage() -> None:
    for kill_at in range(1, 14):
        for cut in range(1, 12):
            files = KillFiles(kill_at)
            witness = Witness()
            try:
                asyncio.run(scenario(files, witness))
            except (Killed, StorageError):
                assert files.killed
            files.start_again()
            files.crash_at = files.calls + cut
            try:
                goes_on(files)
            except (PowerCut, StorageError):
                assert files.cut
            for seed in range(3):
                try:
                    reopened(files.crash(seed))
                except TimeballError as error:
                    pytest.fail(f"killed at {kill_at}, cut {cut} calls later, seed {seed}: {error}")
