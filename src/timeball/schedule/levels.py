"""The level table: parse RocketMQ's `messageDelayLevel`, and convert messages while they wait for a level.

    1s 5s 10s 30s 1m …      level n is the nth item; one blank between; units s, m, h, d

Texts with which RocketMQ does not start are refused: two blanks, an unknown unit, no number. So are durations that are
negative or longer than the maximum delay. Levels need not ascend. The table is fixed at run time. To change it, restart
the broker. A pending message keeps the due time with which it was accepted.

While a message waits for a level it is stored as RocketMQ stores it. The conversion works on columns:

    waiting      topic SCHEDULE_TOPIC_XXXX, queue level - 1,
                 properties … DELAY \\x01 level \\x02 REAL_TOPIC \\x01 topic \\x02 REAL_QID \\x01 queue \\x02
    released     topic and queue as they were; the three properties stay, as consumers of RocketMQ see them

Properties that a client sent under these names are removed first, so that each name occurs once, with the broker's
value. The timer properties are removed as well, since a level overrules them.
"""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball.model import limits
from timeball.model.errors import Corrupt, InvalidMessage, SetupError
from timeball.model.message import (
    PROPERTY_END,
    PROPERTY_NAME_END,
    READ_SCHEMA,
    SCHEDULE_TOPIC,
    Int64Array,
    byte_lengths,
)

# RocketMQ's SCHEDULE_TOPIC_QUEUE_NUM: the topic has this many queues, even with fewer levels.
SCHEDULE_QUEUES_MIN = 18

_UNIT_MS = {"s": limits.SECOND_MS, "m": limits.MINUTE_MS, "h": limits.HOUR_MS, "d": limits.DAY_MS}
_ITEM = re.compile(r"([+]?[0-9]{1,18})([smhd])")


class LevelTable:
    """The duration of each level in ms. Level n is at index n - 1."""

    def __init__(self, durations_ms: tuple[int, ...]) -> None:
        self.durations_ms = durations_ms
        self._array: Int64Array = np.array(durations_ms, dtype=np.int64)

    @classmethod
    def parse(cls, text: str) -> LevelTable:
        """Parse the text of --delay-levels. Raise SetupError with the name of the option and the item."""
        items = text.rstrip(" ").split(" ")
        if len(items) > limits.QUEUES_PER_TOPIC_MAX:
            raise SetupError(f"--delay-levels: {len(items)} levels; at most {limits.QUEUES_PER_TOPIC_MAX}")
        return cls(tuple(_duration_ms(number, item) for number, item in enumerate(items, 1)))

    def __len__(self) -> int:
        return len(self.durations_ms)

    @property
    def queues(self) -> int:
        """The number of queues of the schedule topic."""
        return max(SCHEDULE_QUEUES_MIN, len(self))

    def clamp(self, level: Int64Array) -> Int64Array:
        """Replace levels above the last one by the last, as RocketMQ does. No send is refused for its level."""
        return np.minimum(level, len(self))

    def delay_ms(self, level: Int64Array) -> Int64Array:
        """Look up the durations of these levels (1 to len), in ms."""
        return np.asarray(self._array[level - 1])


def _duration_ms(number: int, item: str) -> int:
    """Parse the item of a level, such as "10s". Raise SetupError."""
    match = _ITEM.fullmatch(item)
    if match is None:
        raise SetupError(
            f"--delay-levels: level {number} is {item!r}; write a number and one of s, m, h, d, "
            "with one blank between levels, such as '1s 5s 10s 1m'"
        )
    duration_ms = int(match[1]) * _UNIT_MS[match[2]]
    if duration_ms > limits.DELAY_MS_MAX:
        raise SetupError(f"--delay-levels: level {number} is {item}; ten years is the most")
    return duration_ms


# ---- the stored form of a message of a level ------------------------------------------------------------------

LEVEL, REAL_TOPIC, REAL_QUEUE = "DELAY", "REAL_TOPIC", "REAL_QID"
OVERRULED = ("TIMER_DELIVER_MS", "TIMER_DELAY_MS", "TIMER_DELAY_SEC")

# `_LEVEL_PROPERTIES` matches one property with one of these names and the separator before it. `_REAL_PROPERTIES`
# matches the two properties with the original topic and queue at the end of a text.
_NAMES = "|".join((LEVEL, REAL_TOPIC, REAL_QUEUE, *OVERRULED))
_LEVEL_PROPERTIES = f"{PROPERTY_END}(?:{_NAMES}){PROPERTY_NAME_END}[^{PROPERTY_END}]*"
_REAL_PROPERTIES = (
    f"{REAL_TOPIC}{PROPERTY_NAME_END}(?P<topic>[^{PROPERTY_END}]+){PROPERTY_END}"
    f"{REAL_QUEUE}{PROPERTY_NAME_END}(?P<queue>-?[0-9]+){PROPERTY_END}$"
)


def disguised_properties(
    properties: pa.Array, level: Int64Array, topic: pa.Array, queue_id: pa.Array
) -> pa.Array:
    """Add the three properties of a pending message of a level. Raise InvalidMessage if a text becomes too long."""
    text = pc.binary_join_element_wise(
        "", pc.utf8_rtrim(properties.fill_null(""), PROPERTY_END), PROPERTY_END
    )
    # Properties of a client with these names are removed: it must not choose the topic that the broker restores later.
    text = pc.replace_substring_regex(text, _LEVEL_PROPERTIES, "")
    added = [
        part
        for name, value in (
            (LEVEL, pa.array(level).cast(pa.string())),
            (REAL_TOPIC, topic),
            (REAL_QUEUE, queue_id.cast(pa.string())),
        )
        for part in (name + PROPERTY_NAME_END, value, PROPERTY_END)
    ]
    # The texts got a leading separator above, so that each property could be matched with the separator before it. The
    # first separator is removed.
    text = pc.binary_join_element_wise(text, PROPERTY_END, *added, "")
    text = pc.utf8_ltrim(text, PROPERTY_END)
    lengths = byte_lengths(text)
    if int(lengths.max()) > limits.PROPERTIES_BYTES_MAX:
        raise InvalidMessage(
            f"properties of row {int(lengths.argmax())} are longer than {limits.PROPERTIES_BYTES_MAX} bytes "
            "with the names a delay level adds"
        )
    return text


def restored(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Convert READ_SCHEMA rows of the schedule topic to messages with their own topics and queues."""
    real = pc.extract_regex(rows.column("properties"), _REAL_PROPERTIES)
    if real.null_count:
        seq = rows.column("seq")[pc.index(real.is_null(), True).as_py()]
        raise Corrupt(f"seq {seq} waits in {SCHEDULE_TOPIC} and does not say for which topic")
    changed = {
        "topic": real.field("topic"),
        "queue_id": real.field("queue").cast(pa.int32()),
        "queue_offset": pa.nulls(rows.num_rows, pa.int64()),
    }
    columns = [changed.get(name, rows.column(name)) for name in READ_SCHEMA.names]
    return pa.RecordBatch.from_arrays(columns, schema=READ_SCHEMA)
