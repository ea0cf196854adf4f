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


class Replicated:
    """A Replication that writes and syncs locally, and returns when the test allows it."""

    def __init__(self) -> None:
        self.epoch = 7
        self.extents: list[Extent] = []
        self.lets = threading.Semaphore(0)
        self.error: BaseException | None = None

    def commit(self, extent: Extent) -> None:
        self.extents.append(extent)
        extent.file.file.write_at(extent.position, extent.frames)
        extent.file.file.sync()
        self.lets.acquire()
        if self.error is not None:
            raise self.error


class Led:
    """A writer of a replicated log."""

    def __init__(self) -> None:
        self.files, clock = CrashFiles(), ManualClock()
        opened = open_log(self.files, segment_bytes=SEGMENT_BYTES, now_ms=clock.wall)
        self.segments, self.replication, self.disk = opened.segments, Replicated(), DiskThread()
        self.failures: list[BaseException] = []
        self.writer = LogWriter(
            self.files, opened.segments, opened.file, clock, self.disk, segment_bytes=SEGMENT_BYTES,
            on_failure=self.failures.append, replication=self.replication,
        )  # fmt: skip

    async def close(self) -> None:
        self.replication.lets.release(1_000)
        await self.writer.close()
        self.disk.shutdown()


def test_commit_is_visible_and_acknowledged_when_it_is_replicated() -> None:
    async def scenario() -> None:
        led = Led()
        seq, done = led.writer.append(batch(1))
        await eventually(lambda: led.replication.extents)
        await eventually(lambda: led.files.trace[-1][0] == "sync")
        assert not done.done() and led.segments.next_seq == seq, "on this disk only"
        led.replication.lets.release()
        assert await done == seq and led.segments.next_seq == seq + 3
        assert list(read_all(led.segments).values()) == bodies([batch(1)])
        await led.close()

    run(scenario())


def test_extents_contain_the_bytes_of_the_log_in_order() -> None:
    async def scenario() -> None:
        led = Led()
        led.replication.lets.release(1_000)
        for number in range(30):
            await led.writer.append(batch(1 + 3 * number))[1]
        extents = led.replication.extents
        assert len(extents) == 30 and led.writer.statistics.rolls > 1
        assert extents[-1].end_seq == led.segments.next_seq == 91
        places = {}
        for extent in extents:
            segment = next(each for each in led.segments.all if each.ordinal == extent.file.ordinal)
            begin = places.get(segment.ordinal, fmt.ALIGN)
            assert extent.position == begin and extent.begins == (begin == fmt.ALIGN)
            places[segment.ordinal] = begin + len(extent.frames)
            assert bytes(segment.buffer[begin : begin + len(extent.frames)]) == extent.frames
            frame = fmt.read_frame(segment.buffer, begin)
            assert frame is not None and frame.epoch == 7 and frame.synced_to == begin
        await led.close()

    run(scenario())


def test_a_commit_of_several_frames_is_one_extent_in_one_segment() -> None:
    async def scenario() -> None:
        led = Led()
        led.replication.lets.release(1_000)
        await led.writer.append(batch(1))[1]
        dones = [led.writer.append(batch(4 + 3 * n), span=3 + n)[1] for n in range(4)]
        await asyncio.gather(*dones)
        extent = led.replication.extents[-1]
        assert len(led.replication.extents) == 2 and extent.end_seq == led.segments.next_seq
        assert [frame.synced_to for frame in frames(extent)] == [extent.position] * 4
        await led.close()

    def frames(extent: Extent) -> list[fmt.Frame]:
        found, position = [], extent.position
        while position < extent.position + len(extent.frames):
            frame = fmt.read_frame(extent.file.mapped, position)
            assert frame is not None
            found.append(frame)
            position = frame.end
        return found

    run(scenario())


@pytest.mark.parametrize("error", [NotLeader("no more"), DiskFailed("broken")], ids=["not leader", "disk"])
def test_failed_replication_stops_the_log_and_shows_no_row(error: Exception) -> None:
    async def scenario() -> None:
        led = Led()
        first, second = led.writer.append(batch(1))[1], None
        await eventually(lambda: led.replication.extents)
        second = led.writer.append(batch(4))[1]
        led.replication.error = error
        led.replication.lets.release()
        for done in (first, second):
            with pytest.raises(type(error)):
                await done
        assert led.failures == [error] and led.segments.next_seq == 1
        # Later calls get the same error: after NotLeader clients ask another node, after a failed disk they do not.
        with pytest.raises(NotLeader if isinstance(error, NotLeader) else StorageError):
            led.writer.append(batch(7))
        with pytest.raises(NotLeader if isinstance(error, NotLeader) else StorageError):
            await led.writer.flushed()
        assert len(led.replication.extents) == 1, "nothing is written behind it"
        await led.close()

    run(scenario())
