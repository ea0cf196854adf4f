"""Places of rows in their queues: of a few in Python's numbers, one after the other, or as an edge has written them.

`Topics.place` would give the same rows the same places. That way is made for columns: it makes fifty calls of numpy,
and each of them takes some microseconds for one row too.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Self

import numpy as np

from timeball.broker.filters.tags import tag_hash, tag_mask
from timeball.broker.rates import Rates, Stat, of_dead_letter
from timeball.broker.registry.topic import Queue, Topic
from timeball.log.queue_entry import ENTRY
from timeball.message import DLQ_PREFIX

_ENTRY = struct.Struct(">qiq")  # as ENTRY has it: row, size, tag
_SEQ = struct.Struct(">q")
assert _ENTRY.size == ENTRY.itemsize

QueueRows = tuple[
    Topic, int, bytearray, int
]  # a queue, entries whose rows count from 0, bytes of their messages


class _Chosen:
    """What one queue gets: its entries, and the bytes of their messages."""

    __slots__ = ("entries", "queue", "size_bytes")

    def __init__(self, queue: Queue, entries: bytearray, size_bytes: int) -> None:
        self.queue, self.entries, self.size_bytes = queue, entries, size_bytes


class FewPlaces:
    """Places of rows, chosen one after the other; `give_out` once nothing can refuse them any more."""

    __slots__ = ("_chosen", "_dead", "_turns")

    def __init__(self) -> None:
        self._chosen: dict[tuple[Topic, int], _Chosen] = {}
        self._turns: dict[Topic, int] = {}
        self._dead: list[str] = []  # a counter's key for each dead letter

    @classmethod
    def chosen(cls, queues: Iterable[QueueRows], turns: Mapping[Topic, int]) -> Self:
        """Return places that have been chosen as `choose` does: see SendRuns (few_sends.py)."""
        places = cls()
        for topic, queue_id, entries, size_bytes in queues:
            places._chosen[topic, queue_id] = _Chosen(topic.queues[queue_id], entries, size_bytes)
        places._turns = dict(turns)
        return places

    def choose(
        self, topic: Topic, row: int, queue_id: int, size_bytes: int, tag: str | None, properties: str | None
    ) -> tuple[int, int]:
        """Return the queue and the offset of a row, which the caller then holds to; `queue_id` -1: any queue."""
        queues = topic.queues
        if topic.name.startswith(DLQ_PREFIX):
            self._dead.append(of_dead_letter(topic.name, properties))
        if queue_id < 0:
            # Round the queues, from where the last batch ended.
            turn = self._turns.get(topic, topic.turn)
            width = topic.write_queues or len(queues)
            queue_id = turn % width
            self._turns[topic] = (turn + 1) % width
        # As in `Topics.place`: a queue that is no more gives its rows to another.
        queue_id %= len(queues)
        chosen = self._chosen.get((topic, queue_id))
        if chosen is None:
            chosen = self._chosen[topic, queue_id] = _Chosen(queues[queue_id], bytearray(), 0)
        # Bytes from the start: numpy makes entries of tuples at a microsecond each.
        entries = chosen.entries
        offset = chosen.queue.next_offset + len(entries) // _ENTRY.size
        entries += _ENTRY.pack(row, size_bytes, tag_number(topic)(tag) if tag else 0)
        chosen.size_bytes += size_bytes
        return queue_id, offset

    def give_out(self) -> None:
        """Give these places to no other row."""
        for chosen in self._chosen.values():
            chosen.queue.next_offset += len(chosen.entries) // _ENTRY.size
        for topic, turn in self._turns.items():
            topic.turn = turn

    def index(self, first_seq: int) -> None:
        """Write the entries; row 0 of the batch is `first_seq`."""
        for chosen in self._chosen.values():
            data = chosen.entries
            # The number of the first row was not known when they were written. The index copies them.
            if len(data) == _ENTRY.size:  # nearly always, and then without a call of numpy
                _SEQ.pack_into(data, 0, _SEQ.unpack_from(data)[0] + first_seq)
                entries = np.frombuffer(data, ENTRY)
            else:
                entries = np.frombuffer(data, ENTRY)
                entries["seq"] += first_seq
            chosen.queue.index.extend(entries)

    def count(self, rates: Rates, *, released: bool = False) -> None:
        """Count what came into each topic; `released`: as scheduled messages, too."""
        for (topic, _), chosen in self._chosen.items():
            rows = len(chosen.entries) // _ENTRY.size
            rates.put(topic.name, rows, chosen.size_bytes)
            if released:
                rates.add(Stat.RELEASED_NUMS, topic.name, rows)
        if self._dead:
            rates.add_each(Stat.DEAD_NUMS, self._dead)

    def queues(self) -> list[tuple[str, int]]:
        """Return the queues that got rows: topic and number."""
        return [(topic.name, queue_id) for topic, queue_id in self._chosen]


def tag_number(topic: Topic) -> Callable[[str], int]:
    """Return what makes the number of a tag that the index of this topic's queues holds."""
    return tag_mask if topic.filter_type == "MULTI_TAG" else tag_hash
