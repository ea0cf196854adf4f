"""A periodic duty for the pending table: detect changes by other programs, and let the table follow the log.

Once a second it checks whether another program has committed to the table, at the cost of two checks for a file name.
If so, the catalog lets the table follow the log again (table/catalog.py). The schedule opens none of the files that are
gone until they are put back. The duty also updates a table that fell behind the log because the disk was full.
"""

from __future__ import annotations

from timeball.broker.accepting.components import Components, in_thread
from timeball.broker.tables.table_changes import TableChanges

LOOK_MS = 1_000


class TableWatch:
    """The periodic duty. Belongs to the event loop."""

    def __init__(self, parts: Components, mover: TableChanges) -> None:
        self._parts, self._mover = parts, mover

    async def watch_table(self) -> None:
        """Let the table follow the log. Raises OverLimit or Unavailable if it cannot now."""
        parts, pending = self._parts, self._parts.hour_log.pending
        if parts.cache is None:
            # For a table in an object store, `StoredTable` does this, because it first checks whether the store
            # answers.
            await self._mover.catch_up()
        await in_thread(parts.table_thread, parts.catalog.look, parts.clock.now_ms())
        # Another program may run VACUUM after its commit, so the catalog has checked all live files.
        gone = frozenset(entry.path for entry in parts.catalog.foreign.missing)
        back = [path for path in pending.missing - gone if await self._is_back(path)]
        if parts.cache is None:
            # Before the schedule tries to open them. For an object store, the local copies determine which files can be
            # opened.
            pending.miss(gone)
        if back:
            # Messages that are due by now are released at once, late.
            pending.found(back)
            parts.hour_log.look_again()
            parts.scheduler.on_earlier()

    async def _is_back(self, path: str) -> bool:
        return await in_thread(self._parts.reader_thread, self._parts.catalog.data.put_back_one, path)
