"""Choose queues and offsets for a few rows, row by row and without numpy, or accept those that a codec has chosen.

`Topics.place` chooses the same queues and offsets, but it works on columns: it calls numpy fifty times, and each call
takes some microseconds even for one row.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Self

import numpy as np

from timeball.broker.filters.tags import tag_hash, tag_mask
from timeball.broker.registry.rates import Rates, Stat, of_dead_letter
from timeball.broker.registry.topics import Queue, Topic
from timeball.log.format import ENTRY
from timeball.model.message import DLQ_PREFIX

_ENTRY = struct.Struct(">qiq")  # same layout as ENTRY: sequence number, size, tag
_SEQ = struct.Struct(">q")
assert _ENTRY.size == ENTRY.itemsize

# Topic, queue id, packed index entries (with row numbers from 0 in place of sequence numbers), and the size of the
# messages in bytes.
QueueRows = tuple[Topic, int, bytearray, int]


class _QueueBatch:
    """The rows of the batch that go to one queue: their index entries, and the size of their messages in bytes."""

    __slots__ = ("entries", "queue", "size_bytes")

    def __init__(self, queue: Queue, entries: bytearray, size_bytes: int) -> None:
        self.queue, self.entries, self.size_bytes = queue, entries, size_bytes


class QueueOffsets:
    """The queues and offsets of a batch of rows. Call `reserve_offsets` when nothing can refuse the rows any more."""

    __slots__ = ("_chosen", "_dead_letter_keys", "_turns")

    def __init__(self) -> None:
        self._chosen: dict[tuple[Topic, int], _QueueBatch] = {}
        self._turns: dict[Topic, int] = {}
        self._dead_letter_keys: list[str] = []  # for each dead letter the key of its counter

    @classmethod
    def chosen(cls, queues: Iterable[QueueRows], turns: Mapping[Topic, int]) -> Self:
        """Accept queues and offsets that a codec has chosen in the same way (SendRuns of admission.py).

        `turns`: the next queue (round robin) of each topic.
        """
        offsets = cls()
        for topic, queue_id, entries, size_bytes in queues:
            offsets._chosen[topic, queue_id] = _QueueBatch(topic.queues[queue_id], entries, size_bytes)
        offsets._turns = dict(turns)
        return offsets

    def choose(
        self, topic: Topic, row: int, queue_id: int, size_bytes: int, tag: str | None, properties: str | None
    ) -> tuple[int, int]:
        """Choose the queue and offset of a row, which become final with `reserve_offsets`. Returns (queue id, offset).

        `row`: the index of the row in the batch. `queue_id` -1: any queue. `size_bytes`: of the message.
        """
        queues = topic.queues
        if topic.name.startswith(DLQ_PREFIX):
            self._dead_letter_keys.append(of_dead_letter(topic.name, properties))
        if queue_id < 0:
            # Round robin, continued from the last batch.
            next_queue = self._turns.get(topic, topic.turn)
            queue_count = topic.write_queues or len(queues)
            queue_id = next_queue % queue_count
            self._turns[topic] = (next_queue + 1) % queue_count
        # As in `Topics.place`: rows for a queue that does not exist go to another one.
        queue_id %= len(queues)
        queue_rows = self._chosen.get((topic, queue_id))
        if queue_rows is None:
            queue_rows = self._chosen[topic, queue_id] = _QueueBatch(queues[queue_id], bytearray(), 0)
        # Packed directly, because numpy needs a microsecond to convert a tuple to an entry.
        entries = queue_rows.entries
        offset = queue_rows.queue.next_offset + len(entries) // _ENTRY.size
        entries += _ENTRY.pack(row, size_bytes, tag_number(topic)(tag) if tag else 0)
        queue_rows.size_bytes += size_bytes
        return queue_id, offset

    def reserve_offsets(self) -> None:
        """Advance the queues, so that no other row gets these offsets."""
        for queue_rows in self._chosen.values():
            queue_rows.queue.next_offset += len(queue_rows.entries) // _ENTRY.size
        for topic, turn in self._turns.items():
            topic.turn = turn

    def index(self, first_seq: int) -> None:
        """Add the entries to the queue indexes. Row 0 of the batch has the sequence number `first_seq`."""
        for queue_rows in self._chosen.values():
            packed = queue_rows.entries
            # Add `first_seq`, which was not known when the entries were packed. The index copies the entries.
            if len(packed) == _ENTRY.size:  # the usual case, without a call of numpy
                _SEQ.pack_into(packed, 0, _SEQ.unpack_from(packed)[0] + first_seq)
                entries = np.frombuffer(packed, ENTRY)
            else:
                entries = np.frombuffer(packed, ENTRY)
                entries["seq"] += first_seq
            queue_rows.queue.index.extend(entries)

    def count(self, rates: Rates, *, released: bool = False) -> list[tuple[str, int]]:
        """Count the rows and bytes in the statistics of their topics.

        `released`: also as released scheduled messages. Returns the queues that got rows, as (topic, queue id).
        """
        queues = []
        for (topic, queue_id), queue_rows in self._chosen.items():
            queues.append((topic.name, queue_id))
            rows = len(queue_rows.entries) // _ENTRY.size
            rates.count_arrived(topic.name, rows, queue_rows.size_bytes)
            if released:
                rates.add(Stat.RELEASED_NUMS, topic.name, rows)
        if self._dead_letter_keys:
            rates.add_each(Stat.DEAD_NUMS, self._dead_letter_keys)
        return queues


def tag_number(topic: Topic) -> Callable[[str], int]:
    """Choose the function that converts a tag to the number in this topic's index entries."""
    return tag_mask if topic.filter_type == "MULTI_TAG" else tag_hash
