"""Lookups of scheduled messages by name. Requests that arrive during one search share the next.

A search of the log and of the key runs costs nearly the same for ten names as for one, and the thread that searches
runs one search at a time. The result for each caller depends only on that caller's names (scheduled_lookup.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
import pyarrow as pa

from timeball.broker.accepting.gate import Gate
from timeball.broker.accepting.ingress import AsyncBatcher
from timeball.broker.revoking.scheduled_lookup import COLUMNS, SETTLING, Found, Names, Search
from timeball.io.threads import in_thread
from timeball.log.key_index import KeyIndex
from timeball.log.reader import LogReader
from timeball.log.writer import LogWriter
from timeball.model import limits
from timeball.model.errors import Corrupt, NotFound, OutOfRange, TimeballError
from timeball.model.message import Kind
from timeball.schedule.hour_log.backlog import HourLog
from timeball.schedule.outcomes import Outcomes
from timeball.table.key_index import TableKeys


class LookUps:
    """The lookups of one broker. Belongs to the event loop."""

    def __init__(
        self,
        *,
        gate: Gate,
        writer: LogWriter,
        reader: LogReader,
        key_index: KeyIndex,
        hour_log: HourLog,
        outcomes: Outcomes,
        file_keys: TableKeys,
        lookup_thread: Executor,
    ) -> None:
        # For the operations that use a lookup: they pass the gate, and flush before they look again (cancel.py).
        self.gate, self.writer, self.outcomes = gate, writer, outcomes
        self._reader, self._key_index, self._hour_log = reader, key_index, hour_log
        self._file_keys = file_keys
        self._lookup_thread = lookup_thread
        self._batcher: AsyncBatcher[Names, Search] = AsyncBatcher(
            self._search_together, limits.CANCELS_PER_REQUEST_MAX
        )

    async def look_up(self, names: Names, *, thorough: bool = False) -> Found:
        """Search log and table for these names. `thorough`: also for the end of scheduled messages without an id.

        Raise Corrupt when a file that may contain one of them cannot be read.
        """
        search = await self._batcher.put(names, rows=len(names.subjects))
        missing = search.missing(names, thorough=thorough)
        if missing:
            search.add_rows(await asyncio.to_thread(scan, self._reader, missing))
        return search.result(names)

    async def _search_together(self, callers: Sequence[Names]) -> list[Search | TimeballError]:
        try:
            search = await self._search(callers)
        except (Corrupt, NotFound) as error:
            if len(callers) == 1:
                return [error]
            # One caller needs a file that cannot be read. The others must not fail, so each one searches separately.
            return [found for names in callers for found in await self._search_together([names])]
        return [search] * len(callers)

    async def _search(self, callers: Sequence[Names]) -> Search:
        """Search log and files, again if retention has removed some of either meanwhile."""
        while True:
            first_seq, live = self._reader.first_seq, self._hour_log.pending.live
            search = Search(
                self._reader, self._key_index, self._file_keys, live, self.outcomes.moved, callers
            )
            try:
                # In one step, because the change to another thread and back costs as much as the search.
                await in_thread(self._lookup_thread, search.search)
            except NotFound:
                if self._hour_log.pending.live is live:
                    raise  # a file of the table is missing
            except OutOfRange:
                if self._reader.first_seq == first_seq:
                    raise
            else:
                if self._reader.first_seq == first_seq:
                    return search


# ---- what no index knows --------------------------------------------------------------------------------------

# An index by number would cost an entry for each release, and most scheduled messages have an id, which RocketMQ's
# clients and Timeball's own set. So the log is read, from the lowest of these numbers to its end. That may take a
# while, so it runs in a separate thread, because consumers wait for the broker's reader thread. Rows that retention
# removes meanwhile are missing from the result, as if they had been removed before.


_BATCH_ROWS = 65_536


def scan(reader: LogReader, wanted: set[int]) -> list[dict[str, Any]]:
    """Read the rows (`COLUMNS`, in order) that move or end these scheduled messages (any thread)."""
    while True:
        begin = max(reader.first_seq, min(wanted))
        try:
            return _scan(reader, sorted(wanted), begin)
        except OutOfRange:
            if reader.first_seq <= begin:
                raise
            # Retention has removed the segment since `first_seq` was read, so the scan begins at the new one.


def _scan(reader: LogReader, wanted: list[int], begin: int) -> list[dict[str, Any]]:
    found = []
    for rows in reader.coalesced(begin, reader.next_seq, (*SETTLING, Kind.MOVED), _BATCH_ROWS, COLUMNS):
        # By number, in vectors and without bodies, because a scan may read days of log.
        mine = np.isin(rows.column("source_seq").fill_null(-1).to_numpy(), wanted)
        if mine.any():
            found += rows.filter(pa.array(mine)).to_pylist()
    return found
