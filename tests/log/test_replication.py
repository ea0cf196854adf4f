"""A log whose commits are replicated: the extents that the writer passes on, and no row visible before."""

from __future__ import annotations

import asyncio
import threading

import pytest
from tests.crash_files import CrashFiles
from tests.log.small_log import SEGMENT_BYTES, batch, bodies, eventually, read_all, run

from timeball.io.clock import ManualClock
from timeball.log import format as fmt
from timeball.log.disk_thread import DiskThread, Extent
from timeball.log.recovery import open_log
from timeball.log.writer import LogWriter
from timeball.model.errors import DiskFailed, NotLeader, StorageError


class HeldReplication:
    """A Replication that writes and syncs locally, and returns from `commit` when the test allows it."""

    def __init__(self) -> None:
        self.epoch = 7
        self.extents: list[Extent] = []
        self.allowed_returns = threading.Semaphore(0)
        self.error: BaseException | None = None

    def commit(self, extent: Extent) -> None:
        """Write and sync the commit. Return, or raise `error`, when the test allows it."""
        self.extents.append(extent)
        extent.file.file.write_at(extent.position, extent.frames)
        extent.file.file.sync()
        self.allowed_returns.acquire()
        if self.error is not None:
            raise self.error


class ReplicatedLog:
    """A replicated log, whose commits the test completes."""

    def __init__(self) -> None:
        self.files, clock = CrashFiles(), ManualClock()
        opened = open_log(self.files, segment_bytes=SEGMENT_BYTES, now_ms=clock.wall)
        self.segments, self.replication, self.disk = opened.segments, HeldReplication(), DiskThread()
        self.failures: list[BaseException] = []
        self.writer = LogWriter(
            self.files, opened.segments, opened.file, clock, self.disk, segment_bytes=SEGMENT_BYTES,
            on_failure=self.failures.append, replication=self.replication,
        )  # fmt: skip

    async def close(self) -> None:
        """Let all commits return, and close the log."""
        self.replication.allowed_returns.release(1_000)
        await self.writer.close()
        self.disk.shutdown()


def test_commit_is_visible_and_acknowledged_when_it_is_replicated() -> None:
    async def scenario() -> None:
        log = ReplicatedLog()
        seq, commit = log.writer.append(batch(1))
        await eventually(lambda: log.replication.extents)
        await eventually(lambda: log.files.trace[-1][0] == "sync")
        assert not commit.done() and log.segments.next_seq == seq, "on this disk only"
        log.replication.allowed_returns.release()
        assert await commit == seq and log.segments.next_seq == seq + 3
        assert list(read_all(log.segments).values()) == bodies([batch(1)])
        await log.close()

    run(scenario())


def test_extents_contain_the_bytes_of_the_log_in_order() -> None:
    async def scenario() -> None:
        log = ReplicatedLog()
        log.replication.allowed_returns.release(1_000)
        for number in range(30):
            await log.writer.append(batch(1 + 3 * number))[1]
        extents = log.replication.extents
        assert len(extents) == 30 and log.writer.statistics.rolls > 1
        assert extents[-1].end_seq == log.segments.next_seq == 91
        end_of: dict[int, int] = {}  # ordinal of a segment -> end of its extents so far
        for extent in extents:
            (segment,) = (segment for segment in log.segments.all if segment.ordinal == extent.file.ordinal)
            begin = end_of.get(segment.ordinal, fmt.ALIGN)
            assert extent.position == begin
            assert extent.begins == (begin == fmt.ALIGN)
            end_of[segment.ordinal] = begin + len(extent.frames)
            assert bytes(segment.buffer[begin : begin + len(extent.frames)]) == extent.frames
            frame = fmt.read_frame(segment.buffer, begin)
            assert frame is not None and frame.epoch == 7 and frame.synced_to == begin
        await log.close()

    run(scenario())


def test_a_commit_of_several_frames_is_one_extent_in_one_segment() -> None:
    async def scenario() -> None:
        log = ReplicatedLog()
        log.replication.allowed_returns.release(1_000)
        await log.writer.append(batch(1))[1]
        # Reservations have frames of their own.
        await asyncio.gather(
            *[log.writer.append(batch(4 + 3 * number), span=3 + number)[1] for number in range(4)]
        )
        extent = log.replication.extents[-1]
        assert len(log.replication.extents) == 2 and extent.end_seq == log.segments.next_seq
        assert [frame.synced_to for frame in frames(extent)] == [extent.position] * 4
        await log.close()

    def frames(extent: Extent) -> list[fmt.Frame]:
        """Read the frames of an extent from its segment."""
        frames, position = [], extent.position
        while position < extent.position + len(extent.frames):
            frame = fmt.read_frame(extent.file.mapped, position)
            assert frame is not None
            frames.append(frame)
            position = frame.end
        return frames

    run(scenario())


@pytest.mark.parametrize("error", [NotLeader("no more"), DiskFailed("broken")], ids=["not leader", "disk"])
def test_failed_replication_stops_the_log_and_shows_no_row(error: Exception) -> None:
    async def scenario() -> None:
        log = ReplicatedLog()
        first = log.writer.append(batch(1))[1]
        await eventually(lambda: log.replication.extents)
        second = log.writer.append(batch(4))[1]
        log.replication.error = error
        log.replication.allowed_returns.release()
        for commit in (first, second):
            with pytest.raises(type(error)):
                await commit
        assert log.failures == [error] and log.segments.next_seq == 1
        # Later calls get the same error: after NotLeader clients ask another node, after a failed disk they do not.
        with pytest.raises(NotLeader if isinstance(error, NotLeader) else StorageError):
            log.writer.append(batch(7))
        with pytest.raises(NotLeader if isinstance(error, NotLeader) else StorageError):
            await log.writer.flushed()
        assert len(log.replication.extents) == 1, "the second commit is not tried"
        await log.close()

    run(scenario())
