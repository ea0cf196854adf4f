"""The writer of the log: group commit, disk space reserved ahead, and the newest rows in memory.

Group commit: all rows that have arrived when the disk becomes idle share one write and one fdatasync.

`append` assigns sequence numbers at once, on the event loop. So the order of calls is the order of the log, and it
decides every race (such as a cancel against a release). The future that `append` returns is done when the rows are on
disk. At most one commit is in flight, in the disk thread, and a commit never spans two segments. Recovery relies on
both rules to distinguish a torn commit from damage.

The log stops at the first failed write or sync, because the page cache may then show bytes that are not on disk
(decision 0003, G9).

    NextSegment      reserves disk space for coming frames
    LogWriter        appends and commits
    NewestRows       the newest visible rows, read without a thread or a frame
    group_entries    combines the appends of a commit into frames
    CommitLog        writer, reader and key index of one broker
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import pyarrow as pa

from timeball.io.clock import Clock, Durations
from timeball.io.files import Files
from timeball.log import format as fmt
from timeball.log.disk_thread import Disk, Extent, Replication
from timeball.log.key_index import KeyIndex
from timeball.log.reader import LogReader
from timeball.log.row_encoder import (
    EncodedRows,
    Payload,
    Rows,
    as_message,
    joined,
    message_bytes,
    read_numbered_row,
)
from timeball.log.segment import (
    STEP_BYTES,
    Segment,
    SegmentFile,
    Segments,
    begin_segment,
    last_epoch,
    prepare,
    segment_name,
)
from timeball.model import limits
from timeball.model.config import Durability
from timeball.model.errors import (
    LEADS_NO_MORE,
    DiskFailed,
    NotLeader,
    OverLimit,
    StorageError,
    TimeballError,
    Unavailable,
)
from timeball.model.message import SMALL_ROWS, ReadRow

logger = logging.getLogger(__name__)

# ---- disk space for coming frames ----------------------------------------------------------------------------
# Space is reserved ahead of need, so that no commit waits for it, and before an announced large write (`make_ready`):
# the next step of the segment being written, then the next segment (the *spare*). So a full disk is noticed while
# releases and cancels still have space: half a segment of disk space is kept free for them. `disk_full_error` then
# states why new scheduled messages are refused.

# Pause between two tries while the disk is full. Admission is closed meanwhile, so a shorter pause would only repeat
# the warning more often.
DISK_FULL_RETRY_S = 2.0


class NextSegment:
    """Reserves space for the log. Belongs to the event loop, except for methods marked with "disk thread"."""

    def __init__(
        self,
        files: Files,
        segments: Segments,
        current: SegmentFile,
        disk: Disk,
        segment_bytes: int,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`on_failure` receives every error except a full disk."""
        self._files, self._segments, self._disk = files, segments, disk
        self._segment_bytes, self._on_failure = segment_bytes, on_failure
        self._loop = asyncio.get_running_loop()
        # Only the disk thread replaces these two, or a roll could miss the spare.
        self.current = current  # the file of the segment being written
        self.spare: SegmentFile | None = None  # the file of the next segment, created ahead
        self.ahead_bytes = min(STEP_BYTES, segment_bytes // 2)  # bytes to reserve after the last frame
        self.is_stopped = False  # True once the log is closed or has failed; set by any thread
        self._task: asyncio.Task[None] | None = None
        self.disk_full_error: OverLimit | None = None
        self._warm: dict[str, int] = {}  # segment name -> position up to which it is warmed

    def start_reserving(self) -> None:
        """Begin to reserve STEP_BYTES more, or to create the spare. A no-op while that runs, or if both exist."""
        if self._task is None and (self.spare is None or self.current.reserved_to < self.current.size_bytes):
            self._task = self._loop.create_task(self._reserve_ahead())

    async def make_ready(self, size_bytes: int) -> None:
        """Reserve space for `size_bytes` of coming frames, unless the disk is full, and warm its pages."""
        last = self._segments.last
        end = last.end + size_bytes
        await self._loop.run_in_executor(self._disk, self._reserve, last.ordinal, end)
        if end > last.buffer.size:
            self.start_reserving()
        await self._warm_up(last.name, last.end, min(end, last.buffer.size))
        # Checked after the await: if the log has rolled into the spare meanwhile, `self.spare` is another file.
        if self.spare is not None and last is self._segments.last:
            await self._warm_up(segment_name(last.ordinal + 1), 0, end - last.buffer.size)

    def create_spare_early(self) -> None:
        """Create the spare before this segment is full (disk thread). Raises OverLimit when the disk is full."""
        if self.spare is None and not self.is_stopped:
            self._check_free_space()
            self.spare = prepare(self._files, self.current.ordinal + 1, self._segment_bytes)

    def begin(self, needed_bytes: int) -> SegmentFile:
        """Take the next file (disk thread): the spare, enlarged if needed, or a new one. Raises OverLimit."""
        spare, self.spare = self.spare, None
        ordinal, size = self.current.ordinal + 1, max(self._segment_bytes, needed_bytes)
        if spare is None:
            spare = prepare(self._files, ordinal, size)
        elif size > spare.size_bytes:
            # A commit larger than a segment is never split. The segment is made as large as the commit.
            spare.file.allocate(size, reserved=False)
            spare.mapped = self._files.map_readonly(segment_name(ordinal))
        self.current = spare
        return spare

    async def stop(self) -> None:
        """Cancel a running preparation. Nothing is prepared afterwards."""
        self.is_stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def close_file(self) -> None:
        """Close the spare (disk thread)."""
        if self.spare is not None:
            self.spare.file.close()

    async def _warm_up(self, name: str, begin: int, end: int) -> None:
        """Load the bytes [begin, end) of a segment into the page cache, except those that were warmed before.

        Writing a page of a file for the first time costs ten times as much as writing one that is already in the
        system's page cache: the system has to find and clear a page, and on a virtual machine fetch it from the host.
        So the pages of writes expected within seconds are *warmed*: loaded into the cache ahead
        (docs/decisions/0040-ready-for-a-burst.md).
        """
        begin = max(begin, self._warm.get(name, 0))
        if begin >= end:
            return
        # Only the newest two names matter: a segment that is full is not warmed again.
        self._warm = {**dict(list(self._warm.items())[-1:]), name: end}
        # In a thread of the default executor: in the disk thread a commit would wait for it, and in the reader thread a
        # read.
        await self._loop.run_in_executor(None, self._files.warm, name, begin, end)

    def _reserve(self, ordinal: int, end: int) -> None:
        """Reserve up to byte `end` of this segment and its spare (disk thread), unless the log has rolled since."""
        with suppress(OverLimit):  # reported when the space is needed
            if not self.is_stopped and self.current.ordinal == ordinal:
                self.current.reserve(end)
                if self.spare is not None:
                    self.spare.reserve(end - self.current.size_bytes)

    async def _reserve_ahead(self) -> None:
        """Reserve a step or create the spare. While the disk is full, set `disk_full_error` and try again."""
        try:
            while not self.is_stopped:
                try:
                    await self._loop.run_in_executor(self._disk, self._reserve_next)
                    self.disk_full_error = None
                    return
                except OverLimit as error:
                    logger.warning("no room for the log reason=%s", error)
                    self.disk_full_error = error
                    await asyncio.sleep(DISK_FULL_RETRY_S)
        # Any error stops the log: no caller awaits this task, so an exception left in it would be lost.
        except Exception as error:
            self._on_failure(error)
        finally:
            self._task = None

    def _reserve_next(self) -> None:
        """Reserve one more step, or create the spare (disk thread). Raises OverLimit when the disk is full."""
        current = self.current
        if self.is_stopped:
            return
        self._check_free_space()
        if current.reserved_to < current.size_bytes:
            current.reserve(current.reserved_to + 1)
        elif self.spare is None:
            self.spare = prepare(self._files, current.ordinal + 1, self._segment_bytes)

    def _check_free_space(self) -> None:
        """Raise OverLimit if less than half a segment of disk space is free."""
        free_bytes = self._files.free_bytes()
        # This space is for releases and cancels. It is only left free, not allocated: allocated blocks would make the
        # log of every small broker look large.
        if free_bytes < self._segment_bytes // 2:
            raise OverLimit(
                f"disk full but for {free_bytes} bytes: free some space on this file system, then go on"
            )


# ---- group commit --------------------------------------------------------------------------------------------


# A power cut loses at most about the last second with `async` durability.
ASYNC_SYNC_INTERVAL_S = 1.0
ENCODE_AHEAD_BYTES = 1 << 20  # a smaller entry is encoded faster than it is handed to another thread


class LogWriter:
    """Appends to the log. Methods belong to the event loop, except those marked with "disk thread"."""

    def __init__(
        self,
        files: Files,
        segments: Segments,
        file: SegmentFile,
        clock: Clock,
        disk: Disk,
        *,
        segment_bytes: int,
        durability: Durability = "sync",
        on_failure: Callable[[BaseException], None] | None = None,
        replication: Replication | None = None,
    ) -> None:
        """`file` is the open file of the last segment. `on_failure` receives the error that stops the log, once."""
        self._files, self._segments, self._file = files, segments, file
        self._clock, self._disk = clock, disk
        self._segment_bytes, self._durability = segment_bytes, durability
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        # The next number to assign. It is ahead of `segments.next_seq`, which counts only durable rows.
        self.next_seq = segments.next_seq
        self._replication = replication  # None: this log has no other replicas
        # The epoch identifies this run of the writer in its frames.
        self._epoch = replication.epoch if replication else last_epoch(segments) + 1
        self._pending: list[Entry] = []
        self._committing: list[Entry] = []
        self._pending_bytes = 0
        self._is_committing = False
        self._scheduled_commit: asyncio.Handle | None = None  # the next commit, while it is scheduled
        self._closing = False
        self._idle = asyncio.Event()
        self._idle.set()
        self.next_segment = NextSegment(files, segments, file, disk, segment_bytes, partial(self._stop, []))
        # The segment for which `roll` was called: the next commit begins another one.
        self._segment_to_end: Segment | None = None
        self.newest = NewestRows()
        # One thread, because at most one entry is encoded ahead.
        self._encoder = ThreadPoolExecutor(1, thread_name_prefix="encoder")
        self._has_disk_failed = False  # disk thread only: set for good by the first failed write or sync
        self.failed: BaseException | None = None
        self.statistics = WriterStatistics(Durations(clock), Durations(clock))
        self._is_sync_scheduled = False
        # Recovery takes a frame's `synced_to` as proof that all bytes before it were acknowledged. So it may be too
        # low, but never too high.
        self._written_to = self._synced_to = segments.last.end  # disk thread only
        # Disk thread only. `segments` gets a new segment when its first commit has ended.
        self._current_segment = segments.last

    @property
    def no_room(self) -> str:
        """The reason why new messages are refused for lack of disk space, or "" if they are not."""
        return str(self.next_segment.disk_full_error or "")

    def check_admission(self) -> None:
        """Raise OverLimit if new messages must not be accepted now: the disk is full, or too many bytes are pending."""
        if self.no_room:
            raise OverLimit(self.no_room)
        # Only admission checks this: refusing releases and cancels would make messages late.
        if self._pending_bytes > limits.APPEND_BYTES_IN_FLIGHT_MAX:
            raise OverLimit(f"{self._pending_bytes} bytes wait for the disk; try again in a moment")

    def append(
        self,
        rows: Rows,
        *,
        span: int | None = None,
        on_durable: DurableCallback | None = None,
        flags: int = 0,
    ) -> tuple[int, asyncio.Future[int]]:
        """Append `rows` (LOG_SCHEMA).

        Returns their first sequence number and a future that is done when they are durable. Raises OverLimit if the
        rows are too large for one frame, Unavailable once `close` was called, and StorageError or NotLeader after a
        failure.

        `span` is the count of sequence numbers to use, if it is more than the rows: the others are reserved. Rows with
        `flags` get a frame of their own. `on_durable` runs on the event loop, in log order, right before the future is
        set: caches must have a row before it is acknowledged.
        """
        if self.failed is not None:
            raise refusal(self.failed)
        if self._closing:
            raise Unavailable("the broker is stopping")
        # Checked here, where it fails one caller. In the disk thread it would stop the log.
        assert rows.num_rows > 0 and (span is None or span >= rows.num_rows)
        is_encoded = isinstance(rows, EncodedRows)
        size_bytes = len(rows.message) if is_encoded else pa.ipc.get_record_batch_size(rows)
        if size_bytes > limits.FRAME_BYTES_MAX - 2 * fmt.ALIGN:
            raise OverLimit(f"{size_bytes} bytes in one request; at most {limits.FRAME_BYTES_MAX}: split it")
        first_seq, span = self.next_seq, rows.num_rows if span is None else span
        # Assigned before the write, so that callers can rely on the order now. A failed write stops the log, so no
        # written number follows an unwritten one.
        self.next_seq += span
        entry = Entry(rows, first_seq, span, size_bytes, self._loop.create_future(), on_durable, flags)
        self._pending.append(entry)
        self._pending_bytes += entry.size_bytes
        self._encode_ahead()
        if not self._is_committing:
            self._is_committing = True
            self._idle.clear()
            # At the end of this loop iteration, so that all rows just read from sockets share the commit.
            self._scheduled_commit = self._loop.call_soon(self._start_commit)
        return first_seq, entry.done

    def _encode_ahead(self) -> None:
        """Encode the first pending entry, if it is large, in another thread while the disk writes a commit."""
        # Only one entry: those that wait for the disk may be hundreds of megabytes, which must not be in memory twice.
        if self._is_committing and self._pending:
            entry = self._pending[0]
            is_large = entry.size_bytes >= ENCODE_AHEAD_BYTES and not isinstance(entry.rows, EncodedRows)
            if entry.payload is None and is_large:
                entry.payload = self._encoder.submit(fmt.encode_rows, entry.rows)

    def commit(self) -> None:
        """Begin the scheduled commit now, if any: the caller has collected the rows of a whole loop iteration."""
        if self._scheduled_commit is not None:
            self._scheduled_commit.cancel()
            self._start_commit()

    @property
    def is_writing(self) -> bool:
        """True while rows that were appended are not durable."""
        return bool(self._pending) or self._is_committing

    async def flushed(self) -> None:
        """Wait until all rows appended so far are durable. Raises the error that stopped the log."""
        if self.failed is not None:
            raise refusal(self.failed)
        if self.is_writing:
            last = self._pending[-1] if self._pending else self._committing[-1]
            if last.flushed is None:
                last.flushed = self._loop.create_future()
            # One shielded future for all callers: cancelling one caller must not cancel it for the others.
            await asyncio.shield(last.flushed)

    async def roll(self) -> None:
        """Make the next commit begin a new segment. Raises OverLimit when the disk has no space for one."""
        segment = self._segments.last
        await self._loop.run_in_executor(self._disk, self.next_segment.create_spare_early)
        self._segment_to_end = segment

    async def synced(self) -> None:
        """Wait until all rows are synced, also in `async` mode: called before a file is written that relies on them."""
        await self.flushed()
        if self._durability == "async":
            await self._loop.run_in_executor(self._disk, self._sync)

    def _start_commit(self) -> None:
        """Take pending entries up to the limits of a commit, at least one, and let the disk thread write them."""
        self._scheduled_commit = None
        entry_count, row_count, size_bytes = 0, 0, 0
        for entry in self._pending:
            row_count += entry.rows.num_rows
            size_bytes += entry.size_bytes
            # Half of the bound, so that the joined batch and its padding fit into one frame. A single larger entry
            # becomes a frame of its own.
            if entry_count and (
                row_count > limits.FRAME_ROWS_MAX or size_bytes > limits.FRAME_BYTES_MAX // 2
            ):
                break
            entry_count += 1
        entries, self._pending = self._pending[:entry_count], self._pending[entry_count:]
        self._committing = entries
        self._encode_ahead()
        # Not `run_in_executor`, whose two futures cost each commit two iterations of the loop.
        self._disk.post(partial(self._write_and_report, entries))

    def _write_and_report(self, entries: list[Entry]) -> None:
        """Write a commit (disk thread) and let the event loop finish it."""
        outcome: Commit | BaseException
        try:
            with self._guard_disk():
                outcome = self.statistics.commit_durations.time(self._write, entries)
        except BaseException as error:  # of any kind: the loop stops the log and fails all callers
            outcome = error
        with suppress(RuntimeError):  # the loop is closed, so no caller waits for this commit
            self._loop.call_soon_threadsafe(self._finish_commit, entries, outcome)

    @contextmanager
    def _guard_disk(self) -> Iterator[None]:
        """Guard a write or a sync (disk thread): after the first one that has failed, raise StorageError instead."""
        if self._has_disk_failed:
            raise StorageError("the log has stopped")
        try:
            yield
        except BaseException:  # the state of the disk is unknown now
            self._has_disk_failed = self.next_segment.is_stopped = True
            raise

    def _write(self, entries: list[Entry]) -> Commit:
        """Encode, write, sync and replicate one commit (disk thread). Begins the next segment if it does not fit.

        Raises OverLimit when the disk is full, DiskFailed, and NotLeader when another node leads.
        """
        segment = self._current_segment
        # A single entry has the fields of FrameRows, and becomes a frame of its own.
        frame_rows: Sequence[Entry | FrameRows] = entries if len(entries) == 1 else group_entries(entries)
        # For each frame the header, and padding of less than ALIGN.
        needed_bytes = sum(part.size_bytes + 2 * fmt.ALIGN for part in frame_rows)
        # Rolled before the first byte: recovery could not distinguish a commit that spans two segments from damage
        # (recovery.py).
        if segment.end + needed_bytes > segment.buffer.size or self._must_end(segment):
            segment = self._current_segment = self._roll(frame_rows[0].first_seq, needed_bytes)
        # The commit is larger than the space reserved ahead.
        if segment.end + needed_bytes > self._file.reserved_to:
            self._file.reserve(segment.end + needed_bytes)
        commit, position, now_ms = Commit(segment), segment.end, self._clock.wall_ms()
        replicated: list[bytes | pa.Buffer] = []
        # In `sync` mode all earlier commits are synced.
        if self._durability == "sync":
            self._synced_to = position
        for part in frame_rows:
            frame, buffers = fmt.encode_frame(
                part.rows, first_seq=part.first_seq, span=part.span, flags=part.flags, append_ms=now_ms,
                epoch=self._epoch, position=position, synced_to=self._synced_to,
                payload=None if part.payload is None else part.payload.result(),
            )  # fmt: skip
            end = frame.end
            assert end <= segment.buffer.size
            if self._replication is None:
                self._write_buffers(position, buffers)
            else:
                replicated += buffers
            commit.frames.append(frame)
            position = end
        self._written_to = position
        if self._replication is not None:
            self._replicate(self._replication, segment, commit, b"".join(replicated))
        elif self._durability == "sync":
            self.statistics.sync_durations.time(self._file.file.sync)
        return commit

    def _must_end(self, segment: Segment) -> bool:
        """Check whether `roll` was called for `segment` and the next one is prepared (disk thread)."""
        # Only with a spare: without one, a full disk would stop the log here instead of only delaying the roll.
        return self._segment_to_end is segment and self.next_segment.spare is not None

    def _replicate(self, replication: Replication, segment: Segment, commit: Commit, frames: bytes) -> None:
        """Write, sync and replicate the frames of a commit (disk thread)."""
        begin, end_seq = segment.end, commit.frames[-1].next_seq
        extent = Extent(self._file, begin, end_seq, frames, begins=begin == fmt.ALIGN)
        self.statistics.sync_durations.time(replication.commit, extent)

    def _write_buffers(self, position: int, buffers: list[bytes | pa.Buffer]) -> None:
        """Write buffers one after the other from `position` on (disk thread)."""
        if sum(len(buffer) for buffer in buffers) <= 65_536:
            self._file.file.write_at(position, b"".join(buffers))  # one call costs more than the copy
            return
        for buffer in buffers:
            if len(buffer):
                self._file.file.write_at(position, buffer)
            position += len(buffer)

    def _roll(self, first_seq: int, needed_bytes: int) -> Segment:
        """Begin the next segment with row `first_seq` (disk thread). Raises OverLimit when the disk is full."""
        # In `sync` mode every commit is synced already. In `async` mode the old segment is synced first, because the
        # existence of the new one states that all of the old one was acknowledged.
        if self._durability != "sync":
            self._file.file.sync()
        spare = self.next_segment.begin(needed_bytes + fmt.ALIGN)
        full_file, self._file = self._file, spare
        full_file.file.close()
        # Positions count from the start of the new segment, whose header `begin_segment` syncs.
        self._synced_to = fmt.ALIGN
        return begin_segment(spare, first_seq, self._clock.wall_ms())

    def _finish_commit(self, entries: list[Entry], outcome: Commit | BaseException) -> None:
        """Make a durable commit visible to readers and caches, then complete its futures. Stop the log on an error."""
        if isinstance(outcome, BaseException) or self.failed is not None:
            self._stop(entries, outcome if isinstance(outcome, BaseException) else self.failed)
            return
        commit = outcome
        # A segment and its frames become visible to readers here, on the loop, after the sync. So readers never see a
        # row that a power cut could take back.
        if commit.segment is not self._segments.last:
            self._segments.add(commit.segment)
            self.statistics.rolls += 1
        for frame in commit.frames:
            commit.segment.add(frame)
        self.statistics.commits += 1
        self.statistics.frames += len(commit.frames)
        for entry in entries:
            self._pending_bytes -= entry.size_bytes
            self.statistics.rows += entry.rows.num_rows
            self.statistics.bytes += entry.size_bytes
            if _is_visible(entry.rows):
                self.newest.add(entry.first_seq, entry.rows)
            if entry.on_durable is not None:
                try:
                    entry.on_durable()
                # The rows are on disk but missing in a cache. Only recovery can repair that.
                except Exception as error:
                    self._stop(entries, error)
                    return
            # The caches have the rows now (on_durable), so the caller may be answered. A caller that is cancelled has
            # cancelled its future.
            if not entry.done.done():
                entry.done.set_result(entry.first_seq)
            if entry.flushed is not None:
                entry.flushed.set_result(None)
        self._after_commit(commit.segment)

    def _after_commit(self, last: Segment) -> None:
        """Schedule a sync (`async` durability), reserve space ahead, and start the next commit if rows are pending."""
        if self._durability == "async" and not self._is_sync_scheduled:
            self._is_sync_scheduled = True
            self._loop.call_later(ASYNC_SYNC_INTERVAL_S, self._start_periodic_sync)
        # Reserved ahead, so that a full disk is noticed while releases and cancels still have space.
        if last.end + self.next_segment.ahead_bytes > self.next_segment.current.reserved_to:
            self.next_segment.start_reserving()
        if self._pending:
            self._start_commit()
        else:
            self._is_committing = False
            self._idle.set()

    def _start_periodic_sync(self) -> None:
        """Sync now: this bounds the loss with `async` durability to about a second."""
        self._is_sync_scheduled = False
        if self.failed is None and not self._closing:
            task = self._loop.run_in_executor(self._disk, self._sync)
            task.add_done_callback(self._finish_periodic_sync)

    def _sync(self) -> None:
        """Sync the current segment (disk thread)."""
        with self._guard_disk():
            self._file.file.sync()
            self._synced_to = self._written_to

    def _finish_periodic_sync(self, done: asyncio.Future[None]) -> None:
        """Stop the log if the sync has failed."""
        if done.exception() is not None:
            self._stop([], done.exception())

    def _stop(self, entries: list[Entry], error: BaseException | None) -> None:
        """Stop for good: fail these and all later calls. Only a restart helps, because it reads the disk again."""
        assert error is not None
        is_first = self.failed is None
        if is_first:
            self.failed = error
            self.next_segment.is_stopped = True
            # A change of the leader is a normal end of this log's writer.
            level = logging.WARNING if isinstance(error, NotLeader) else logging.CRITICAL
            # As text, because some handlers keep their records, and the frames of an error keep the broker.
            logger.log(level, "log stopped reason=%s", str(error))
        # Entries in flight fail too: only the next start can find out whether their bytes reached the disk.
        failed_entries, self._pending = [*entries, *self._pending], []
        caller_error = error if isinstance(error, TimeballError) else DiskFailed(f"append failed: {error!r}")
        for entry in failed_entries:
            for future in (entry.done, entry.flushed):
                if future is not None and not future.done():
                    future.set_exception(caller_error)
                    # Retrieved, so that asyncio does not report it for cancelled callers: `on_failure` reports it once.
                    future.exception()
        self._idle.set()
        if is_first and self._on_failure is not None:
            self._on_failure(error)

    def abandon(self) -> None:
        """Refuse all pending and later calls: another node's log counts now."""
        self._stop([], NotLeader(LEADS_NO_MORE))

    async def close(self) -> None:
        """Commit all accepted rows, sync, and close the file. Raises DiskFailed if the last sync fails."""
        self._closing = True
        await self._idle.wait()
        await self.next_segment.stop()
        await self._loop.run_in_executor(self._disk, self._close_file)
        self._encoder.shutdown()

    def _close_file(self) -> None:
        """Sync and close the files (disk thread)."""
        # No sync after a failed one: it may succeed although bytes were lost (decision 0003).
        if not self._has_disk_failed:
            self._file.file.sync()
        self._file.file.close()
        self.next_segment.close_file()


def _is_visible(rows: Rows) -> bool:
    """Check whether consumers can read any of these rows."""
    if isinstance(rows, EncodedRows):
        return rows.is_visible
    return bool(rows.column("queue_offset").null_count < rows.num_rows)


# ---- the newest visible rows in memory -----------------------------------------------------------------------
# Most messages are read right after they become visible. A read from the log needs a switch to the reader thread and
# back, a frame that is mapped, checked and opened, and a value from each of its columns. But these rows are still in
# memory from their commit. The cache has a bound in bytes: rows that it no longer contains are read from the log. It
# contains only durable rows, so that no reader sees a row that a power cut could take back.

BYTES_MAX = 8 * 1024 * 1024  # of all rows, including the other memory that their batches hold
# A larger append is not kept: the next append could not reuse its memory, and would take a tenth longer.
APPEND_BYTES_MAX = 1024 * 1024
# Appends kept at most: an append of one row takes some kilobytes of memory.
APPENDS_MAX = 4_096


class NewestRows:
    """The newest rows by sequence number. Belongs to the event loop.

    `add` must be called in the order of these numbers.
    """

    def __init__(self) -> None:
        self._first_seqs: list[int] = []
        # (rows, row count, bytes) of each append. The first read of a row replaces its batch by an Arrow message.
        self._appends: deque[tuple[Rows | bytes, int, int]] = deque()
        # Entries at the start of `_first_seqs` whose rows are no longer in `_appends`.
        self._dropped_appends = 0
        self._size_bytes = 0

    def __len__(self) -> int:
        """The number of appends kept."""
        return len(self._appends)

    def add(self, first_seq: int, rows: Rows) -> None:
        """Keep the rows of a durable append, unless they are too large. Drops the oldest appends above the bounds."""
        if isinstance(rows, EncodedRows):
            # The Python values take about as much memory as the message.
            size_bytes = len(rows.message) * (2 if rows.values else 1)
        else:
            size_bytes = rows.get_total_buffer_size()
        if size_bytes > APPEND_BYTES_MAX:
            return
        self._first_seqs.append(first_seq)
        self._appends.append((rows, rows.num_rows, size_bytes))
        self._size_bytes += size_bytes
        while self._size_bytes > BYTES_MAX or len(self._appends) > APPENDS_MAX:
            self._size_bytes -= self._appends.popleft()[2]
            self._dropped_appends += 1
        # Cut only when half of the list is unused: cutting at each append would move all entries each time.
        if self._dropped_appends > len(self._appends) + 16:
            del self._first_seqs[: self._dropped_appends]
            self._dropped_appends = 0

    def values_of(self, seqs: Sequence[int]) -> list[ReadRow] | None:
        """Read the rows with these sequence numbers, as tuples with a value for each column of READ_SCHEMA.

        None if one of the rows is not kept, or not any more.
        """
        values: list[ReadRow] = []
        for seq in seqs:
            index = bisect_right(self._first_seqs, seq, lo=self._dropped_appends) - 1
            if index < self._dropped_appends:
                return None
            rows, row_count, size_bytes = self._appends[index - self._dropped_appends]
            row_index = seq - self._first_seqs[index]
            if row_index >= row_count:
                return None
            if isinstance(rows, pa.RecordBatch):
                rows = as_message(rows)
                self._appends[index - self._dropped_appends] = rows, row_count, size_bytes
            values.append(read_numbered_row(rows, row_index, seq))
        return values


# ---- the parts of a group commit -----------------------------------------------------------------------------

DurableCallback = Callable[[], None]


@dataclass(slots=True)
class Entry:
    """Rows of one `append` call until they are durable."""

    rows: Rows
    first_seq: int
    # At least rows.num_rows. It is larger when the entry reserves sequence numbers beyond its rows.
    span: int
    size_bytes: int
    done: asyncio.Future[int]  # the caller's: a caller that is cancelled cancels it
    on_durable: DurableCallback | None
    flags: int = 0
    # The encoded rows, when the encoder thread encodes them while an earlier commit is written.
    payload: Future[Payload] | None = None
    # One future for all callers of `flushed()`, which shield it.
    flushed: asyncio.Future[None] | None = None


class FrameRows(NamedTuple):
    """Rows that become one frame."""

    rows: Rows
    first_seq: int
    span: int
    size_bytes: int  # of the rows as an Arrow message
    flags: int = 0
    payload: Future[Payload] | None = None


def group_entries(entries: list[Entry]) -> list[FrameRows]:
    """Group the entries of a commit into the rows of its frames, in the same order.

    Neighbouring entries share a frame, except an entry that reserves numbers, has flags, or is encoded already. Encoded
    entries of fewer than SMALL_ROWS rows are encoded again together with their neighbours: a reader pays the same for a
    frame of one row as for a frame of many.
    """
    frames: list[FrameRows] = []
    sharing: list[Entry] = []  # neighbours that will share the next frame

    def end_shared_frame() -> None:
        """Add the frame of the neighbours collected so far, if there are any."""
        if sharing:
            rows, size_bytes = sharing[0].rows, sharing[0].size_bytes
            if len(sharing) > 1:
                rows = joined([entry.rows for entry in sharing])
                size_bytes = message_bytes(rows)
            frames.append(FrameRows(rows, sharing[0].first_seq, rows.num_rows, size_bytes))
            sharing.clear()

    for entry in entries:
        # To join a large encoded message, it would have to be decoded and encoded again.
        is_large_message = isinstance(entry.rows, EncodedRows) and entry.rows.num_rows >= SMALL_ROWS
        if entry.flags or entry.span != entry.rows.num_rows or entry.payload is not None or is_large_message:
            end_shared_frame()
            frames.append(
                FrameRows(
                    entry.rows, entry.first_seq, entry.span, entry.size_bytes, entry.flags, entry.payload
                )
            )
        else:
            sharing.append(entry)
    end_shared_frame()
    return frames


@dataclass(slots=True)
class WriterStatistics:
    """Counters since the start of the writer."""

    commit_durations: Durations  # encode, write and sync
    sync_durations: Durations  # sync alone, with `sync` durability
    commits: int = 0
    frames: int = 0
    rows: int = 0
    bytes: int = 0
    rolls: int = 0


@dataclass(slots=True)
class Commit:
    """The result of one commit in the disk thread: the frames written, all in one segment."""

    segment: Segment
    frames: list[fmt.Frame] = field(default_factory=list)


def refusal(failure: BaseException) -> TimeballError:
    """Build the error for calls after `failure` stopped the log.

    An Unavailable (such as NotLeader) keeps its type, so that the caller asks the node that leads now.
    """
    if isinstance(failure, Unavailable):
        return type(failure)(str(failure))
    return StorageError(f"the log has stopped: {failure}")


@dataclass(frozen=True, slots=True)
class CommitLog:
    """The open log of one broker."""

    writer: LogWriter
    reader: LogReader
    key_index: KeyIndex  # rows by message id and key
