"""State of leases: counts of the leases in the log, the leases saved by an orderly stop, and the secret of receipts.

`LeaseCounts` counts the leases that are kept in the log, by group and topic: held leases and nacked leases. A lease
takes 13 bytes: the number of its scheduled message, its group and topic, its state. Receives, acknowledgements and
releases change whole batches of leases by number. An unknown number changes nothing.

The counts are a cache: all of them follow from the log, and the checkpoint contains a copy (`facts`). Recovery starts
with that copy and applies the later rows (`replay`), in the order of the log.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from timeball.broker.filters.tags import BoolArray
from timeball.broker.registry.meta import MetaLog, MetaTable
from timeball.log.checkpoint import LeaseFacts
from timeball.model.message import (
    DLQ_PREFIX,
    NACK_TIME,
    ORIGIN_GROUP,
    PROPERTY_END,
    PROPERTY_NAME_END,
    RETRY_PREFIX,
    RETRY_TOPIC,
    SECRET_PREFIX,
    Int64Array,
    Kind,
    filled,
    int64,
)

GroupTopic = tuple[str, str]  # a group, and the topic whose messages it holds
Counts = dict[GroupTopic, int]

SWEEP_ROWS_MIN = 1_024
FEW = 4  # up to this number, leases are changed one by one, because numpy costs as much for one lease as for ten

_NONE = np.empty(0, np.int64)


class State(IntEnum):
    """The states of a lease."""

    HELD = 0  # delivered, neither acknowledged nor nacked
    NACKED = 1  # nacked by the consumer, and not delivered again yet
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
        # Number of leases that are not ended. Each has a pending scheduled message that delivers its message again. A
        # plain attribute, because every release reads it.
        self.waiting_rows = 0

    def held(self) -> Counts:
        """Count the messages that members hold, by group and topic."""
        return self._count_by_key(State.HELD)

    def nacked(self) -> Counts:
        """Count the nacked messages that are not delivered again yet, by group and topic."""
        return self._count_by_key(State.NACKED)

    def state_of(self, number: int) -> State | None:
        """Find the state of one lease. None if it is unknown, or was forgotten after its end."""
        index = self._find_index(number)
        return None if index is None else State(int(self._state[index]))

    # -- changes -------------------------------------------------------------------------------------------------

    def add(self, group: str, topic: str, numbers: Int64Array) -> None:
        """Add leases with the numbers of their scheduled messages.

        Numbers ascend, and are larger than all known numbers.
        """
        key_index, begin = self._key_index((group, topic)), self._rows
        if begin + len(numbers) > len(self._number):
            self._sweep_or_grow(len(numbers))
            begin = self._rows
        self._rows = end = begin + len(numbers)
        self._number[begin:end], self._key[begin:end], self._state[begin:end] = numbers, key_index, State.HELD
        self._counts[State.HELD, key_index] += len(numbers)
        self.waiting_rows += len(numbers)

    def add_rows(self, scheduled_rows: pa.RecordBatch, numbers: Int64Array) -> None:
        """Add the leases of these scheduled messages, whose properties name groups and topics."""
        keys = keys_of(scheduled_rows)
        # In runs of equal keys: a receive writes its leases side by side, and numbers must ascend.
        begin = 0
        for end in range(1, len(keys) + 1):
            if end == len(keys) or keys[end] != keys[begin]:
                if (key := keys[begin]) is not None:
                    self.add(*key, numbers[begin:end])
                begin = end

    def end(self, numbers: Int64Array) -> None:
        """End these leases: their messages were acknowledged or are dead, or their scheduled messages were released."""
        self._set(numbers, State.ENDED)

    def change(self, numbers: Int64Array, nacked: BoolArray) -> None:
        """Change these leases to nacked, or to held again. If a number occurs twice, its last element counts."""
        last_by_number = dict(zip(numbers.tolist(), nacked.tolist(), strict=True))
        for state, is_target_nacked in ((State.NACKED, True), (State.HELD, False)):
            self._set(
                np.array(
                    [number for number, is_nacked in last_by_number.items() if is_nacked is is_target_nacked],
                    dtype=np.int64,
                ),
                state,
            )

    def _set(self, numbers: Int64Array, state: State) -> None:
        if not self._rows or not len(numbers):
            return
        if len(numbers) <= FEW:
            for number in numbers.tolist():
                self._set_one(number, state)
            return
        # A number that occurs twice must be counted once.
        numbers, known_numbers = np.unique(numbers), self._number[: self._rows]
        # `searchsorted` returns `_rows` for numbers after the last one, which is no valid index.
        indexes = np.minimum(np.searchsorted(known_numbers, numbers), self._rows - 1)
        indexes = indexes[(known_numbers[indexes] == numbers) & (self._state[indexes] != State.ENDED)]
        if len(indexes):
            keys = self._key[indexes]
            # `subtract.at` counts repeated indexes, which `-=` would count once.
            np.subtract.at(self._counts, (self._state[indexes], keys), 1)
            np.add.at(self._counts, (np.full(len(indexes), state), keys), 1)
            self._state[indexes] = state
            self.waiting_rows -= len(indexes) if state == State.ENDED else 0

    def _set_one(self, number: int, state: State) -> None:
        index = self._find_index(number)
        if index is None or (before := int(self._state[index])) == State.ENDED:
            return
        key = int(self._key[index])
        self._counts[before, key] -= 1
        self._counts[state, key] += 1
        self._state[index] = state
        self.waiting_rows -= state == State.ENDED

    def _find_index(self, number: int) -> int | None:
        """Find the index of a lease in the columns, or None if it is unknown."""
        index = int(self._number[: self._rows].searchsorted(number))
        return index if index < self._rows and self._number[index] == number else None

    def _key_index(self, key: GroupTopic) -> int:
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self._keys)
            self._keys.append(key)
            # Keys are never removed: each takes only three counters.
            self._counts = np.concatenate([self._counts, np.zeros((len(State), 1), np.int64)], axis=1)
        return index

    def _sweep_or_grow(self, rows: int) -> None:
        """Remove ended leases, and allocate columns for `rows` more leases."""
        open_leases = np.flatnonzero(self._state[: self._rows] != State.ENDED)
        self._counts[State.ENDED] = 0
        # Twice the needed size, so that a sweep is amortized over as many additions.
        size = max(SWEEP_ROWS_MIN, 2 * (len(open_leases) + rows))
        for name in ("_number", "_key", "_state"):
            column = getattr(self, name)
            enlarged = np.empty(size, column.dtype)
            enlarged[: len(open_leases)] = column[open_leases]
            setattr(self, name, enlarged)
        self._rows = len(open_leases)

    def _count_by_key(self, state: State) -> Counts:
        counts = self._counts[state]
        return {self._keys[index]: int(counts[index]) for index in np.flatnonzero(counts).tolist()}

    # -- restarts ------------------------------------------------------------------------------------------------

    def facts(self) -> list[LeaseFacts]:
        """Export the leases for a checkpoint."""
        number, key, state = (column[: self._rows] for column in (self._number, self._key, self._state))
        held_spans, nacked_spans = (
            spans(number[state == lease_state], key[state == lease_state])
            for lease_state in (State.HELD, State.NACKED)
        )
        return [
            LeaseFacts(*self._keys[key_index], held_spans.get(key_index, []), nacked_spans.get(key_index, []))
            for key_index in sorted(held_spans.keys() | nacked_spans.keys())
        ]

    def restore(self, facts: Sequence[LeaseFacts]) -> None:
        """Start with the leases of a checkpoint."""
        columns = [
            (_expand_spans(lease_spans), self._key_index((lease_facts.group, lease_facts.topic)), state)
            for lease_facts in facts
            for lease_spans, state in ((lease_facts.held, State.HELD), (lease_facts.nacked, State.NACKED))
        ]
        if not columns:
            return
        number = np.concatenate([numbers for numbers, _, _ in columns])
        key = np.concatenate(
            [np.full(len(numbers), key_index, np.int32) for numbers, key_index, _ in columns]
        )
        state = np.concatenate(
            [np.full(len(numbers), lease_state, np.int8) for numbers, _, lease_state in columns]
        )
        # `_find_index` needs ascending numbers, but a checkpoint lists them by key and state.
        order = np.argsort(number)
        self._number, self._key, self._state = number[order], key[order], state[order]
        self._rows = self.waiting_rows = len(number)
        np.add.at(self._counts, (state, key), 1)

    def replay(self, rows: pa.RecordBatch) -> None:
        """Apply READ_SCHEMA rows of the log, in its order."""
        if rows.column("source_seq").null_count == rows.num_rows:
            return  # most batches contain only messages, and scheduled messages that bring nothing back
        kinds = rows.column("kind").to_numpy()
        has_source = np.asarray(rows.column("source_seq").is_valid()) & np.asarray(
            rows.column("due_ms").is_valid()
        )
        is_lease = has_source & (kinds == Kind.SCHEDULED)
        if is_lease.any():
            scheduled_rows = rows.filter(pa.array(is_lease))
            self.add_rows(scheduled_rows, int64(scheduled_rows.column("seq")))
        if not self._rows:
            return
        # After all additions: the row that changes or ends a lease stands after its scheduled message.
        moves = rows.filter(pa.array(has_source & (kinds == Kind.MOVED)))
        if moves.num_rows:
            self.change(int64(moves.column("source_seq")), were_nacked(moves))
        ends = rows.filter(pa.array(has_source & np.isin(kinds, [Kind.RELEASE, Kind.CANCEL])))
        self.end(int64(ends.column("source_seq")))


def spans(numbers: Int64Array, keys: npt.NDArray[np.integer[Any]]) -> dict[int, list[tuple[int, int]]]:
    """Compress the ascending numbers of each key to (first, count): leases of one receive have consecutive numbers."""
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


def _expand_spans(spans: Sequence[tuple[int, int]]) -> Int64Array:
    return np.concatenate([_NONE, *(np.arange(first, first + count) for first, count in spans)])


def keys_of(scheduled_rows: pa.RecordBatch) -> list[GroupTopic | None]:
    """Find the group and topic of each lease. None where the properties do not name the group."""
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
    """Map a group's retry topic to the original topic. Any other topic is returned unchanged.

    >>> topic_of("g", "%RETRY%g_orders"), topic_of("g", "orders")
    ('orders', 'orders')
    """
    return topic.removeprefix(f"{RETRY_PREFIX}{group}_")


def were_nacked(rows: pa.RecordBatch) -> BoolArray:
    """Check which of these MOVED rows record a nack by the consumer."""
    mark = f"(^|{PROPERTY_END}){NACK_TIME}{PROPERTY_NAME_END}"
    return np.asarray(pc.match_substring_regex(filled(rows.column("properties"), ""), mark))


def _property(texts: pa.Array, name: str) -> pa.Array:
    """Extract the value of one property of each text, null where it is missing."""
    # Vectorized, because a start after a crash may read the leases of an hour.
    pattern = f"(?:^|{PROPERTY_END}){name}{PROPERTY_NAME_END}(?P<value>[^{PROPERTY_END}]*)"
    return pc.struct_field(pc.extract_regex(filled(texts, ""), pattern), "value")


# ---- META rows: saved leases, and the secret that seals receipts ---------------------------------------------
# There is one row of saved leases for each queue that was not idle. It is written when the broker stops and deleted
# before the next start serves, so that a crash never finds old ones (consuming/memory_leases.py).


class SavedLease(msgspec.Struct, array_like=True):
    """The saved form of a lease on the message at `offset`."""

    offset: int
    seq: int
    size_bytes: int
    pop_ms: int  # identifies the receipt
    # On the wall clock. In memory a deadline is elapsed time.
    deadline_ms: int
    in_order: bool
    times: int  # ordered consumption: how often the lease ended without an acknowledgement
    nacked_ms: int | None = None
    nack_reason: str = ""  # missing in rows of older versions, as `nacked_ms`


class SavedLeases(msgspec.Struct):
    """The leases of one group in one queue that was not idle."""

    group: str
    topic: str
    queue_id: int
    next_offset: int
    stored_offset: int  # if another offset is stored at the start, this row is ignored
    last_pop_ms: int
    attempt_id: str
    in_flight: list[SavedLease]
    returned: list[SavedLease]
    acked_ahead: list[int]
    in_log: bool  # see QueueLeases


NAME = "receipts"
SIZE_BYTES = 32


class ReceiptSecret:
    """The secret of this data folder, which seals the texts of receipts. Belongs to the event loop.

    Receipts that consumers hold must stay valid across a restart, so the secret is a META row. It protects only against
    invented or changed receipts: a user who can read the folder can read the secret too. Readers of the log outside the
    broker do not get its value (`Broker.read_log`).
    """

    def __init__(self, meta: MetaLog) -> None:
        self._table = MetaTable(meta, SECRET_PREFIX.rstrip("/"), bytes)

    @property
    def is_made(self) -> bool:
        """True if the log contains the secret. It must be durable before a receipt is returned to a consumer."""
        return NAME in self._table.values

    def get(self) -> bytes:
        """Read the secret. Create it if there is none."""
        if not self.is_made:
            # Created with the first receipt, so that a broker that never leases a message stores no secret.
            self._table.put([(NAME, secrets.token_bytes(SIZE_BYTES))])
        return self._table.values[NAME]
