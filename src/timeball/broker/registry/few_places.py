"""Places of a few rows in their queues, in Python's numbers.

`Topics.place` would give the same rows the same places. That way is made for columns: it makes fifty calls of numpy,
and each of them takes some microseconds for one row too.
"""

from __future__ import annotations

from timeball.broker.filters.tags import tag_hash, tag_mask
from timeball.broker.rates import Rates, Stat, of_dead_letter
from timeball.broker.registry.topic import Topic
from timeball.message import DLQ_PREFIX


class FewPlaces:
    """Places of a few rows, chosen one after the other; `give_out` once nothing can refuse them any more."""

    __slots__ = ("_dead", "_queues", "_turns")

    def __init__(self) -> None:
        self._queues: dict[tuple[Topic, int], list[tuple[int, int, int]]] = {}  # row, size, tag
        self._turns: dict[Topic, int] = {}
        self._dead: list[str] = []  # a counter's key for each dead letter

    def choose(
        self, topic: Topic, row: int, queue_id: int, size_bytes: int, tag: str | None, properties: str | None
    ) -> tuple[int, int]:
        """Return the queue and the offset of a row, which the caller then holds to; `queue_id` -1: any queue."""
        if topic.name.startswith(DLQ_PREFIX):
            self._dead.append(of_dead_letter(topic.name, properties))
        if queue_id < 0:
            # Round the queues, from where the last batch ended.
            turn = self._turns.get(topic, topic.turn)
            width = topic.write_queues or len(topic.queues)
            queue_id = turn % width
            self._turns[topic] = (turn + 1) % width
        # As in `Topics.place`: a queue that is no more gives its rows to another.
        queue_id %= len(topic.queues)
        entries = self._queues.get((topic, queue_id))
        if entries is None:
            entries = self._queues[topic, queue_id] = []
        offset = topic.queues[queue_id].next_offset + len(entries)
        of_tag = tag_mask if topic.filter_type == "MULTI_TAG" else tag_hash
        entries.append((row, size_bytes, of_tag(tag) if tag else 0))
        return queue_id, offset

    def give_out(self) -> None:
        """Give these places to no other row."""
        for (topic, queue_id), entries in self._queues.items():
            topic.queues[queue_id].next_offset += len(entries)
        for topic, turn in self._turns.items():
            topic.turn = turn

    def index(self, first_seq: int) -> None:
        """Write the entries; row 0 of the batch is `first_seq`."""
        for (topic, queue_id), entries in self._queues.items():
            topic.queues[queue_id].index.extend([(first_seq + row, size, tag) for row, size, tag in entries])

    def count(self, rates: Rates, *, released: bool = False) -> None:
        """Count what came into each topic; `released`: as scheduled messages, too."""
        for (topic, _), entries in self._queues.items():
            rates.put(topic.name, len(entries), sum(size for _, size, _ in entries))
            if released:
                rates.add(Stat.RELEASED_NUMS, topic.name, len(entries))
        rates.add_each(Stat.DEAD_NUMS, self._dead)

    def queues(self) -> list[tuple[str, int]]:
        """Return the queues that got rows: topic and number."""
        return [(topic.name, queue_id) for topic, queue_id in self._queues]
