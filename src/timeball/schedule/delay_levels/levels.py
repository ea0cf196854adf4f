"""The level table: a line of text, as RocketMQ's `messageDelayLevel` has it, and what it says of each level.

    1s 5s 10s 30s 1m …      level n is the nth item; one blank between; units s, m, h, d

Refuses what RocketMQ does not start with (two blanks, an unknown unit, no number), and what no level may be:
negative, or beyond the maximum delay. Levels need not ascend. There are no levels at run time but these: to
change the table is to start again, and a message that waits keeps the instant it was accepted for.

While it waits for a level a message has RocketMQ's disguise, put on and taken off by the column:

    waiting      topic SCHEDULE_TOPIC_XXXX, queue level - 1,
                 properties … DELAY \\x01 level \\x02 REAL_TOPIC \\x01 topic \\x02 REAL_QID \\x01 queue \\x02
    released     topic and queue as they were; the three properties stay, as consumers of RocketMQ see them

What a client sent under these names is taken out first, so that there is one of each and it is ours; so are the
timer properties, which a level overrules.
"""

from __future__ import annotations

import re

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from timeball import limits
from timeball.errors import Corrupt, InvalidMessage, SetupError
from timeball.message import (
    PROPERTY_END,
    PROPERTY_NAME_END,
    READ_SCHEMA,
    SCHEDULE_TOPIC,
    Int64Array,
    byte_lengths,
)

# RocketMQ's SCHEDULE_TOPIC_QUEUE_NUM: the topic has so many queues however few levels there are.
SCHEDULE_QUEUES_MIN = 18

_UNIT_MS = {"s": limits.SECOND_MS, "m": limits.MINUTE_MS, "h": limits.HOUR_MS, "d": limits.DAY_MS}
_ITEM = re.compile(r"([+]?[0-9]{1,18})([smhd])")


class LevelTable:
    """How long each level waits; level n at index n - 1."""

    def __init__(self, durations_ms: tuple[int, ...]) -> None:
        self.durations_ms = durations_ms
        self._array: Int64Array = np.array(durations_ms, dtype=np.int64)

    @classmethod
    def parse(cls, text: str) -> LevelTable:
        """Read the text of --delay-levels; raise SetupError naming the option and the item."""
        items = text.rstrip(" ").split(" ")
        if len(items) > limits.QUEUES_PER_TOPIC_MAX:
            raise SetupError(f"--delay-levels: {len(items)} levels; at most {limits.QUEUES_PER_TOPIC_MAX}")
        return cls(tuple(_duration_ms(number, item) for number, item in enumerate(items, 1)))

    def __len__(self) -> int:
        return len(self.durations_ms)

    @property
    def queues(self) -> int:
        """Return how many queues the schedule topic has."""
        return max(SCHEDULE_QUEUES_MIN, len(self))

    def clamp(self, level: Int64Array) -> Int64Array:
        """Return these levels, those above the last as the last, as in RocketMQ: no send is refused for its level."""
        return np.minimum(level, len(self))

    def delay_ms(self, level: Int64Array) -> Int64Array:
        """Return how long messages of these levels (1 to len) wait."""
        return np.asarray(self._array[level - 1])


def _duration_ms(number: int, item: str) -> int:
    found = _ITEM.fullmatch(item)
    if found is None:
        raise SetupError(
            f"--delay-levels: level {number} is {item!r}; write a number and one of s, m, h, d, "
            "with one blank between levels, such as '1s 5s 10s 1m'"
        )
    duration_ms = int(found[1]) * _UNIT_MS[found[2]]
    if duration_ms > limits.DELAY_MS_MAX:
        raise SetupError(f"--delay-levels: level {number} is {item}; ten years is the most")
    return duration_ms


# ---- how a message looks while it waits for a level -----------------------------------------------------------

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
    # Taken out before ours are added: a client must not choose the topic that the broker restores later.
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
        "topic": real.field("topic"),
        "queue_id": real.field("queue").cast(pa.int32()),
        "queue_offset": pa.nulls(rows.num_rows, pa.int64()),
    }
    columns = [changed.get(name, rows.column(name)) for name in READ_SCHEMA.names]
    return pa.RecordBatch.from_arrays(columns, schema=READ_SCHEMA)
