"""Disk space for coming frames: the next step of the segment being written, then the next segment.

Space is reserved ahead of need, so that no commit waits for it, and before an announced large write (`make_ready`).
So a full disk is noticed while releases and cancels still have space: half a segment of disk space is kept free for
them. `disk_full_error` then states why new scheduled messages are refused.

Writing a page of a file for the first time costs ten times as much as writing one that is already in the system's page
cache: the system has to find and clear a page, and on a virtual machine fetch it from the host. So the pages of writes
expected within seconds are *warmed*: loaded into the cache ahead (docs/decisions/0040-ready-for-a-burst.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from timeball.io.files import Files
from timeball.log.disk_thread import Disk
from timeball.log.segment import STEP_BYTES, SegmentFile, Segments, prepare, segment_name
from timeball.model.errors import OverLimit

logger = logging.getLogger(__name__)

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
        self.current = current
        self.spare: SegmentFile | None = None
        self.ahead_bytes = min(STEP_BYTES, segment_bytes // 2)  # bytes to reserve after the last frame
        self.is_over = False  # True when the log is closed or has stopped; set by any thread
        self._task: asyncio.Task[None] | None = None
        self.disk_full_error: OverLimit | None = None
        self._warm: dict[str, int] = {}  # segment name -> position up to which it is warmed

    def prepare(self) -> None:
        """Reserve one more step, or the next segment, unless it exists or is being reserved."""
        if self._task is None and (self.spare is None or self.current.reserved_to < self.current.size_bytes):
            self._task = self._loop.create_task(self._reserve_ahead())

    async def make_ready(self, size_bytes: int) -> None:
        """Prepare for `size_bytes` to be written soon: reserve the space and warm its pages."""
        last = self._segments.last
        end = last.end + size_bytes
        await self._loop.run_in_executor(self._disk, self._reserve, last.ordinal, end)
        if end > last.buffer.size:
            self.prepare()
        await self._warm_up(last.name, last.end, min(end, last.buffer.size))
        # Checked after the await: if the log has rolled into the spare meanwhile, `self.spare` is another file.
        if self.spare is not None and last is self._segments.last:
            await self._warm_up(segment_name(last.ordinal + 1), 0, end - last.buffer.size)

    def prepare_spare(self) -> None:
        """Prepare the next segment before this one is full (disk thread). Raises OverLimit."""
        if self.spare is None and not self.is_over:
            self._check_free_space()
            self.spare = prepare(self._files, self.current.ordinal + 1, self._segment_bytes)

    def begin(self, needed_bytes: int) -> SegmentFile:
        """Take the file of the next segment (disk thread): the spare, enlarged if needed, or a new one."""
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
        self.is_over = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def close_file(self) -> None:
        """Close the spare (disk thread)."""
        if self.spare is not None:
            self.spare.file.close()

    async def _warm_up(self, name: str, begin: int, end: int) -> None:
        """Load the bytes [begin, end) of a segment into the page cache, except those that were warmed before."""
        begin = max(begin, self._warm.get(name, 0))
        if begin >= end:
            return
        # Only the newest two names matter: a segment that is full is not warmed again.
        self._warm = {**dict(list(self._warm.items())[-1:]), name: end}
        # In a thread of the default executor: in the disk thread a commit would wait for it, and in the reader thread a
        # read.
        await self._loop.run_in_executor(None, self._files.warm, name, begin, end)

    def _reserve(self, ordinal: int, end: int) -> None:
        """Reserve space up to `end` of a segment, continuing into the spare (disk thread), if the disk has enough."""
        with suppress(OverLimit):  # reported when the space is needed
            if not self.is_over and self.current.ordinal == ordinal:
                self.current.reserve(end)
                if self.spare is not None:
                    self.spare.reserve(end - self.current.size_bytes)

    async def _reserve_ahead(self) -> None:
        """Reserve the next step or segment. While the disk is full, set `disk_full_error` and try again every 2 s."""
        try:
            while not self.is_over:
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
        """Reserve one more step. When the segment is fully reserved, prepare a spare (disk thread)."""
        current = self.current
        if self.is_over:
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
