"""How a message looks while it waits for a level: RocketMQ's disguise, put on and taken off by the column.

    waiting      topic SCHEDULE_TOPIC_XXXX, queue level - 1,
                 properties … DELAY \\x01 level \\x02 REAL_TOPIC \\x01 topic \\x02 REAL_QID \\x01 queue \\x02
    released     topic and queue as they were; the three properties stay, as consumers of RocketMQ see them

What a client sent under these names is taken out first, so that there is one of each and it is ours; so are the
timer properties, which a level overrules.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball import limits
from timeball.errors import Corrupt, InvalidMessage
from timeball.message import (
    PROPERTY_END,
    PROPERTY_NAME_END,
    READ_SCHEMA,
    SCHEDULE_TOPIC,
    Int64Array,
    Kind,
    byte_lengths,
)

LEVEL, REAL_TOPIC, REAL_QUEUE = "DELAY", "REAL_TOPIC", "REAL_QID"
OVERRULED = ("TIMER_DELIVER_MS", "TIMER_DELAY_MS", "TIMER_DELAY_SEC")

_NAMES = "|".join((LEVEL, REAL_TOPIC, REAL_QUEUE, *OVERRULED))
_OURS = f"{PROPERTY_END}(?:{_NAMES}){PROPERTY_NAME_END}[^{PROPERTY_END}]*"
_REAL = (
    f"{REAL_TOPIC}{PROPERTY_NAME_END}(?P<topic>[^{PROPERTY_END}]+){PROPERTY_END}"
    f"{REAL_QUEUE}{PROPERTY_NAME_END}(?P<queue>-?[0-9]+){PROPERTY_END}$"
)


def disguised_properties(
    properties: pa.Array, level: Int64Array, topic: pa.Array, queue_id: pa.Array
) -> pa.Array:
    """Return the properties text of messages that are to wait; raise InvalidMessage where it becomes too long."""
    text = pc.binary_join_element_wise(
        "", pc.utf8_rtrim(properties.fill_null(""), PROPERTY_END), PROPERTY_END
    )
    text = pc.replace_substring_regex(text, _OURS, "")
    ours = [
        part
        for name, value in (
            (LEVEL, pa.array(level).cast(pa.string())),
            (REAL_TOPIC, topic),
            (REAL_QUEUE, queue_id.cast(pa.string())),
        )
        for part in (name + PROPERTY_NAME_END, value, PROPERTY_END)
    ]
    # Each entry began with a separator, so that each could be matched by itself; the first one goes again.
    text = pc.binary_join_element_wise(text, PROPERTY_END, *ours, "")
    text = pc.utf8_ltrim(text, PROPERTY_END)
    lengths = byte_lengths(text)
    if int(lengths.max()) > limits.PROPERTIES_BYTES_MAX:
        raise InvalidMessage(
            f"properties of row {int(lengths.argmax())} are longer than {limits.PROPERTIES_BYTES_MAX} bytes "
            "with the names a delay level adds"
        )
    return text


def restored(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return READ_SCHEMA rows of the schedule topic as any other promises."""
    real = pc.extract_regex(rows.column("properties"), _REAL)
    if real.null_count:
        seq = rows.column("seq")[pc.index(real.is_null(), True).as_py()]
        raise Corrupt(f"seq {seq} waits in {SCHEDULE_TOPIC} and does not say for which topic")
    changed = {
        "kind": pa.array(np.full(rows.num_rows, Kind.PROMISE, dtype=np.int8)),
        "topic": real.field("topic"),
        "queue_id": real.field("queue").cast(pa.int32()),
        "queue_offset": pa.nulls(rows.num_rows, pa.int64()),
    }
    columns = [changed.get(name, rows.column(name)) for name in READ_SCHEMA.names]
    return pa.RecordBatch.from_arrays(columns, schema=READ_SCHEMA)
