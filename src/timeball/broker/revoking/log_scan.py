"""Reading the log for what no index knows: rows that move or end promises without an id, or numbers that lie nowhere.

An index by number would cost every release of every promise; clients of ours give each message an id, and nobody
asks often for what has none. So it is read, from the first of these numbers on to the end, which may take a while: in a
thread of its own, because consumers wait for the broker's reader thread. What retention lets go meanwhile is missing
from the outcome, as if it had been gone before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from timeball.errors import OutOfRange
from timeball.log.reader import LogReader
from timeball.message import CANCEL_NEXT, Kind, decode_properties
from timeball.schedule.moved import Moved

COLUMNS = [
    "seq", "kind", "topic", "queue_offset", "unique_key", "keys", "due_ms", "store_ms", "accepted_ms", "source_seq",
    "properties",
]  # fmt: skip
SETTLING = (Kind.RELEASE, Kind.CANCEL)
_BATCH_ROWS = 65_536


def walk(reader: LogReader, moved: Moved, wanted: set[int]) -> list[dict[str, Any]]:
    """The rows (of `COLUMNS`, in order) that move or end these promises, and those they were moved to; any thread."""
    while True:
        begin = max(reader.first_seq, min(wanted))
        try:
            return _walk(reader, moved, set(wanted), begin)
        except OutOfRange:
            if reader.first_seq <= begin:
                raise
            # Retention was faster.


def next_seq_of(row: dict[str, Any]) -> int | None:
    """The number under which the promise goes on that this row ends; None when it does not."""
    if row["kind"] != Kind.CANCEL or not row["properties"]:
        return None
    text = decode_properties(row["properties"]).get(CANCEL_NEXT)
    return None if text is None else int(text)


def _walk(reader: LogReader, moved: Moved, wanted: set[int], begin: int) -> list[dict[str, Any]]:
    wanted |= {seq for seq in map(moved.next_of, wanted) if seq is not None}
    found: dict[int, dict[str, Any]] = {}
    for rows in reader.coalesced(begin, reader.next_seq, (*SETTLING, Kind.MOVED), _BATCH_ROWS, COLUMNS):
        source = rows.column("source_seq").fill_null(-1).to_numpy()
        looked_for = 0
        while looked_for < len(wanted):  # again, when a row has told of another number to look for
            looked_for = len(wanted)
            mine = np.isin(source, list(wanted))
            for row in rows.filter(pa.array(mine)).to_pylist() if mine.any() else ():
                found[row["seq"]] = row
                wanted |= {seq for seq in (next_seq_of(row),) if seq is not None}
    return [found[seq] for seq in sorted(found)]
