"""Decide which scheduled messages follow elapsed time. All others are due at a time of the wall clock.

    leases and retries     a topic that returns messages to a group, or a dead letter topic
    a relative delay       `accepted_ms` of the SCHEDULED row: the delay counts from that time
    RocketMQ's timers      TIMER_DELAY_MS or TIMER_DELAY_SEC among the properties

Messages of a delay level are durations too: they wait in their level's queue (schedule/delay_levels). The rows of the
log contain this information, so a start can recover it. The data files of the pending table do not contain it.
Therefore messages that are in files at a start are due by the wall clock.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.log.reader import LogReader
from timeball.log.row_encoder import NumberedRows, ReadRows
from timeball.model.message import DLQ_PREFIX, PROPERTY_NAME_END, READ_SCHEMA, RETRY_PREFIX, Kind, int64
from timeball.schedule import locations
from timeball.schedule.backlog import Bools
from timeball.schedule.durations import Found
from timeball.schedule.locations import Waiting

_TIMERS = [f"{name}{PROPERTY_NAME_END}" for name in ("TIMER_DELAY_MS", "TIMER_DELAY_SEC")]
TIMER_PREFIX = b"TIMER_DELAY_"
# Topics of leases and retries, and of dead letters.
_AGAIN = (RETRY_PREFIX, DLQ_PREFIX)
_PROPERTIES = READ_SCHEMA.get_field_index("properties")
_COLUMNS = (
    "seq", "kind", "topic", "properties", "store_ms", "due_ms", "queue_offset", "accepted_ms", "source_seq",
    "version_seq", "from_due_ms",
)  # fmt: skip
_BATCH_ROWS = 65_536
_NONE = np.empty(0, np.int64)


def is_duration(scheduled_rows: pa.RecordBatch) -> Bools | None:
    """Compute a mask: True for the SCHEDULED and MOVED rows whose message is due after a duration. None: no row is."""
    topic, properties, accepted = (
        scheduled_rows.column(name) for name in ("topic", "properties", "accepted_ms")
    )
    lasting = np.asarray(pc.or_(*(pc.starts_with(topic, prefix) for prefix in _AGAIN)), dtype=np.bool_)
    # Only in SCHEDULED rows: in MOVED rows `accepted_ms` is the time at which the message was accepted.
    if accepted.null_count < len(accepted):
        lasting |= np.asarray(accepted.is_valid()) & (
            scheduled_rows.column("kind").to_numpy() == Kind.SCHEDULED
        )
    if properties.null_count < len(properties):
        for name in _TIMERS:
            lasting |= np.asarray(pc.match_substring(properties, name).fill_null(False))
    return lasting if lasting.any() else None


def is_duration_small(scheduled_rows: ReadRows) -> Bools | None:
    """Like `is_duration`, for rows of a small batch (small_batch.py).

    Tests only the timer properties of RocketMQ: such rows have no `accepted_ms`.
    """
    if not isinstance(scheduled_rows, NumberedRows):
        return is_duration(scheduled_rows)
    texts = [row[_PROPERTIES] or "" for row in scheduled_rows.values]
    lasting = np.array([any(name in text for name in _TIMERS) for text in texts], dtype=np.bool_)
    return lasting if lasting.any() else None


def find_durations(reader: LogReader, from_seq: int, to_seq: int) -> Found:
    """Find the durations among the rows from `from_seq` to before `to_seq`, each at the last of its rows. Blocking."""
    # Each begins with an empty part, because joining needs at least one.
    parts, stored = [Waiting(_NONE, _NONE, _NONE)], [_NONE]
    begin = max(from_seq, reader.first_seq)
    for rows in reader.coalesced(begin, to_seq, locations.KINDS, _BATCH_ROWS, _COLUMNS):
        scheduled_rows = locations.waiting_rows(rows)
        if scheduled_rows.num_rows and (lasting := is_duration(scheduled_rows)) is not None:
            scheduled_rows = scheduled_rows.filter(pa.array(lasting))
            parts.append(locations.waiting_in(scheduled_rows))
            stored.append(int64(scheduled_rows.column("store_ms")))
    waiting, store_ms = Waiting.joined(parts), np.concatenate(stored)
    # Reversed, because `unique` returns the first index of each number. In reverse, that is the last row in the log.
    _, at = np.unique(waiting.seq[::-1], return_index=True)
    last = len(waiting) - 1 - at
    return Found(waiting.part(last), store_ms[last])
