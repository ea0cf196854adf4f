"""The duty beside a pending table in an object store: keep local all that is due soon.

Every few seconds the files that hold something due within the hour are pinned and those of them fetched that are not
local, the earliest first. So a store that is away for an hour makes nothing late. What could not be fetched by its
instant is late alone: it holds up no other promise, none of it counts as settled, and it is released once its file is
there.

A table that could not follow the log is brought up when the store answers again (table_changes.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from functools import partial

from timeball.broker.components import Components, in_thread
from timeball.broker.table_changes import TableChanges
from timeball.errors import Corrupt, NotFound, Unavailable
from timeball.table.attachment import FileEntry
from timeball.table.file_cache import THREADS, FileCache

logger = logging.getLogger(__name__)

LOOK_MS = 5_000


class StoredTable:
    """Belongs to the event loop."""

    def __init__(self, parts: Components, cache: FileCache, mover: TableChanges) -> None:
        self._parts, self._cache, self._mover = parts, cache, mover
        self._unreadable: set[str] = set()  # files that the log lines have named

    async def look(self) -> None:
        """Fetch what is due soon; then, if the store answers, let the table follow the log."""
        due = self._due_soon()
        # Before the first is fetched: fetching one makes room by evicting others.
        self._cache.pin(entry.path for entry in due)
        # Each by itself: one file that the store never gives must not keep the table from following.
        for step in (partial(self._fetch, due), self._follow):
            try:
                await step()
            except Unavailable:
                # Counted, logged once and shown by the cache; the next look tries again.
                continue
        self._cache.missing_files = sum(not self._cache.is_local(entry.path) for entry in due)

    async def _follow(self) -> None:
        await in_thread(self._parts.table_thread, self._cache.probe)
        await self._mover.catch_up()

    def _due_soon(self) -> list[FileEntry]:
        parts = self._parts
        return parts.hour_log.pending.due_between(parts.scheduler.settled_before_ms, parts.soon_ms())

    async def _fetch(self, due: Sequence[FileEntry]) -> None:
        missing = [entry.path for entry in due if not self._cache.is_local(entry.path)]
        for begin in range(0, len(missing), THREADS):
            some = missing[begin : begin + THREADS]
            calls = (in_thread(self._cache.threads, self._cache.fetch, path) for path in some)
            ends = await asyncio.gather(*calls, return_exceptions=True)
            # Behind each few: the first of them may be due now, and the last in an hour.
            self.look_again()
            for path, end in zip(some, ends, strict=True):
                if isinstance(end, Corrupt | NotFound):
                    self._note_unreadable(path, end)
                elif end is not None and not isinstance(end, Unavailable):
                    raise end
            # A store that is away fails all of them, and one of many may be what it cannot give.
            if all(isinstance(end, Unavailable) for end in ends):
                return
        self.look_again()

    def look_again(self) -> None:
        """Let the schedule open what has become local."""
        self._parts.hour_log.look_again()
        self._parts.scheduler.on_earlier()

    def _note_unreadable(self, path: str, error: BaseException) -> None:
        # The broker goes on: the promises of other files are due, too. Those of this one wait for an operator.
        if path not in self._unreadable:
            self._unreadable.add(path)
            logger.error("data file cannot be fetched file=%s reason=%s", path, error)
