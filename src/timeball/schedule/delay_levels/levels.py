"""The level table: a line of text, as RocketMQ's `messageDelayLevel` has it, and what it says of each level.

    1s 5s 10s 30s 1m …      level n is the nth item; one blank between; units s, m, h, d

Refuses what RocketMQ does not start with (two blanks, an unknown unit, no number), and what no level may be:
negative, or beyond the maximum delay. Levels need not ascend. There are no levels at run time but these: to
change the table is to start again, and a message that waits keeps the instant it was accepted for.
"""

from __future__ import annotations

import re

import numpy as np

from timeball import limits
from timeball.errors import SetupError
from timeball.message import Int64Array

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
