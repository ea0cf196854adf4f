"""A periodic duty for a pending table in an object store: keep local copies of all files with messages due soon.

Every few seconds, files with messages due within the hour are pinned, so that they are not evicted from the cache. The
missing ones are fetched, the earliest first. So no message is late if the store is unreachable for one hour. If a file
could not be fetched before the due time of its messages, only these are late. They delay no others, none of them counts
as settled (released or cancelled), and they are released once the file is there.

A Delta table that could not follow the log is updated when the store answers again (table_changes.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Executor
from functools import partial

from timeball.broker.tables.table_changes import TableChanges, soon_ms
from timeball.io.clock import SchedulerClock
from timeball.io.threads import in_thread
from timeball.model.config import Settings
from timeball.model.errors import Corrupt, NotFound, Unavailable
from timeball.schedule.hour_log.backlog import HourLog
from timeball.schedule.scheduler import Scheduler
from timeball.table.attachment import FileEntry
from timeball.table.file_cache import THREADS, FileCache

logger = logging.getLogger(__name__)

LOOK_MS = 5_000


class StoredTable:
    """The periodic duty. Belongs to the event loop."""

    def __init__(
        self,
        cache: FileCache,
        mover: TableChanges,
        *,
        settings: Settings,
        clock: SchedulerClock,
        scheduler: Scheduler,
        hour_log: HourLog,
        table_thread: Executor,
    ) -> None:
        self._cache, self._mover = cache, mover
        self._settings, self._clock, self._scheduler = settings, clock, scheduler
        self._hour_log, self._table_thread = hour_log, table_thread
        self._unreadable: set[str] = set()  # files that were logged already

    async def look(self) -> None:
        """Fetch the files that are due soon. Then let the Delta table follow the log, if the store answers."""
        due = self._due_soon()
        # Before the first fetch, because a fetch may evict other files to free space.
        self._cache.pin(entry.path for entry in due)
        # Separately, so that a file that can never be fetched does not stop the table from following.
        for step in (partial(self._fetch, due), self._follow):
            try:
                await step()
            except Unavailable:
                # The cache counts, logs and shows this error. The next look tries again.
                continue
        self._cache.missing_files = sum(not self._cache.is_local(entry.path) for entry in due)

    async def _follow(self) -> None:
        await in_thread(self._table_thread, self._cache.probe)
        await self._mover.catch_up()

    def _due_soon(self) -> list[FileEntry]:
        return self._hour_log.pending.due_between(
            self._scheduler.settled_before_ms, soon_ms(self._clock, self._settings)
        )

    async def _fetch(self, due: Sequence[FileEntry]) -> None:
        missing = [entry.path for entry in due if not self._cache.is_local(entry.path)]
        for begin in range(0, len(missing), THREADS):
            some = missing[begin : begin + THREADS]
            calls = (in_thread(self._cache.threads, self._cache.fetch, path) for path in some)
            ends = await asyncio.gather(*calls, return_exceptions=True)
            # After each few files: the first one may be due now, and the last one in an hour.
            self.look_again()
            for path, end in zip(some, ends, strict=True):
                if isinstance(end, Corrupt | NotFound):
                    self._note_unreadable(path, end)
                elif end is not None and not isinstance(end, Unavailable):
                    raise end
            # If all fail, the store is unreachable. If only some fail, the store cannot deliver these files.
            if all(isinstance(end, Unavailable) for end in ends):
                return
        self.look_again()

    def look_again(self) -> None:
        """Let the schedule open files that have become local."""
        self._hour_log.look_again()
        self._scheduler.on_earlier()

    def _note_unreadable(self, path: str, error: BaseException) -> None:
        # The broker continues, because messages of other files are due too. The messages of this file wait until an
        # administrator restores it.
        if path not in self._unreadable:
            self._unreadable.add(path)
            logger.error("data file cannot be fetched file=%s reason=%s", path, error)
