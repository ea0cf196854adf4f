"""Scan the log for what no index knows: rows that move or end promises without an id, or numbers that lie nowhere.

An index by number would cost an entry for each release, and messages of RocketMQ's and our clients have ids. So the
log is read, from the first of these numbers to its end. That may take a while, so it runs in a thread of its own:
consumers wait for the broker's reader thread. Rows that retention removes meanwhile are missing from the result, as if
they had been removed before.
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


def scan(reader: LogReader, moved: Moved, wanted: set[int]) -> list[dict[str, Any]]:
    """Return the rows (`COLUMNS`, in order) that move or end these promises, or those they moved to; any thread."""
    while True:
        begin = max(reader.first_seq, min(wanted))
        try:
            return _scan(reader, moved, set(wanted), begin)
        except OutOfRange:
            if reader.first_seq <= begin:
                raise
            # Retention has removed the segment since `first_seq` was read: begin at the new one.


def next_seq_of(row: dict[str, Any]) -> int | None:
    """Return the number that this row moves its promise to; None for a row that moves none."""
    if row["kind"] != Kind.CANCEL or not row["properties"]:
        return None
    text = decode_properties(row["properties"]).get(CANCEL_NEXT)
    return None if text is None else int(text)


def _scan(reader: LogReader, moved: Moved, wanted: set[int], begin: int) -> list[dict[str, Any]]:
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
