"""Group commit: which entries share a frame, when callers are notified, and how the log rolls."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.crash_files import CrashFiles
from tests.log.small_log import (
    SEGMENT_BYTES,
    AtOnce,
    HeldDisk,
    batch,
    bodies,
    opened,
    read_all,
    reopened,
    run,
    run_loop,
    syncs,
)

from timeball.io.files import RealFiles
from timeball.log import writer as writer_module
from timeball.log.segment import segment_name
from timeball.model import limits
from timeball.model.errors import OverLimit, Unavailable
from timeball.model.message import Kind, build_rows

# ---- group commit ----------------------------------------------------------------------------------------


def test_entries_appended_while_the_disk_is_busy_share_a_frame_and_a_sync() -> None:
    async def work() -> None:
        files, disk = CrashFiles(), HeldDisk()
        async with opened(files, disk=disk) as log:
            syncs_before = syncs(files)
            first = log.writer.append(batch(1, 1))
            await run_loop()
            assert len(disk.held) == 1
            others = [log.writer.append(batch(1 + number, 1)) for number in range(1, 50)]
            await run_loop()
            assert len(disk.held) == 1, "one commit is in flight at a time"
            disk.run_held()
            await first[1]
            assert not any(commit.done() for _, commit in others)
            await run_loop()
            disk.run_held()
            assert await asyncio.gather(*[commit for _, commit in others]) == list(range(2, 51))
            statistics = log.writer.statistics
            assert (statistics.commits, statistics.frames, statistics.rows) == (2, 2, 50)
            assert syncs(files) - syncs_before == 2
            assert list(read_all(log.segments).values()) == bodies([batch(1, 50)])

    run(work())


def test_appends_of_one_loop_iteration_share_a_commit() -> None:
    async def work() -> None:
        async with opened(CrashFiles(), disk=AtOnce()) as log:
            assert await log.append(*[batch(1 + 3 * number) for number in range(4)]) == [1, 4, 7, 10]
            assert log.writer.statistics.commits == log.writer.statistics.frames == 1

    run(work())


def test_append_assigns_numbers_at_once_in_the_order_of_calls() -> None:
    async def work() -> None:
        async with opened(CrashFiles(), disk=HeldDisk()) as log:
            calls = [log.writer.append(batch(1, count)) for count in (2, 5, 1)]
            assert [first_seq for first_seq, _ in calls] == [1, 3, 8]
            assert log.writer.next_seq == 9
            assert log.reader.next_seq == 1, "not durable, so not visible to readers"

    run(work())


def test_futures_are_done_only_after_the_sync() -> None:
    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce()) as log:
            for number in range(6):
                _, commit = log.writer.append(batch(1 + 3 * number))
                await commit
                on_disk = read_all(reopened(files.crash(survival="nothing")).segments)
                assert list(on_disk.values()) == bodies([batch(1, 3 * number + 3)])

    run(work())


def test_on_durable_runs_before_the_future_and_in_log_order() -> None:
    async def work() -> None:
        calls: list[str] = []
        async with opened(CrashFiles()) as log:
            futures = []
            for number in range(3):
                _, commit = log.writer.append(
                    batch(1 + 3 * number),
                    on_durable=lambda number=number: calls.append(f"on_durable {number}"),
                )
                commit.add_done_callback(lambda _, number=number: calls.append(f"future {number}"))
                futures.append(commit)
            await asyncio.gather(*futures)
        assert calls == ["on_durable 0", "on_durable 1", "on_durable 2", "future 0", "future 1", "future 2"]

    run(work())


def test_reservation_gets_a_frame_of_its_own_and_its_numbers_are_unused() -> None:
    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce()) as log:
            reserve = build_rows(1, kind=int(Kind.TABLE), body=b"10")
            calls = [
                log.writer.append(batch(1, 2)),
                log.writer.append(reserve, span=11),
                log.writer.append(batch(3, 2)),
            ]
            assert [await commit for _, commit in calls] == [1, 3, 14]
            assert (log.writer.statistics.commits, log.writer.statistics.frames) == (1, 3)
            assert sorted(read_all(log.segments)) == [1, 2, 3, 14, 15]
        assert reopened(files).segments.next_seq == 16

    run(work())


def test_a_commit_is_bounded_in_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "FRAME_ROWS_MAX", 10)

    async def work() -> None:
        async with opened(CrashFiles(), disk=AtOnce()) as log:
            await log.append(*[batch(1 + 4 * number, 4) for number in range(5)])
            first_seqs = [seq for segment in log.segments.all for seq in segment.frame_seqs]
            assert first_seqs == [1, 9, 17], "two appends of four rows fit into a frame of ten"

    run(work())


@pytest.mark.parametrize("is_committing", [True, False])
def test_flushed_waits_for_appends_of_cancelled_callers(is_committing: bool) -> None:
    async def work() -> None:
        disk = HeldDisk()
        async with opened(CrashFiles(), disk=disk) as log:
            _, commit = log.writer.append(batch(1))
            if is_committing:
                await run_loop()
            waiting, cancelled = (asyncio.ensure_future(log.writer.flushed()) for _ in range(2))
            await run_loop()
            commit.cancel()
            cancelled.cancel()
            await run_loop()
            assert not waiting.done(), "the rows are not on disk yet"
            disk.run_held()
            await waiting
            assert log.segments.next_seq == log.writer.next_seq

    run(work())


def test_flushed_waits_for_earlier_appends() -> None:
    async def work() -> None:
        disk = HeldDisk()
        async with opened(CrashFiles(), disk=disk) as log:
            await log.writer.flushed()
            log.writer.append(batch(1))
            await run_loop()
            log.writer.append(batch(4))
            waiting = asyncio.ensure_future(log.writer.flushed())
            await run_loop()
            disk.run_held()
            await run_loop()
            assert not waiting.done()
            disk.run_held()
            await waiting
            assert log.reader.next_seq == 7

    run(work())


def test_close_commits_accepted_rows_and_refuses_others() -> None:
    async def work() -> None:
        files, disk = CrashFiles(), HeldDisk()
        async with opened(files, disk=disk) as log:
            _, first = log.writer.append(batch(1))
            await run_loop()
            _, second = log.writer.append(batch(4))
        assert await first == 1 and await second == 4
        with pytest.raises(Unavailable):
            log.writer.append(batch(7))
        assert reopened(files.crash(survival="nothing")).segments.next_seq == 7

    run(work())


# ---- wrong and cancelled calls ---------------------------------------------------------------------------


def test_a_wrong_append_fails_its_caller_but_not_the_log(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No rows, fewer numbers than rows, and too many bytes."""
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


def test_cancelled_caller_does_not_disturb_others() -> None:
    async def work() -> None:
        disk = HeldDisk()
        async with opened(CrashFiles(), disk=disk) as log:
            _, cancelled = log.writer.append(batch(1))
            _, other = log.writer.append(batch(4))
            cancelled.cancel()
            await run_loop()
            disk.run_held()
            assert await other == 4
            assert log.failures == []

    run(work())


def test_encoding_ahead_does_not_change_the_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While the disk writes a commit, the next append is pending, and encoded ahead if it is large enough."""

    async def write_log(encode_ahead_bytes: int) -> tuple[bytes, int]:
        """Write a log. Returns its bytes, and how many appends were encoded ahead."""
        monkeypatch.setattr(writer_module, "ENCODE_AHEAD_BYTES", encode_ahead_bytes)
        files, disk, encoded_ahead = CrashFiles(), HeldDisk(), 0
        async with opened(files, disk=disk) as log:
            for number in range(1, 7):
                # Appends with an odd number are being written while the next one waits.
                commit = log.writer.append(batch(number, 1, body_bytes=50 * number))[1]
                encoded_ahead += any(entry.payload is not None for entry in log.writer._pending)
                await run_loop()
                while number % 2 == 0 and not commit.done():
                    disk.run_held()
                    await run_loop()
            assert list(read_all(log.segments).values()) == [
                body for number in range(1, 7) for body in bodies([batch(number, 1, body_bytes=50 * number)])
            ]
        return bytes(files.map_readonly(segment_name(1))), encoded_ahead

    async def work() -> None:
        log_bytes, encoded_ahead = await write_log(encode_ahead_bytes=1)
        assert encoded_ahead > 0
        assert await write_log(encode_ahead_bytes=1 << 30) == (log_bytes, 0)

    run(work())


# ---- rolling ---------------------------------------------------------------------------------------------


def test_full_segment_is_followed_by_the_prepared_spare() -> None:
    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce()) as log:
            while log.writer.statistics.rolls < 3:
                await log.append(batch(log.writer.next_seq))
                await run_loop()
            created = [name for call, name in files.trace if call == "create"]
            assert created == [segment_name(ordinal) for ordinal in range(1, len(created) + 1)], (
                "each one once"
            )
            assert [segment.ordinal for segment in log.segments.all] == [1, 2, 3, 4]
            assert list(read_all(log.segments).values()) == bodies([batch(1, log.writer.next_seq - 1)])

    run(work())


def test_roll_right_after_the_preparation_uses_the_spare() -> None:
    """The disk thread writes the next commit before the event loop is notified of the spare."""

    async def work() -> None:
        files, disk = CrashFiles(), HeldDisk()
        async with opened(files, disk=disk) as log:
            _, half_a_segment = log.writer.append(batch(1, 1, body_bytes=SEGMENT_BYTES // 2))
            await run_loop()
            disk.run_held()
            await half_a_segment
            await run_loop()
            assert len(disk.held) == 1, "the spare is being prepared"
            _, in_next_segment = log.writer.append(batch(2, 1, body_bytes=SEGMENT_BYTES // 2))
            await run_loop()
            disk.run_held(2)
            await in_next_segment
            for number in range(3, 9):
                _, commit = log.writer.append(batch(number, 1, body_bytes=SEGMENT_BYTES // 2))
                while not commit.done():
                    await run_loop()
                    disk.run_held()
            assert log.failures == []
        assert sorted(read_all(reopened(files.crash(survival="nothing")).segments)) == list(range(1, 9))

    run(work())


def test_the_first_commit_after_a_roll_begins_a_new_segment() -> None:
    async def work() -> None:
        files = CrashFiles()
        async with opened(files) as log:
            await log.writer.append(batch(1, 3))[1]
            assert log.segments.last.first_append_ms == log.segments.last.newest_append_ms
            await log.writer.roll()
            await log.writer.roll()
            assert len(log.segments.all) == 1, "a segment begins with a commit"
            for seq in (4, 5):
                await log.writer.append(batch(seq, 1))[1]
            assert [segment.next_seq for segment in log.segments.all] == [4, 6], "two calls, one new segment"
        assert list(read_all(reopened(files).segments).values()) == bodies([batch(1, 5)])

    run(work())


def test_a_roll_on_a_full_disk_is_refused_and_the_log_continues_in_its_segment() -> None:
    async def work() -> None:
        files = CrashFiles()
        async with opened(files) as log:
            await log.writer.append(batch(1, 3))[1]
            files.fail_at(files.calls + 1, OverLimit("disk full"), forever=True)
            with pytest.raises(OverLimit):
                await log.writer.roll()
            files.heal()
            await log.writer.append(batch(4, 1))[1]
            assert log.writer.failed is None and len(log.segments.all) == 1
        assert list(read_all(reopened(files).segments).values()) == bodies([batch(1, 4)])

    run(work())


def test_commit_before_the_preparation_of_the_spare_makes_a_segment() -> None:
    async def work() -> None:
        files, disk = CrashFiles(), HeldDisk()
        async with opened(files, disk=disk) as log:
            for number in range(1, 9):
                _, commit = log.writer.append(batch(number, 1, body_bytes=SEGMENT_BYTES // 2))
                await run_loop()
                while not commit.done():
                    disk.run_held()
                    disk.held.reverse()  # the next commit before the spare
                    await asyncio.sleep(0)
            assert log.failures == []
        assert sorted(read_all(reopened(files.crash(survival="nothing")).segments)) == list(range(1, 9))

    run(work())


def test_a_commit_larger_than_a_segment_gets_a_segment_of_its_size() -> None:
    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce()) as log:
            await log.append(batch(1, 2, body_bytes=50))
            await log.append(batch(3, 2, body_bytes=2 * SEGMENT_BYTES))
            await run_loop()
            await log.append(batch(5, 2, body_bytes=50))
            assert files.size(segment_name(2)) > 4 * SEGMENT_BYTES
        kept_bodies = read_all(reopened(files.crash(survival="nothing")).segments)
        small, large = 50, 2 * SEGMENT_BYTES
        assert [len(body) for body in kept_bodies.values()] == [small, small, large, large, small, small]

    run(work())


# ---- a real folder and a real thread ---------------------------------------------------------------------


def test_many_senders_share_commits_on_a_real_disk(tmp_path: Path) -> None:
    files = RealFiles(tmp_path)

    async def work() -> None:
        async with opened(files) as log:

            async def sender(number: int) -> list[int]:
                return [(await log.append(batch(1_000 * number + offset, 1)))[0] for offset in range(20)]

            seqs_of_senders = await asyncio.gather(*[sender(number) for number in range(10)])
            assert sorted(seq for seqs in seqs_of_senders for seq in seqs) == list(range(1, 201))
            assert all(seqs == sorted(seqs) for seqs in seqs_of_senders)
            assert log.writer.statistics.commits < 200, "senders share commits"
            body_of = read_all(log.segments)
            for number, seqs in enumerate(seqs_of_senders):
                assert [body_of[seq] for seq in seqs] == bodies([batch(1_000 * number, 20)])

    run(work())
    recovered = reopened(files)
    assert recovered.segments.next_seq == 201
    recovered.file.file.close()
