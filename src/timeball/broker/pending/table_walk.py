"""The pending scheduled messages of the table from a position on, row group by row group.

Files and row groups are read in the order of their first due times, so that a page reads only as many as it needs. Due
times, numbers and topics are read of a whole row group, the other columns only of the rows that a page shows.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from timeball.broker.pending.log_tail import Codes, TopicCodes
from timeball.broker.pending.pages import Position
from timeball.broker.pending.snapshot import Snapshot
from timeball.model.message import Int64Array
from timeball.schedule.backlog import Bools
from timeball.schedule.columns import Columns
from timeball.table.attachment import FileEntry
from timeball.table.data_file import DataFile

# Bounds for one page, about 100 ms of the background thread. The page may be short, and contains the next position.
GROUPS_MAX, FILES_MAX = 64, 64


@dataclass(frozen=True, slots=True)
class Filed(Columns):
    """Scheduled messages in files: due time, version, topic, and file, row group and row."""

    due_ms: Int64Array
    seq: Int64Array
    topic: Codes
    file: Int64Array  # index into Snapshot.entries
    group: Int64Array
    row: Int64Array  # within its row group


_NONE = np.empty(0, np.int64)
NOTHING = Filed(_NONE, _NONE, np.empty(0, np.int32), _NONE, _NONE, _NONE)


class TableWalk:
    """One walk through the files of a snapshot. Belongs to the background thread."""

    def __init__(
        self,
        snapshot: Snapshot,
        open_file: Callable[[FileEntry], DataFile],
        codes: TopicCodes,
        topic: str | None,
    ) -> None:
        self._snapshot, self._open_file, self._codes, self._topic = snapshot, open_file, codes, topic
        self.files: dict[int, DataFile] = {}  # the files read so far

    def after(
        self, low: Position, high: Position, rows: int, keep: Callable[[Codes], Bools]
    ) -> tuple[Filed, Position]:
        """Return scheduled messages in [low, high), and the position up to which all of them are in the result.

        The result has more than `rows` scheduled messages, unless there are fewer or a bound of the walk is reached.
        `keep`: which topics count.
        """
        snapshot, found, count, groups = self._snapshot, [NOTHING], 0, 0
        # The next steps, earliest first: (first due time, file, row group), with -1 for a file that is not open yet.
        steps = [
            (max(snapshot.first_ms(entry), low[0]), at, -1)
            for at, entry in enumerate(snapshot.entries)
            if entry.max_due_ms >= low[0] and entry.min_due_ms <= high[0]
        ]
        # A file is opened when its turn comes, so that a page of the next hour opens no files of later years.
        heapq.heapify(steps)
        while steps:
            first_ms, at, group = heapq.heappop(steps)
            is_enough = count > rows and _count_before(found, first_ms) > rows
            # Not at the due time where the page begins, or the next page would begin there again.
            if first_ms > low[0] and (is_enough or groups >= GROUPS_MAX or len(self.files) >= FILES_MAX):
                return Filed.joined(found), (first_ms, 0)
            if group < 0:
                file = self.files[at] = self._open_file(snapshot.entries[at])
                for each in file.groups_between(low, high):
                    first = max(first_ms, int(file.group_min_ms[each]))
                    # Statistics of the file exclude most row groups of other topics without a read.
                    if self._topic is None or file.may_have_topic(each, self._topic):
                        heapq.heappush(steps, (first, at, each))
                continue
            groups += 1
            part = self._read(at, group, low, high, keep)
            count += len(part)
            found.append(part)
        return Filed.joined(found), high

    def _read(
        self, at: int, group: int, low: Position, high: Position, keep: Callable[[Codes], Bools]
    ) -> Filed:
        rows = self.files[at].read_group(group, ["due_ms", "seq", "topic"])
        due_ms, seq = (rows.column(name).to_numpy() for name in ("due_ms", "seq"))
        topic = self._codes.encode(rows.column("topic").combine_chunks())
        chosen = keep(topic) & self._snapshot.waits(due_ms, seq)
        chosen &= (due_ms > low[0]) | ((due_ms == low[0]) & (seq >= low[1]))
        chosen &= (due_ms < high[0]) | ((due_ms == high[0]) & (seq < high[1]))
        row = np.flatnonzero(chosen)
        count = len(row)
        return Filed(
            due_ms[row], seq[row], topic[row], np.full(count, at), np.full(count, group), row
        )  # fmt: skip

    def rows_of(self, chosen: Filed, columns: list[str]) -> pa.Table:
        """Read columns of these scheduled messages, in their order."""
        # Sorted by file and row group, so that each row group is read once.
        order = np.lexsort((chosen.row, chosen.group, chosen.file))
        sorted_, parts = chosen.part(order), []
        cuts = np.flatnonzero(np.diff(sorted_.file) | np.diff(sorted_.group)) + 1
        for part in np.split(np.arange(len(sorted_)), cuts):
            one = sorted_.part(part)
            parts.append(self.files[int(one.file[0])].read_group_rows(int(one.group[0]), one.row, columns))
        # The inverse permutation restores the order of `chosen`.
        back = np.empty_like(order)
        back[order] = np.arange(len(order))
        return pa.concat_tables(parts).take(pa.array(back))


def _count_before(found: list[Filed], first_ms: int) -> int:
    return sum(int(np.searchsorted(part.due_ms, first_ms)) for part in found)
