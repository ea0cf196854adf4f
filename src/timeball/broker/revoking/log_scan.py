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
from timeball.message import Kind

COLUMNS = [
    "seq", "kind", "topic", "queue_offset", "unique_key", "keys", "due_ms", "store_ms", "accepted_ms", "source_seq",
    "version_seq", "from_due_ms", "properties",
]  # fmt: skip
SETTLING = (Kind.RELEASE, Kind.CANCEL)
_BATCH_ROWS = 65_536


def scan(reader: LogReader, wanted: set[int]) -> list[dict[str, Any]]:
    """Return the rows (`COLUMNS`, in order) that move or end these promises; any thread."""
    while True:
        begin = max(reader.first_seq, min(wanted))
        try:
            return _scan(reader, sorted(wanted), begin)
        except OutOfRange:
            if reader.first_seq <= begin:
                raise
            # Retention has removed the segment since `first_seq` was read: begin at the new one.


def _scan(reader: LogReader, wanted: list[int], begin: int) -> list[dict[str, Any]]:
    found = []
    for rows in reader.coalesced(begin, reader.next_seq, (*SETTLING, Kind.MOVED), _BATCH_ROWS, COLUMNS):
        mine = np.isin(rows.column("source_seq").fill_null(-1).to_numpy(), wanted)
        if mine.any():
            found += rows.filter(pa.array(mine)).to_pylist()
    return found
