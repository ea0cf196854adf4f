"""Positions of a few rows in their queues: computed row by row with Python's numbers, or chosen by a codec before.

`Topics.place` would give the same rows the same positions, but it is made for columns: it calls numpy fifty times, and
each call takes some microseconds even for one row.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Self

import numpy as np

from timeball.broker.filters.tags import tag_hash, tag_mask
from timeball.broker.registry.rates import Rates, Stat, of_dead_letter
from timeball.broker.registry.topic import Queue, Topic
from timeball.log.queue_entry import ENTRY
from timeball.model.message import DLQ_PREFIX

_ENTRY = struct.Struct(">qiq")  # same layout as ENTRY: row, size, tag
_SEQ = struct.Struct(">q")
assert _ENTRY.size == ENTRY.itemsize

# A topic, a queue, its entries whose rows count from 0, and the size of their messages in bytes.
QueueRows = tuple[Topic, int, bytearray, int]


class _Chosen:
    """The rows chosen for one queue: their entries, and the size of their messages in bytes."""

    __slots__ = ("entries", "queue", "size_bytes")

    def __init__(self, queue: Queue, entries: bytearray, size_bytes: int) -> None:
        self.queue, self.entries, self.size_bytes = queue, entries, size_bytes


class FewPlaces:
    """Positions of rows, chosen one after the other. Call `give_out` when nothing can refuse the rows any more."""

    __slots__ = ("_chosen", "_dead", "_turns")

    def __init__(self) -> None:
        self._chosen: dict[tuple[Topic, int], _Chosen] = {}
        self._turns: dict[Topic, int] = {}
        self._dead: list[str] = []  # the key of a counter for each dead letter

    @classmethod
    def chosen(cls, queues: Iterable[QueueRows], turns: Mapping[Topic, int]) -> Self:
        """Take over positions that were chosen elsewhere like those of `choose` (SendRuns of small_batch.py)."""
        places = cls()
        for topic, queue_id, entries, size_bytes in queues:
            places._chosen[topic, queue_id] = _Chosen(topic.queues[queue_id], entries, size_bytes)
        places._turns = dict(turns)
        return places

    def choose(
        self, topic: Topic, row: int, queue_id: int, size_bytes: int, tag: str | None, properties: str | None
    ) -> tuple[int, int]:
        """Choose the queue and offset of a row, which become final with `give_out`. `queue_id` -1: any queue."""
        queues = topic.queues
        if topic.name.startswith(DLQ_PREFIX):
            self._dead.append(of_dead_letter(topic.name, properties))
        if queue_id < 0:
            # All queues in turn, after that of the last batch.
            turn = self._turns.get(topic, topic.turn)
            width = topic.write_queues or len(queues)
            queue_id = turn % width
            self._turns[topic] = (turn + 1) % width
        # As in `Topics.place`: rows for a queue that no longer exists go to another one.
        queue_id %= len(queues)
        chosen = self._chosen.get((topic, queue_id))
        if chosen is None:
            chosen = self._chosen[topic, queue_id] = _Chosen(queues[queue_id], bytearray(), 0)
        # Bytes from the start: numpy needs a microsecond to make an entry of a tuple.
        entries = chosen.entries
        offset = chosen.queue.next_offset + len(entries) // _ENTRY.size
        entries += _ENTRY.pack(row, size_bytes, tag_number(topic)(tag) if tag else 0)
        chosen.size_bytes += size_bytes
        return queue_id, offset

    def give_out(self) -> None:
        """Reserve these positions, so that no other row gets them."""
        for chosen in self._chosen.values():
            chosen.queue.next_offset += len(chosen.entries) // _ENTRY.size
        for topic, turn in self._turns.items():
            topic.turn = turn

    def index(self, first_seq: int) -> None:
        """Write the index entries. Row 0 of the batch has the sequence number `first_seq`."""
        for chosen in self._chosen.values():
            data = chosen.entries
            # The sequence numbers were not known when the entries were packed. The index copies the entries.
            if len(data) == _ENTRY.size:  # the usual case, without a call of numpy
                _SEQ.pack_into(data, 0, _SEQ.unpack_from(data)[0] + first_seq)
                entries = np.frombuffer(data, ENTRY)
            else:
                entries = np.frombuffer(data, ENTRY)
                entries["seq"] += first_seq
            chosen.queue.index.extend(entries)

    def count(self, rates: Rates, *, released: bool = False) -> None:
        """Count the rows and bytes for each topic. `released`: count them as released scheduled messages, too."""
        for (topic, _), chosen in self._chosen.items():
            rows = len(chosen.entries) // _ENTRY.size
            rates.put(topic.name, rows, chosen.size_bytes)
            if released:
                rates.add(Stat.RELEASED_NUMS, topic.name, rows)
        if self._dead:
            rates.add_each(Stat.DEAD_NUMS, self._dead)

    def queues(self) -> list[tuple[str, int]]:
        """Return the queues that got rows, as topic and number."""
        return [(topic.name, queue_id) for topic, queue_id in self._chosen]


def tag_number(topic: Topic) -> Callable[[str], int]:
    """Return the function that turns a tag into the number in this topic's index entries."""
    return tag_mask if topic.filter_type == "MULTI_TAG" else tag_hash
