"""Count the messages that were given back with a delay and wait for their next delivery, by group and topic.

Each of them is a scheduled message in the log (consuming/redelivery.py). It takes 12 bytes here: its number, and its
group and topic. Releases and cancels change whole batches by number. An unknown number changes nothing.

The counts are a cache: all of them follow from the log, and the checkpoint contains a copy (`facts`). Recovery starts
with that copy and applies the later rows (`replay`), in the order of the log.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball.log.checkpoint import RedeliveryFacts
from timeball.model.message import (
    DLQ_PREFIX,
    ORIGIN_GROUP,
    PROPERTY_END,
    PROPERTY_NAME_END,
    RETRY_PREFIX,
    RETRY_TOPIC,
    Int64Array,
    Kind,
    filled,
    int64,
)

GroupTopic = tuple[str, str]  # a group, and the topic whose messages it gets again
Counts = dict[GroupTopic, int]

SWEEP_ROWS_MIN = 1_024

_NONE = np.empty(0, np.int64)
_ENDED = -1  # the key of a message that was released or cancelled. Its entry stays until the next sweep


class Redeliveries:
    """The messages of all groups that wait for their next delivery. Belongs to the event loop."""

    def __init__(self) -> None:
        self._keys: list[GroupTopic] = []
        self._index: dict[GroupTopic, int] = {}
        # Two columns with `_rows` entries in use: numbers, ascending, and indexes of `_keys` (or _ENDED).
        self._number, self._key = _NONE, np.empty(0, np.int32)
        self._rows = 0
        self._counts = np.zeros(0, np.int64)  # by key
        # A plain attribute, because every release reads it.
        self.waiting_rows = 0

    def counts(self) -> Counts:
        """Count the waiting messages, by group and topic."""
        return {
            self._keys[index]: int(self._counts[index]) for index in np.flatnonzero(self._counts).tolist()
        }

    def count(self, key: GroupTopic) -> int:
        """Count the waiting messages of one group and topic."""
        index = self._index.get(key)
        return 0 if index is None else int(self._counts[index])

    def is_waiting(self, number: int) -> bool:
        """Check whether the scheduled message of this number waits for its next delivery."""
        index = int(self._number[: self._rows].searchsorted(number))
        return index < self._rows and self._number[index] == number and self._key[index] != _ENDED

    # -- changes -------------------------------------------------------------------------------------------------

    def add(self, keys: Sequence[GroupTopic | None], numbers: Int64Array) -> None:
        """Add the scheduled messages of these numbers, which ascend and are larger than all numbers so far.

        `keys` are parallel. A message without a key is not counted.
        """
        indexes = np.array([_ENDED if key is None else self._key_index(key) for key in keys], np.int32)
        has_key = indexes != _ENDED
        numbers, indexes = numbers[has_key], indexes[has_key]
        if self._rows + len(numbers) > len(self._number):
            self._sweep_and_grow(len(numbers))
        begin, end = self._rows, self._rows + len(numbers)
        self._number[begin:end], self._key[begin:end] = numbers, indexes
        self._rows = end
        np.add.at(self._counts, indexes, 1)
        self.waiting_rows += len(numbers)

    def end(self, numbers: Int64Array) -> None:
        """Subtract these messages from the counts, because they were released or cancelled."""
        if not self._rows or not len(numbers):
            return
        waiting_numbers = self._number[: self._rows]
        # A number that occurs twice must be counted once.
        numbers = np.unique(numbers)
        # `searchsorted` returns `_rows` for numbers after the last one, which is no valid index.
        indexes = np.minimum(np.searchsorted(waiting_numbers, numbers), self._rows - 1)
        indexes = indexes[(waiting_numbers[indexes] == numbers) & (self._key[indexes] != _ENDED)]
        # `subtract.at` counts repeated keys, which `-=` would count once.
        np.subtract.at(self._counts, self._key[indexes], 1)
        self._key[indexes] = _ENDED
        self.waiting_rows -= len(indexes)

    def _key_index(self, key: GroupTopic) -> int:
        """Find the index of a key, or add the key."""
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self._keys)
            self._keys.append(key)
            # Keys are never removed: each takes only one counter.
            self._counts = np.append(self._counts, 0)
        return index

    def _sweep_and_grow(self, rows: int) -> None:
        """Remove ended messages, and allocate columns for `rows` more."""
        waiting = np.flatnonzero(self._key[: self._rows] != _ENDED)
        # Twice the needed size, so that a sweep is amortized over as many additions.
        size = max(SWEEP_ROWS_MIN, 2 * (len(waiting) + rows))
        for name in ("_number", "_key"):
            column = getattr(self, name)
            enlarged = np.empty(size, column.dtype)
            enlarged[: len(waiting)] = column[waiting]
            setattr(self, name, enlarged)
        self._rows = len(waiting)

    # -- restarts ------------------------------------------------------------------------------------------------

    def facts(self) -> list[RedeliveryFacts]:
        """Export the waiting messages for a checkpoint."""
        number, key = self._number[: self._rows], self._key[: self._rows]
        spans_by_key = spans(number[key != _ENDED], key[key != _ENDED])
        return [
            RedeliveryFacts(*self._keys[key_index], key_spans)
            for key_index, key_spans in sorted(spans_by_key.items())
        ]

    def restore(self, facts: Sequence[RedeliveryFacts]) -> None:
        """Start with the messages of a checkpoint."""
        counted = [
            (number, (redelivery.group, redelivery.topic))
            for redelivery in facts
            for first, count in redelivery.waiting
            for number in range(first, first + count)
        ]
        # Numbers ascend here, but a checkpoint lists them by key.
        counted.sort()
        self.add([key for _, key in counted], np.array([number for number, _ in counted], np.int64))

    def replay(self, rows: pa.RecordBatch) -> None:
        """Apply READ_SCHEMA rows of the log, in its order."""
        if rows.column("source_seq").null_count == rows.num_rows:
            return  # most batches contain only messages, and scheduled messages that bring nothing back
        kinds = rows.column("kind").to_numpy()
        has_source = np.asarray(rows.column("source_seq").is_valid()) & np.asarray(
            rows.column("due_ms").is_valid()
        )
        is_redelivery = has_source & (kinds == Kind.SCHEDULED)
        if is_redelivery.any():
            scheduled_rows = rows.filter(pa.array(is_redelivery))
            self.add(keys_of(scheduled_rows), int64(scheduled_rows.column("seq")))
        # After all additions: the row that ends a wait comes after its scheduled message.
        ends = rows.filter(pa.array(has_source & np.isin(kinds, [Kind.RELEASE, Kind.CANCEL])))
        self.end(int64(ends.column("source_seq")))


def spans(numbers: Int64Array, keys: npt.NDArray[np.integer[Any]]) -> dict[int, list[tuple[int, int]]]:
    """Compress the ascending numbers of each key to ranges (first, count). `keys` are parallel to `numbers`."""
    # Sorted once: on the event loop, one search for each of thousands of groups would take tenths of a second.
    order = np.argsort(keys, kind="stable")
    numbers, keys = numbers[order], keys[order]
    begins = np.flatnonzero((np.diff(numbers, prepend=-1) != 1) | (np.diff(keys, prepend=-1) != 0))
    counts = np.diff(begins, append=len(numbers))
    spans_by_key = defaultdict[int, list[tuple[int, int]]](list)
    runs = zip(keys[begins].tolist(), numbers[begins].tolist(), counts.tolist(), strict=True)
    for key, first, count in runs:
        spans_by_key[key].append((first, count))
    return spans_by_key


def keys_of(scheduled_rows: pa.RecordBatch) -> list[GroupTopic | None]:
    """Find the group and topic of each of these messages. None where the properties do not name the group."""
    texts = scheduled_rows.column("properties")
    groups, origins = (_property(texts, name).to_pylist() for name in (ORIGIN_GROUP, RETRY_TOPIC))
    # The name of a retry topic contains the topic. A group has one dead-letter topic for all topics, so there the
    # properties contain the topic.
    return [
        None
        if group is None
        else (group, topic_of(group, origin or topic if topic.startswith(DLQ_PREFIX) else topic))
        for group, origin, topic in zip(
            groups, origins, scheduled_rows.column("topic").to_pylist(), strict=True
        )
    ]


def topic_of(group: str, topic: str) -> str:
    """Map a group's retry topic to the original topic. Any other topic is returned unchanged.

    >>> topic_of("g", "%RETRY%g_orders"), topic_of("g", "orders")
    ('orders', 'orders')
    """
    return topic.removeprefix(f"{RETRY_PREFIX}{group}_")


def _property(texts: pa.Array, name: str) -> pa.Array:
    """Extract the value of one property of each text, null where it is missing."""
    # Vectorized, because a start after a crash may read the messages of an hour.
    pattern = f"(?:^|{PROPERTY_END}){name}{PROPERTY_NAME_END}(?P<value>[^{PROPERTY_END}]*)"
    return pc.struct_field(pc.extract_regex(filled(texts, ""), pattern), "value")
