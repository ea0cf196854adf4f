"""Read the pending scheduled messages of the table from a position on, row group by row group.

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

# Bounds for one page: about 100 ms of the background thread. A page that reaches a bound has fewer messages.
GROUPS_MAX, FILES_MAX = 64, 64


@dataclass(frozen=True, slots=True)
class Filed(Columns):
    """Scheduled messages in files, as columns. `seq`: version. `file`, `group`, `row`: where the message is stored."""

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
        self, low: Position, high: Position, rows: int, is_topic_shown: Callable[[Codes], Bools]
    ) -> tuple[Filed, Position]:
        """Read the pending messages in [low, high), and the position up to which the result is complete.

        The result has more than `rows` messages, unless there are fewer or a bound of the walk is reached.
        `is_topic_shown` maps topic codes to whether their messages count.
        """
        snapshot, parts, row_count, group_count = self._snapshot, [NOTHING], 0, 0
        # A heap of the next steps, earliest first: (first due time, file, row group). Row group -1: open the file.
        steps = [
            (max(snapshot.first_ms(entry), low[0]), file_index, -1)
            for file_index, entry in enumerate(snapshot.entries)
            if entry.max_due_ms >= low[0] and entry.min_due_ms <= high[0]
        ]
        # Files are opened in order of due time, so that a page of the next hour opens no files of later years.
        heapq.heapify(steps)
        while steps:
            first_ms, file_index, group = heapq.heappop(steps)
            is_enough = row_count > rows and _count_before(parts, first_ms) > rows
            # Never stop at the due time where the page begins, because the next page would begin at the same position.
            if first_ms > low[0] and (is_enough or group_count >= GROUPS_MAX or len(self.files) >= FILES_MAX):
                return Filed.joined(parts), (first_ms, 0)
            if group < 0:
                file = self.files[file_index] = self._open_file(snapshot.entries[file_index])
                for row_group in file.groups_between(low, high):
                    group_first_ms = max(first_ms, int(file.group_min_ms[row_group]))
                    # The file's statistics exclude most row groups of other topics without a read.
                    if self._topic is None or file.may_have_topic(row_group, self._topic):
                        heapq.heappush(steps, (group_first_ms, file_index, row_group))
                continue
            group_count += 1
            matches = self._read_group(file_index, group, low, high, is_topic_shown)
            row_count += len(matches)
            parts.append(matches)
        return Filed.joined(parts), high

    def _read_group(
        self,
        file_index: int,
        group: int,
        low: Position,
        high: Position,
        is_topic_shown: Callable[[Codes], Bools],
    ) -> Filed:
        rows = self.files[file_index].read_group(group, ["due_ms", "seq", "topic"])
        due_ms, seq = (rows.column(name).to_numpy() for name in ("due_ms", "seq"))
        topic = self._codes.encode(rows.column("topic").combine_chunks())
        is_match = is_topic_shown(topic) & self._snapshot.waits(due_ms, seq)
        is_match &= (due_ms > low[0]) | ((due_ms == low[0]) & (seq >= low[1]))
        is_match &= (due_ms < high[0]) | ((due_ms == high[0]) & (seq < high[1]))
        row = np.flatnonzero(is_match)
        row_count = len(row)
        return Filed(
            due_ms[row], seq[row], topic[row], np.full(row_count, file_index), np.full(row_count, group), row
        )  # fmt: skip

    def rows_of(self, chosen: Filed, columns: list[str]) -> pa.Table:
        """Read some columns of these messages, in their order."""
        # Sorted by file and row group, so that each row group is read once.
        order = np.lexsort((chosen.row, chosen.group, chosen.file))
        ordered, tables = chosen.part(order), []
        boundaries = np.flatnonzero(np.diff(ordered.file) | np.diff(ordered.group)) + 1
        for indexes in np.split(np.arange(len(ordered)), boundaries):
            of_group = ordered.part(indexes)
            tables.append(
                self.files[int(of_group.file[0])].read_group_rows(
                    int(of_group.group[0]), of_group.row, columns
                )
            )
        # The inverse permutation restores the order of `chosen`.
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        return pa.concat_tables(tables).take(pa.array(inverse))


def _count_before(parts: list[Filed], first_ms: int) -> int:
    return sum(int(np.searchsorted(filed.due_ms, first_ms)) for filed in parts)
