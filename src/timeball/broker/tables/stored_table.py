"""A periodic task for a pending table in an object store: keep local copies of all files with messages due soon.

Every few seconds, files with messages due within the hour are pinned in the cache, so that they are not evicted.
Missing files are fetched, the earliest due first. So no message is late if the store is unreachable for one hour. If a
file cannot be fetched in time, only its messages are late. They delay no others, none of them counts as settled
(released or cancelled), and they are released once the file is local.

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
from timeball.model.errors import Corrupt, NotFound, Unavailable
from timeball.schedule.hour_log import HourLog
from timeball.schedule.scheduler import Scheduler
from timeball.table.attachment import FileEntry
from timeball.table.file_cache import THREADS, FileCache

logger = logging.getLogger(__name__)

LOOK_MS = 5_000


class StoredTable:
    """The periodic task that fetches files and updates the Delta table. Belongs to the event loop."""

    def __init__(
        self,
        cache: FileCache,
        mover: TableChanges,
        *,
        clock: SchedulerClock,
        scheduler: Scheduler,
        hour_log: HourLog,
        table_thread: Executor,
    ) -> None:
        self._cache, self._mover = cache, mover
        self._clock, self._scheduler = clock, scheduler
        self._hour_log, self._table_thread = hour_log, table_thread
        self._unreadable: set[str] = set()  # files that were logged already

    async def look(self) -> None:
        """Fetch the files that are due soon. Then update a Delta table that is behind the log, if the store answers."""
        due_soon = self._due_soon()
        # Before the first fetch, because a fetch may evict other files to free space.
        self._cache.pin(entry.path for entry in due_soon)
        # Two separate steps: a file that can never be fetched must not prevent updates of the Delta table.
        for step in (partial(self._fetch, due_soon), self._update_delta_table):
            try:
                await step()
            except Unavailable:
                # The cache counts, logs and shows this error. The next call tries again.
                continue
        self._cache.missing_files = sum(not self._cache.is_local(entry.path) for entry in due_soon)

    async def _update_delta_table(self) -> None:
        await in_thread(self._table_thread, self._cache.probe)
        await self._mover.catch_up()

    def _due_soon(self) -> list[FileEntry]:
        return self._hour_log.pending.due_between(self._scheduler.settled_before_ms, soon_ms(self._clock))

    async def _fetch(self, due_soon: Sequence[FileEntry]) -> None:
        missing = [entry.path for entry in due_soon if not self._cache.is_local(entry.path)]
        for begin in range(0, len(missing), THREADS):
            paths = missing[begin : begin + THREADS]
            fetches = (in_thread(self._cache.threads, self._cache.fetch, path) for path in paths)
            errors = await asyncio.gather(*fetches, return_exceptions=True)
            # After each group of files: the first file may be due now, and the last one in an hour.
            self.look_again()
            for path, error in zip(paths, errors, strict=True):
                if isinstance(error, Corrupt | NotFound):
                    self._log_unreadable(path, error)
                elif error is not None and not isinstance(error, Unavailable):
                    raise error
            # If all fetches fail, the store is unreachable. If some succeed, only these files have a problem.
            if all(isinstance(error, Unavailable) for error in errors):
                return
        self.look_again()

    def look_again(self) -> None:
        """Let the schedule open files that have become local."""
        self._hour_log.look_again()
        self._scheduler.on_earlier()

    def _log_unreadable(self, path: str, error: BaseException) -> None:
        # The broker continues, because messages of other files are due too. The messages of this file wait until an
        # administrator restores it.
        if path not in self._unreadable:
            self._unreadable.add(path)
            logger.error("data file cannot be fetched file=%s reason=%s", path, error)
