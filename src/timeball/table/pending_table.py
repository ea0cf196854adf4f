"""The pending table as the broker sees it: its Delta log, its index of keys, and the cache of an object store."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from timeball.table.catalog import Catalog
from timeball.table.data_file import DataFiles
from timeball.table.file_cache import FileCache, RangedFiles
from timeball.table.key_index import TableKeys


@dataclass(frozen=True, slots=True)
class PendingTable:
    """The pending table of one broker."""

    catalog: Catalog  # the Delta log: a cache of the live files
    file_keys: TableKeys  # rows of the live files by id, key and number
    cache: FileCache | None = (
        None  # cache of a table in an object store; None: the files are in the data folder
    )

    @property
    def data_files(self) -> DataFiles:
        """The source of any data file, for threads that may wait for an object store."""
        return self.catalog.data if self.cache is None else RangedFiles(self.cache)

    @property
    def whole_files(self) -> DataFiles:
        """The same for callers that read whole files."""
        return self.catalog.data if self.cache is None else self.cache

    def status(self) -> dict[str, object]:
        """Build the figures of `TableStatus`."""
        foreign = self.catalog.foreign
        figures: dict[str, object] = {
            "uri": self.catalog.uri,
            "version": self.catalog.version,
            "foreign_commits": foreign.commits,
            "last_foreign_commit": foreign.last,
            "lost_files": len(foreign.missing),
            "lost_rows": sum(entry.rows for entry in foreign.missing),
        }
        if self.cache is not None:
            figures |= {
                "problem": self.cache.problem,
                "cached_bytes": self.cache.size_bytes,
                "missing_files": self.cache.missing_files,
            }
        return figures

    async def leave_store(self) -> None:
        """Stop using the object store, if there is one. Abandons requests without an answer."""
        if self.cache is not None:
            # Waits for answers that are on their way, at most one second.
            await asyncio.to_thread(self.cache.leave_store)
