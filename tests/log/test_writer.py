"""Group commit: which entries share a frame, when callers are notified, and how the log rolls."""

from __future__ import annotations

import asyncio

import pytest
from tests.crash_files import CrashFiles
from tests.log.small_log import (
    SEGMENT_BYTES,
    AtOnce,
    OnDemand,
    batch,
    bodies,
    opened,
    read_all,
    reopened,
    run,
    syncs,
    turns,
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


def test_appends_of_one_loop_iteration_share_a_commit() -> None:
    async def work() -> None:
        async with opened(CrashFiles(), disk=AtOnce()) as log:
            assert await log.append(*[batch(1 + 3 * n) for n in range(4)]) == [1, 4, 7, 10]
            assert log.writer.statistics.commits == log.writer.statistics.frames == 1

    run(work())


def test_append_assigns_numbers_at_once_in_the_order_of_calls() -> None:
    async def work() -> None:
        async with opened(CrashFiles(), disk=OnDemand()) as log:
            calls = [log.writer.append(batch(1, count)) for count in (2, 5, 1)]
            assert [first_seq for first_seq, _ in calls] == [1, 3, 8]
            assert log.writer.next_seq == 9
            assert log.reader.next_seq == 1, "not durable yet, so not there to be read"

    run(work())


def test_futures_are_done_only_after_the_sync() -> None:
    async def work() -> None:
        files = CrashFiles()
        async with opened(files, disk=AtOnce()) as log:
            for n in range(6):
                _, done = log.writer.append(batch(1 + 3 * n))
                await done
                on_disk = read_all(reopened(files.crash(survival="nothing")).segments)
                assert list(on_disk.values()) == bodies([batch(1, 3 * n + 3)])

    run(work())


def test_on_durable_runs_before_the_future_and_in_log_order() -> None:
    async def work() -> None:
        heard: list[object] = []
        async with opened(CrashFiles()) as log:
            scheduled_rows = []
            for n in range(3):
                _, done = log.writer.append(
                    batch(1 + 3 * n), on_durable=lambda n=n: heard.append(f"cache {n}")
                )
                done.add_done_callback(lambda done: heard.append(done.result()))
                scheduled_rows.append(done)
            await asyncio.gather(*scheduled_rows)
        assert heard == ["cache 0", "cache 1", "cache 2", 1, 4, 7]

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


@pytest.mark.parametrize("is_under_way", [True, False])
def test_flushed_waits_for_appends_of_cancelled_callers(is_under_way: bool) -> None:
    async def work() -> None:
        disk = OnDemand()
        async with opened(CrashFiles(), disk=disk) as log:
            _, done = log.writer.append(batch(1))
            if is_under_way:
                await turns()
            waiting = [asyncio.ensure_future(log.writer.flushed()) for _ in range(2)]
            await turns()
            done.cancel()
            waiting[1].cancel()
            await turns()
            assert not waiting[0].done(), "the rows are not on disk yet"
            disk.let_go()
            await waiting[0]
            assert log.segments.next_seq == log.writer.next_seq

    run(work())


def test_flushed_waits_for_earlier_appends() -> None:
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


def test_close_commits_accepted_rows_and_refuses_others() -> None:
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


def test_oversized_batch_fails_its_caller_but_not_the_log(
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


def test_cancelled_caller_does_not_disturb_others() -> None:
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


def test_encoding_ahead_does_not_change_the_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a busy disk rows are pending, and are then encoded ahead, with one frame per append."""

    async def written(ahead_bytes: int) -> tuple[bytes, int]:
        monkeypatch.setattr(writer_module, "ENCODE_AHEAD_BYTES", ahead_bytes)
        files, disk, ahead = CrashFiles(), OnDemand(), 0
        async with opened(files, disk=disk) as log:
            for n in range(1, 7):
                # One waits behind each one that is being written.
                done = log.writer.append(batch(n, 1, body_bytes=50 * n))[1]
                ahead += any(entry.payload is not None for entry in log.writer._pending)
                await turns()
                while n % 2 == 0 and not done.done():
                    disk.let_go()
                    await turns()
            assert list(read_all(log.segments).values()) == [
                body for n in range(1, 7) for body in bodies([batch(n, 1, body_bytes=50 * n)])
            ]
        return bytes(files.map_readonly(segment_name(1))), ahead

    async def work() -> None:
        with_it, without = await written(1), await written(1 << 30)
        assert with_it[1] and not without[1]
        assert with_it[0] == without[0]

    run(work())


# ---- rolling ---------------------------------------------------------------------------------------------


def test_full_segment_is_followed_by_the_prepared_spare() -> None:
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


def test_roll_right_after_the_preparation_uses_the_spare() -> None:
    """The disk thread writes the next commit before the event loop is notified of the spare."""

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


def test_commit_after_roll_begins_a_new_segment() -> None:
    async def work() -> None:
        files = CrashFiles()
        async with opened(files) as log:
            await log.writer.append(batch(1, 3))[1]
            assert log.segments.last.first_append_ms == log.segments.last.newest_append_ms
            await log.writer.roll()
            await log.writer.roll()
            assert len(log.segments.all) == 1, "without a commit there is nothing to begin it with"
            for seq in (4, 5):
                await log.writer.append(batch(seq, 1))[1]
            assert [segment.next_seq for segment in log.segments.all] == [4, 6], "once"
            files.fail_at(files.calls + 1, OverLimit("disk full"), forever=True)
            with pytest.raises(OverLimit):
                await log.writer.roll()
            files.heal()
            await log.writer.append(batch(6, 1))[1]
            assert log.writer.failed is None and len(log.segments.all) == 2
        assert list(read_all(reopened(files).segments).values()) == bodies([batch(1, 6)])

    run(work())


def test_commit_before_the_preparation_of_the_spare_makes_a_segment() -> None:
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
        kept_bodies = read_all(reopened(files.crash(survival="nothing")).segments)
        assert [len(body) for body in kept_bodies.values()] == [
            50,
            50,
            2 * SEGMENT_BYTES,
            2 * SEGMENT_BYTES,
            50,
            50,
        ]

    run(work())


# ---- a real folder and a real thread ---------------------------------------------------------------------


def test_many_senders_share_commits_on_a_real_disk(tmp_path) -> None:  # type: ignore[no-untyped-def]
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
    found.file.file.close()
