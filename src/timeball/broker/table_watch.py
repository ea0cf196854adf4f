"""The duty beside the pending table: other programs may change it, and a full disk may keep it from following the log.

Each second, for the cost of two questions about a file name: has another program committed to the table? Then the
catalog lets it follow the log again (table/catalog.py), and the schedule opens none of the files that are gone, until
they are put back.
"""

from __future__ import annotations

from timeball.broker.components import Components, in_thread
from timeball.broker.table_changes import TableChanges

LOOK_MS = 1_000


class TableWatch:
    """Belongs to the event loop."""

    def __init__(self, parts: Components, mover: TableChanges) -> None:
        self._parts, self._mover = parts, mover

    async def watch_table(self) -> None:
        """Let the table follow the log; raise OverLimit or Unavailable when it cannot now."""
        parts, pending = self._parts, self._parts.hour_log.pending
        if parts.cache is None:
            # Of a table in an object store `StoredTable` does this, which first asks whether the store answers.
            await self._mover.catch_up()
        await in_thread(parts.table_thread, parts.catalog.look, parts.clock.now_ms())
        # A commit may come with a VACUUM, so the catalog has looked for all live files behind it.
        gone = frozenset(entry.path for entry in parts.catalog.foreign.missing)
        back = [path for path in pending.missing - gone if await self._is_back(path)]
        if parts.cache is None:
            # Before the schedule would find it out; of a store the local copies say what can be opened.
            pending.miss(gone)
        if back:
            # What is due by now is released at once, and late.
            pending.found(back)
            parts.hour_log.look_again()
            parts.scheduler.on_earlier()

    async def _is_back(self, path: str) -> bool:
        return await in_thread(self._parts.reader_thread, self._parts.catalog.data.put_back_one, path)
