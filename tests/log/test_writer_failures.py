"""Failures that stop the log or close admission. With async durability a power cut loses only a tail."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import pytest
from tests.crash_files import CrashFiles
from tests.log.small_log import (
    SEGMENT_BYTES,
    AtOnce,
    HeldDisk,
    batch,
    bodies,
    eventually,
    opened,
    read_all,
    reopened,
    run,
    run_loop,
    syncs,
)
from tests.starving import no_descriptors

from timeball.io.files import RealFiles
from timeball.log import writer as writer_module
from timeball.log.segment import segment_name
from timeball.model import limits
from timeball.model.errors import DiskFailed, OverLimit, StorageError

# ---- fail-stop -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["write_at", "sync"])
def test_after_the_first_failure_no_caller_is_acknowledged_and_no_write_is_tried(call: str) -> None:
    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce()) as log:
            await log.append(batch(1))
            # A commit is a write and a sync.
            files.fail_at(files.calls + (1 if call == "write_at" else 2), DiskFailed("broken"))
            failing = log.writer.append(batch(4))[1], log.writer.append(batch(7))[1]
            await run_loop()
            for commit in failing:
                with pytest.raises(DiskFailed, match="broken"):
                    await commit
            calls = files.calls
            assert files.trace[-1][0] == call
            with pytest.raises(StorageError, match="has stopped"):
                log.writer.append(batch(10))
            with pytest.raises(StorageError, match="has stopped"):
                await log.writer.flushed()
            assert log.reader.next_seq == 4, "rows that may not be on the disk are invisible"
            assert len(log.failures) == 1
        assert files.calls == calls, "closing makes no call of the disk either"
        assert files.syncs_after_failure == []
        assert sorted(read_all(reopened(files.crash(survival="nothing")).segments)) == [1, 2, 3]

    run(work())


def test_entries_after_a_failed_commit_fail_too() -> None:
    async def work() -> None:
        files, disk = CrashFiles(), HeldDisk()
        async with opened(files, disk=disk) as log:
            _, first = log.writer.append(batch(1))
            await run_loop()
            _, second = log.writer.append(batch(4))
            flushed = asyncio.ensure_future(log.writer.flushed())
            await run_loop()
            files.fail_at(files.calls + 2, DiskFailed("broken"))
            disk.run_held()
            for waiting in (first, second, flushed):
                with pytest.raises(DiskFailed):
                    await waiting
            assert disk.held == [], "the second commit is not tried"

    run(work())


def test_any_failed_call_stops_the_log_and_loses_no_acknowledged_row() -> None:
    async def work(files: CrashFiles) -> dict[int, bytes]:
        """Append until the log stops. Returns the acknowledged bodies by number."""
        acknowledged: dict[int, bytes] = {}
        async with opened(files, disk=AtOnce()) as log:
            for number in range(12):
                rows = batch(1 + 2 * number, 2, body_bytes=900)
                try:
                    (first_seq,) = await log.append(rows)
                except StorageError:
                    assert log.writer.failed is not None and len(log.failures) == 1
                    break
                assert not log.failures, "acknowledged after a failure"
                acknowledged.update(enumerate(bodies([rows]), first_seq))
                await run_loop()
        return acknowledged

    without_failure = CrashFiles()
    assert len(asyncio.run(work(without_failure))) == 24
    for call in range(8, without_failure.calls + 1):
        files = CrashFiles()
        files.fail_at(call, DiskFailed("broken"))
        try:
            acknowledged = asyncio.run(work(files))
        except DiskFailed:  # while opening
            continue
        assert files.syncs_after_failure == [], call
        recovered = read_all(reopened(files.crash(survival="nothing")).segments)
        assert acknowledged.items() <= recovered.items(), call


def test_failing_on_durable_stops_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise OverLimit("disk full while growing an index")

    async def work() -> None:
        async with opened(CrashFiles()) as log:
            _, failing = log.writer.append(batch(1), on_durable=fail)
            _, following = log.writer.append(batch(4))
            for waiting in (failing, following):
                with pytest.raises(OverLimit):
                    await asyncio.wait_for(waiting, 30)
            assert [type(error) for error in log.failures] == [OverLimit]
            with pytest.raises(StorageError, match="has stopped"):
                log.writer.append(batch(7))

    run(work())
    assert [record.args for record in caplog.records] == [("disk full while growing an index",)], (
        "a record keeps the text, because the frames of an error keep the whole broker"
    )


def test_a_spare_that_cannot_be_synced_stops_the_log() -> None:
    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce()) as log:
            commit = log.writer.append(batch(1, 1, body_bytes=SEGMENT_BYTES // 2))[1]
            # The commit is a write and a sync; then a spare is created, allocated, reserved and synced.
            files.fail_at(files.calls + 6, DiskFailed("broken"))
            await commit
            await eventually(lambda: log.failures)
            assert files.trace[-2:] == [("sync", segment_name(2)), ("remove", segment_name(2))]
            with pytest.raises(StorageError, match="has stopped"):
                log.writer.append(batch(2))
        gc.collect()  # a task whose exception was not retrieved would warn now

    run(work())


# ---- disk full -------------------------------------------------------------------------------------------


def test_a_full_disk_closes_admission_before_the_segment_is_full_and_opens_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer_module, "DISK_FULL_RETRY_S", 0.001)

    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce()) as log:
            log.writer.check_admission()
            files.fail_at(1, OverLimit("disk full"), forever=True)
            await log.append(batch(1, 1, body_bytes=SEGMENT_BYTES // 2))
            await run_loop()
            with pytest.raises(OverLimit, match="disk full"):
                log.writer.check_admission()
            # Releases and cancels are not checked: they fit into the present segment.
            assert await log.append(batch(2, 2)) == [2]
            assert not files.exists(segment_name(2))
            files.heal()
            await eventually(lambda: files.exists(segment_name(2)))
            await run_loop()
            log.writer.check_admission()
            for number in range(4, 30):
                await log.append(batch(number, 1, body_bytes=900))
            assert log.writer.statistics.rolls >= 1 and log.failures == []

    run(work())


def test_a_disk_that_stays_full_stops_the_log_when_the_segment_is_full() -> None:
    async def work() -> None:
        files = CrashFiles()
        acknowledged = 0
        async with opened(files, disk=AtOnce()) as log:
            files.fail_at(1, OverLimit("disk full"), forever=True)
            while log.writer.failed is None:
                try:
                    await log.append(batch(1 + acknowledged, 1, body_bytes=900))
                except OverLimit:
                    break
                acknowledged += 1
            assert len(log.failures) == 1
        files.heal()
        assert sorted(read_all(reopened(files).segments)) == list(range(1, acknowledged + 1))

    run(work())


def test_without_descriptors_the_log_rolls_into_the_spare_and_then_closes_admission(tmp_path: Path) -> None:
    """A roll into the spare needs no descriptor. The next spare would need one."""

    async def work() -> None:
        files = RealFiles(tmp_path)
        async with opened(files, disk=AtOnce()) as log:
            while log.writer.next_segment.spare is None:
                await log.append(batch(1))
                await run_loop()
            with no_descriptors():
                while not log.writer.statistics.rolls:
                    await log.append(batch(1))
                while log.segments.last.end < SEGMENT_BYTES * 3 // 4:
                    await log.append(batch(1))
                await run_loop()
                with pytest.raises(OverLimit, match="too many open files"):
                    log.writer.check_admission()
            assert log.failures == []

    run(work())


def test_too_many_pending_bytes_refuse_admission_until_they_are_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "APPEND_BYTES_IN_FLIGHT_MAX", 10_000)

    async def work() -> None:
        disk = HeldDisk()
        async with opened(CrashFiles(), disk=disk) as log:
            _, commit = log.writer.append(batch(1, 1, body_bytes=10_000))
            with pytest.raises(OverLimit, match="wait for the disk"):
                log.writer.check_admission()
            await run_loop()
            disk.run_held()
            await commit
            log.writer.check_admission()

    run(work())


# ---- async durability ------------------------------------------------------------------------------------


def test_async_durability_acknowledges_before_the_sync_and_syncs_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer_module, "ASYNC_SYNC_INTERVAL_S", 0.001)

    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce(), durability="async") as log:
            syncs_before = syncs(files)
            _, commit = log.writer.append(batch(1))
            await commit
            assert syncs(files) == syncs_before
            assert reopened(files.crash(survival="nothing")).segments.next_seq == 1, "the row would be lost"
            await eventually(lambda: syncs(files) > syncs_before)
            assert reopened(files.crash(survival="nothing")).segments.next_seq == 4

    run(work())


def test_async_durability_loses_only_a_tail() -> None:
    async def work(files: CrashFiles) -> None:
        async with opened(files, disk=AtOnce(), durability="async") as log:
            for number in range(20):
                await log.append(batch(1 + 2 * number, 2, body_bytes=400))
                await run_loop()
            assert log.writer.statistics.rolls >= 2
            appended = bodies([batch(1, 40, body_bytes=400)])
            for seed in range(40):
                survivors = list(read_all(reopened(files.crash(seed)).segments).values())
                assert survivors == appended[: len(survivors)]
                assert len(survivors) >= log.segments.last.first_seq - 1, "a sealed segment is synced"

    files = CrashFiles()
    run(work(files))
    assert len(read_all(reopened(files.crash(survival="nothing")).segments)) == 40, "closing syncs"


def test_async_damage_before_the_last_sync_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "ASYNC_SYNC_INTERVAL_S", 0.001)

    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce(), durability="async") as log:
            await log.append(batch(1))
            syncs_before = syncs(files)
            await eventually(lambda: syncs(files) > syncs_before)
            await log.append(batch(4))
        file = files.open(segment_name(1))
        file.write_at(400, b"damage")
        with pytest.raises(StorageError, match="proves"):
            reopened(files)

    run(work())


def test_async_failed_sync_stops_the_log_and_fails_entries_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer_module, "ASYNC_SYNC_INTERVAL_S", 0.001)

    async def work() -> None:
        files, disk = CrashFiles(), HeldDisk()
        async with opened(files, disk=disk, durability="async") as log:
            _, first = log.writer.append(batch(1))
            await run_loop()
            disk.run_held()
            await first
            await eventually(lambda: disk.held)
            # The next commit would roll, and a roll syncs the old segment.
            _, following = log.writer.append(batch(4, 1, body_bytes=SEGMENT_BYTES))
            await run_loop()
            assert len(disk.held) == 2
            files.fail_at(files.calls + 1, DiskFailed("broken"))
            disk.run_held()
            with pytest.raises(StorageError):
                await following
            assert len(log.failures) == 1
        assert files.syncs_after_failure == []

    run(work())


def test_async_failed_sync_is_reported_without_further_appends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "ASYNC_SYNC_INTERVAL_S", 0.001)

    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce(), durability="async") as log:
            files.fail_at(files.calls + 2, DiskFailed("broken"))
            await log.append(batch(1))
            await eventually(lambda: log.failures)
            with pytest.raises(StorageError):
                await log.writer.flushed()
        assert files.syncs_after_failure == []

    run(work())
