"""The rows of scheduled messages as a look-up reads them: from the log, from files of the table, and by a scan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from timeball.log.reader import LogReader
from timeball.model.errors import OutOfRange
from timeball.model.message import Kind, ReadRow

COLUMNS = [
    "seq", "kind", "topic", "queue_offset", "unique_key", "keys", "due_ms", "store_ms", "accepted_ms", "source_seq",
    "version_seq", "from_due_ms", "properties",
]  # fmt: skip
# The kinds of rows that end a scheduled message.
SETTLING = (Kind.RELEASE, Kind.CANCEL)
# Rows of the log that become Python values at once, in about 1 ms. This holds the interpreter, so the event loop waits.
VALUES_ROWS = 512
SCHEDULED = int(Kind.SCHEDULED)


class FoundRow(msgspec.Struct, frozen=True, gc=False):
    """A row of the log or of a file that accepts, moves or ends a scheduled message."""

    kind: int  # of a row in a file: SCHEDULED
    number: int  # of the message
    version: int  # of the message: the seq of the row that set the due time
    due_ms: int
    topic: str
    unique_key: str | None
    keys: str | None
    accepted_ms: int | None
    store_ms: int  # 0 for a row in a file
    is_level: bool  # it is in the queue of a delay level
    in_table: bool  # it is a row in a file
    at_seq: int | None  # its own seq, if it is a row of the log that contains the message
    properties: str | None  # None for a row in a file
    row: ReadRow | None = None  # the row of the log itself, if all of it was read


def rows_in_log(rows: pa.RecordBatch) -> Iterator[FoundRow]:
    """Yield the rows of the log (`COLUMNS`) that accept, move or end scheduled messages. Half messages are left out."""
    return found_rows(zip(*(column.to_pylist() for column in rows.columns), strict=True))


def found_rows(
    rows: Iterable[tuple[Any, ...]], log_rows: Iterable[ReadRow | None] = repeat(None)
) -> Iterator[FoundRow]:
    """Yield the rows as `rows_in_log` does. `rows`: a tuple with the values of `COLUMNS` for each row.

    `log_rows`: for each row, all its values (READ_SCHEMA), or None.
    """
    for (
        seq, kind, topic, queue_offset, unique_key, keys, due_ms, store_ms, accepted_ms, source_seq, version_seq,
        from_due_ms, properties,
    ), log_row in zip(rows, log_rows):  # fmt: skip
        if due_ms is None:  # a half message
            continue
        if kind == SCHEDULED:
            yield FoundRow(
                kind, seq, seq, due_ms, topic, unique_key, keys, store_ms, store_ms, queue_offset is not None,
                False, seq, properties, log_row,
            )  # fmt: skip
            continue
        # A reschedule sets a due time, so it is a version itself. Other rows name a version.
        version = seq if from_due_ms is not None else source_seq if version_seq is None else version_seq
        if kind == Kind.MOVED:
            # Only scheduled messages of delay levels have a position in a queue.
            is_level, at_seq = queue_offset is not None, seq
        elif kind in SETTLING:
            # Retention may have removed the scheduled message itself, or it was never in the log (bulk).
            is_level, at_seq = False, None
        else:
            continue
        yield FoundRow(
            kind, source_seq, version, due_ms, topic, unique_key, keys, accepted_ms, store_ms, is_level, False,
            at_seq, properties, None if at_seq is None else log_row,
        )  # fmt: skip


def rows_in_files(identities: Iterable[dict[str, Any]]) -> Iterator[FoundRow]:
    """Convert rows of files (mappings of ID_SCHEMA)."""
    for row in identities:
        version, number = row["seq"], row["number"]
        yield FoundRow(
            Kind.SCHEDULED, version if number is None else number, version, row["due_ms"], row["topic"],
            row["unique_key"], row["keys"], row["accepted_ms"], 0, False, True, None, None,
        )  # fmt: skip


# ---- scan of the log by number -------------------------------------------------------------------------------
# No index maps a message number to the rows that move or end it. Such an index would need an entry for each release,
# and most scheduled messages have an id, because RocketMQ's and Timeball's clients set one. For the others the log is
# read, from the lowest number to its end. A scan may take long, so it does not run in the broker's reader thread, for
# which consumers wait. Rows that retention removes during the scan are missing from the result.

_BATCH_ROWS = 65_536


def scan(reader: LogReader, numbers: set[int]) -> list[FoundRow]:
    """Read the MOVED, RELEASE and CANCEL rows of the messages with these numbers, in log order (any thread).

    Raises the errors of a read of the log, but not OutOfRange for rows that retention removes meanwhile.
    """
    while True:
        begin_seq = max(reader.first_seq, min(numbers))
        try:
            return _scan(reader, sorted(numbers), begin_seq)
        except OutOfRange:
            if reader.first_seq <= begin_seq:
                raise
            # Retention has removed the segment since `first_seq` was read, so the scan begins at the new one.


def _scan(reader: LogReader, numbers: list[int], begin_seq: int) -> list[FoundRow]:
    """Scan the log from `begin_seq` on. Raises OutOfRange if retention has removed that row."""
    matches = list[FoundRow]()
    for rows in reader.coalesced(begin_seq, reader.next_seq, (*SETTLING, Kind.MOVED), _BATCH_ROWS, COLUMNS):
        # Vectorized and without bodies, because a scan may read days of log.
        is_match = np.isin(rows.column("source_seq").fill_null(-1).to_numpy(), numbers)
        if is_match.any():
            matching = rows.filter(pa.array(is_match))
            for begin in range(0, matching.num_rows, VALUES_ROWS):
                matches += rows_in_log(matching.slice(begin, VALUES_ROWS))
    return matches
