"""Find the scheduled messages that are due after a duration of elapsed time. All others are due by the wall clock.

A row belongs to such a message (a duration) in these cases:

    retries                its topic returns messages to a group, or is a dead letter topic
    a relative delay       it is a SCHEDULED row with `accepted_ms`: the delay counts from that time
    RocketMQ's timers      its properties contain TIMER_DELAY_MS or TIMER_DELAY_SEC

Messages of a delay level are durations too, but they are in the queue of their level (schedule/delay_levels.py). A
start recovers the durations from the rows of the log. The data files of the pending table do not contain these columns,
so messages that are in files at a start are due by the wall clock.
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
from timeball.schedule.durations import StoredDurations
from timeball.schedule.locations import Waiting

_TIMERS = [f"{name}{PROPERTY_NAME_END}" for name in ("TIMER_DELAY_MS", "TIMER_DELAY_SEC")]
TIMER_PREFIX = b"TIMER_DELAY_"  # of both names
# Prefixes of the topics of leases, retries and dead letters.
_RETURN_PREFIXES = (RETRY_PREFIX, DLQ_PREFIX)
_PROPERTIES = READ_SCHEMA.get_field_index("properties")
_COLUMNS = (
    "seq", "kind", "topic", "properties", "store_ms", "due_ms", "queue_offset", "accepted_ms", "source_seq",
    "version_seq", "from_due_ms",
)  # fmt: skip
_BATCH_ROWS = 65_536
_NONE = np.empty(0, np.int64)


def is_duration(scheduled_rows: pa.RecordBatch) -> Bools | None:
    """Compute a mask of the durations among SCHEDULED and MOVED rows (READ_SCHEMA). None if there are none."""
    topic, properties, accepted_ms = (
        scheduled_rows.column(name) for name in ("topic", "properties", "accepted_ms")
    )
    mask = np.asarray(pc.or_(*(pc.starts_with(topic, prefix) for prefix in _RETURN_PREFIXES)), dtype=np.bool_)
    # Only in SCHEDULED rows: in MOVED rows `accepted_ms` is the time at which the message was accepted.
    if accepted_ms.null_count < len(accepted_ms):
        mask |= np.asarray(accepted_ms.is_valid()) & (
            scheduled_rows.column("kind").to_numpy() == Kind.SCHEDULED
        )
    if properties.null_count < len(properties):
        for name in _TIMERS:
            mask |= np.asarray(pc.match_substring(properties, name).fill_null(False))
    return mask if mask.any() else None


def is_duration_small(scheduled_rows: ReadRows) -> Bools | None:
    """Compute a mask of the durations among rows of a small batch (admission.py). None if there are none.

    NumberedRows are tested only for RocketMQ's timer properties, because they have no `accepted_ms`.
    """
    if not isinstance(scheduled_rows, NumberedRows):
        return is_duration(scheduled_rows)
    texts = [row[_PROPERTIES] or "" for row in scheduled_rows.values]
    mask = np.array([any(name in text for name in _TIMERS) for text in texts], dtype=np.bool_)
    return mask if mask.any() else None


def find_durations(reader: LogReader, from_seq: int, to_seq: int) -> StoredDurations:
    """Find the durations in the rows [from_seq, to_seq) of the log that retention has kept. This blocks.

    A message with several rows counts with the last one.
    """
    # Both lists begin with an empty element, because joining needs at least one.
    batches, store_times = [Waiting(_NONE, _NONE, _NONE)], [_NONE]
    begin = max(from_seq, reader.first_seq)
    for rows in reader.coalesced(begin, to_seq, locations.KINDS, _BATCH_ROWS, _COLUMNS):
        scheduled_rows = locations.waiting_rows(rows)
        if scheduled_rows.num_rows and (mask := is_duration(scheduled_rows)) is not None:
            scheduled_rows = scheduled_rows.filter(pa.array(mask))
            batches.append(locations.waiting_in(scheduled_rows))
            store_times.append(int64(scheduled_rows.column("store_ms")))
    waiting, store_ms = Waiting.joined(batches), np.concatenate(store_times)
    # `unique` returns the first index of each number. In reverse order that is the message's last row in the log.
    _, first_in_reverse = np.unique(waiting.seq[::-1], return_index=True)
    last_rows = len(waiting) - 1 - first_in_reverse
    return StoredDurations(waiting.part(last_rows), store_ms[last_rows])
