"""Group commit: who shares a frame, who is told when, and what stops the log."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine
from typing import Any

import pyarrow as pa
import pytest
from tests.crash_files import CrashFiles
from tests.log.small_log import (
    SEGMENT_BYTES,
    AtOnce,
    Log,
    OnDemand,
    batch,
    bodies,
    eventually,
    opened,
    read_all,
    reopened,
)

from timeball import limits
from timeball.errors import DiskFailed, OverLimit, StorageError, TimeballError, Unavailable
from timeball.files import RealFiles
from timeball.log import writer as writer_module
from timeball.log.segment import segment_name
from timeball.message import Kind, build_rows


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


async def turns(count: int = 5) -> None:
    """Give the event loop its turns; nothing waits for a time here."""
    for _ in range(count):
        await asyncio.sleep(0)


def syncs(files: CrashFiles, name: str = "") -> int:
    return sum(call == "sync" and name in where for call, where in files.trace)


# ---- group commit ----------------------------------------------------------------------------------------


def test_what_arrives_before_the_disk_is_idle_shares_one_frame_and_one_sync() -> None:
    async def work() -> None:
        files, disk = CrashFiles(), OnDemand()
        async with opened(files, disk=disk) as log:
            before = syncs(files)
            first = log.writer.append(batch(1, 1))
            await turns()
            assert len(disk.waiting) == 1
            others = [log.writer.append(batch(1 + n, 1)) for n in range(1, 50)]
            await turns()
            assert len(disk.waiting) == 1, "one commit is in flight at a time"
            disk.let_go()
            await first[1]
            assert not any(done.done() for _, done in others)
            await turns()
            disk.let_go()
            assert await asyncio.gather(*[done for _, done in others]) == list(range(2, 51))
            statistics = log.writer.statistics
            assert (statistics.commits, statistics.frames, statistics.rows) == (2, 2, 50)
            assert syncs(files) - before == 2
            assert list(read_all(log.segments).values()) == bodies([batch(1, 50)])

    run(work())


def test_calls_of_one_turn_of_the_loop_share_a_commit() -> None:
    async def work() -> None:
        async with opened(CrashFiles(), disk=AtOnce()) as log:
            assert await log.append(*[batch(1 + 3 * n) for n in range(4)]) == [1, 4, 7, 10]
            assert log.writer.statistics.commits == log.writer.statistics.frames == 1

    run(work())


def test_numbers_are_given_out_at_once_and_in_the_order_of_calls() -> None:
    async def work() -> None:
        async with opened(CrashFiles(), disk=OnDemand()) as log:
            calls = [log.writer.append(batch(1, count)) for count in (2, 5, 1)]
            assert [first_seq for first_seq, _ in calls] == [1, 3, 8]
            assert log.writer.next_seq == 9
            assert log.reader.next_seq == 1, "not durable yet, so not there to be read"

    run(work())


def test_nobody_is_told_before_the_sync_has_returned() -> None:
    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce()) as log:
            for n in range(6):
                _, done = log.writer.append(batch(1 + 3 * n))
                await done
                on_disk = read_all(reopened(files.crash(survival="nothing")).segments)
                assert list(on_disk.values()) == bodies([batch(1, 3 * n + 3)])

    run(work())


def test_caches_hear_of_a_row_before_its_sender_and_in_the_order_of_the_log() -> None:
    async def work() -> None:
        heard: list[object] = []
        async with opened(CrashFiles()) as log:
            promises = []
            for n in range(3):
                _, done = log.writer.append(
                    batch(1 + 3 * n), on_durable=lambda n=n: heard.append(f"cache {n}")
                )
                done.add_done_callback(lambda done: heard.append(done.result()))
                promises.append(done)
            await asyncio.gather(*promises)
        assert heard == ["cache 0", "cache 1", "cache 2", 1, 4, 7]

    run(work())


def test_a_reservation_has_a_frame_of_its_own_and_its_numbers_are_left_out() -> None:
    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce()) as log:
            reserve = build_rows(1, kind=int(Kind.RESERVE), body=b"10")
            calls = [
                log.writer.append(batch(1, 2)),
                log.writer.append(reserve, span=11),
                log.writer.append(batch(3, 2)),
            ]
            assert [await done for _, done in calls] == [1, 3, 14]
            assert (log.writer.statistics.commits, log.writer.statistics.frames) == (1, 3)
            assert sorted(read_all(log.segments)) == [1, 2, 3, 14, 15]
        assert reopened(files).segments.next_seq == 16

    run(work())


def test_a_commit_is_bounded_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FRAME_ROWS_MAX", 10)

    async def work() -> None:
        async with opened(CrashFiles(), disk=AtOnce()) as log:
            await log.append(*[batch(1 + 4 * n, 4) for n in range(5)])
            assert [s for segment in log.segments.all for s in segment.frame_seqs] == [1, 9, 17]

    run(work())


def test_flushed_waits_for_what_was_appended_before() -> None:
    async def work() -> None:
        disk = OnDemand()
        async with opened(CrashFiles(), disk=disk) as log:
            await log.writer.flushed()
            log.writer.append(batch(1))
            await turns()
            log.writer.append(batch(4))
            waiting = asyncio.ensure_future(log.writer.flushed())
            await turns()
            disk.let_go()
            await turns()
            assert not waiting.done()
            disk.let_go()
            await waiting
            assert log.reader.next_seq == 7

    run(work())


def test_closing_finishes_what_was_accepted_and_takes_no_more() -> None:
    async def work() -> None:
        files, disk = CrashFiles(), OnDemand()
        async with opened(files, disk=disk) as log:
            _, first = log.writer.append(batch(1))
            await turns()
            _, second = log.writer.append(batch(4))
        assert await first == 1 and await second == 4
        with pytest.raises(Unavailable):
            log.writer.append(batch(7))
        assert reopened(files.crash(survival="nothing")).segments.next_seq == 7

    run(work())


# ---- what one caller gets wrong --------------------------------------------------------------------------


def test_a_batch_that_can_be_no_frame_is_its_caller_s_and_not_the_log_s_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "FRAME_BYTES_MAX", 8192)

    async def work() -> None:
        async with opened(CrashFiles(), disk=AtOnce()) as log:
            with pytest.raises(AssertionError):
                log.writer.append(build_rows(0))
            with pytest.raises(AssertionError):
                log.writer.append(batch(1, 3), span=2)
            with pytest.raises(OverLimit, match="split it"):
                log.writer.append(batch(1, 1, body_bytes=8192))
            assert log.writer.next_seq == 1, "no number is used up"
            assert await log.append(batch(1)) == [1]
            assert log.writer.failed is None

    run(work())


def test_a_sender_who_has_gone_away_harms_nobody() -> None:
    async def work() -> None:
        disk = OnDemand()
        async with opened(CrashFiles(), disk=disk) as log:
            _, gone = log.writer.append(batch(1))
            _, here = log.writer.append(batch(4))
            gone.cancel()
            await turns()
            disk.let_go()
            assert await here == 4
            assert log.failures == []

    run(work())


# ---- rolling ---------------------------------------------------------------------------------------------


def test_a_full_segment_is_followed_by_the_spare_that_was_ready() -> None:
    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce()) as log:
            while log.writer.statistics.rolls < 3:
                await log.append(batch(log.writer.next_seq))
                await turns()
            created = [name for call, name in files.trace if call == "create"]
            assert created == [segment_name(n) for n in range(1, len(created) + 1)], "each one once"
            assert [s.ordinal for s in log.segments.all] == [1, 2, 3, 4]
            assert list(read_all(log.segments).values()) == bodies([batch(1, log.writer.next_seq - 1)])

    run(work())


def test_a_roll_right_behind_the_preparation_of_the_spare_takes_it() -> None:
    """The disk thread goes on with the next commit before the event loop has heard of the spare."""

    async def work() -> None:
        files, disk = CrashFiles(), OnDemand()
        async with opened(files, disk=disk) as log:
            _, half = log.writer.append(batch(1, 1, body_bytes=SEGMENT_BYTES // 2))
            await turns()
            disk.let_go()
            await half
            await turns()
            assert len(disk.waiting) == 1, "the spare is being prepared"
            _, rolled = log.writer.append(batch(2, 1, body_bytes=SEGMENT_BYTES // 2))
            await turns()
            disk.let_go(2)
            await rolled
            for n in range(3, 9):
                _, done = log.writer.append(batch(n, 1, body_bytes=SEGMENT_BYTES // 2))
                while not done.done():
                    await turns()
                    disk.let_go()
            assert log.failures == []
        assert sorted(read_all(reopened(files.crash(survival="nothing")).segments)) == list(range(1, 9))

    run(work())


def test_a_commit_ahead_of_the_preparation_of_the_spare_rolls_by_itself() -> None:
    async def work() -> None:
        files, disk = CrashFiles(), OnDemand()
        async with opened(files, disk=disk) as log:
            for n in range(1, 9):
                _, done = log.writer.append(batch(n, 1, body_bytes=SEGMENT_BYTES // 2))
                await turns()
                while not done.done():
                    disk.let_go()
                    disk.waiting.reverse()  # the next commit before the spare
                    await asyncio.sleep(0)
            assert log.failures == []
        assert sorted(read_all(reopened(files.crash(survival="nothing")).segments)) == list(range(1, 9))

    run(work())


def test_a_commit_larger_than_a_segment_gets_one_of_its_size() -> None:
    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce()) as log:
            await log.append(batch(1, 2, body_bytes=50))
            await log.append(batch(3, 2, body_bytes=2 * SEGMENT_BYTES))
            await turns()
            await log.append(batch(5, 2, body_bytes=50))
            assert files.size(segment_name(2)) > 4 * SEGMENT_BYTES
        found = read_all(reopened(files.crash(survival="nothing")).segments)
        assert [len(body) for body in found.values()] == [
            50,
            50,
            2 * SEGMENT_BYTES,
            2 * SEGMENT_BYTES,
            50,
            50,
        ]

    run(work())


# ---- fail-stop -------------------------------------------------------------------------------------------


async def fails(log: Log, rows: pa.RecordBatch) -> TimeballError:
    with pytest.raises(TimeballError) as failure:
        await log.append(rows)
    return failure.value


@pytest.mark.parametrize("call", ["write_at", "sync"])
def test_after_the_first_failure_nobody_is_told_and_nothing_is_tried_again(call: str) -> None:
    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce()) as log:
            await log.append(batch(1))
            files.fail_at(files.calls + (1 if call == "write_at" else 2), DiskFailed("broken"))
            failing = log.writer.append(batch(4))[1], log.writer.append(batch(7))[1]
            await turns()
            for done in failing:
                with pytest.raises(DiskFailed, match="broken"):
                    await done
            calls = files.calls
            assert files.trace[-1][0] == call
            with pytest.raises(StorageError, match="has stopped"):
                log.writer.append(batch(10))
            with pytest.raises(StorageError, match="has stopped"):
                await log.writer.flushed()
            assert log.reader.next_seq == 4, "nobody sees what may not be on the disk"
            assert len(log.failures) == 1
        assert files.calls == calls, "not even closing touches the disk"
        assert files.syncs_after_failure == []
        assert sorted(read_all(reopened(files.crash(survival="nothing")).segments)) == [1, 2, 3]

    run(work())


def test_what_waits_behind_a_failing_commit_fails_with_it() -> None:
    async def work() -> None:
        files, disk = CrashFiles(), OnDemand()
        async with opened(files, disk=disk) as log:
            _, first = log.writer.append(batch(1))
            await turns()
            _, second = log.writer.append(batch(4))
            flushed = asyncio.ensure_future(log.writer.flushed())
            await turns()
            files.fail_at(files.calls + 2, DiskFailed("broken"))
            disk.let_go()
            for waiting in (first, second, flushed):
                with pytest.raises(DiskFailed):
                    await waiting
            assert disk.waiting == []

    run(work())


def test_every_call_failing_once_stops_the_log_or_costs_nothing() -> None:
    async def work(files: CrashFiles) -> dict[int, bytes]:
        acknowledged: dict[int, bytes] = {}
        async with opened(files, disk=AtOnce()) as log:
            for n in range(12):
                rows = batch(1 + 2 * n, 2, body_bytes=900)
                try:
                    (first_seq,) = await log.append(rows)
                except StorageError:
                    assert log.writer.failed is not None and len(log.failures) == 1
                    break
                assert not log.failures, "acknowledged after a failure"
                acknowledged.update(enumerate(bodies([rows]), first_seq))
                await turns()
        return acknowledged

    whole = CrashFiles()
    assert len(asyncio.run(work(whole))) == 24
    for call in range(8, whole.calls + 1):
        files = CrashFiles()
        files.fail_at(call, DiskFailed("broken"))
        try:
            acknowledged = asyncio.run(work(files))
        except DiskFailed:  # while opening
            continue
        assert files.syncs_after_failure == [], call
        found = read_all(reopened(files.crash(survival="nothing")).segments)
        assert acknowledged.items() <= found.items(), call


def test_a_cache_that_cannot_take_a_row_stops_the_log_instead_of_hanging_it() -> None:
    def full() -> None:
        raise OverLimit("disk full while growing an index")

    async def work() -> None:
        async with opened(CrashFiles()) as log:
            _, done = log.writer.append(batch(1), on_durable=full)
            behind = log.writer.append(batch(4))[1]
            for waiting in (done, behind):
                with pytest.raises(OverLimit):
                    await asyncio.wait_for(waiting, 30)
            assert [type(error) for error in log.failures] == [OverLimit]
            with pytest.raises(StorageError, match="has stopped"):
                log.writer.append(batch(7))

    run(work())


def test_a_spare_that_cannot_be_synced_stops_the_log() -> None:
    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce()) as log:
            done = log.writer.append(batch(1, 1, body_bytes=SEGMENT_BYTES // 2))[1]
            # The commit is a write and a sync; then a spare is created, allocated and synced.
            files.fail_at(files.calls + 5, DiskFailed("broken"))
            await done
            await eventually(lambda: log.failures)
            assert files.trace[-2:] == [("sync", segment_name(2)), ("remove", segment_name(2))]
            with pytest.raises(StorageError, match="has stopped"):
                log.writer.append(batch(2))
        gc.collect()  # a task that ended unnoticed would complain now

    run(work())


# ---- disk full -------------------------------------------------------------------------------------------


def test_a_full_disk_closes_admission_before_the_segment_is_full_and_opens_it_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer_module, "ROOM_RETRY_S", 0.001)

    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce()) as log:
            log.writer.check_room()
            files.fail_at(1, OverLimit("disk full"), forever=True)
            await log.append(batch(1, 1, body_bytes=SEGMENT_BYTES // 2))
            await turns()
            with pytest.raises(OverLimit, match="disk full"):
                log.writer.check_room()
            # Releases and cancels do not ask: they fit into the segment at hand.
            assert await log.append(batch(2, 2)) == [2]
            assert not files.exists(segment_name(2))
            files.heal()
            await eventually(lambda: files.exists(segment_name(2)))
            await turns()
            log.writer.check_room()
            for n in range(4, 30):
                await log.append(batch(n, 1, body_bytes=900))
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


def test_too_much_waiting_for_the_disk_is_refused_until_it_has_caught_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "APPEND_BYTES_IN_FLIGHT_MAX", 10_000)

    async def work() -> None:
        disk = OnDemand()
        async with opened(CrashFiles(), disk=disk) as log:
            _, done = log.writer.append(batch(1, 1, body_bytes=10_000))
            with pytest.raises(OverLimit, match="wait for the disk"):
                log.writer.check_room()
            await turns()
            disk.let_go()
            await done
            log.writer.check_room()

    run(work())


# ---- async durability ------------------------------------------------------------------------------------


def test_async_durability_tells_before_the_sync_and_syncs_soon_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "ASYNC_SYNC_INTERVAL_S", 0.001)

    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce(), durability="async") as log:
            before = syncs(files)
            _, done = log.writer.append(batch(1))
            await done
            assert syncs(files) == before
            assert reopened(files.crash(survival="nothing")).segments.next_seq == 1, "that is the price"
            await eventually(lambda: syncs(files) > before)
            assert reopened(files.crash(survival="nothing")).segments.next_seq == 4

    run(work())


def test_async_durability_loses_only_a_tail_and_starts_again() -> None:
    async def work(files: CrashFiles) -> None:
        async with opened(files, disk=AtOnce(), durability="async") as log:
            for n in range(20):
                await log.append(batch(1 + 2 * n, 2, body_bytes=400))
                await turns()
            assert log.writer.statistics.rolls >= 2
            for seed in range(40):
                found = read_all(reopened(files.crash(seed)).segments)
                assert list(found.values()) == bodies([batch(1, 40, body_bytes=400)])[: len(found)]
                assert len(found) >= log.segments.last.first_seq - 1, "a sealed segment is synced"

    files = CrashFiles()
    run(work(files))
    assert len(read_all(reopened(files.crash(survival="nothing")).segments)) == 40, "closing syncs"


def test_async_damage_before_the_last_sync_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "ASYNC_SYNC_INTERVAL_S", 0.001)

    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce(), durability="async") as log:
            await log.append(batch(1))
            before = syncs(files)
            await eventually(lambda: syncs(files) > before)
            await log.append(batch(4))
        file = files.open(segment_name(1))
        file.write_at(400, b"damage")
        with pytest.raises(StorageError, match="proves"):
            reopened(files)

    run(work())


def test_async_a_failed_sync_stops_the_log_and_what_is_in_flight_is_not_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writer_module, "ASYNC_SYNC_INTERVAL_S", 0.001)

    async def work() -> None:
        files, disk = CrashFiles(), OnDemand()
        async with opened(files, disk=disk, durability="async") as log:
            _, first = log.writer.append(batch(1))
            await turns()
            disk.let_go()
            await first
            await eventually(lambda: disk.waiting)
            # Behind the sync that fails waits a commit that would roll, and sync once more on the way.
            _, behind = log.writer.append(batch(4, 1, body_bytes=SEGMENT_BYTES))
            await turns()
            assert len(disk.waiting) == 2
            files.fail_at(files.calls + 1, DiskFailed("broken"))
            disk.let_go()
            with pytest.raises(StorageError):
                await behind
            assert len(log.failures) == 1
        assert files.syncs_after_failure == []

    run(work())


def test_async_a_failed_sync_is_heard_of_when_nothing_else_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "ASYNC_SYNC_INTERVAL_S", 0.001)

    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce(), durability="async") as log:
            files.fail_at(files.calls + 2, DiskFailed("broken"))
            await log.append(batch(1))
            await eventually(lambda: log.failures)
            assert isinstance(await fails_to_flush(log), StorageError)
        assert files.syncs_after_failure == []

    async def fails_to_flush(log: Log) -> BaseException:
        with pytest.raises(StorageError) as failure:
            await log.writer.flushed()
        return failure.value

    run(work())


# ---- a real folder and a real thread ---------------------------------------------------------------------


def test_many_senders_on_a_real_disk(tmp_path) -> None:  # type: ignore[no-untyped-def]
    files = RealFiles(tmp_path)

    async def work() -> None:
        async with opened(files) as log:

            async def sender(number: int) -> list[int]:
                return [(await log.append(batch(1_000 * number + n, 1)))[0] for n in range(20)]

            seqs = await asyncio.gather(*[sender(number) for number in range(10)])
            assert sorted(seq for own in seqs for seq in own) == list(range(1, 201))
            assert all(own == sorted(own) for own in seqs)
            assert log.writer.statistics.commits < 200, "senders share commits"
            found = read_all(log.segments)
            for number, own in enumerate(seqs):
                expected = bodies([batch(1_000 * number, 20)])
                assert [found[seq] for seq in own] == expected

    run(work())
    found = reopened(files)
    assert found.segments.next_seq == 201
    found.file.close()
