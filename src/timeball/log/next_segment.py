"""Room for the frames to come: the next step of the segment being written, then the next segment.

It is reserved before it is needed, so that no commit waits for it, or when much is about to be written (`make_ready`).
A full disk is noticed by it, while releases and cancels still have room: half a segment's, kept free on the disk.
`room_error` then says why new promises are refused.

A page of a file that was never written costs ten times as much as one that the system's cache has already: it has to
be found, emptied, and on a virtual machine be fetched from the host. So what is known to come within seconds is
*warmed*: its pages are made before (docs/decisions/0040-ready-for-a-burst.md).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from timeball.errors import OverLimit
from timeball.files import Files
from timeball.log.disk_thread import Disk
from timeball.log.segment import STEP_BYTES, SegmentFile, Segments, prepare, segment_name

logger = logging.getLogger(__name__)

# How often a full disk is tried again. Admission stays closed meanwhile, so a shorter pause would only fill the log.
ROOM_RETRY_S = 2.0


class NextSegment:
    """Belongs to the event loop, but for what says that it runs in the disk thread."""

    def __init__(
        self,
        files: Files,
        segments: Segments,
        current: SegmentFile,
        disk: Disk,
        segment_bytes: int,
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """Call `on_failure` with what a full disk does not explain."""
        self._files, self._segments, self._disk = files, segments, disk
        self._segment_bytes, self._on_failure = segment_bytes, on_failure
        self._loop = asyncio.get_running_loop()
        # Both are replaced by the disk thread only, or a roll may miss the spare.
        self.current = current
        self.spare: SegmentFile | None = None
        self.ahead_bytes = min(STEP_BYTES, segment_bytes // 2)  # reserved behind the last frame
        self.is_over = False  # the log is closed, or has stopped: any thread sets it
        self._task: asyncio.Task[None] | None = None
        self.room_error: OverLimit | None = None
        self._warm: dict[str, int] = {}  # name of a segment -> up to where it has been warmed

    def prepare(self) -> None:
        """Get one more step, or the next segment, unless it is there or under way."""
        if self._task is None and (self.spare is None or self.current.reserved_to < self.current.size_bytes):
            self._task = self._loop.create_task(self._get_room())

    async def make_ready(self, size_bytes: int) -> None:
        """Make ready for so many bytes to be written soon: the room, and its pages."""
        last = self._segments.last
        end = last.end + size_bytes
        await self._loop.run_in_executor(self._disk, self._reserve, last.ordinal, end)
        if end > last.buffer.size:
            self.prepare()
        await self._warm_up(last.name, last.end, min(end, last.buffer.size))
        # Asked for behind the pause: it is a spare no more when the log has rolled into it meanwhile.
        if self.spare is not None and last is self._segments.last:
            await self._warm_up(segment_name(last.ordinal + 1), 0, end - last.buffer.size)

    def get_spare(self) -> None:
        """Prepare the next segment before this one is full (disk thread); raise OverLimit."""
        if self.spare is None and not self.is_over:
            self._check_free()
            self.spare = prepare(self._files, self.current.ordinal + 1, self._segment_bytes)

    def begin(self, needed_bytes: int) -> SegmentFile:
        """Return the file to go on with (disk thread): the spare when there is one and it is large enough."""
        spare, self.spare = self.spare, None
        ordinal, size = self.current.ordinal + 1, max(self._segment_bytes, needed_bytes)
        if spare is None:
            spare = prepare(self._files, ordinal, size)
        elif size > spare.size_bytes:
            # One commit larger than a segment: the segment is made as large as the commit, never the commit split.
            spare.file.allocate(size, reserved=False)
            spare.mapped = self._files.map_readonly(segment_name(ordinal))
        self.current = spare
        return spare

    async def stop(self) -> None:
        """Prepare nothing more."""
        self.is_over = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def close_file(self) -> None:
        """Close the spare (disk thread)."""
        if self.spare is not None:
            self.spare.file.close()

    async def _warm_up(self, name: str, begin: int, end: int) -> None:
        begin = max(begin, self._warm.get(name, 0))
        if begin >= end:
            return
        # Of one segment that is full nothing is asked again: two names are all that count.
        self._warm = {**dict(list(self._warm.items())[-1:]), name: end}
        # Neither in the disk thread, where a commit would wait for it, nor in the reader's.
        await self._loop.run_in_executor(None, self._files.warm, name, begin, end)

    def _reserve(self, ordinal: int, end: int) -> None:
        """Reserve room up to `end` of a segment and behind it (disk thread), if there is as much."""
        with suppress(OverLimit):  # said when it is needed indeed
            if not self.is_over and self.current.ordinal == ordinal:
                self.current.reserve(end)
                if self.spare is not None:
                    self.spare.reserve(end - self.current.size_bytes)

    async def _get_room(self) -> None:
        """Get the next step or segment before it is needed; a full disk closes admission until there is room."""
        try:
            while not self.is_over:
                try:
                    await self._loop.run_in_executor(self._disk, self._reserve_next)
                    self.room_error = None
                    return
                except OverLimit as error:
                    logger.warning("no room for the log reason=%s", error)
                    self.room_error = error
                    await asyncio.sleep(ROOM_RETRY_S)
        # Any error stops the log: no caller awaits this task, so an exception left in it would be lost.
        except Exception as error:
            self._on_failure(error)
        finally:
            self._task = None

    def _reserve_next(self) -> None:
        """Reserve one more step, and behind the last one prepare a spare (disk thread)."""
        current = self.current
        if self.is_over:
            return
        self._check_free()
        if current.reserved_to < current.size_bytes:
            current.reserve(current.reserved_to + 1)
        elif self.spare is None:
            self.spare = prepare(self._files, current.ordinal + 1, self._segment_bytes)

    def _check_free(self) -> None:
        free_bytes = self._files.free_bytes()
        # What releases and cancels will need. Reserved as blocks it would count as the log's on every small broker.
        if free_bytes < self._segment_bytes // 2:
            raise OverLimit(
                f"disk full but for {free_bytes} bytes: free some space on this file system, then go on"
            )
