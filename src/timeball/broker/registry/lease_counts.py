"""Counts of the leases kept in the log, by group and topic: those that members hold, and those they have given back.

A lease takes 13 bytes: the number of its scheduled message, its group and topic, its state. Receives, answers and
releases change whole batches of leases by number. An unknown number changes nothing.

This is a cache: all of it follows from the log, and the checkpoint contains a copy (`facts`). Recovery starts with that
copy and applies the later rows (`replay`), in the order of the log.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.filters.tags import BoolArray
from timeball.log.checkpoint import LeaseFacts
from timeball.model.message import (
    DLQ_PREFIX,
    NACK_TIME,
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

GroupTopic = tuple[str, str]  # a group, and the topic whose messages it holds
Counts = dict[GroupTopic, int]

SWEEP_ROWS_MIN = 1_024
FEW = 4  # up to this number, leases are changed one by one: in columns, one costs as much as ten

_NONE = np.empty(0, np.int64)


class State(IntEnum):
    """The states of a lease."""

    HELD = 0  # delivered, and not answered
    NACKED = 1  # given back, and not delivered again yet
    ENDED = 2  # acknowledged, dead or expired, and kept until the next sweep


class LeaseCounts:
    """The states of all leases kept in the log, and their counts. Belongs to the event loop."""

    def __init__(self) -> None:
        self._keys: list[GroupTopic] = []
        self._index: dict[GroupTopic, int] = {}
        # The columns of the leases, with `_rows` entries in use. Numbers ascend, in the order of the log.
        self._number, self._key, self._state = _NONE, np.empty(0, np.int32), np.empty(0, np.int8)
        self._rows = 0
        self._counts = np.zeros((len(State), 0), np.int64)  # by state and key
        # Pending scheduled messages that bring a message back to its group. An attribute and no property: every release
        # reads it.
        self.waiting_rows = 0

    def held(self) -> Counts:
        """Count the messages that members hold, by group and topic."""
        return self._by_key(State.HELD)

    def nacked(self) -> Counts:
        """Count the messages that were given back and are not delivered again yet, by group and topic."""
        return self._by_key(State.NACKED)

    def state_of(self, number: int) -> State | None:
        """Return the state of one lease, or None if it is unknown, or forgotten because it ended long ago."""
        at = self._place(number)
        return None if at is None else State(int(self._state[at]))

    # -- changes -------------------------------------------------------------------------------------------------

    def add(self, group: str, topic: str, numbers: Int64Array) -> None:
        """Count leases whose messages have these numbers. Numbers ascend, and are larger than all known ones."""
        key, rows = self._key_at((group, topic)), self._rows
        if rows + len(numbers) > len(self._number):
            self._make_room(len(numbers))
            rows = self._rows
        self._rows = end = rows + len(numbers)
        self._number[rows:end], self._key[rows:end], self._state[rows:end] = numbers, key, State.HELD
        self._counts[State.HELD, key] += len(numbers)
        self.waiting_rows += len(numbers)

    def add_rows(self, scheduled_rows: pa.RecordBatch, numbers: Int64Array) -> None:
        """Count the leases of these scheduled messages, with the groups and topics that they name."""
        keys = keys_of(scheduled_rows)
        # Run by run: a receive writes its leases side by side, and numbers must ascend.
        begin = 0
        for at in range(1, len(keys) + 1):
            if at == len(keys) or keys[at] != keys[begin]:
                if (key := keys[begin]) is not None:
                    self.add(*key, numbers[begin:at])
                begin = at

    def end(self, numbers: Int64Array) -> None:
        """Stop counting these leases: they were answered for good, or their scheduled messages have been released."""
        self._set(numbers, State.ENDED)

    def change(self, numbers: Int64Array, nacked: BoolArray) -> None:
        """Count these leases as given back, or as held again. If a number occurs twice, the last one counts."""
        last = dict(zip(numbers.tolist(), nacked.tolist(), strict=True))
        for state, wanted in ((State.NACKED, True), (State.HELD, False)):
            self._set(np.array([n for n, was in last.items() if was is wanted], dtype=np.int64), state)

    def _set(self, numbers: Int64Array, state: State) -> None:
        if not self._rows or not len(numbers):
            return
        if len(numbers) <= FEW:
            for number in numbers.tolist():
                self._set_one(number, state)
            return
        # A number that occurs twice must be counted once.
        numbers, known = np.unique(numbers), self._number[: self._rows]
        # Limited to the last index, so that a number after all known ones can be compared too.
        at = np.minimum(np.searchsorted(known, numbers), self._rows - 1)
        at = at[(known[at] == numbers) & (self._state[at] != State.ENDED)]
        if len(at):
            keys = self._key[at]
            # `subtract.at` counts repeated indexes, which `-=` would count once.
            np.subtract.at(self._counts, (self._state[at], keys), 1)
            np.add.at(self._counts, (np.full(len(at), state), keys), 1)
            self._state[at] = state
            self.waiting_rows -= len(at) if state == State.ENDED else 0

    def _set_one(self, number: int, state: State) -> None:
        at = self._place(number)
        if at is None or (before := int(self._state[at])) == State.ENDED:
            return
        key = int(self._key[at])
        self._counts[before, key] -= 1
        self._counts[state, key] += 1
        self._state[at] = state
        self.waiting_rows -= state == State.ENDED

    def _place(self, number: int) -> int | None:
        """Find the index of a lease in the columns, or None if it is unknown."""
        at = int(self._number[: self._rows].searchsorted(number))
        return at if at < self._rows and self._number[at] == number else None

    def _key_at(self, key: GroupTopic) -> int:
        found = self._index.get(key)
        if found is None:
            found = self._index[key] = len(self._keys)
            self._keys.append(key)
            # Keys are never removed, because each takes only three counters.
            self._counts = np.concatenate([self._counts, np.zeros((len(State), 1), np.int64)], axis=1)
        return found

    def _make_room(self, rows: int) -> None:
        """Forget ended leases, and enlarge the columns when the space is still too small."""
        kept = np.flatnonzero(self._state[: self._rows] != State.ENDED)
        self._counts[State.ENDED] = 0
        # Twice the need, so that the cost of a sweep is spread over as many additions.
        size = max(SWEEP_ROWS_MIN, 2 * (len(kept) + rows))
        for name in ("_number", "_key", "_state"):
            column = getattr(self, name)
            fresh = np.empty(size, column.dtype)
            fresh[: len(kept)] = column[kept]
            setattr(self, name, fresh)
        self._rows = len(kept)

    def _by_key(self, state: State) -> Counts:
        counts = self._counts[state]
        return {self._keys[at]: int(counts[at]) for at in np.flatnonzero(counts).tolist()}

    # -- restarts ------------------------------------------------------------------------------------------------

    def facts(self) -> list[LeaseFacts]:
        """Export the leases for a checkpoint."""
        number, key, state = (column[: self._rows] for column in (self._number, self._key, self._state))
        held, nacked = (spans(number[state == one], key[state == one]) for one in (State.HELD, State.NACKED))
        return [
            LeaseFacts(*self._keys[at], held.get(at, []), nacked.get(at, []))
            for at in sorted(held.keys() | nacked.keys())
        ]

    def restore(self, facts: Sequence[LeaseFacts]) -> None:
        """Start with the leases of a checkpoint."""
        columns = [
            (_numbers(some), self._key_at((one.group, one.topic)), state)
            for one in facts
            for some, state in ((one.held, State.HELD), (one.nacked, State.NACKED))
        ]
        if not columns:
            return
        number = np.concatenate([numbers for numbers, _, _ in columns])
        key = np.concatenate([np.full(len(numbers), at, np.int32) for numbers, at, _ in columns])
        state = np.concatenate([np.full(len(numbers), one, np.int8) for numbers, _, one in columns])
        # `_place` needs ascending numbers, but a checkpoint lists them by key and state.
        order = np.argsort(number)
        self._number, self._key, self._state = number[order], key[order], state[order]
        self._rows = self.waiting_rows = len(number)
        np.add.at(self._counts, (state, key), 1)

    def replay(self, rows: pa.RecordBatch) -> None:
        """Apply READ_SCHEMA rows of the log, in its order."""
        if rows.column("source_seq").null_count == rows.num_rows:
            return  # most batches contain only messages, and scheduled messages that bring nothing back
        kinds = rows.column("kind").to_numpy()
        named = np.asarray(rows.column("source_seq").is_valid()) & np.asarray(
            rows.column("due_ms").is_valid()
        )
        leased = named & (kinds == Kind.SCHEDULED)
        if leased.any():
            scheduled_rows = rows.filter(pa.array(leased))
            self.add_rows(scheduled_rows, int64(scheduled_rows.column("seq")))
        if not self._rows:
            return
        # After all additions: the row that changes or ends a lease stands after its scheduled message.
        moved = rows.filter(pa.array(named & (kinds == Kind.MOVED)))
        if moved.num_rows:
            self.change(int64(moved.column("source_seq")), were_nacked(moved))
        ended = rows.filter(pa.array(named & np.isin(kinds, [Kind.RELEASE, Kind.CANCEL])))
        self.end(int64(ended.column("source_seq")))


def spans(numbers: Int64Array, keys: npt.NDArray[np.integer[Any]]) -> dict[int, list[tuple[int, int]]]:
    """Compress the ascending numbers of each key to (first, count): leases of one receive have consecutive numbers."""
    # Sorted once: on the event loop, one search for each of thousands of groups would take tenths of a second.
    order = np.argsort(keys, kind="stable")
    numbers, keys = numbers[order], keys[order]
    begins = np.flatnonzero((np.diff(numbers, prepend=-1) != 1) | (np.diff(keys, prepend=-1) != 0))
    counts = np.diff(begins, append=len(numbers))
    found = defaultdict[int, list[tuple[int, int]]](list)
    runs = zip(keys[begins].tolist(), numbers[begins].tolist(), counts.tolist(), strict=True)
    for key, first, count in runs:
        found[key].append((first, count))
    return found


def _numbers(found: Sequence[tuple[int, int]]) -> Int64Array:
    return np.concatenate([_NONE, *(np.arange(first, first + count) for first, count in found)])


def keys_of(scheduled_rows: pa.RecordBatch) -> list[GroupTopic | None]:
    """Return the group and topic of each lease's message, with None where the properties do not name the group."""
    texts = scheduled_rows.column("properties")
    groups, firsts = (_property(texts, name).to_pylist() for name in (ORIGIN_GROUP, RETRY_TOPIC))
    # The retry topic contains the topic. All topics share one dead-letter topic, so there the properties contain it.
    return [
        None
        if group is None
        else (group, topic_of(group, first or topic if topic.startswith(DLQ_PREFIX) else topic))
        for group, first, topic in zip(
            groups, firsts, scheduled_rows.column("topic").to_pylist(), strict=True
        )
    ]


def topic_of(group: str, topic: str) -> str:
    """Return the topic to which a group's retry topic belongs. Any other topic is returned unchanged.

    >>> topic_of("g", "%RETRY%g_orders"), topic_of("g", "orders")
    ('orders', 'orders')
    """
    return topic.removeprefix(f"{RETRY_PREFIX}{group}_")


def were_nacked(rows: pa.RecordBatch) -> BoolArray:
    """Return which of these MOVED rows record that a member has given its message back."""
    mark = f"(^|{PROPERTY_END}){NACK_TIME}{PROPERTY_NAME_END}"
    return np.asarray(pc.match_substring_regex(filled(rows.column("properties"), ""), mark))


def _property(texts: pa.Array, name: str) -> pa.Array:
    """Extract the value of one property of each text, null where it is missing."""
    # As a column, because a start after a crash may read the leases of an hour.
    pattern = f"(?:^|{PROPERTY_END}){name}{PROPERTY_NAME_END}(?P<value>[^{PROPERTY_END}]*)"
    return pc.struct_field(pc.extract_regex(filled(texts, ""), pattern), "value")
