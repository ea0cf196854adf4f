"""Events in a promise's life: their schema, and those that do not stand in the log as one row each.

    event       one row for                                          first_seq, rows
    accepted    a PROMISE row, the MOVED row that commits a          its own numbers; a range may be long
                half message, or one range of a bulk attach
    moved       a MOVED row to another instant, which is due_ms       the promise it moves, 1
    released    a RELEASE row                                        the promise it keeps, 1
    cancelled   a CANCEL row                                         the promise it ends, 1
    started     the log was taken up again; lateness_ms: for how     its first row of that life, 0
                long the broker was down

Events of one row are SQL (view_sql.events_sql). This module makes the others, which are few: ranges and starts.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from timeball.message import READ_SCHEMA, Kind
from timeball.pipeline.endpoint import Endpoint
from timeball.table import attachment as att

LEDGER_APP_ID = (
    "timeball-ledger"  # the ledger's mark in its Delta table: the row up to which it has the events
)
EVENT_SCHEMA = pa.schema(
    [
        ("event", pa.string()),
        ("first_seq", pa.int64()),
        ("rows", pa.int64()),
        ("topic", pa.string()),
        ("unique_key", pa.string()),
        ("due_ms", pa.int64()),
        ("at_ms", pa.int64()),
        ("lateness_ms", pa.int64()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("attempt", pa.int32()),  # reconsume_times + 1
        ("event_seq", pa.int64()),  # the row of the log that says so
    ]
)

# What passed, as the archive job keeps it: the log's columns, and the day it is filed under.
ARCHIVE_SCHEMA = pa.schema([*READ_SCHEMA, pa.field("day", pa.date32())])


def read_spans(broker: Endpoint, from_seq: int, to_seq: int) -> pa.Table:
    """Read the events of rows from_seq <= seq < to_seq that are no single promise's: bulk attaches and starts."""
    if from_seq >= to_seq:
        return EVENT_SCHEMA.empty_table()
    found = [
        {"event": "started", "first_seq": start.first_seq, "rows": 0, "at_ms": start.at_ms,
         "lateness_ms": max(0, start.at_ms - start.before_ms), "event_seq": start.first_seq}
        for start in broker.starts(from_seq, to_seq)
    ]  # fmt: skip
    for batch in broker.read_log(from_seq, to_seq, [Kind.TABLE], columns=["seq", "store_ms", "body"]):
        found += attach_events(batch)
    return pa.Table.from_pylist(found, EVENT_SCHEMA)


def attach_events(rows: pa.RecordBatch) -> Iterator[dict[str, object]]:
    """Yield an event for each range of numbers that a bulk attach among these TABLE rows used."""
    for row in rows.to_pylist():  # one for each change of the table
        change = att.decode_change(row["body"])
        if not isinstance(change, att.Attachment) or change.job != "bulk":
            continue
        for first, count in change.ranges:
            yield {"event": "accepted", "first_seq": first, "rows": count, "at_ms": row["store_ms"],
                   "attempt": 1, "event_seq": row["seq"]}  # fmt: skip
