"""Look up scheduled messages by id, key or number. Requests that arrive during a search share the next search.

A search of the log's key index and the files' key runs costs nearly the same for ten names as for one, and the lookup
thread runs one search at a time. The result for each caller depends only on that caller's names (scheduled_lookup.py).
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
from timeball.broker.revoking.scheduled_lookup import COLUMNS, SETTLING, LookupResult, Names, Search
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
        # Public for cancel.py: an operation passes the gate, and flushes the writer before it repeats a lookup.
        self.gate, self.writer, self.outcomes = gate, writer, outcomes
        self._reader, self._key_index, self._hour_log = reader, key_index, hour_log
        self._file_keys = file_keys
        self._lookup_thread = lookup_thread
        self._batcher: AsyncBatcher[Names, Search] = AsyncBatcher(
            self._search_together, limits.CANCELS_PER_REQUEST_MAX
        )

    async def look_up(self, names: Names, *, thorough: bool = False) -> LookupResult:
        """Search log and table for the scheduled messages with these names, and for the rows that ended them.

        `thorough`: also find the end of messages without an id, which needs a scan of the log. Raise Corrupt if a file
        that may contain one of the messages cannot be read.
        """
        search = await self._batcher.put(names, rows=len(names.subjects))
        missing = search.missing(names, thorough=thorough)
        if missing:
            search.add_rows(await asyncio.to_thread(scan, self._reader, missing))
        return search.result(names)

    async def _search_together(self, callers: Sequence[Names]) -> list[Search | TimeballError]:
        """Run one search for several callers. The result has a search or an error for each caller, in order."""
        try:
            search = await self._search(callers)
        except (Corrupt, NotFound) as error:
            if len(callers) == 1:
                return [error]
            # One caller needs a file that cannot be read. The others must not fail, so each one searches separately.
            return [result for names in callers for result in await self._search_together([names])]
        return [search] * len(callers)

    async def _search(self, callers: Sequence[Names]) -> Search:
        """Search log and files. Repeat the search if retention removed segments or files meanwhile."""
        while True:
            first_seq, live_files = self._reader.first_seq, self._hour_log.pending.live
            search = Search(
                self._reader, self._key_index, self._file_keys, live_files, self.outcomes.moved, callers
            )
            try:
                # One call for log and files, because a switch to another thread and back costs as much as the search.
                await in_thread(self._lookup_thread, search.search)
            except NotFound:
                if self._hour_log.pending.live is live_files:
                    raise  # a file of the table is missing
            except OutOfRange:
                if self._reader.first_seq == first_seq:
                    raise
            else:
                if self._reader.first_seq == first_seq:
                    return search


# ---- scan of the log by number ----------------------------------------------------------------------------------

# No index maps a message number to the rows that move or end it. Such an index would need an entry for each release,
# and most scheduled messages have an id, because RocketMQ's and Timeball's clients set one. For the others the log is
# read, from the lowest number to its end. A scan may take long, so it does not run in the broker's reader thread, for
# which consumers wait. Rows that retention removes during the scan are missing from the result.


_BATCH_ROWS = 65_536


def scan(reader: LogReader, numbers: set[int]) -> list[dict[str, Any]]:
    """Read the MOVED, RELEASE and CANCEL rows of the scheduled messages with these numbers, in log order (any thread).

    Rows have the columns `COLUMNS`.
    """
    while True:
        begin_seq = max(reader.first_seq, min(numbers))
        try:
            return _scan(reader, sorted(numbers), begin_seq)
        except OutOfRange:
            if reader.first_seq <= begin_seq:
                raise
            # Retention has removed the segment since `first_seq` was read, so the scan begins at the new one.


def _scan(reader: LogReader, numbers: list[int], begin_seq: int) -> list[dict[str, Any]]:
    matches = []
    for rows in reader.coalesced(begin_seq, reader.next_seq, (*SETTLING, Kind.MOVED), _BATCH_ROWS, COLUMNS):
        # Vectorized and without bodies, because a scan may read days of log.
        is_match = np.isin(rows.column("source_seq").fill_null(-1).to_numpy(), numbers)
        if is_match.any():
            matches += rows.filter(pa.array(is_match)).to_pylist()
    return matches
