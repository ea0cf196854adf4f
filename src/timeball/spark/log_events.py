"""The events of scheduled messages: their schema, and how they are derived from rows of the log.

    event       one row for                                          first_seq, rows
    accepted    a SCHEDULED row, the MOVED row that commits a          its own numbers; a range may be long
                half message, or one range of a bulk attach
    moved       a MOVED row to another due time, in due_ms           the scheduled message that it moves, 1
    released    a RELEASE row                                        the scheduled message that it releases, 1
    cancelled   a CANCEL row                                         the scheduled message that it cancels, 1
    started     a start of the broker; lateness_ms is how long       the first row after the start, 0
                the broker was down

A half message (of a RocketMQ transaction) has no due time, so it is not a scheduled message yet. Its first move gives
it one, and counts as its acceptance. A row that ends a half message and has no due time is no event. A move that keeps
the due time, because the message was only written again, is no event.

The column `reason`: of a cancel, the reason in its row. OCCURRENCE for an accepted occurrence of a recurring schedule,
and EXPIRED for a release into the topic of expired messages. Otherwise null.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.model.answers import REPLACED as REPLACED
from timeball.model.message import (
    CANCEL_REASON,
    NO_DUE_TIME_MS,
    PROPERTY_END,
    PROPERTY_NAME_END,
    READ_SCHEMA,
    Kind,
)
from timeball.model.send_options import EXPIRED_PREFIX
from timeball.spark.endpoint import Endpoint, after_last_seq, retrying_read
from timeball.table import attachment as att

# Application id of the ledger's mark in its Delta table: the row of the log up to which it has events.
LEDGER_APP_ID = "timeball-ledger"
# Values of the column `reason`. A selection's id follows SELECTION. The values in MISSED are those of occurrences that
# a recurring schedule has skipped.
OCCURRENCE, EXPIRED, SELECTION = "occurrence", "expired", "selection "
MISSED = ("missed", "overlap")
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
        ("event_seq", pa.int64()),  # the row of the log that records the event
        # moved: the due time before. released: the original due time, if a clock step has shifted it to due_ms.
        ("from_due_ms", pa.int64()),
        ("reason", pa.string()),
    ]
)

# Rows of the archive: the log's columns, and the day by which the table is partitioned.
ARCHIVE_SCHEMA = pa.schema([*READ_SCHEMA, pa.field("day", pa.date32())])


# The kinds of rows that are events of one scheduled message, and the columns from which the events are built.
_KINDS = (Kind.SCHEDULED, Kind.MOVED, Kind.RELEASE, Kind.CANCEL)
_COLUMNS = (
    "seq", "kind", "topic", "unique_key", "due_ms", "store_ms", "source_seq", "queue_id", "queue_offset",
    "reconsume_times", "from_due_ms", "accepted_ms", "properties",
)  # fmt: skip
_EVENTS = pa.array(["accepted", "moved", "released", "cancelled"])
_ACCEPTED, _RELEASED, _CANCELLED = 0, 2, 3  # indexes in _EVENTS
# The reason in the properties of a CANCEL row.
_REASON = f"(?:^|{PROPERTY_END}){CANCEL_REASON}{PROPERTY_NAME_END}(?P<reason>[^{PROPERTY_END}]*)"


def read_events(broker: Endpoint, from_seq: int, to_seq: int) -> Iterator[pa.RecordBatch]:
    """Yield the events of the rows from_seq <= seq < to_seq of the log, in EVENT_SCHEMA.

    First the events of `read_spans`, then those of `read_row_events`.
    """
    spans = read_spans(broker, from_seq, to_seq)
    yield from (batch for batch in spans.to_batches() if batch.num_rows)
    yield from read_row_events(broker, from_seq, to_seq)


def read_row_events(broker: Endpoint, from_seq: int, to_seq: int) -> Iterator[pa.RecordBatch]:
    """Yield the events of the rows from_seq <= seq < to_seq of the log that concern one message each, in EVENT_SCHEMA.

    Continues after a restart of the broker.
    """

    def read(begin: int) -> Iterator[pa.RecordBatch]:
        return broker.read_log(begin, to_seq, _KINDS, columns=_COLUMNS)

    if from_seq < to_seq:
        for batch in retrying_read(broker, read, from_seq, after_last_seq):
            events = derive_events(batch)
            if events.num_rows:
                yield events


def derive_events(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Derive the events of log rows, at most one per row, in EVENT_SCHEMA.

    `rows`: log rows of the kinds _KINDS with the columns _COLUMNS. Rows that are no event are left out (see the module
    docstring).
    """
    is_moved = pc.equal(rows.column("kind"), int(Kind.MOVED))
    changes_due_time = pc.or_(pc.invert(is_moved), rows.column("from_due_ms").is_valid())
    rows = rows.filter(pc.and_(changes_due_time, rows.column("due_ms").is_valid()))
    kind, from_due_ms = rows.column("kind"), rows.column("from_due_ms")
    is_released, null = pc.equal(kind, int(Kind.RELEASE)), pa.scalar(None, pa.int64())
    # A MOVED row that gives a half message its due time counts as the acceptance of the message.
    commits_half_message = pc.fill_null(pc.equal(from_due_ms, NO_DUE_TIME_MS), False)
    event_kinds = np.where(
        commits_half_message.to_numpy(zero_copy_only=False), int(Kind.SCHEDULED), kind.to_numpy()
    )
    # _KINDS is in ascending order and in the order of _EVENTS.
    events = pa.array(np.searchsorted([int(event_kind) for event_kind in _KINDS], event_kinds))
    # As in message.lateness_ms: if the message was already due when it was accepted, lateness counts from then.
    begin_ms = pc.max_element_wise(rows.column("due_ms"), rows.column("accepted_ms"))
    lateness_ms = pc.max_element_wise(pc.subtract(rows.column("store_ms"), begin_ms), 0)
    attempt = pc.add(pc.fill_null(rows.column("reconsume_times"), 0), pa.scalar(1, pa.int32()))
    columns = {
        "event": _EVENTS.take(events),
        "first_seq": pc.if_else(
            pc.equal(kind, int(Kind.SCHEDULED)), rows.column("seq"), rows.column("source_seq")
        ),
        "rows": pa.repeat(pa.scalar(1, pa.int64()), rows.num_rows),
        "at_ms": rows.column("store_ms"),
        "lateness_ms": pc.if_else(is_released, lateness_ms, null),
        "queue_id": pc.if_else(is_released, rows.column("queue_id"), pa.scalar(None, pa.int32())),
        "queue_offset": pc.if_else(is_released, rows.column("queue_offset"), null),
        "attempt": attempt.cast(pa.int32()),
        "event_seq": rows.column("seq"),
        "from_due_ms": pc.if_else(pc.equal(events, _ACCEPTED), null, from_due_ms),
        "reason": _reasons(rows, events),
    }
    event_columns = [columns[name] if name in columns else rows.column(name) for name in EVENT_SCHEMA.names]
    return pa.RecordBatch.from_arrays(event_columns, schema=EVENT_SCHEMA)


def _reasons(rows: pa.RecordBatch, events: pa.Array) -> pa.Array:
    """Compute the column `reason` (see the module docstring). `events`: the index in _EVENTS of each row."""
    reasons: pa.Array = pa.nulls(rows.num_rows, pa.string())
    is_accepted, is_released, is_cancelled = (
        pc.equal(events, index) for index in (_ACCEPTED, _RELEASED, _CANCELLED)
    )
    # The id of an occurrence is the name of its schedule, which has no dot, then a dot and its due time in ms.
    keys = rows.column("unique_key")
    may_be_occurrence = pc.and_(is_accepted, pc.fill_null(pc.match_substring(keys, "."), False))
    if pc.any(may_be_occurrence).as_py():
        parts = pc.split_pattern(keys.filter(may_be_occurrence), ".", max_splits=1)
        due = rows.column("due_ms").filter(may_be_occurrence).cast(pa.string())
        is_occurrence = pc.equal(pc.list_element(parts, 1), due)
        occurrences = pc.if_else(is_occurrence, pa.scalar(OCCURRENCE), pa.scalar(None, pa.string()))
        reasons = pc.replace_with_mask(reasons, may_be_occurrence, occurrences)
    # A message that expired is released into the topic of expired messages.
    has_expired_topic = pc.fill_null(pc.starts_with(rows.column("topic"), EXPIRED_PREFIX), False)
    reasons = pc.if_else(pc.and_(is_released, has_expired_topic), pa.scalar(EXPIRED), reasons)
    if pc.any(is_cancelled).as_py():
        matches = pc.extract_regex(rows.column("properties").filter(is_cancelled), _REASON)
        reasons = pc.replace_with_mask(reasons, is_cancelled, pc.struct_field(matches, "reason"))
    return reasons


def read_spans(broker: Endpoint, from_seq: int, to_seq: int) -> pa.Table:
    """Read the events of rows from_seq <= seq < to_seq that concern many messages or none, in EVENT_SCHEMA.

    These are the bulk attaches and the starts of the broker.
    """
    if from_seq >= to_seq:
        return EVENT_SCHEMA.empty_table()
    events = [
        {"event": "started", "first_seq": start.first_seq, "rows": 0, "at_ms": start.at_ms,
         "lateness_ms": max(0, start.at_ms - start.before_ms), "event_seq": start.first_seq}
        for start in broker.starts(from_seq, to_seq)
    ]  # fmt: skip
    for batch in broker.read_log(from_seq, to_seq, [Kind.TABLE], columns=["seq", "store_ms", "body"]):
        events += attach_events(batch)
    return pa.Table.from_pylist(events, EVENT_SCHEMA)


def attach_events(rows: pa.RecordBatch) -> Iterator[dict[str, object]]:
    """Yield an `accepted` event for each range of sequence numbers of the bulk attaches among these TABLE rows."""
    for row in rows.to_pylist():  # few rows: one per change of the table
        change = att.decode_change(row["body"])
        if not isinstance(change, att.Attachment) or change.job != "bulk":
            continue
        for first, count in change.ranges:
            yield {"event": "accepted", "first_seq": first, "rows": count, "at_ms": row["store_ms"],
                   "attempt": 1, "event_seq": row["seq"]}  # fmt: skip
