"""Rows of the log as events, in Arrow: what the ledger job will write for the rows it has not come to yet.

The job itself does this in Spark (jobs/ledger.py, whose docstring says what an event is); a quick look should not wait
for a session to start. A test compares the two on one log, so that they cannot drift apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc

from timeball.message import Kind
from timeball.pipeline.endpoint import Endpoint, Start
from timeball.table import attachment as att

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
_OF_ONE = (Kind.PROMISE, Kind.LEVEL_PROMISE, Kind.RELEASE, Kind.CANCEL)
_COLUMNS = [
    "seq",
    "kind",
    "topic",
    "unique_key",
    "due_ms",
    "store_ms",
    "source_seq",
    "queue_id",
    "queue_offset",
    "reconsume_times",
]


def read_events(broker: Endpoint, from_seq: int, to_seq: int) -> Iterator[pa.RecordBatch]:
    """Events of rows from_seq <= seq < to_seq, in EVENT_SCHEMA: of one promise each, bulk attaches, starts."""
    if from_seq >= to_seq:
        return
    for batch in broker.read_log(from_seq, to_seq, _OF_ONE, columns=_COLUMNS):
        yield events(batch)
    for batch in broker.read_log(from_seq, to_seq, [Kind.TABLE], columns=["seq", "store_ms", "body"]):
        yield attach_events(batch)
    yield start_events(broker.starts(from_seq, to_seq))


def events(rows: pa.RecordBatch) -> pa.RecordBatch:
    """The events of promises, releases and cancels: one a row."""
    kind = rows.column("kind")
    is_release, is_cancel = pc.equal(kind, int(Kind.RELEASE)), pc.equal(kind, int(Kind.CANCEL))
    stored, due = rows.column("store_ms"), rows.column("due_ms")
    columns = {
        "event": pc.if_else(is_release, "released", pc.if_else(is_cancel, "cancelled", "accepted")),
        "first_seq": pc.if_else(pc.or_(is_release, is_cancel), rows.column("source_seq"), rows.column("seq")),
        "rows": pa.repeat(pa.scalar(1, pa.int64()), rows.num_rows),
        "at_ms": stored,
        "lateness_ms": _only(is_release, pc.subtract(stored, due)),
        "queue_id": _only(is_release, rows.column("queue_id")),
        "queue_offset": _only(is_release, rows.column("queue_offset")),
        "attempt": pc.add(pc.coalesce(rows.column("reconsume_times"), pa.scalar(0, pa.int32())), 1),
        "event_seq": rows.column("seq"),
        **{name: rows.column(name) for name in ("topic", "unique_key", "due_ms")},
    }
    return pa.RecordBatch.from_arrays(
        [columns[field.name].cast(field.type) for field in EVENT_SCHEMA], schema=EVENT_SCHEMA
    )


def attach_events(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the events of TABLE rows: one for each range of numbers that a bulk attach used."""
    found = []
    for row in rows.to_pylist():  # one for each change of the table
        change = att.decode_change(row["body"])
        if isinstance(change, att.Attachment) and change.job == "bulk":
            found += [
                {"event": "accepted", "first_seq": first, "rows": count, "at_ms": row["store_ms"],
                 "attempt": 1, "event_seq": row["seq"]}
                for first, count in change.ranges
            ]  # fmt: skip
    return pa.RecordBatch.from_pylist(found, EVENT_SCHEMA)


def start_events(starts: Sequence[Start]) -> pa.RecordBatch:
    """The events of starts of the broker: of no promise; lateness_ms says for how long nobody had written."""
    found = [
        {"event": "started", "first_seq": start.first_seq, "rows": 0, "at_ms": start.at_ms,
         "lateness_ms": max(0, start.at_ms - start.before_ms), "event_seq": start.first_seq}
        for start in starts
    ]  # fmt: skip
    return pa.RecordBatch.from_pylist(found, EVENT_SCHEMA)


def _only(where: pa.Array, values: pa.Array) -> pa.Array:
    return pc.if_else(where, values, pa.scalar(None, values.type))
